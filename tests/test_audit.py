"""The audit: its bounds by hand, and that it finds what is planted and nothing else."""

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from experiments import audit as script
from experiments.audit import AuditConfig
from wtdp_jax.accounting import epsilon_pld
from wtdp_jax.audit import bounds, one_run, settings, white_box, worst_case
from wtdp_jax.audit.settings import Setting, examine, faulty_settings, sound_settings

# ---- bounds -----------------------------------------------------------------------------------------------


def test_an_upper_bound_is_the_rate_at_which_so_few_are_seen_rarely_enough() -> None:
    for count, draws in ((0, 10), (3, 10), (50, 1000)):
        rate = bounds.upper_bound(count, draws, 0.99)
        assert stats.binom.cdf(count, draws, rate) == pytest.approx(0.01, rel=1e-6)
    # None in n: (1 - p)^n = 0.01.
    assert bounds.upper_bound(0, 10, 0.99) == pytest.approx(1 - 0.01**0.1)
    assert bounds.upper_bound(10, 10, 0.99) == 1


def test_the_errors_of_two_normals_give_their_distance() -> None:
    # Between N(0, 1) and N(mu, 1) at threshold t the errors are Q(t) and P(t - mu).
    for mu in (0.5, 2.0):
        for t in (-1.0, 0.0, 1.5):
            found = bounds.mu_lower_bound(float(stats.norm.sf(t)), float(stats.norm.cdf(t - mu)))
            assert found == pytest.approx(mu)
    assert bounds.mu_lower_bound(0.6, 0.6) == 0


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 4.0])
def test_the_gaussian_curve_agrees_with_the_accountant(noise_multiplier: float) -> None:
    by_pld = epsilon_pld(noise_multiplier=noise_multiplier, sampling_prob=1.0, steps=1, delta=1e-5)
    assert bounds.gaussian_epsilon(1 / noise_multiplier, 1e-5) == pytest.approx(by_pld, rel=1e-3)


def test_the_gaussian_curves_ends() -> None:
    assert bounds.gaussian_epsilon(0.0, 1e-5) == 0 and bounds.gaussian_epsilon(math.inf, 1e-5) == math.inf
    # At epsilon 0 delta is P(mu / 2) - P(-mu / 2): 0.0399 at mu = 0.1.
    assert bounds.gaussian_epsilon(0.1, 0.04) == 0 < bounds.gaussian_epsilon(0.1, 0.03)


def test_guesses_in_one_run() -> None:
    def bound(correct: int, delta: float = 0.0) -> float:
        return bounds.one_run_epsilon_lower_bound(correct, 100, canaries=400, delta=delta, confidence=0.95)

    # With delta 0 the number of correct guesses is at most binomial with probability e^eps / (1 + e^eps).
    epsilon = bound(80)
    assert stats.binom.sf(79, 100, 1 / (1 + math.exp(-epsilon))) == pytest.approx(0.05, rel=1e-3)
    assert bound(50) == 0 < bound(70) < bound(80) < bound(100)
    # A delta can only explain more.
    assert bound(80, delta=1e-3) < epsilon
    assert bound(0) == 0


# ---- one step ---------------------------------------------------------------------------------------------


def _mechanism(stddev: float) -> white_box.Mechanism:
    """A sum of numbers, and noise on each of its two coordinates."""
    return white_box.Mechanism(
        release=lambda params, batch, is_padding: {
            "a": jnp.sum(jnp.where(is_padding[:, None], 0, batch["x"]), 0),
        },
        noised=lambda total, key: {"a": total["a"] + stddev * jax.random.normal(key, total["a"].shape)},
    )


def _pair() -> white_box.Neighbours:
    x = jnp.asarray([[5.0, 1.0], [0.6, 0.8]])  # a canary of length 1
    return white_box.Neighbours(params={}, batch={"x": x}, others=jnp.asarray([False]))


@pytest.mark.parametrize("stddev", [0.5, 1.0])
def test_a_gaussian_step_is_bounded_from_below_and_nearly_reached(stddev: float) -> None:
    found = white_box.audit(_mechanism(stddev), _pair(), jax.random.key(0), draws=20_000, delta=1e-5)
    assert 0.9 / stddev < found.mu < 1 / stddev
    assert found.epsilon == pytest.approx(bounds.gaussian_epsilon(found.mu, 1e-5))
    assert (found.draws, found.confidence) == (20_000, 0.999)


