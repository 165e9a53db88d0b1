import jax
import numpy as np

from wtdp_jax.streams import dropout_keys, new_streams


def _words(streams) -> list[bytes]:
    keys = (streams.noise_key, streams.dropout_key)
    return [
        *(np.asarray(jax.random.key_data(key)).tobytes() for key in keys),
        streams.entropy_words.tobytes(),
    ]


def test_a_seed_decides_all_and_streams_differ():
    assert _words(new_streams(3)) == _words(new_streams(3))
    assert not set(_words(new_streams(3))) & set(_words(new_streams(4)))
    assert len(set(_words(new_streams(3)))) == 3
    assert new_streams(3).entropy == 3


def test_without_a_seed_nothing_repeats():
    first, second = new_streams(None), new_streams(None)
    assert not set(_words(first)) & set(_words(second))
    assert first.entropy >= 2**64  # 128 bits: below this with probability 2^-64


def test_dropout_keys_are_all_different():
    key = jax.random.key(0)
    keys = [dropout_keys(key, step, number, 3) for step in range(2) for number in range(2)]
    assert all(batch.shape == (3, 2) for batch in keys)
    assert len({np.asarray(row).tobytes() for batch in keys for row in batch}) == 12
