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


_RUN = {"settings": {"seed": None, "out": "a"}, "identity": {"jax": "1"}}


def _checkpoints(tmp_path: Path, run: dict = _RUN) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", run)


def test_restores_the_same_bits_and_structure(tmp_path: Path):
    saved, other = _state(1), _state(2)
    with _checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, saved)
    with _checkpoints(tmp_path) as checkpoints:
        step, restored = checkpoints.restore(like=other)
    assert step == 7
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert _bits(restored) == _bits(saved) != _bits(other)


def test_keeps_the_newest(tmp_path: Path):
    with _checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [] and checkpoints.restore(like=_state(0)) is None
        for step in (0, 3, 6, 12):
            checkpoints.save(step, _state(step))
        checkpoints.save(12, _state(0))  # already there: stays as it is
        assert checkpoints.steps == [6, 12]
        assert _bits(checkpoints.restore(like=_state(0)).state) == _bits(_state(12))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["12", "6"]
    assert NUM_KEPT == 2


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_keys_are_their_owners_alone(tmp_path: Path, umask: int):
    def mode() -> int:
        return stat.S_IMODE(os.stat(tmp_path / "checkpoints").st_mode)

    before = os.umask(umask)
    try:
        with _checkpoints(tmp_path) as checkpoints:
            checkpoints.save(0, _state(0))
        assert mode() == 0o700
        (tmp_path / "checkpoints").chmod(0o755)
        with _checkpoints(tmp_path):
            assert mode() == 0o700
    finally:
        os.umask(before)
