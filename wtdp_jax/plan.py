"""What a run will do, settled before anything is written: loss, gradient, steps, noise, guarantee."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from wtdp_jax.accounting import calibrate_noise_multiplier
from wtdp_jax.batching import Batcher
from wtdp_jax.clipping import ClippedGrad, clipped_grad, partition
from wtdp_jax.clipping.auto import Choice
from wtdp_jax.config import TrainConfig
from wtdp_jax.data import Encoded
from wtdp_jax.evaluate import Evaluator
from wtdp_jax.inputs import Inputs
from wtdp_jax.losses import label_word_loss, lm_loss, next_token_loss
from wtdp_jax.noise import add_gaussian_noise, divide_by
from wtdp_jax.optimizers import make_optimizer
from wtdp_jax.privacy import PrivacyStatement, default_delta
from wtdp_jax.sampling import PoissonSampler, ShuffledBatches
from wtdp_jax.step import GradFn, Step, make_step, plain_grad
from wtdp_jax.trees import leaf_paths, map_with_path

Status = Literal["running", "stopped", "complete"]

_STATUS = {
    "running": "planned: the guarantee of all steps, of which the steps taken so far have spent no more",
    "stopped": "stopped early: the guarantee of the steps taken",
    "complete": "complete: the guarantee of the whole run",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do.

    Attributes:
      config: the settings it was made from.
      num_examples: training examples.
      num_steps: optimizer steps, each on one logical batch.
      trainable: says of a leaf's path whether it is trained; None trains all.
      statement: the guarantee of the whole run; None for a non-private one.
      optimizer: `noise_key -> optimizer` of a step's sum: noise, division by the expected size, adam or sgd.
      grad_fn: `(params, batch, is_padding) -> (sum of gradients, PerExample)`, clipped in a private run.
      step: the compiled functions of a step.
      evaluate: `params -> Evaluation`, compiled.
      choice: what engine "auto" stands for; None where one was named.
    """

    config: TrainConfig
    num_examples: int
    num_steps: int
    trainable: Callable[[str], bool] | None
    statement: PrivacyStatement | None
    optimizer: Callable[[Any], optax.GradientTransformation]
    grad_fn: GradFn
    step: Step
    evaluate: Evaluator
    choice: Choice | None

    def sampler(self, entropy: int) -> PoissonSampler | ShuffledBatches:
        """Returns what draws the batches; a private run's reads its probability where the accountant does.

        Args:
          entropy: the sampling stream's.
        """
        physical = self.config.physical_batch_size
        if self.statement is None:
            return ShuffledBatches(
                num_examples=self.num_examples,
                batch_size=self.config.batch_size,
                physical_batch_size=physical,
                entropy=entropy,
            )
        return PoissonSampler(
            num_examples=self.num_examples,
            sampling_prob=self.statement.sampling_prob,
            physical_batch_size=physical,
            entropy=entropy,
        )

    def batcher(self, data: Encoded) -> Batcher:
        """Returns what makes physical batches of a split's rows."""
        return _batcher(self.config, data)

    def to_json(self) -> dict[str, Any]:
        """Returns what the settings left open."""
        private = self.statement and {
            "noise_multiplier": self.statement.noise_multiplier,
            "sensitivity": self.statement.sensitivity,
            "sampling_prob": self.statement.sampling_prob,
            "delta": self.statement.delta,
        }
        chosen = {"engine": self.choice.engine} if self.choice else {}
        return {"num_steps": self.num_steps, **(private or {}), **chosen}

    def guarantee(self, status: Status, steps: int) -> dict[str, Any]:
        """Returns what privacy.json says.

        Args:
          status: how the run stands.
          steps: steps that the statement is to cover.
        """
        if self.statement is None:
            return {"status": _STATUS[status], "mechanism": None, "epsilon": None, "steps": steps}
        covered = dataclasses.replace(self.statement, steps=steps)
        return {"status": _STATUS[status], **covered.to_json()}

    def describe(self) -> str:
        """Returns the guarantee in words."""
        if self.statement is None:
            return "No privacy: the gradients were neither clipped nor noised."
        chosen = f"{self.choice}\n" if self.choice else ""
        return chosen + self.statement.describe()


def make_plan(config: TrainConfig, inputs: Inputs) -> Plan:
    """Settles what the settings leave open, calibrating the noise if a target epsilon is given (seconds).

    Raises:
      ValueError: if settings, data and model do not fit together.
    """
    num_examples = len(inputs.train_data)
    if config.batch_size > num_examples:
        raise ValueError(
            f"batch_size must be at most the {num_examples} training examples, got {config.batch_size}"
        )
    num_steps = config.num_steps(num_examples)
    mean_optimizer = optax.chain(divide_by(config.batch_size), make_optimizer(config, num_steps))
    loss_fn = _loss(config, inputs)
    trainable = None if config.trainable is None else _Matches(config.trainable)
    trained, _ = partition(inputs.params, trainable)
    _check_double_noise(config.double_noise, trained)
    statement, choice, grad_fn = None, None, plain_grad(loss_fn, trainable)
    if config.regime == "dp":
        grad_fn, choice = _clipped_grad(config, inputs, loss_fn, trainable)
        statement = _statement(config, num_examples, num_steps, grad_fn.sensitivity)

    def optimizer(noise_key: Any) -> optax.GradientTransformation:
        if statement is None:
            return mean_optimizer
        noises = _noises(statement.noise_stddev, noise_key, config.double_noise)
        return optax.chain(*noises, mean_optimizer)

    return Plan(
        config=config,
        num_examples=num_examples,
        num_steps=num_steps,
        trainable=trainable,
        statement=statement,
        optimizer=optimizer,
        grad_fn=grad_fn,
        step=make_step(grad_fn, optimizer, config.l2_clip_norm),
        evaluate=Evaluator(
            inputs.model,
            loss_fn,
            tuple(inputs.eval_data.label_ids.tolist()),
            _batcher(config, inputs.eval_data),
        ),
        choice=choice,
    )


