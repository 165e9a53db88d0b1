import os
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wtdp_jax.checkpoint import NUM_KEPT, Checkpoints, TrainState


def _state(seed: int) -> TrainState:
    keys = jax.random.split(jax.random.key(seed))
    trained = {
        "a": {"kernel": jax.random.normal(keys[0], (2, 3)), "frozen": None},
        "b": jnp.ones(3, jnp.bfloat16),
    }
    return TrainState(
        trained=trained,
        opt_state=optax.chain(optax.trace(0.9), optax.adam(optax.linear_schedule(1.0, 0.0, 5))).init(trained),
        streams={"noise_key": keys[1], "entropy": np.arange(4, dtype=np.uint32) + np.uint32(2**32 - 9)},
    )


def _bits(tree) -> list[bytes]:
    raw = jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf,
        tree,
    )
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(raw)]


def test_restores_the_same_bits_and_structure(tmp_path: Path):
    saved, other = _state(1), _state(2)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(7, saved)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest_step == 7
        restored = checkpoints.restore(like=other)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert _bits(restored) == _bits(saved) != _bits(other)


def test_keeps_the_newest(tmp_path: Path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest_step is None
        for step in (0, 3, 6):
            checkpoints.save(step, _state(step))
        checkpoints.save(6, _state(0))  # already there: stays as it is
        assert checkpoints.latest_step == 6
        assert _bits(checkpoints.restore(like=_state(0))) == _bits(_state(6))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["3", "6"]
    assert NUM_KEPT == 2


def test_keys_are_their_owners_alone(tmp_path: Path):
    with Checkpoints(tmp_path / "checkpoints"):
        pass
    assert stat.S_IMODE(os.stat(tmp_path / "checkpoints").st_mode) == 0o700


def test_no_checkpoint_is_an_error(tmp_path: Path):
    with (
        Checkpoints(tmp_path / "checkpoints") as checkpoints,
        pytest.raises(ValueError, match="no checkpoint in"),
    ):
        checkpoints.restore(like=_state(0))
