"""Batches and parameters that hypothesis draws: rows of every kind that a run may meet, and some more.

Dimension key: B rows, T tokens.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.fuzz.shapes import LABEL_WORDS, ROWS, TOKENS, VOCABULARY, Shape, normal_params

_PADDING_ID, _LAST_ID, _NO_ID = 0, VOCABULARY - 1, 1000

# What a finite number may be and still leave room, in float64, for the squares of all that is formed of it.
_MODERATE = (1.0, 0.3, 3.0, -2.0, 1e-3, 1e3, 1e-20, 1e20)
_EXTREME = (5e-324, 1e-300, 1e-45, 1e38, 1e300, -1e308)
_NOT_FINITE = (math.nan, math.inf, -math.inf)
_PARAMS_SCALES = (1.0, 0.1, 1e-6, 1e-3, 10.0, 1e2, 1e4, 0.0, 1e-310, 1e-160)

_token = st.integers(0, _LAST_ID)
_ids = st.one_of(
    _token.map(lambda token: [token] * TOKENS),
    st.integers(0, VOCABULARY - TOKENS).map(lambda first: list(range(first, first + TOKENS))),
    st.lists(_token, min_size=TOKENS, max_size=TOKENS),
    st.integers(1, TOKENS).map(lambda length: [7] * length + [_PADDING_ID] * (TOKENS - length)),
    # Negative ids count from the end; some are in no vocabulary.
    st.lists(st.sampled_from((-1, _LAST_ID, -VOCABULARY, 0, 4)), min_size=TOKENS, max_size=TOKENS),
    st.lists(st.sampled_from((0, 4, 7, _NO_ID, -_NO_ID)), min_size=TOKENS, max_size=TOKENS),
)
_numbers = st.sampled_from((0.0, *_MODERATE, *_EXTREME, *_NOT_FINITE))
_weights = st.one_of(
    st.just([1.0] * TOKENS),
    st.just([0.0] * TOKENS),
    st.integers(0, TOKENS - 1).map(lambda where: [float(column == where) for column in range(TOKENS)]),
    st.lists(st.floats(0.1, 2), min_size=TOKENS, max_size=TOKENS),
    st.lists(_numbers, min_size=TOKENS, max_size=TOKENS),
)
# Mostly rows that are as they should be: one odd row spoils nothing only where there are others.
_scales = st.one_of(st.sampled_from(_MODERATE), st.floats(0.1, 10), _numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One example, before it is put into arrays."""

    ids: list[int]
    position: int
    target: int
    weights: list[float]
    scale: float

    @property
    def is_moderate(self) -> bool:
        """Whether no number of it is so large or small that squares leave float64's range."""
        numbers = [number for number in (*self.weights, self.scale) if number != 0]
        return all(not math.isfinite(number) or 1e-60 < abs(number) < 1e60 for number in numbers)


@st.composite
def rows(draw: Any) -> Row:
    """One row; its target is often one of its own tokens."""
    ids = draw(_ids)
    targets = st.one_of(st.sampled_from(ids), _token, st.sampled_from(LABEL_WORDS))
    return Row(
        ids=ids,
        position=draw(st.integers(0, TOKENS - 1)),
        target=draw(targets),
        weights=draw(_weights),
        scale=draw(_scales),
    )


batches = st.lists(rows(), min_size=ROWS, max_size=ROWS)

masks = st.one_of(
    st.just([False] * ROWS), st.just([True] * ROWS), st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)
)
"""Which rows are padding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamsDraw:
    """Parameters: normal entries, times a number that may be another for the embedding."""

    seed: int
    scale: float
    embedding_scale: float


params_draws = st.builds(
    ParamsDraw,
    seed=st.integers(0, 2),
    scale=st.one_of(st.just(1.0), st.sampled_from(_PARAMS_SCALES), st.floats(0.01, 3)),
    embedding_scale=st.one_of(st.just(1.0), st.sampled_from(_PARAMS_SCALES)),
)


def to_arrays(batch: list[Row], shape: Shape) -> dict[str, Any]:
    """The batch in the shape's types, in which what is too large is infinite and what is too small 0."""
    dtype = np.dtype(shape.params_dtype)
    with np.errstate(over="ignore", under="ignore"):
        floats = {
            "weights": np.asarray([row.weights for row in batch], np.float64).astype(dtype),
            "scale": np.asarray([row.scale for row in batch], np.float64).astype(dtype),
        }
    integers = {
        "ids": np.asarray([row.ids for row in batch], np.int32),
        "positions": np.asarray([row.position for row in batch], np.int32),
        "targets": np.asarray([row.target for row in batch], np.int32),
    }
    return {name: jnp.asarray(leaf) for name, leaf in (floats | integers).items()}


def to_params(draw: ParamsDraw, shape: Shape) -> Any:
    """The parameters in the shape's type."""

    def scaled(path: Any, leaf: Any) -> Any:
        is_embedding = path[-1].key == "embedding"
        return leaf * jnp.asarray(draw.scale * (draw.embedding_scale if is_embedding else 1), leaf.dtype)

    return jax.tree_util.tree_map_with_path(scaled, normal_params(shape, draw.seed))
