"""Draws, masks and redraws of the Poisson sampler and of the shuffled epochs."""

import numpy as np
import pytest

from wtdp_jax.sampling import PoissonSampler, ShuffledBatches, entropy_from_os


def poisson(**changes: int | float) -> PoissonSampler:
    fields = {"num_examples": 40, "sampling_prob": 0.25, "physical_batch_size": 4, "entropy": 7}
    return PoissonSampler(**(fields | changes))


def shuffled(**changes: int) -> ShuffledBatches:
    fields = {"num_examples": 10, "batch_size": 4, "physical_batch_size": 3, "entropy": 7}
    return ShuffledBatches(**(fields | changes))


def real_rows(sampler: PoissonSampler | ShuffledBatches, step: int) -> list[int]:
    """All rows that the mask of a step's batches lets through."""
    batches = sampler.batches(step)
    return [int(row) for batch in batches for row in batch.indices[~batch.is_padding]]


@pytest.mark.parametrize("step", range(20))
def test_batches_hold_the_whole_draw_in_one_shape(step: int) -> None:
    sampler = poisson()
    batches = sampler.batches(step)
    assert real_rows(sampler, step) == list(sampler.draw(step))
    assert len(batches) == max(1, -(-len(sampler.draw(step)) // 4))
    for indices, is_padding in batches:
        assert indices.shape == is_padding.shape == (4,)
        assert (indices[is_padding] == 0).all()
    assert not any(is_padding.any() for _, is_padding in batches[:-1])


def test_poisson_draws_no_row_twice_and_sizes_differ() -> None:
    draws = [poisson().draw(step) for step in range(50)]
    assert all((np.diff(draw) > 0).all() for draw in draws)
    assert len({len(draw) for draw in draws}) > 5


def test_poisson_includes_every_row_with_the_probability() -> None:
    # Over 4000 steps a row's frequency has standard deviation sqrt(0.25 * 0.75 / 4000) = 0.0068; 4.5 of them
    # for 40 rows. The sizes' variance is that of a binomial, 40 * 0.25 * 0.75 = 7.5, within 10%.
    sampler = poisson()
    counts = np.zeros(40)
    sizes = []
    for step in range(4000):
        draw = sampler.draw(step)
        counts[draw] += 1
        sizes.append(len(draw))
    assert np.abs(counts / 4000 - 0.25).max() < 4.5 * 0.0068
    assert np.var(sizes) == pytest.approx(7.5, rel=0.1)


def test_poisson_rows_are_drawn_independently() -> None:
    # Two rows come together with probability 1/16: standard deviation sqrt(0.0586 / 4000) = 0.0038.
    drawn = np.zeros((4000, 40))
    for step in range(4000):
        drawn[step, poisson().draw(step)] = 1
    together = drawn.T @ drawn / 4000
    assert np.abs(together[np.triu_indices(40, k=1)] - 1 / 16).max() < 5 * 0.0038


@pytest.mark.parametrize("step", [0, 1, 99])
def test_probability_one_draws_all_and_zero_none(step: int) -> None:
    assert real_rows(poisson(sampling_prob=1.0), step) == list(range(40))
    batches = poisson(sampling_prob=0.0).batches(step)
    assert len(batches) == 1
    assert batches[0].is_padding.all() and (batches[0].indices == 0).all()


def test_a_draw_larger_than_the_physical_batch_is_never_cut() -> None:
    batches = poisson(sampling_prob=1.0, physical_batch_size=16).batches(0)
    # 40 rows in 16 + 16 + 8
    assert [int((~batch.is_padding).sum()) for batch in batches] == [16, 16, 8]


@pytest.mark.parametrize("make", [poisson, shuffled])
def test_a_step_is_the_same_whenever_and_wherever_it_is_asked_for(make: type) -> None:
    onward = [real_rows(make(), step) for step in range(8)]
    sampler = make()
    assert [real_rows(sampler, step) for step in reversed(range(8))] == onward[::-1]
    assert onward[0] != onward[1]


@pytest.mark.parametrize("make", [poisson, shuffled])
def test_every_bit_of_the_entropy_counts(make: type) -> None:
    draws = {tuple(real_rows(make(entropy=2**bit), 0)) for bit in (0, 31, 32, 63, 64, 127)}
    assert len(draws) == 6


def test_entropy_and_step_do_not_run_into_each_other() -> None:
    # A generator seeded with the words of both, end to end, would confuse these.
    assert real_rows(poisson(entropy=1 + (5 << 32)), 0) != real_rows(poisson(entropy=1), 5)


def test_entropy_from_os_is_new_each_time_and_128_bits() -> None:
    drawn = [entropy_from_os() for _ in range(64)]
    assert len(set(drawn)) == 64
    assert 2**120 < max(drawn) < 2**128


def test_an_epoch_goes_through_all_rows_once_with_a_short_last_batch() -> None:
    sampler = shuffled()
    assert sampler.steps_per_epoch == 3  # 4 + 4 + 2 rows
    for epoch in range(3):
        steps = [real_rows(sampler, 3 * epoch + place) for place in range(3)]
        assert [len(rows) for rows in steps] == [4, 4, 2]
        assert sorted(sum(steps, [])) == list(range(10))


def test_epochs_have_different_orders() -> None:
    orders = {
        tuple(sum((real_rows(shuffled(), 3 * epoch + place) for place in range(3)), [])) for epoch in range(5)
    }
    assert len(orders) == 5


def test_shuffled_batches_have_one_shape() -> None:
    # 4 rows in physical batches of 3: 3 + 1; the epoch's last 2 rows: one batch with one padding row.
    masks = [[batch.is_padding.tolist() for batch in shuffled().batches(step)] for step in (0, 2)]
    assert masks == [[[False, False, False], [False, True, True]], [[False, False, True]]]


def test_a_batch_larger_than_the_data_is_the_data() -> None:
    sampler = shuffled(batch_size=100)
    assert sampler.steps_per_epoch == 1
    assert sorted(real_rows(sampler, 5)) == list(range(10))


@pytest.mark.parametrize(
    ("make", "name", "value", "requirement"),
    [
        (poisson, "num_examples", 0, "at least 1"),
        (poisson, "physical_batch_size", 0, "at least 1"),
        (poisson, "entropy", -1, "at least 0"),
        (poisson, "sampling_prob", 1.5, r"in \[0, 1\]"),
        (poisson, "sampling_prob", float("nan"), r"in \[0, 1\]"),
        (shuffled, "num_examples", 0, "at least 1"),
        (shuffled, "batch_size", 0, "at least 1"),
    ],
)
def test_samplers_refuse_what_is_out_of_range(make: type, name: str, value: float, requirement: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be {requirement}, got {value}$"):
        make(**{name: value})


@pytest.mark.parametrize("make", [poisson, shuffled])
def test_a_negative_step_is_refused(make: type) -> None:
    with pytest.raises(ValueError, match="^step must be at least 0, got -2$"):
        make().batches(-2)
