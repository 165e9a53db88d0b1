"""The settings of a training run: one frozen dataclass, checked before anything is loaded or written."""

import dataclasses
import json
import math
import re
import typing
from pathlib import Path
from typing import Any, Literal

DEFAULT_EPSILON = 3.0
DEFAULT_EPOCHS = 3.0

WITHOUT_EFFECT_ON_VALUES = ("out", "resume", "checkpoint_every", "data_dir", "model")
"""Settings that say where things lie or how often to write. What lies in `data_dir` and `model` does have an
effect: that is compared by fingerprint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Fine-tunes a language model, weight-tied or untied, on a classification task, privately by default."""

    task: str = "reviews"
    """Task: reviews (generated, needs no file and no hub), sst2, qnli or qqp."""

    data_dir: Path | None = None
    """Folder with the tasks' files, e.g. ../shared/data; None downloads from the Hugging Face hub."""

    model: str | None = None
    """Folder or hub name of a GPT-2, Llama or Qwen 2 in Hugging Face form; None: a small untrained GPT-2
    (reviews)."""

    tie_embeddings: bool = True
    """Whether the output head is the input embedding itself; an untied head starts as a copy of it."""

    dropout: float = 0.0
    """Dropout rate while training, in [0, 1); of a Llama's attention weights alone."""

    remat: bool | Literal["full"] = False
    """What the backward pass computes again to save memory: False, nothing; True, what is cheap in each
    block; full, the dense layers too."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the layers compute in; parameters, norms, sums and noise are float32."""

    prompt: str | None = None
    """Prompt in place of the task's, with a {column} for each text, ending where the label word follows."""

    label_words: tuple[str, ...] | None = None
    """Label words in place of the task's, one for each class, in the order of the labels."""

    max_length: int | None = None
    """Longest sequence in tokens; None: the smaller of what the task needs and the model's n_positions."""

    length_multiple: int | None = None
    """Sort a step's rows by length, and cut each physical batch to the next multiple of this many tokens:
    faster, at one compilation a length; None: all have the longest row's."""

    held_out_fraction: float = 0.0
    """Share of the training rows, in [0, 1), that is evaluated on in place of the dev rows, and not trained
    on; to choose settings by."""

    loss: Literal["next_token", "label_words", "lm"] = "next_token"
    """Cross-entropy of the label word over the vocabulary, over the label words; or of the whole sequence."""

    regime: Literal["dp", "nonprivate"] = "dp"
    """dp: clipped gradients, Gaussian noise, Poisson sampling; nonprivate: none of these, no guarantee."""

    engine: Literal["ghost", "bookkeeping", "materialized", "microbatched", "auto"] = "ghost"
    """How per-example norms and the clipped sum are computed; auto: the cheapest way that fits in memory."""

    memory_budget_gb: float | None = None
    """Memory in GB (1e9 bytes) for the gradient program that auto chooses; None: what the device has."""

    tied_norm: Literal["cross_term", "materialize", "omit", "triangle"] = "cross_term"
    """Norm of a tied matrix in the ghost and bookkeeping engines; omit is naive: sensitivity sqrt(2) C."""

    clipping: Literal["flat", "automatic", "per_layer"] = "flat"
    """How an example's factor follows from its norm."""

    uncovered: Literal["materialize", "error"] = "materialize"
    """What to do with a parameter that no norm rule covers."""

    microbatch_size: int = 1
    """Examples held at once by the microbatched engine."""

    trainable: str | None = None
    """Regular expression searched in each parameter's path, e.g. 'lm_head|ln_f'; None trains everything."""

    epsilon: float | None = None
    """Target epsilon, to which the noise is calibrated; 3 if neither this nor a noise multiplier is given."""

    delta: float | None = None
    """Delta of the guarantee; None takes n^-1.1 for n training examples."""

    noise_multiplier: float | None = None
    """Noise standard deviation on the sum over l2_clip_norm, in place of a target epsilon."""

    double_noise: str | None = None
    """Regular expression searched in each trained parameter's path: where it is found, noise is added twice,
    in independent draws. For study; the guarantee is stated without the second."""

    l2_clip_norm: float = 1.0
    """Clipping threshold C: the largest L2 norm one example may add to the sum."""

    steps: int | None = None
    """Optimizer steps (logical batches), in place of epochs."""

    epochs: float | None = None
    """Expected passes over the training data; 3 if neither this nor steps is given."""

    batch_size: int = 256
    """Expected examples a step; each is drawn with probability batch_size / n."""

    physical_batch_size: int = 32
    """Examples on the device at once; a step takes as many physical batches as its draw needs."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer, from optax."""

    learning_rate: float = 1e-3
    """Peak learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warmup; linear and cosine end at zero."""

    schedule_steps: int | None = None
    """Steps that the schedule is laid out for, of which the run takes the first; None: those it takes."""

    warmup_steps: int = 0
    """Steps over which the learning rate first rises from zero."""

    momentum: float = 0.0
    """Momentum of sgd, in [0, 1)."""

    evaluate_every: int = 50
    """Steps between evaluations; the model is also evaluated before the first step and after the last."""

    checkpoint_every: int = 100
    """Steps between checkpoints; one is also written before the first step and after the last."""

    seed: int | None = None
    """Seed of noise, sampling and dropout; None: the operating system's randomness, as a release needs."""

    out: Path = Path("runs/finetune")
    """Run folder, created if absent."""

    resume: bool = False
    """Continue the run in the folder from its last checkpoint, if it has one."""

    def __post_init__(self) -> None:
        self._check_choices()
        for name in _POSITIVE_INTEGERS:
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "at least 1")
            _require(value is None or value < 2**31, name, value, "below 2**31")
        for name in _POSITIVE_NUMBERS:
            value = getattr(self, name)
            _require(value is None or 0.0 < value < math.inf, name, value, "positive and finite")
        for name in ("dropout", "momentum", "held_out_fraction"):
            _require(0.0 <= getattr(self, name) < 1.0, name, getattr(self, name), "in [0, 1)")
        _require(self.delta is None or 0.0 < self.delta < 1.0, "delta", self.delta, "in (0, 1)")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "at least 0")
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2**63)")
        self._check_combinations()

    def _check_choices(self) -> None:
        """Checks every field that takes one of a few names."""
        for name, hint in typing.get_type_hints(type(self)).items():
            choices = typing.get_args(hint)
            if typing.get_origin(hint) is Literal and getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    def _check_combinations(self) -> None:
        """Checks what single fields cannot show."""
        for one, other in (("epsilon", "noise_multiplier"), ("steps", "epochs")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"give {one} or {other}, not both")
        if self.regime == "nonprivate":
            for name in ("epsilon", "delta", "noise_multiplier", "double_noise"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} has no meaning with regime nonprivate, got {getattr(self, name)}"
                    )
        if self.optimizer != "sgd" and self.momentum:
            raise ValueError(f"momentum needs optimizer sgd, got {self.momentum} with {self.optimizer}")
        for name in ("trainable", "double_noise"):
            pattern = getattr(self, name)
            try:
                re.compile(pattern or "")
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{name} must be a regular expression, got {pattern!r}: {error}") from None

    @property
    def target_epsilon(self) -> float:
        """The epsilon that the noise is calibrated to, unless the noise multiplier is given."""
        return DEFAULT_EPSILON if self.epsilon is None else self.epsilon

    def num_steps(self, num_examples: int) -> int:
        """Returns the number of steps on a training set of `num_examples`, rounded up to whole steps.

        Raises:
          ValueError: if the epochs take more steps than can be counted.
        """
        if self.steps is not None:
            return self.steps
        epochs = DEFAULT_EPOCHS if self.epochs is None else self.epochs
        steps = epochs * num_examples / self.batch_size
        _require(steps < 2**31, "epochs", epochs, f"below 2**31 steps of {self.batch_size} examples")
        return math.ceil(steps)

    def to_json(self) -> dict[str, Any]:
        """Returns all settings as JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


_POSITIVE_INTEGERS = (
    "max_length",
    "length_multiple",
    "microbatch_size",
    "steps",
    "schedule_steps",
    "batch_size",
    "physical_batch_size",
    "evaluate_every",
    "checkpoint_every",
)
_POSITIVE_NUMBERS = (
    "epsilon",
    "noise_multiplier",
    "l2_clip_norm",
    "epochs",
    "learning_rate",
    "memory_budget_gb",
)


def _require(holds: bool, name: str, value: Any, requirement: str) -> None:
    """Raises the house's one-line error unless a requirement holds."""
    if not holds:
        raise ValueError(f"{name} must be {requirement}, got {value}")
