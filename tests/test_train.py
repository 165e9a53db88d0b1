import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from wtdp_jax import train
from wtdp_jax.clipping import merge, partition
from wtdp_jax.config import TrainConfig
from wtdp_jax.losses import next_token_loss
from wtdp_jax.metrics import read_metrics
from wtdp_jax.models import from_pretrained
from wtdp_jax.noise import add_gaussian_noise, key_from_seed
from wtdp_jax.plan import Plan, make_plan
from wtdp_jax.run_folder import read_json
from wtdp_jax.sampling import PoissonSampler
from wtdp_jax.trees import map_with_path

_STEPS, _BATCH, _PHYSICAL, _CLIP, _NOISE, _RATE, _SEED = 5, 10, 4, 2.0, 0.5, 0.1, 7


@pytest.fixture(scope="module", autouse=True)
def _quick_to_compile() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


_TRAINABLE = "wte|c_fc|ln_f"  # few leaves compile fast


def _config(out: Path, **changes: object) -> TrainConfig:
    settings = {
        "engine": "materialized",
        "trainable": _TRAINABLE,
        "noise_multiplier": _NOISE,
        "l2_clip_norm": _CLIP,
        "optimizer": "sgd",
        "learning_rate": _RATE,
        "steps": _STEPS,
        "batch_size": _BATCH,
        "physical_batch_size": _PHYSICAL,
        "evaluate_every": 3,
        "checkpoint_every": 2,
        "seed": _SEED,
    }
    return TrainConfig(out=out, **{**settings, **changes})


@functools.cache
def _plan(regime: str) -> Plan:
    """Plans hold compiled functions, so the tests share them."""
    changes = {"noise_multiplier": None} if regime == "nonprivate" else {}
    return make_plan(_config(Path("unused"), regime=regime, **changes), tiny.inputs())


def _run(out: Path, inputs=None, plan: Plan | None = None, **changes: object) -> train.Outcome:
    return train.run(_config(out, **changes), inputs or tiny.inputs(), plan or _plan("dp"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> train.Outcome:
    """A private run that nothing interrupted."""
    return _run(tmp_path_factory.mktemp("whole") / "run")


def _same_bits(a, b) -> bool:
    first, second = (jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), tree) for tree in (a, b))
    return first == second


def _without_times(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_leaves_a_complete_folder(whole: train.Outcome):
    folder = whole.folder
    names = {path.name for path in folder.path.iterdir() if not path.name.startswith(".")}
    assert names == {
        "config.json", "metrics.jsonl", "results.json", "privacy.json", "predictions.json", "checkpoints",
        "model", "curves.png",
    }  # fmt: skip
    results = read_json(folder.results)
    rows = read_metrics(folder.metrics)
    assert [row["step"] for row in rows] == list(range(_STEPS + 1))
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [0, 3, 5]
    assert results["accuracy"] == rows[-1]["eval_accuracy"] == whole.results.accuracy
    assert results["examples_per_second"] == pytest.approx(_BATCH / results["median_step_seconds"])
    assert results["peak_memory_bytes"] > 0 and results["peak_memory_of"] == "process"
    assert results["versions"]["jax"] == jax.__version__ and results["device"]["platform"] == "cpu"
    assert folder.curves.read_bytes().startswith(b"\x89PNG")
    assert str(folder.path) in whole.describe() and "differentially private" in whole.describe()


def test_the_exported_model_is_the_trained_one(whole: train.Outcome):
    _, params = from_pretrained(whole.folder.model)
    assert _same_bits(params, whole.params)


def test_states_the_guarantee(whole: train.Outcome):
    statement = read_json(whole.folder.privacy)
    assert statement["status"].startswith("complete")
    assert statement["steps"] == _STEPS
    assert statement["noise_multiplier"] == _NOISE
    assert statement["sampling_prob"] == _BATCH / 40
    assert statement["sensitivity"] == statement["l2_clip_norm"] == _CLIP
    assert statement["reproducible_randomness"] is True
    assert statement["epsilon"] == whole.results.epsilon
    assert read_metrics(whole.folder.metrics)[-1]["epsilon_rdp"] == statement["epsilon_rdp"]


def test_compiles_once_for_draws_of_every_size(whole: train.Outcome):
    counts = {row.get("non_private_physical_batches") for row in read_metrics(whole.folder.metrics)[1:]}
    assert len(counts) > 1
    step = whole.plan.step
    assert [f._cache_size() for f in (step.start, step.accumulate, step.update)] == [1, 1, 1]
    assert whole.plan.evaluate.example_values._cache_size() == 1


def test_unnoised_figures_say_so(whole: train.Outcome):
    released = {"step", "seconds", "eval_loss", "eval_accuracy", "epsilon_rdp"}
    for row in read_metrics(whole.folder.metrics):
        assert all(name.startswith("non_private_") for name in row.keys() - released)
    assert {name for name in row if name.startswith("non_private_")} == {
        "non_private_loss",
        "non_private_mean_norm",
        "non_private_clipped_fraction",
        "non_private_clipped_sum_norm",
        "non_private_not_finite",
        "non_private_examples",
        "non_private_physical_batches",
    }


@jax.jit
def _after_one_step(trained, total):
    """What is trained, after noise on the sum, division by the expected size, and descent."""
    noise = add_gaussian_noise(_NOISE * _CLIP, key_from_seed(_SEED, "noise"))
    noised, _ = noise.update(total, noise.init(total))
    return jax.tree.map(lambda p, n: p - _RATE * n / _BATCH, trained, noised)


def _assert_close(params, trained, frozen) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, merge(trained, frozen))


