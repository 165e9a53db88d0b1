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


def test_seeds_are_resampled_too() -> None:
    # Examples all alike, seeds apart: the interval spans the seeds' means.
    values = np.tile([[0.0], [1.0]], (1, 50))
    found = interval(values)
    assert found == Interval(0.5, 0.0, 1.0)
    assert interval(values[:1]) == Interval(0.0, 0.0, 0.0)


def test_it_is_the_same_every_time_and_ends_belong_to_it() -> None:
    values = np.eye(3)
    assert interval(values) == interval(values)
    assert Interval(0.5, 0.4, 0.6).includes(0.4) and not Interval(0.5, 0.4, 0.6).includes(0.39)


def test_one_seed_has_no_deviation() -> None:
    assert standard_deviation(np.array([0.5])) is None
    assert standard_deviation(np.array([1.0, 3.0])) == pytest.approx(2**0.5)