def _batcher(config: TrainConfig, data: Encoded) -> Batcher:
    """What makes physical batches of a split's rows."""
    return Batcher(
        arrays=data.arrays,
        physical_batch_size=config.physical_batch_size,
        length_multiple=config.length_multiple,
    )


@dataclasses.dataclass(frozen=True)
class _Matches:
    """Whether a regular expression is found in a path; hashable, as a gradient function's parts must be."""

    pattern: str

    def __call__(self, path: str) -> bool:
        return re.search(self.pattern, path) is not None


# Folded into the noise key for the second draw; the first folds in step numbers, which never get there.
_SECOND_DRAW = np.uint32(2**32 - 1)


def _noises(stddev: float, key: Any, double_noise: str | None) -> tuple[optax.GradientTransformation, ...]:
    """The noise, and where a path matches a second draw of it."""
    noise = add_gaussian_noise(stddev, key)
    if double_noise is None:
        return (noise,)
    is_doubled = _Matches(double_noise)
    again = add_gaussian_noise(stddev, jax.random.fold_in(key, _SECOND_DRAW))
    return noise, optax.masked(again, lambda tree: map_with_path(lambda path, _: is_doubled(path), tree))


def _check_double_noise(pattern: str | None, trained: Any) -> None:
    paths = list(leaf_paths(trained))
    if pattern is not None and not any(map(_Matches(pattern), paths)):
        raise ValueError(f"double_noise must match at least one of {paths}, got {pattern!r}")


def _loss(config: TrainConfig, inputs: Inputs) -> Callable[[Any, Any], Array]:
    """The training loss of each example."""
    if config.loss == "label_words":
        return label_word_loss(inputs.model, inputs.train_data.label_ids.tolist())
    return {"next_token": next_token_loss, "lm": lm_loss}[config.loss](inputs.model)


def _clipped_grad(
    config: TrainConfig, inputs: Inputs, loss_fn: Callable[[Any, Any], Array], trainable: _Matches | None
) -> tuple[ClippedGrad, Choice | None]:
    """The engine, and its choice; what `uncovered="error"` refuses is refused here, not in the first step."""
    grad_fn = clipped_grad(
        loss_fn,
        engine=config.engine,
        l2_clip_norm=config.l2_clip_norm,
        # An untied model has no cross-term to leave out: its sensitivity is the clip norm.
        tied_norm=config.tied_norm if inputs.model.config.tie_embeddings else "cross_term",
        clipping=config.clipping,
        trainable=trainable,
        uncovered=config.uncovered,
        microbatch_size=config.microbatch_size,
        memory_budget=None if config.memory_budget_gb is None else _bytes(config.memory_budget_gb),
    )
    choice = None
    if config.engine == "auto":
        choice = grad_fn.choose(inputs.params, _physical_batch(config, inputs))
        grad_fn = dataclasses.replace(grad_fn, engine=choice.engine)
    if config.uncovered == "error":
        row = {name: leaf[:1] for name, leaf in inputs.train_data.arrays.items()}
        jax.eval_shape(grad_fn, inputs.params, row)
    return grad_fn, choice


def _bytes(gigabytes: float) -> int:
    """Whole bytes; no more than 64 bits count."""
    return int(min(gigabytes * 1e9, 2**62))


def _physical_batch(config: TrainConfig, inputs: Inputs) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of a physical batch."""
    rows = config.physical_batch_size
    batch = {
        name: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in inputs.train_data.arrays.items()
    }
    if inputs.model.config.dropout > 0:
        batch["dropout_key"] = jax.ShapeDtypeStruct((rows, 2), jnp.uint32)
    return batch


def _statement(
    config: TrainConfig, num_examples: int, num_steps: int, sensitivity: float
) -> PrivacyStatement:
    """The guarantee, with the noise multiplier given or calibrated."""
    delta = default_delta(num_examples) if config.delta is None else config.delta
    noise_multiplier = config.noise_multiplier or calibrate_noise_multiplier(
        sampling_prob=config.batch_size / num_examples,
        steps=num_steps,
        epsilon=config.target_epsilon,
        delta=delta,
        l2_clip_norm=config.l2_clip_norm,
        sensitivity=sensitivity,
    )
    return PrivacyStatement(
        num_examples=num_examples,
        expected_batch_size=config.batch_size,
        steps=num_steps,
        noise_multiplier=noise_multiplier,
        l2_clip_norm=config.l2_clip_norm,
        sensitivity=sensitivity,
        delta=delta,
        reproducible_randomness=config.seed is not None,
    )
