"""Several devices: noise is that of one device, once, and every device's part of it is its own."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.devices_child import DEVICES, ENGINES, SHAPE

Arrays = dict[str, np.ndarray]

pytestmark = pytest.mark.slow

# Random words are the same in every program. Compilers round what is made of them in different orders (jax
# 0.10 alike, 0.12 not): some units in the last place of values up to 7. Other words would differ by about 1.
_ROUNDING = 3e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    """What a process with several devices computes, and on one of them alone."""
    out = tmp_path_factory.mktemp("devices") / "out.npz"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    subprocess.run(
        [sys.executable, "-m", "tests.devices_child", str(out)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        check=True,
    )
    with np.load(out) as arrays:
        return dict(arrays)


def test_a_leaf_spread_over_devices_has_the_noise_of_one_device(found: Arrays) -> None:
    parts = [found[f"split {device}"] for device in range(DEVICES)]
    assert all(part.shape == (SHAPE[0] // DEVICES, SHAPE[1]) for part in parts)
    np.testing.assert_allclose(np.concatenate(parts), found["alone"], rtol=0, atol=_ROUNDING)


def test_devices_that_hold_a_whole_leaf_hold_the_same_noise(found: Arrays) -> None:
    for device in range(DEVICES):
        np.testing.assert_array_equal(found[f"whole {device}"], found["whole 0"])
    np.testing.assert_allclose(found["whole 0"], found["alone"], rtol=0, atol=_ROUNDING)


def test_noise_is_independent_across_devices(found: Arrays) -> None:
    parts = [found[f"split {device}"].ravel() for device in range(DEVICES)]
    bound = 5 / np.sqrt(parts[0].size)  # five standard deviations of a correlation of independent normals
    for one, other in itertools.combinations(parts, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < bound
        # Nor is one a copy of the other moved along, or with another sign.
        assert not np.intersect1d(np.abs(one), np.abs(other)).size > one.size // 100
    assert abs(found["alone"].std() - 1) < 0.02


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_spread_over_devices_has_the_sum_of_one_device(found: Arrays, engine: str) -> None:
    np.testing.assert_allclose(found[f"{engine} split"], found[f"{engine} alone"], rtol=1e-4, atol=1e-6)
    assert np.linalg.norm(found[f"{engine} alone"]) > 0.5
