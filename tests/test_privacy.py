"""What the privacy statement derives, and says."""

import dataclasses
import json
import math
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld

from wtdp_jax.accounting import epsilon_pld, epsilon_rdp
from wtdp_jax.privacy import PrivacyStatement, default_delta

SMALL: dict[str, Any] = {"noise_multiplier": 4.0, "sampling_prob": 0.1, "steps": 50, "delta": 1e-5}


def make_statement(**changes: Any) -> PrivacyStatement:
    fields = {
        "num_examples": 1000,
        "expected_batch_size": 100,
        "steps": 50,
        "noise_multiplier": 4.0,
        "l2_clip_norm": 0.5,
        "sensitivity": 0.5,
        "delta": 1e-5,
        "reproducible_randomness": False,
    }
    return PrivacyStatement(**(fields | changes))


def test_default_delta() -> None:
    # 10^-1.1 = 1 / 12.589
    assert default_delta(10) == pytest.approx(0.0794328, rel=1e-6)
    assert default_delta(67_349) < 1 / 67_349
    assert default_delta(2) == pytest.approx(0.4665165, rel=1e-6)
    with pytest.raises(ValueError, match="^num_examples must be at least 2 for a default delta, got 1$"):
        default_delta(1)


def test_statement_derives_its_figures() -> None:
    statement = make_statement(num_examples=7, expected_batch_size=3, sensitivity=1.0)
    assert statement.sampling_prob == 3 / 7
    assert statement.noise_stddev == 2.0  # 4 * 0.5
    assert statement.effective_noise_multiplier == 2.0  # 2 / 1


def test_statement_epsilon_is_the_effective_multipliers() -> None:
    exact = make_statement()
    assert exact.epsilon == exact.epsilon_claimed == epsilon_pld(**SMALL)
    naive = make_statement(sensitivity=math.sqrt(2) * 0.5)
    assert naive.epsilon == pytest.approx(epsilon_pld(**SMALL | {"noise_multiplier": 4 / math.sqrt(2)}))
    assert naive.epsilon_rdp == pytest.approx(epsilon_rdp(**SMALL | {"noise_multiplier": 4 / math.sqrt(2)}))
    assert naive.epsilon_claimed == exact.epsilon < naive.epsilon


def test_json_holds_all_that_an_independent_accountant_needs() -> None:
    figures = json.loads(json.dumps(make_statement(expected_batch_size=101.5).to_json(), allow_nan=False))
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            figures["sampling_prob"], dp_accounting.GaussianDpEvent(figures["effective_noise_multiplier"])
        ),
        figures["steps"],
    )
    independent = pld.PLDAccountant().compose(event).get_epsilon(figures["delta"])
    assert figures["epsilon"] == pytest.approx(independent, rel=1e-9)
    assert figures["sampling_prob"] * figures["num_examples"] == pytest.approx(figures["expected_batch_size"])
    assert set(figures) == {
        "mechanism",
        "sampling",
        "sampling_prob",
        "expected_batch_size",
        "num_examples",
        "noise_multiplier",
        "effective_noise_multiplier",
        "steps",
        "delta",
        "epsilon",
        "epsilon_rdp",
        "epsilon_claimed",
        "l2_clip_norm",
        "sensitivity",
        "neighboring_relation",
        "privacy_unit",
        "reproducible_randomness",
        "not_covered",
    }


def test_json_of_no_privacy_is_strict_json() -> None:
    figures = json.loads(json.dumps(make_statement(noise_multiplier=0.0).to_json(), allow_nan=False))
    assert figures["epsilon"] == "inf"
    assert float(figures["epsilon_rdp"]) == math.inf
    assert "No privacy" in make_statement(noise_multiplier=0.0).describe()


def test_description_says_the_figures_and_the_limits() -> None:
    statement = make_statement()
    text = statement.describe()
    assert f"({statement.epsilon:.4g}, 1e-05)-differentially private" in text
    assert "one training row" in text and "50 steps" in text
    epsilon = make_statement().epsilon
    assert f"a factor of e^{epsilon:.4g} = {math.exp(epsilon):.3g}, " in text
    assert " = inf, " in make_statement(noise_multiplier=0.01).describe()
    assert "evaluation data" in text and "hyperparameters" in text and "two rows by one author" in text
    assert "seed" not in text and "does not hold" not in text and "1/n" not in text


def test_description_warns_where_this_run_needs_it() -> None:
    assert "anyone who knows the seed" in make_statement(reproducible_randomness=True).describe()
    assert "does not hold" in make_statement(sensitivity=0.7).describe()
    assert "Delta is above 1/n" in make_statement(delta=0.01).describe()


def test_a_run_cut_short_states_fewer_steps() -> None:
    cut = dataclasses.replace(make_statement(), steps=0)
    assert cut.epsilon == 0 and cut.to_json()["steps"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 0}, "num_examples must be at least 1, got 0"),
        ({"expected_batch_size": 0.0}, r"expected_batch_size must be in \(0, num_examples = 1000\], got 0.0"),
        (
            {"expected_batch_size": 1001},
            r"expected_batch_size must be in \(0, num_examples = 1000\], got 1001",
        ),
        ({"l2_clip_norm": math.inf}, "l2_clip_norm must be positive and finite with privacy, got inf"),
        ({"l2_clip_norm": 0.0}, "l2_clip_norm must be positive and finite with privacy, got 0.0"),
        ({"sensitivity": math.inf}, "sensitivity must be positive and finite with privacy, got inf"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be finite and at least 0, got -1.0"),
        ({"delta": 1.5}, r"delta must be in \(0, 1\), got 1.5"),
    ],
)
def test_statement_refuses_what_means_nothing(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        make_statement(**changes)
