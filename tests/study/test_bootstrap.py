import numpy as np
import pytest

from wtdp_jax.study.bootstrap import Interval, interval, standard_deviation


def test_one_seeds_interval_is_the_binomials() -> None:
    right = np.repeat([1.0, 0.0], [300, 100])[None]
    found = interval(right)
    # 0.75 +- 1.96 sqrt(0.75 0.25 / 400) = 0.75 +- 0.0424
    assert found.mean == 0.75
    assert found.low == pytest.approx(0.75 - 0.0424, abs=0.003)
    assert found.high == pytest.approx(0.75 + 0.0424, abs=0.003)


def test_pairing_takes_out_what_both_share() -> None:
    rng = np.random.default_rng(0)
    first = (rng.random((1, 400)) < 0.7).astype(float)
    second = first.copy()
    second[0, :8] = 1 - second[0, :8]
    paired = interval(second - first)
    assert paired.high - paired.low < 0.04
    assert interval(first).high - interval(first).low > 0.08


def test_where_seeds_alone_differ_it_is_students() -> None:
    values = np.tile([[0.0], [1.0], [2.0]], (1, 50))
    found = interval(values)
    # The 97.5% quantile of Student's t with 2 degrees of freedom is 4.303; the standard error 1 / sqrt(3).
    assert found.mean == 1.0
    assert (found.high - 1.0, 1.0 - found.low) == pytest.approx((4.303 / 3**0.5,) * 2, rel=1e-2)
    assert interval(values[:1]) == Interval(0.0, 0.0, 0.0)


@pytest.mark.parametrize(("num_seeds", "spread"), [(2, 0.2), (3, 0.2), (5, 0.2), (3, 0.02), (3, 0.0)])
def test_it_covers_the_truth_as_often_as_it_says(num_seeds: int, spread: float) -> None:
    rng = np.random.default_rng(num_seeds)
    trials = 200
    covered = 0
    for _ in range(trials):
        seeds = rng.normal(scale=spread, size=(num_seeds, 1))
        examples = rng.integers(-1, 2, size=(1, 100))
        covered += interval(seeds + examples).includes(0.0)
    # 0.95 less three standard errors of the trials.
    assert covered / trials > 0.95 - 3 * (0.05 * 0.95 / trials) ** 0.5


def test_it_is_the_same_every_time_and_ends_belong_to_it() -> None:
    values = np.eye(3)
    assert interval(values) == interval(values)
    assert Interval(0.5, 0.4, 0.6).includes(0.4) and not Interval(0.5, 0.4, 0.6).includes(0.39)


def test_one_seed_has_no_deviation() -> None:
    assert standard_deviation(np.array([0.5])) is None
    assert standard_deviation(np.array([1.0, 3.0])) == pytest.approx(2**0.5)