def test_a_step_is_the_mechanism(tmp_path: Path):
    """One step by definition: clip each, sum, noise on the sum, divide by the expected size, descend."""
    inputs = tiny.inputs()
    outcome = _run(tmp_path / "run", plan=dataclasses.replace(_plan("dp"), num_steps=1))
    rows = PoissonSampler(
        num_examples=40, sampling_prob=_BATCH / 40, physical_batch_size=_PHYSICAL, entropy=_SEED
    ).draw(step=0)
    loss_fn = next_token_loss(inputs.model)
    trained, frozen = partition(inputs.params, _plan("dp").trainable)

    @jax.jit
    @jax.grad
    def gradient_of(trained, example):
        return loss_fn(merge(trained, frozen), {name: leaf[None] for name, leaf in example.items()})[0]

    total = jax.tree.map(jnp.zeros_like, trained)
    for row in rows:
        gradient = gradient_of(trained, {name: leaf[row] for name, leaf in inputs.train_data.arrays.items()})
        factor = min(1.0, _CLIP / float(optax.tree.norm(gradient)))
        total = jax.tree.map(lambda t, g, f=factor: t + f * g, total, gradient)
    _assert_close(outcome.params, _after_one_step(trained, total), frozen)
    assert read_metrics(outcome.folder.metrics)[1]["non_private_examples"] == len(rows)


def test_the_clipped_sums_norm_is_logged(tmp_path: Path):
    """Each example's gradient is longer than so small a C, and so the sum of one example is as long as C."""
    plan = make_plan(_config(Path("unused"), l2_clip_norm=1e-3, batch_size=1), tiny.inputs())
    outcome = _run(tmp_path / "run", plan=plan, l2_clip_norm=1e-3, batch_size=1, seed=3)
    rows = read_metrics(outcome.folder.metrics)[1:]
    (one, *_) = [row for row in rows if row["non_private_examples"] == 1]
    assert one["non_private_clipped_sum_norm"] == pytest.approx(1e-3, rel=1e-3)
    assert all(row["non_private_clipped_sum_norm"] == 0 for row in rows if not row["non_private_examples"])


def test_noise_is_doubled_where_asked_by_independent_draws():
    plan = make_plan(_config(Path("unused"), double_noise="^wte/"), tiny.inputs())
    trained, _ = partition(tiny.inputs().params, plan.trainable)
    zero = jax.tree.map(jnp.zeros_like, trained)

    def updates(plan: Plan):
        optimizer = plan.optimizer(key_from_seed(_SEED, "noise"))
        return optimizer.update(zero, optimizer.init(trained), trained)[0]

    once, twice = updates(_plan("dp")), updates(plan)
    more = jax.tree.map(lambda a, b: np.asarray(b - a), once, twice)
    assert np.all(more["h"]["c_fc"]["kernel"] == 0) and np.all(more["ln_f"]["scale"] == 0)
    first, second = np.ravel(once["wte"]["embedding"]), np.ravel(more["wte"]["embedding"])
    assert np.std(second) == pytest.approx(np.std(first), rel=0.4)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.5
    with pytest.raises(ValueError, match=r"double_noise must match at least one of .*, got 'lm_head'"):
        make_plan(_config(Path("unused"), double_noise="lm_head"), tiny.inputs())


