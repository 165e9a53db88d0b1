"""Plans of drawn settings: refused in one line, or with a statement that agrees with itself and engine."""

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import example
from hypothesis import strategies as st

from tests import tiny
from tests.fuzz.cases import count, drawn
from tests.fuzz.loading import loaded_or_refused
from wtdp_jax.config import TrainConfig
from wtdp_jax.plan import Plan, make_plan

NUM_EXAMPLES = 40
_FIELDS = [field.name for field in dataclasses.fields(TrainConfig)]

_moderate = st.sampled_from((0.1, 0.5, 1.0, 3.0, 10.0))
_extreme = st.sampled_from((5e-324, 1e-300, 1e-9, 1e6, 1e300, 0.0, -1.0, math.nan, math.inf))
_numbers = st.one_of(_moderate, _moderate, _moderate, _extreme)
_counts = st.sampled_from((1, 2, 7, 10, 40, 41, 1000, 0, -1, 10**6, 2**31 - 1, 2**31, 10**25))
_patterns = st.sampled_from((None, None, "wte", "lm_head", "bias", "nothing", "(", "", "ln_f|h/"))
_settings = st.fixed_dictionaries(
    {
        "engine": st.sampled_from(("ghost", "bookkeeping", "materialized", "microbatched")),
        "tied_norm": st.sampled_from(("cross_term", "materialize", "omit", "omit", "triangle")),
        "clipping": st.sampled_from(("flat", "automatic", "per_layer")),
        "tie_embeddings": st.booleans(),
        "batch_size": st.sampled_from((1, 4, 10, 40, 40, 41)),
    },
    optional={
        "loss": st.sampled_from(("next_token", "label_words", "lm")),
        "regime": st.sampled_from(("dp", "dp", "nonprivate")),
        "uncovered": st.sampled_from(("materialize", "error")),
        "noise_multiplier": _numbers,
        "delta": st.one_of(st.sampled_from((1e-5, 1e-3, 0.5)), _extreme),
        "l2_clip_norm": _numbers,
        "memory_budget_gb": _numbers,
        "epochs": _numbers,
        "steps": _counts,
        "microbatch_size": _counts,
        "physical_batch_size": _counts,
        "warmup_steps": _counts,
        "schedule_steps": _counts,
        "momentum": _numbers,
        "optimizer": st.sampled_from(("adam", "sgd")),
        "schedule": st.sampled_from(("constant", "linear", "cosine")),
        "trainable": _patterns,
        "double_noise": _patterns,
        "seed": st.sampled_from((None, 0, 2**62, -1)),
    },
)
# Calibration takes seconds: most cases give the noise.
_with_noise = st.one_of(
    *[_settings.map(lambda settings: {"noise_multiplier": 1.0, "steps": 10} | settings)] * 4, _settings
)


@pytest.mark.slow
@drawn("plans", settings=_with_noise)
@example(settings={"epochs": 1e300, "batch_size": 4, "noise_multiplier": 1.0})
@example(settings={"steps": 2**31 - 1, "batch_size": 4, "noise_multiplier": 1.0})
@example(settings={"memory_budget_gb": 1e300, "batch_size": 4, "noise_multiplier": 1.0})
@example(settings={"epsilon": 1e-300, "batch_size": 4, "steps": 5})
@example(settings={"epsilon": 1e300, "batch_size": 4, "steps": 5})
@example(settings={"noise_multiplier": 1e300, "batch_size": 4, "steps": 5})
@example(settings={"noise_multiplier": 5e-324, "batch_size": 4, "steps": 5})
@example(
    settings={
        "l2_clip_norm": 1e-300,
        "tied_norm": "omit",
        "batch_size": 4,
        "steps": 5,
        "noise_multiplier": 1.0,
    }
)
def test_a_plan_agrees_with_itself_or_is_refused(settings: dict[str, Any]) -> None:
    count("plans")
    plan = loaded_or_refused(lambda: _plan(settings), *_FIELDS, "num_examples", "sampling_prob")
    if plan is None:
        return
    assert plan.num_steps >= 1 and plan.num_examples == NUM_EXAMPLES
    json.dumps([plan.to_json(), plan.guarantee("complete", plan.num_steps)], allow_nan=False)
    assert "nan" not in plan.describe()
    if plan.config.regime == "nonprivate":
        assert plan.statement is None
        return
    _assert_consistent(plan)


def _plan(settings: dict[str, Any]) -> Plan:
    config = TrainConfig(**settings)
    return make_plan(config, tiny.inputs(NUM_EXAMPLES, tie_embeddings=config.tie_embeddings))


def _assert_consistent(plan: Plan) -> None:
    config, statement = plan.config, plan.statement
    omits = config.tied_norm == "omit" and config.tie_embeddings and config.engine in ("ghost", "bookkeeping")
    assert statement.sensitivity == plan.grad_fn.sensitivity
    assert statement.sensitivity == config.l2_clip_norm * (math.sqrt(2) if omits else 1)
    assert statement.sampling_prob == config.batch_size / NUM_EXAMPLES == plan.sampler(0).sampling_prob
    assert statement.steps == plan.num_steps and 0 < statement.noise_stddev < math.inf
    effective = statement.noise_stddev / statement.sensitivity
    assert math.isclose(statement.effective_noise_multiplier, effective, rel_tol=1e-9)
    assert 0 <= statement.epsilon_claimed <= statement.epsilon
    assert statement.describe().startswith("No privacy") == math.isinf(statement.epsilon)
    if config.noise_multiplier is None:
        assert statement.epsilon <= config.target_epsilon
