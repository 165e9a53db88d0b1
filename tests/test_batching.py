"""Physical batches: every row once, short texts apart from long ones, the same sums and figures."""

from pathlib import Path

import jax
import numpy as np
import pytest

from tests import tiny
from wtdp_jax import train
from wtdp_jax.batching import Batcher
from wtdp_jax.config import TrainConfig
from wtdp_jax.metrics import read_metrics


def _arrays(lengths: list[int], width: int, *, lm: bool = False) -> dict[str, np.ndarray]:
    size, columns = len(lengths), np.arange(width)
    of_row = np.asarray(lengths)[:, None]
    arrays = {
        "ids": np.where(columns < of_row, 1 + np.arange(size)[:, None], 0).astype(np.int32),
        "positions": np.asarray(lengths, np.int32) - (2 if lm else 1),
        "labels": np.arange(size),
    }
    if lm:
        arrays["weights"] = ((columns > 0) & (columns < of_row)).astype(np.float32)
    return arrays


@pytest.mark.parametrize("lm", [False, True])
def test_batches_are_cut_where_the_longest_text_ends(lm: bool) -> None:
    lengths = [9, 2, 5, 4, 8, 3]
    arrays = _arrays(lengths, 10, lm=lm)
    batches = list(Batcher(arrays=arrays, physical_batch_size=2, length_multiple=4)(np.arange(6)))
    assert [batch.arrays["ids"].shape for batch in batches] == [(2, 4), (2, 8), (2, 10)]
    assert [batch.indices.tolist() for batch in batches] == [[1, 5], [3, 2], [4, 0]]
    for batch in batches:
        tokens = np.count_nonzero(batch.arrays["ids"], axis=1)
        np.testing.assert_array_equal(tokens, np.asarray(lengths)[batch.indices])
        np.testing.assert_array_equal(batch.arrays["labels"], batch.indices)
        if lm:
            assert batch.arrays["weights"].shape == batch.arrays["ids"].shape


def test_without_a_multiple_rows_stay_in_order_and_whole() -> None:
    arrays = _arrays([9, 2, 5], 10)
    batches = list(Batcher(arrays=arrays, physical_batch_size=2, length_multiple=None)(np.array([2, 0, 1])))
    assert [batch.indices.tolist() for batch in batches] == [[2, 0], [1, 0]]
    assert [batch.is_padding.tolist() for batch in batches] == [[False, False], [False, True]]
    assert all(batch.arrays["ids"].shape == (2, 10) for batch in batches)


@pytest.mark.parametrize("multiple", [None, 4])
def test_no_rows_are_one_batch_of_padding(multiple: int | None) -> None:
    batcher = Batcher(arrays=_arrays([9, 2], 10), physical_batch_size=3, length_multiple=multiple)
    (batch,) = batcher(np.zeros(0, np.int64))
    assert batch.is_padding.all() and batch.arrays["ids"].shape == (3, 10)


@pytest.mark.parametrize("regime", ["dp", "nonprivate"])
def test_a_run_comes_to_the_same(tmp_path: Path, regime: str) -> None:
    private = {"noise_multiplier": 0.5, "engine": "ghost"} if regime == "dp" else {}
    outcomes = []
    for multiple in (None, 4):
        config = TrainConfig(
            **private,
            regime=regime,
            steps=3,
            batch_size=12,
            physical_batch_size=4,
            optimizer="sgd",
            learning_rate=0.1,
            seed=3,
            length_multiple=multiple,
            out=tmp_path / str(multiple),
        )
        outcomes.append(train.run(config, tiny.inputs()))
    first, second = outcomes
    for a, b in zip(*(jax.tree.leaves(outcome.params) for outcome in outcomes), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert first.results.loss == pytest.approx(second.results.loss, rel=1e-5)
    rows = [read_metrics(outcome.folder.metrics) for outcome in outcomes]
    for name in ("non_private_loss", "non_private_mean_norm", "non_private_clipped_sum_norm"):
        values = [[row[name] for row in of_run if name in row] for of_run in rows]
        np.testing.assert_allclose(*values, rtol=1e-5)
