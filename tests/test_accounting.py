"""Epsilon against closed forms and second implementations; calibration."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import special

from wtdp_jax import accounting
from wtdp_jax.accounting import (
    calibrate_noise_multiplier,
    effective_noise_multiplier,
    epsilon_pld,
    epsilon_rdp,
)

SMALL: dict[str, Any] = {"noise_multiplier": 4.0, "sampling_prob": 0.1, "steps": 50, "delta": 1e-5}
BOUNDS = [epsilon_pld, epsilon_rdp]


def upper_tail(x: float) -> float:
    """P(N(0, 1) > x)."""
    return float(special.ndtr(-x))


def renyi_epsilon(sigma: float, q: float, steps: int, delta: float) -> float:
    """Subsampled Gaussian at integer orders (Mironov et al. 2019, section 3.3), turned into epsilon as there.

    (a - 1) RDP(a) = log sum_k C(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) / 2 sigma^2)
    epsilon = min_a steps RDP(a) + log(1 / delta) / (a - 1)
    """
    best = math.inf
    for order in range(2, 64):
        k = np.arange(order + 1)
        log_terms = np.log(special.binom(order, k)) + (order - k) * np.log1p(-q) + k * np.log(q)
        renyi = special.logsumexp(log_terms + k * (k - 1) / (2 * sigma**2)) / (order - 1)
        best = min(best, steps * float(renyi) + math.log(1 / delta) / (order - 1))
    return best


def gaussian_delta(sigma: float, steps: int, epsilon: float) -> float:
    """The exact delta of the Gaussian mechanism without sampling (Balle and Wang 2018, theorem 8)."""
    mu = math.sqrt(steps) / sigma
    return upper_tail(epsilon / mu - mu / 2) - math.exp(epsilon) * upper_tail(epsilon / mu + mu / 2)


def convolved_delta(sigma: float, q: float, steps: int, epsilon: float) -> float:
    """Delta for removing a row, from the losses of one step on a fine grid, convolved by an FFT.

    The loss of an outcome x is log(1 - q + q exp((2 x - 1) / 2 sigma^2)), x from the mixture (1 - q) N(0) + q
    N(1).
    """
    spacing, points = 1e-4, 2**19
    edges = np.linspace(-12 * sigma, 1 + 12 * sigma, 400_001)
    mass = np.diff((1 - q) * special.ndtr(edges / sigma) + q * special.ndtr((edges - 1) / sigma))
    middle = (edges[1:] + edges[:-1]) / 2
    loss = np.log1p(q * np.expm1((2 * middle - 1) / (2 * sigma**2)))
    one_step = np.zeros(points)
    np.add.at(one_step, np.rint(loss / spacing).astype(int) % points, mass)  # negative losses wrap around
    composed = np.fft.irfft(np.fft.rfft(one_step) ** steps, points)
    losses = spacing * ((np.arange(points) + points // 2) % points - points // 2)
    return float(np.sum(composed * np.maximum(0, -np.expm1(epsilon - losses)), where=losses > epsilon))


@pytest.mark.parametrize(("sigma", "epochs", "published"), [(1.3, 15, 1.19), (1.1, 60, 3.01)])
def test_epsilon_of_the_classic_mnist_settings(sigma: float, epochs: int, published: float) -> None:
    # The DP-SGD tutorial's table: 60,000 rows, batches of 256, delta 1e-5, by RDP with the conversion of
    # 2017.
    q, steps, delta = 256 / 60_000, epochs * 60_000 // 256, 1e-5
    classic = renyi_epsilon(sigma, q, steps, delta)
    assert classic == pytest.approx(published, rel=0.015)
    by_rdp = epsilon_rdp(noise_multiplier=sigma, sampling_prob=q, steps=steps, delta=delta)
    by_pld = epsilon_pld(noise_multiplier=sigma, sampling_prob=q, steps=steps, delta=delta)
    # The conversion of 2020 gains up to a fifth on it, the loss distribution some more.
    assert 0.8 * classic < by_rdp < classic
    assert 0.7 * classic < by_pld < by_rdp


@pytest.mark.parametrize(("sigma", "steps"), [(5.0, 1), (5.0, 9), (40.0, 400)])
def test_pld_is_the_closed_form_without_sampling(sigma: float, steps: int) -> None:
    epsilon = epsilon_pld(noise_multiplier=sigma, sampling_prob=1.0, steps=steps, delta=1e-5)
    assert gaussian_delta(sigma, steps, epsilon) <= 1e-5
    assert gaussian_delta(sigma, steps, 0.999 * epsilon) > 1e-5


@pytest.mark.parametrize(("sigma", "q"), [(2.0, 0.1), (1.5, 0.3)])
def test_pld_is_the_closed_form_for_one_step(sigma: float, q: float) -> None:
    epsilon = epsilon_pld(noise_multiplier=sigma, sampling_prob=q, steps=1, delta=1e-5)

    def delta(epsilon: float) -> float:
        # The mixture exceeds e^epsilon N(0) where 1 - q + q exp((2 x - 1) / 2 sigma^2) > e^epsilon, x >
        # threshold.
        threshold = sigma**2 * math.log((math.exp(epsilon) - 1 + q) / q) + 0.5
        without = upper_tail(threshold / sigma)
        return (1 - q) * without + q * upper_tail((threshold - 1) / sigma) - math.exp(epsilon) * without

    assert delta(epsilon) <= 1e-5
    assert delta(0.999 * epsilon) > 1e-5


@pytest.mark.parametrize("sigma", [0.7, 1.0, 4.0])
@pytest.mark.parametrize(("q", "steps"), [(0.1, 50), (0.01, 1000), (0.03, 60), (0.5, 10)])
def test_pld_agrees_with_a_second_composition(sigma: float, q: float, steps: int) -> None:
    epsilon = epsilon_pld(noise_multiplier=sigma, sampling_prob=q, steps=steps, delta=1e-5)
    assert convolved_delta(sigma, q, steps, epsilon) == pytest.approx(1e-5, rel=0.01)


def test_pld_stays_tight_over_very_many_tiny_losses() -> None:
    # Central limit (Bu et al. 2020): a Gaussian mechanism of mu = q sqrt(T (e^(1 / sigma^2) - 1)), here
    # 0.1003.
    epsilon = epsilon_pld(noise_multiplier=10.0, sampling_prob=1e-3, steps=10**6, delta=1e-5)
    mu = 1e-3 * math.sqrt(10**6 * math.expm1(1 / 100))
    assert gaussian_delta(1 / mu, 1, 1.02 * epsilon) < 1e-5 < gaussian_delta(1 / mu, 1, 0.98 * epsilon)


@pytest.mark.parametrize("steps", [10**6 + 1, 2**31 - 1])
def test_more_steps_than_a_grid_can_hold_are_bounded_by_rdp(steps: int) -> None:
    mechanism: dict[str, Any] = {"noise_multiplier": 1.0, "sampling_prob": 0.1, "delta": 1e-5}
    epsilon = epsilon_pld(**mechanism, steps=steps)
    assert epsilon == epsilon_rdp(**mechanism, steps=steps) > epsilon_pld(**mechanism, steps=10**6)


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "expected"),
    [
        # One step's Renyi divergence of order 2 is log(1 + q^2 (e^(1 / sigma^2) - 1)); its root is a typical
        # loss, and a tenth of that the spacing where it is below the library's.
        (100.0, 0.01, 10, 0.1 * math.sqrt(math.log1p(1e-4 * math.expm1(1e-4)))),
        (1.0, 0.5, 10, 1e-4),
        # 200,000 points up to the largest loss of one step, log(1 + q (e^(10 / sigma + 1 / 2 sigma^2) - 1)).
        (0.1, 0.5, 1, (150 + math.log(0.5)) / 2e5),
        # A million points up to ten standard deviations above what all steps lose: log(1 + (e^100 - 1) / 4).
        (0.1, 0.5, 10**4, (1e4 * (100 - math.log(4)) + 1e3 * math.sqrt(100 - math.log(4))) / 1e6),
        (1.0, 0.9, 10**5, (1e5 * (d := math.log1p(0.81 * math.expm1(1))) + 1e1 * math.sqrt(1e5 * d)) / 1e6),
    ],
)
def test_the_grid_is_fine_for_tiny_losses_and_coarse_for_huge(
    sigma: float, q: float, steps: int, expected: float
) -> None:
    assert accounting._loss_interval(sigma, q, steps) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-3, 0.4, 1.0])
@pytest.mark.parametrize("exponent", [1e-9, 0.999, 1.0, 4.0])
def test_losses_of_a_mixture(scale: float, exponent: float) -> None:
    expected = math.log1p(scale * math.expm1(exponent))
    assert accounting._log1p_scaled_expm1(scale, exponent) == pytest.approx(expected, rel=1e-12)
    assert accounting._log1p_scaled_expm1(scale, 1e4) == pytest.approx(1e4 + math.log(scale), rel=1e-12)


def test_pld_of_hardly_any_noise_is_finite() -> None:
    # One step of the Gaussian mechanism at mu = 100: epsilon is about mu^2 / 2 + 4.26 mu = 5426.
    epsilon = epsilon_pld(noise_multiplier=0.01, sampling_prob=1.0, steps=1, delta=1e-5)
    assert epsilon == pytest.approx(5426, rel=2e-3)


@pytest.mark.parametrize("bound", BOUNDS)
def test_epsilon_grows_with_steps_and_sampling_and_falls_with_noise_and_delta(bound: Any) -> None:
    base = bound(**SMALL)
    assert bound(**SMALL | {"steps": 60}) > base
    assert bound(**SMALL | {"sampling_prob": 0.12}) > base
    assert bound(**SMALL | {"noise_multiplier": 4.4}) < base
    assert bound(**SMALL | {"delta": 1e-4}) < base


@pytest.mark.parametrize("bound", BOUNDS)
def test_epsilon_at_the_edges(bound: Any) -> None:
    assert bound(**SMALL | {"steps": 0}) == 0
    assert bound(**SMALL | {"steps": 0, "noise_multiplier": 0.0}) == 0
    assert bound(**SMALL | {"sampling_prob": 0.0}) == 0
    assert bound(**SMALL | {"noise_multiplier": 0.0}) == math.inf


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", -1.0),
        ("noise_multiplier", math.inf),
        ("noise_multiplier", math.nan),
        ("sampling_prob", 1.1),
        ("sampling_prob", -0.1),
        ("steps", -1),
        ("delta", 0.0),
        ("delta", 1.0),
    ],
)
def test_epsilon_refuses_what_is_out_of_range(bound: Any, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*, got {value}$"):
        bound(**SMALL | {name: value})


def test_rdp_leaves_the_librarys_order_warnings_out(caplog: pytest.LogCaptureFixture) -> None:
    # At q = 1/2 the library cannot compute orders near 1; it says so once for each, and uses the others.
    assert 0 < epsilon_rdp(noise_multiplier=5.0, sampling_prob=0.5, steps=10, delta=1e-5) < math.inf
    assert not caplog.records


def test_effective_noise_multiplier() -> None:
    # A standard deviation of 1.5 * 2 = 3 against a sensitivity of 6.
    assert effective_noise_multiplier(1.5, l2_clip_norm=2.0, sensitivity=6.0) == 0.5
    # 0.7 * 0.1 / 0.1 is not 0.7 in floats: equal norms must not make a second, different epsilon.
    assert effective_noise_multiplier(0.7, l2_clip_norm=0.1, sensitivity=0.1) == 0.7


@pytest.mark.parametrize("ratio", [1.0, math.sqrt(2)])
@pytest.mark.parametrize(
    ("sampling_prob", "steps", "epsilon"), [(0.1, 50, 1.0), (1.0, 3, 2.0), (0.02, 200, 0.005), (0.5, 4, 1.0)]
)
def test_calibration_is_just_below_the_target(
    sampling_prob: float, steps: int, epsilon: float, ratio: float
) -> None:
    noise_multiplier = calibrate_noise_multiplier(
        sampling_prob=sampling_prob,
        steps=steps,
        epsilon=epsilon,
        delta=1e-5,
        l2_clip_norm=0.3,
        sensitivity=0.3 * ratio,
    )
    reached = epsilon_pld(
        noise_multiplier=noise_multiplier / ratio, sampling_prob=sampling_prob, steps=steps, delta=1e-5
    )
    assert (1 - 1.001e-3) * epsilon <= reached <= epsilon * (1 + 1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be positive and finite, got 0.0"),
        ({"epsilon": math.inf}, "epsilon must be positive and finite, got inf"),
        ({"delta": 0.0}, r"delta must be in \(0, 1\), got 0.0"),
        ({"sampling_prob": 2.0}, r"sampling_prob must be in \[0, 1\], got 2.0"),
        # 1 - 0.9^2 = 0.19
        (
            {"delta": 0.2, "steps": 2},
            "delta must be below the probability 0.19 that a row is drawn at all .*",
        ),
        ({"steps": 0}, "delta must be below the probability 0 that a row is drawn at all .*"),
        ({"delta": 1e-16}, "epsilon must be reachable with a noise multiplier up to 1048576, got .*"),
        ({"l2_clip_norm": math.inf}, "l2_clip_norm must be positive and finite with privacy, got inf"),
        ({"sensitivity": 0.0}, "sensitivity must be positive and finite with privacy, got 0.0"),
        ({"sensitivity": math.inf}, "sensitivity must be positive and finite with privacy, got inf"),
    ],
)
def test_calibration_refuses_what_it_cannot_do(changes: dict[str, float], message: str) -> None:
    settings = {
        "sampling_prob": 0.1,
        "steps": 10,
        "epsilon": 1.0,
        "delta": 1e-5,
        "l2_clip_norm": 1.0,
        "sensitivity": 1.0,
    }
    with pytest.raises(ValueError, match=f"^{message}$"):
        calibrate_noise_multiplier(**(settings | changes))