def test_the_best_test_is_the_column_that_tells_most() -> None:
    rng = np.random.default_rng(0)
    without, with_canary = rng.normal(size=(2, 4000, 3))
    with_canary[:, 1] += 3
    view, threshold = white_box.best_test(without, with_canary)
    assert view == 1 and threshold == pytest.approx(1.5, abs=0.2)


def test_ascent_finds_where_the_naive_norm_is_wrong() -> None:
    """A product of embedding and head: gradients h in one and e in the other, parallel where e = h."""

    def loss(params: Any, embedding: Any, head: Any) -> Any:
        return jnp.dot(embedding[0], head[1]) + jnp.dot(embedding[0], head[0])

    def ratio(params: Any) -> Any:
        return worst_case.norm_ratio(loss, params, ("e",))

    params = {"e": jnp.asarray([[1.0, 0.2], [-1.3, 1.0]])}
    better = worst_case.ascend(ratio, params, steps=300, learning_rate=0.05)
    # g_in = (E_0 + E_1, 0), g_out = (E_0, E_0). With E_0 + E_1 = a E_0 the squared ratio is
    # 1 + 2 a / (a^2 + 2), at best 1 + 1 / sqrt(2).
    assert float(ratio(params)) < 1 < 1.29 < float(ratio(better)) <= math.sqrt(1 + 1 / math.sqrt(2)) + 1e-4


# ---- settings ---------------------------------------------------------------------------------------------


def _examine(setting: Setting, ascent_steps: int = 1000) -> settings.Finding:
    return examine(setting, seed=0, draws=20_000, ascent_steps=ascent_steps)


@pytest.mark.slow
@pytest.mark.parametrize("setting", faulty_settings(), ids=lambda setting: setting.name)
def test_every_fault_is_found_out(setting: Setting) -> None:
    found = _examine(setting)
    assert not setting.is_sound and found.is_refuted and found.is_as_expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [s for s in sound_settings() if s.clipping != "automatic"], ids=lambda setting: setting.name
)
def test_sound_settings_stand_close_to_their_epsilon(setting: Setting) -> None:
    found = _examine(setting)
    assert setting.is_sound and not found.is_refuted and found.is_as_expected
    # The test is nearly the best there is, so that a small fault would be seen.
    least = 0.5 if setting.clipping == "per_layer" or setting.tied_norm in ("omit", "triangle") else 0.85
    assert found.audit.epsilon > least * found.stated_epsilon


def test_the_model_is_small_enough_to_draw_from() -> None:
    params = settings._neighbours(settings._model(tie=False), seed=0).params
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) < 5000


@pytest.mark.slow
def test_a_whole_run_is_bounded_far_below_its_epsilon() -> None:
    found = one_run.audit_one_run(one_run.RunConfig(engine="ghost"))
    assert 0 < found.epsilon < found.stated_epsilon
    loud = one_run.audit_one_run(one_run.RunConfig(engine="ghost", noise_multiplier=20.0))
    assert loud.correct < found.correct and loud.epsilon < loud.stated_epsilon


# ---- the script -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_tells_a_wrong_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = next(s for s in faulty_settings() if "half" in s.name)
    monkeypatch.setattr(script, "sound_settings", lambda: ())
    monkeypatch.setattr(script, "faulty_settings", lambda: (one,))
    assert script.main(AuditConfig(out=tmp_path / "a", run_engines=(), draws=20_000))
    assert capsys.readouterr().out.splitlines()[-1] == "1 audits: all as expected"
    (row,) = json.loads((tmp_path / "a" / "results.json").read_text())["rows"]
    assert row["verdict"] == "refuted" and row["epsilon"] > row["stated_epsilon"]
    # A sound setting that is called faulty must be missed, and said to be.
    blank = Setting(name="fault: none", engine="ghost", claims_exact=True)
    monkeypatch.setattr(script, "faulty_settings", lambda: (blank,))
    assert not script.main(AuditConfig(out=tmp_path / "b", run_engines=(), draws=20_000))
    assert capsys.readouterr().out.splitlines()[-1] == "1 audits: NOT as expected: fault: none"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draws": 100}, "draws must be at least 20000, got 100"),
        ({"ascent_steps": -1}, "ascent_steps must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AuditConfig(**settings)


def test_a_folder_that_exists_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["audit.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(script.__file__), run_name="__main__")
    assert leaving.value.code == 2
    assert capsys.readouterr().err == f"error: out must not exist, got {tmp_path}\n"
