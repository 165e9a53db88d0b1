"""A training run, from settings to run folder: the one place where the parts are coupled.

What one logical step does, privately:

    the sampler draws each example with probability q = expected batch size / n
    -> physical batches of one shape, padded: as many as the draw needs, one if it is empty
    -> each adds its sum of clipped gradients to the step's sum             (`Step.accumulate`, compiled once)
    -> Gaussian noise of noise_multiplier x l2_clip_norm on the sum
    -> divided by the EXPECTED batch size -> adam or sgd                    (`Step.update`, compiled once)

An empty draw goes the same way: its sum is zero, its noise is not, and it counts as a step. A non-private run
takes shuffled batches and plain gradients through the same functions, without noise. What is logged without
noise has `non_private` in its name.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import tqdm

from wtdp_jax import report
from wtdp_jax.checkpoint import CheckpointError, Checkpoints, TrainState
from wtdp_jax.clipping import merge, partition
from wtdp_jax.config import TrainConfig
from wtdp_jax.evaluate import Evaluation
from wtdp_jax.inputs import Inputs, load
from wtdp_jax.metrics import MetricsLog, read_metrics
from wtdp_jax.models import save_pretrained
from wtdp_jax.plan import Plan, make_plan
from wtdp_jax.run_folder import Record, RunFolder, read_json, write_json
from wtdp_jax.step import Sums, measurements
from wtdp_jax.streams import dropout_keys, new_streams

Params = Any
Row = report.Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run leaves in memory; its folder holds the same and more.

    Attributes:
      results: the figures.
      params: the parameters at the end, trained and frozen.
      plan: what was done, with the guarantee.
      folder: where everything lies.
    """

    results: report.Results
    params: Params
    plan: Plan
    folder: RunFolder

    def describe(self) -> str:
        """Returns figures and guarantee in words."""
        return report.describe(self.results, self.plan.describe(), self.folder.path)


def prepare(config: TrainConfig) -> tuple[TrainConfig, Inputs, Plan]:
    """Loads and settles everything that `run` takes; bad input is found here, and nothing is written.

    Raises:
      ValueError: if settings, inputs and run folder do not fit together.
    """
    RunFolder(config.out).check({"settings": config.to_json()}, resume=config.resume)
    inputs = load(config)
    RunFolder(config.out).check(_record(config, inputs), resume=config.resume)
    plan = make_plan(config, inputs)
    RunFolder(config.out).check(_record(config, inputs, plan), resume=config.resume)
    return config, inputs, plan


def run(config: TrainConfig, inputs: Inputs, plan: Plan | None = None) -> Outcome:
    """Trains, and leaves a complete run folder.

    Args:
      config: the settings; those that say what to load are only recorded.
      inputs: what was loaded.
      plan: made from both; None makes it here.

    Raises:
      ValueError: if settings, inputs and run folder do not fit together; nothing is written then.
      BlockingIOError: if another process holds the run folder.
      CheckpointError: if a checkpoint cannot be written, or the run has none to go on from.
      FloatingPointError: if released parameters, or a non-private loss, are not finite.
    """
    plan = make_plan(config, inputs) if plan is None else plan
    folder = RunFolder(config.out)
    record = _record(config, inputs, plan)
    with (
        folder.claimed(record, resume=config.resume),
        Checkpoints(folder.checkpoints, record) as checkpoints,
    ):
        steps = _Run(config, inputs, plan, folder, checkpoints)
        write_json(folder.config, record)
        if not (folder.results.exists() and folder.privacy.exists()):
            steps.take_all()
            _finish(config, inputs, plan, folder, steps)
        results = report.Results(**read_json(folder.results))
    return Outcome(results=results, params=steps.params, plan=plan, folder=folder)