def test_predictions_are_those_of_the_trained_model(whole: train.Outcome):
    predictions = read_json(whole.folder.predictions)
    assert predictions["labels"] == tiny.inputs().eval_data.arrays["labels"].tolist()
    assert predictions["right"] == whole.plan.evaluate(whole.params).right.astype(int).tolist()
    assert np.mean(predictions["right"]) == pytest.approx(whole.results.accuracy)


def test_an_empty_draw_is_a_step_of_noise_alone(tmp_path: Path):
    inputs, plan = tiny.inputs(), _plan("dp")
    never = dataclasses.replace(plan.statement, expected_batch_size=1e-9)
    outcome = _run(tmp_path / "run", plan=dataclasses.replace(plan, num_steps=1, statement=never))
    row = read_metrics(outcome.folder.metrics)[1]
    assert row["non_private_examples"] == 0 and row["non_private_physical_batches"] == 1
    assert row["non_private_loss"] is None
    trained, frozen = partition(inputs.params, plan.trainable)
    _assert_close(outcome.params, _after_one_step(trained, jax.tree.map(jnp.zeros_like, trained)), frozen)


class _Interrupted(Exception):
    pass


def _interrupt_before_step(plan: Plan, step: int) -> Plan:
    """The plan, with a failure when the update of the given step is due."""
    calls = iter(range(1, 100))

    def update(*args):
        if next(calls) == step:
            raise _Interrupted
        return plan.step.update(*args)

    return dataclasses.replace(plan, step=dataclasses.replace(plan.step, update=update))


@pytest.mark.parametrize("step", [1, 4])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path, whole: train.Outcome, step: int):
    out = tmp_path / "run"
    with pytest.raises(_Interrupted):
        _run(out, plan=_interrupt_before_step(_plan("dp"), step))
    statement = read_json(out / "privacy.json")
    assert statement["status"].startswith("stopped") and statement["steps"] == step - 1
    assert not (out / "results.json").exists() and not (out / "model").exists()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "non_priv')
    resumed = _run(out, resume=True)
    assert _same_bits(resumed.params, whole.params)
    assert _without_times(read_metrics(out / "metrics.jsonl")) == _without_times(
        read_metrics(whole.folder.metrics)
    )
    assert read_json(out / "privacy.json") == read_json(whole.folder.privacy)
    assert _plan("dp").step.accumulate._cache_size() == 1


def test_resuming_keeps_the_operating_systems_randomness(tmp_path: Path):
    """Without a seed the keys come from the checkpoint, even the first one."""
    out = tmp_path / "run"
    with pytest.raises(_Interrupted):
        _run(out, plan=_interrupt_before_step(_plan("dp"), 2), seed=None)
    first = read_metrics(out / "metrics.jsonl")[1]
    _run(out, seed=None, resume=True)
    again = read_metrics(out / "metrics.jsonl")[1]
    assert _without_times([again]) == _without_times([first])


def test_a_finished_run_is_told_again_but_not_repeated(whole: train.Outcome):
    before = {path: path.stat().st_mtime_ns for path in whole.folder.path.iterdir() if path.suffix}
    again = _run(whole.folder.path, resume=True)
    assert again.results == whole.results and _same_bits(again.params, whole.params)
    after = {path: path.stat().st_mtime_ns for path in before}
    changed = {path.name for path in before if before[path] != after[path]}
    assert changed <= {"config.json"}
    with pytest.raises(ValueError, match="already holds this run: add --resume"):
        _run(whole.folder.path)


def test_resuming_as_another_run_is_refused(whole: train.Outcome, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="learning_rate was 0.1, now 0.2"):
        _run(whole.folder.path, resume=True, learning_rate=0.2)
    inputs = tiny.inputs()
    other_data = dataclasses.replace(inputs, train_data=tiny.encoded(40, seed=5))
    with pytest.raises(ValueError, match="train_data was"):
        _run(whole.folder.path, other_data, resume=True)
    other_params = dataclasses.replace(inputs, params=jax.tree.map(lambda p: p + 1, inputs.params))
    with pytest.raises(ValueError, match="initial_model was"):
        _run(whole.folder.path, other_params, resume=True)
    other_noise = dataclasses.replace(_plan("dp").statement, noise_multiplier=0.4)
    with pytest.raises(ValueError, match="noise_multiplier was 0.5, now 0.4"):
        other_plan = dataclasses.replace(_plan("dp"), statement=other_noise)
        _run(whole.folder.path, plan=other_plan, resume=True)
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    with pytest.raises(ValueError, match="jax was '.*', now '0.0.1'"):
        _run(whole.folder.path, resume=True)


