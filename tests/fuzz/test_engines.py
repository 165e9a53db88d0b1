"""Clipped sums on drawn batches, by every engine: exact, harmless, and within their sensitivity."""

from typing import Any

import numpy as np
import pytest
from hypothesis import target

from tests.fuzz.batches import ParamsDraw, Row, batches, masks, params_draws, to_arrays, to_params
from tests.fuzz.cases import count, drawn
from tests.fuzz.properties import assert_exact, assert_harmless, largest_change
from tests.fuzz.shapes import Shape

SHAPES = (
    Shape(engine="ghost"),
    Shape(engine="ghost", loss="lm", clipping="automatic", tied_norm="materialize"),
    Shape(engine="ghost", tie=False, loss="lm", clipping="per_layer"),
    Shape(engine="ghost", family="llama", loss="lm"),
    Shape(engine="ghost", family="bare"),
    Shape(engine="ghost", loss="lm", tied_norm="omit"),
    Shape(engine="bookkeeping", loss="lm"),
    Shape(engine="bookkeeping", clipping="per_layer"),
    Shape(engine="bookkeeping", tied_norm="triangle"),
    Shape(engine="bookkeeping", family="llama", tie=False, loss="label_words", clipping="automatic"),
    Shape(engine="bookkeeping", family="llama", loss="lm", clipping="per_layer"),
    Shape(engine="bookkeeping", family="bare", clipping="per_layer"),
    Shape(engine="materialized", loss="lm", clipping="automatic"),
    Shape(engine="microbatched", clipping="per_layer"),
    Shape(engine="ghost", loss="lm", dtype="float32", optimized=True),
    Shape(engine="ghost", dtype="bfloat16"),
    Shape(engine="ghost", family="bare", tied_norm="omit", dtype="float32", l2_clip_norm=1e-3),
    Shape(engine="bookkeeping", dtype="float32", optimized=True),
    Shape(engine="bookkeeping", loss="lm", tied_norm="omit", clipping="per_layer", dtype="float32"),
    Shape(engine="materialized", dtype="float32", l2_clip_norm=10.0),
)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sum_keeps_its_contract(shape: Shape) -> None:
    @drawn(
        "engine batches",
        share=1 / len(SHAPES),
        batch=batches,
        mask=masks,
        draw=params_draws,
        other=batches,
    )
    def check(batch: list[Row], mask: list[bool], draw: ParamsDraw, other: list[Row]) -> None:
        count("engine batches")
        is_padding = np.asarray(mask)
        with shape.types():
            params, arrays = to_params(draw, shape), to_arrays(batch, shape)
            assert_harmless(shape, params, arrays, is_padding, to_arrays(other, shape))
            target(largest_change(shape, params, arrays, is_padding))
            if shape.dtype == "float64":
                assert_exact(shape, params, arrays, is_padding | _immoderate(batch))

    check()


def _immoderate(batch: list[Row]) -> Any:
    return np.asarray([not row.is_moderate for row in batch])