def _record(config: TrainConfig, inputs: Inputs, plan: Plan | None = None) -> Record:
    """What the run is, as config.json and checkpoints keep it: a run may only be resumed as the same."""
    record = {"settings": config.to_json(), "identity": {**inputs.fingerprints(), **report.computation()}}
    # What was calibrated is compared too: another accountant's version might find another noise multiplier.
    return record if plan is None else {**record, "plan": plan.to_json()}


class _Run:
    """The steps of one run, from its beginning or from its last checkpoint."""

    def __init__(
        self, config: TrainConfig, inputs: Inputs, plan: Plan, folder: RunFolder, checkpoints: Checkpoints
    ) -> None:
        self.config, self.plan, self.folder, self.checkpoints = config, plan, folder, checkpoints
        self.batches = plan.batcher(inputs.train_data)
        self.has_dropout = inputs.model.config.dropout > 0
        self.state, self.frozen = _initial_state(config.seed, inputs.params, plan)
        restored = checkpoints.restore(like=self.state)
        self.is_new = restored is None
        self.done, self.state = (0, self.state) if restored is None else restored
        if self.is_new and _is_begun(folder):
            raise CheckpointError(
                f"{folder.path} tells of a run that has no checkpoint left: begun again, it would "
                "spend more than it states; choose another out"
            )
        self.sampler = plan.sampler(self.state.streams.entropy)
        self._evaluation: Evaluation | None = None

    def take_all(self) -> None:
        """Takes the steps that are left."""
        with MetricsLog(self.folder.metrics, keep_through_step=-1 if self.is_new else self.done) as log:
            if self.is_new:
                # Before anything tells of steps: see `_is_begun`.
                self._log_and_save(log, {})
            steps = tqdm.tqdm(total=self.plan.num_steps, initial=self.done, disable=None, unit="step")
            with self._stating_the_guarantee(), steps as progress:
                while self.done < self.plan.num_steps:
                    self._log_and_save(log, self._take_step())
                    progress.update()

    @property
    def params(self) -> Params:
        """All parameters, trained and frozen."""
        return merge(self.state.trained, self.frozen)

    @property
    def evaluation(self) -> Evaluation:
        """The evaluation of the parameters as they are after the last step."""
        return self.plan.evaluate(self.params) if self._evaluation is None else self._evaluation

    def _take_step(self) -> Row:
        """Takes one logical step, and returns what it measured."""
        started = time.perf_counter()
        sums, num_batches = self._sum_over_batch()
        statistics = jax.device_get(sums.statistics)
        if self.plan.statement is None and statistics.not_finite:
            raise FloatingPointError(f"the loss is not finite in step {self.done + 1}")
        state = self.state
        trained, opt_state, checks = self.plan.step.update(
            state.trained, state.opt_state, sums.gradient, state.streams.noise_key
        )
        self.state = dataclasses.replace(state, trained=trained, opt_state=opt_state)
        self.done += 1
        if not checks.is_finite:
            raise FloatingPointError(f"the parameters are not finite after step {self.done}")
        return {
            "seconds": time.perf_counter() - started,
            **measurements(statistics, float(checks.sum_norm), has_norms=self.plan.statement is not None),
            "non_private_physical_batches": num_batches,
        }

    def _sum_over_batch(self) -> tuple[Sums, int]:
        """Adds the gradients of one logical batch; also returns how many physical ones it took."""
        batches = [
            (self.state.trained, self.frozen, self._with_dropout_keys(number, arrays), is_padding)
            for number, (_, arrays, is_padding) in enumerate(self.batches(self.sampler.draw(self.done)))
        ]
        return self.plan.step.sum_over(batches), len(batches)

    def _with_dropout_keys(self, number: int, batch: dict[str, Any]) -> dict[str, Any]:
        """A physical batch of this step, with one dropout key an example if there is dropout."""
        if not self.has_dropout:
            return batch
        key, size = self.state.streams.dropout_key, self.config.physical_batch_size
        return {**batch, "dropout_key": dropout_keys(key, self.done, number, size)}

    def _log_and_save(self, log: MetricsLog, row: Row) -> None:
        """Logs a step, and evaluates and saves where due; the log is on the disk before the checkpoint."""
        is_last = self.done == self.plan.num_steps
        if is_last or self.done % self.config.evaluate_every == 0:
            self._evaluation = evaluation = self.plan.evaluate(self.params)
            row = {**row, "eval_loss": evaluation.loss, "eval_accuracy": evaluation.accuracy}
            if self.plan.statement is not None:
                spent = dataclasses.replace(self.plan.statement, steps=self.done)
                row["epsilon_rdp"] = spent.epsilon_rdp
        log.append(self.done, **row)
        if is_last or self.done % self.config.checkpoint_every == 0:
            log.sync()
            self.checkpoints.save(self.done, self.state)

    @contextlib.contextmanager
    def _stating_the_guarantee(self) -> Iterator[None]:
        """Has privacy.json hold the planned guarantee, and if the run stops early that of the steps taken."""
        write_json(self.folder.privacy, self.plan.guarantee("running", self.plan.num_steps))
        try:
            yield
        except BaseException:
            # On a full disk the planned guarantee stays, which is no smaller.
            with contextlib.suppress(OSError):
                write_json(self.folder.privacy, self.plan.guarantee("stopped", self.done))
            raise


