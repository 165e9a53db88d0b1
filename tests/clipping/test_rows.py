"""Rows that must not take part are replaced, and batches that are none are refused."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from wtdp_jax.clipping import rows


@pytest.mark.parametrize(
    ("unwanted", "taken"),
    [
        ([False, True, False, True], [0, 0, 2, 0]),
        ([True, True, False, False], [2, 2, 2, 3]),
        ([True, False, True, False], [1, 1, 1, 3]),
        ([False] * 4, [0, 1, 2, 3]),
        ([True] * 4, [0, 0, 0, 0]),
    ],
)
def test_an_unwanted_row_is_a_copy_of_the_first_wanted_one(unwanted: list[bool], taken: list[int]) -> None:
    batch = {"x": jnp.arange(12.0).reshape(4, 3), "id": jnp.arange(4)}
    found = rows.replace(batch, jnp.array(unwanted))
    np.testing.assert_array_equal(found["id"], taken)
    np.testing.assert_array_equal(found["x"], np.asarray(batch["x"])[taken])


def test_the_size_is_the_first_axis() -> None:
    batch = {"x": np.ones((3, 2)), "y": np.ones(3)}
    assert rows.size(batch, None) == rows.size(batch, jnp.zeros(3, bool)) == 3
    assert rows.size({"x": np.ones((1, 2))}, None) == 1


@pytest.mark.parametrize("batch", [{}, {"x": np.ones(())}, {"x": np.ones((0, 2))}])
def test_no_row_is_refused(batch: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="share a first axis of at least one row"):
        rows.size(batch, None)


def test_leaves_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one row, got shapes .*2.*3"):
        rows.size({"x": np.ones((3, 2)), "y": np.ones(2)}, None)


@pytest.mark.parametrize(
    ("shape", "dtype"), [(2, jnp.bool_), ((3, 1), jnp.bool_), (3, jnp.int32), (3, jnp.float32)]
)
def test_a_mask_that_does_not_fit_is_refused(shape: Any, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"must be bool of shape \(3,\), got "):
        rows.size({"x": np.ones((3, 2))}, jnp.zeros(shape, dtype))