def _with_a_bad_row() -> tiny.Inputs:
    """Inputs whose every training row but one holds a token that the model does not know: its loss is NaN."""
    inputs = tiny.inputs()
    arrays = dict(inputs.train_data.arrays)
    arrays["ids"] = arrays["ids"].copy()
    arrays["ids"][1:, 0] = 999
    return dataclasses.replace(inputs, train_data=dataclasses.replace(inputs.train_data, arrays=arrays))


def test_a_private_run_goes_on_whatever_a_row_holds(tmp_path: Path):
    outcome = _run(tmp_path / "run", _with_a_bad_row(), seed=8)
    assert outcome.results.non_private_not_finite > 0
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(outcome.params))


def test_a_private_run_stops_on_released_values(tmp_path: Path):
    inputs = tiny.inputs()
    broken = dataclasses.replace(inputs, params=jax.tree.map(lambda p: p * jnp.inf, inputs.params))
    with pytest.raises(FloatingPointError, match="^the parameters are not finite after step 1"):
        _run(tmp_path / "run", broken)
    assert read_json(tmp_path / "run" / "privacy.json")["steps"] == 1


def test_a_non_private_run_learns_and_promises_nothing(tmp_path: Path):
    plan = _plan("nonprivate")
    outcome = _run(tmp_path / "run", plan=plan, regime="nonprivate", noise_multiplier=None)
    rows = read_metrics(outcome.folder.metrics)
    assert rows[-1]["non_private_loss"] < rows[1]["non_private_loss"]
    assert rows[1].keys() == {
        "step", "seconds", "non_private_loss", "non_private_not_finite", "non_private_examples",
        "non_private_physical_batches",
    }  # fmt: skip
    assert {row["non_private_examples"] for row in rows[1:]} == {_BATCH}
    assert outcome.results.epsilon is None
    assert read_json(outcome.folder.privacy)["epsilon"] is None
    assert "No privacy" in outcome.describe()
    with pytest.raises(FloatingPointError, match="^the loss is not finite in step 1"):
        _run(tmp_path / "bad", _with_a_bad_row(), plan, regime="nonprivate", noise_multiplier=None)


def test_the_engine_is_chosen_and_recorded() -> None:
    plan = make_plan(_config(Path("unused"), engine="auto"), tiny.inputs())
    # At so tiny a size either may need the fewer operations.
    assert plan.choice is not None and plan.choice.engine in ("bookkeeping", "ghost")
    assert "the fewest operations within " in plan.describe()
    assert plan.to_json()["engine"] == plan.choice.engine


def test_ghost_with_dropout_frozen_leaves_and_a_whole_sequence_loss(tmp_path: Path):
    inputs = tiny.inputs(dropout=0.5)
    config = _config(
        tmp_path / "run",
        engine="ghost",
        loss="lm",
        optimizer="adam",
        schedule="cosine",
        warmup_steps=1,
        steps=2,
    )
    outcome = train.run(config, inputs)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), outcome.params, inputs.params)
    assert changed == map_with_path(lambda path, _: bool(re.search(_TRAINABLE, path)), changed)


@pytest.mark.parametrize("tied", [True, False])
def test_the_naive_norms_price_is_paid_where_there_is_a_tie(tmp_path: Path, tied: bool):
    config = _config(tmp_path, engine="ghost", tied_norm="omit")
    statement = make_plan(config, tiny.inputs(tie_embeddings=tied)).statement
    assert statement.sensitivity == pytest.approx(_CLIP * 2**0.5 if tied else _CLIP)
    assert (statement.epsilon > statement.epsilon_claimed) == tied


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 41}, "batch_size must be at most the 40 training examples, got 41"),
        ({"warmup_steps": 5}, r"warmup_steps must be below the number of steps \(5\), got 5"),
        ({"trainable": "no_such"}, "trainable must choose at least one leaf"),
        ({"noise_multiplier": None, "epsilon": 1.0, "delta": 0.999}, "delta must be below"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict, message: str
):
    with pytest.raises(ValueError, match=message):
        train.run(_config(tmp_path / "run", **changes), tiny.inputs())
    assert not (tmp_path / "run").exists()


def test_the_noise_is_calibrated_to_the_target(tmp_path: Path):
    config = _config(tmp_path, noise_multiplier=None, epsilon=2.0, tied_norm="omit", engine="ghost")
    statement = make_plan(config, tiny.inputs()).statement
    assert 1.99 < statement.epsilon <= 2.0
    assert statement.epsilon_claimed < 1.9
