"""What a worker does, without training."""

from typing import Any

import pytest

from wtdp_jax import compiled
from wtdp_jax.config import TrainConfig
from wtdp_jax.inputs import load
from wtdp_jax.study import runs
from wtdp_jax.study.runs import Compilation, Variant

_SETTINGS: dict[str, Any] = {"task": "reviews", "max_length": 8}


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves this process's settings alone."""
    monkeypatch.setattr(Compilation, "apply", lambda self: None)


def test_an_engine_is_measured_as_itself_and_standard_clipping_as_the_materialized_one() -> None:
    inputs = load(TrainConfig(**_SETTINGS))
    for variant in runs.variants_of(("standard", "ghost", "bookkeeping")):
        if variant.tie and variant.engine != "nonprivate":
            expected = "materialized" if variant.engine == "standard" else variant.engine
            assert runs._plan(_SETTINGS, variant, inputs, 4).config.engine == expected


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_planned_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [Variant("tied nonprivate", True, "nonprivate"), Variant("tied standard", True, "standard")]

    def measure() -> dict[str, dict[str, Any]]:
        how: Any = {"repeats": 1, "physical_batch_size": 32, "compilation": Compilation(None, True)}
        return {row["name"]: row for row in runs.measure_costs(_SETTINGS, variants, **how)["rows"]}

    small, large = (row["step_bytes"] for row in measure().values())
    assert large > 2 * small
    monkeypatch.setattr(compiled, "device_memory", lambda: 3 * small)
    rows = measure()
    assert len(rows["tied nonprivate"]["seconds"]) == 1
    assert rows["tied standard"]["seconds"] is None and rows["tied standard"]["step_bytes"] == large


def test_fingerprints_are_those_that_a_run_records() -> None:
    found = runs.fingerprints({**_SETTINGS, "held_out_fraction": 0.05}, Compilation(None, True))
    assert found.keys() == {"initial_model", "non_private_train_data", "eval_data"}
    other = runs.fingerprints({**_SETTINGS, "tie_embeddings": False}, Compilation(None, True))
    assert all(found[name] != other[name] for name in found)