def _is_begun(folder: RunFolder) -> bool:
    """Whether steps may have been taken: none of this is there before the first checkpoint is."""
    after = (folder.privacy, folder.predictions, folder.curves, folder.model, folder.results)
    return any(path.exists() for path in after) or any(row["step"] for row in read_metrics(folder.metrics))


def _initial_state(seed: int | None, params: Params, plan: Plan) -> tuple[TrainState, Params]:
    """The state before the first step, and the frozen parameters."""
    streams = new_streams(seed)
    trained, frozen = partition(params, plan.trainable)
    opt_state = plan.optimizer(streams.noise_key).init(trained)
    state = TrainState(trained=trained, opt_state=opt_state, streams=streams)
    # Copied, because updates reuse the memory, and the caller's parameters stay. Bound to a device, as a
    # restored state is: functions are compiled for one or the other.
    return jax.device_put((state, frozen), jax.local_devices()[0], may_alias=False)


def _finish(config: TrainConfig, inputs: Inputs, plan: Plan, folder: RunFolder, steps: _Run) -> None:
    """Writes what a whole run leaves; results.json comes last, and says that all is there."""
    rows = read_metrics(folder.metrics)
    save_pretrained(folder.model, inputs.model, steps.params, inputs.tokenizer)
    labels, right = plan.evaluate.labels, steps.evaluation.right
    write_json(folder.predictions, {"labels": labels.tolist(), "right": right.astype(int).tolist()})
    report.plot_curves(folder.curves, rows)
    guarantee = plan.guarantee("complete", plan.num_steps)
    write_json(folder.privacy, guarantee)
    memory, owner = report.peak_memory()
    results = report.Results(
        accuracy=rows[-1]["eval_accuracy"],
        loss=rows[-1]["eval_loss"],
        steps=plan.num_steps,
        **{name: guarantee.get(name) for name in ("epsilon", "epsilon_claimed", "delta", "noise_multiplier")},
        **report.speed(rows, config.batch_size),
        peak_memory_bytes=memory,
        peak_memory_of=owner,
        num_trained_parameters=sum(leaf.size for leaf in jax.tree.leaves(steps.state.trained)),
        num_train_examples=len(inputs.train_data),
        num_eval_examples=len(inputs.eval_data),
        non_private_num_train_cut=inputs.train_data.num_cut,
        num_eval_cut=inputs.eval_data.num_cut,
        non_private_not_finite=sum(row.get("non_private_not_finite", 0) for row in rows),
        versions=report.versions(),
        device=report.device(),
    )
    write_json(folder.results, results.to_json())
