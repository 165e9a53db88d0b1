"""Pretrains a small GPT-2 with its own tokenizer on public text, without privacy, for the study.

On WikiText-2 and whatever other text there is, 30 to 60 minutes on two CPU cores:

    python experiments/pretrain.py --data-dir ../shared/data --text 'texts/**/*.txt' --out runs/pretrain

In seconds, to see that all is well:

    python experiments/pretrain.py --quick --data-dir ../shared/data --out runs/pretrain-quick

The folder `model` in the run folder is what `finetune.py --model` and `study.py --models` take. The text must
not be the private task's: a guarantee says nothing of what the model saw before. Loss and perplexity are
those of held-out pages, in nats a token. `--resume` continues an interrupted run to the same bits.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

from wtdp_jax import cli, report
from wtdp_jax.benchmark import runs
from wtdp_jax.checkpoint import Checkpoints, TrainState
from wtdp_jax.data import corpus, load_tokenizer
from wtdp_jax.evaluate import padded_batches
from wtdp_jax.losses import lm_loss
from wtdp_jax.metrics import MetricsLog, read_metrics
from wtdp_jax.models import GPT2, GPT2Config, save_pretrained
from wtdp_jax.run_folder import RunFolder, write_json
from wtdp_jax.sampling import ShuffledBatches
from wtdp_jax.streams import dropout_keys, new_streams

Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Pretrains a small GPT-2 with its own tokenizer on public text, without privacy."""

    text: tuple[str, ...] = ()
    """Text files or globs (UTF-8, `**` for any depth), besides WikiText-2."""

    data_dir: Path | None = None
    """Folder with wikitext-2/valid.txt and test.txt, e.g. ../shared/data; None: only --text."""

    out: Path = Path("runs/pretrain")
    """Run folder, created if absent; its folder `model` is the result."""

    vocab_size: int = 6144
    """Entries of the tokenizer, at most."""

    words: tuple[str, ...] = (" terrible", " great", " bad", " good", " yes", " no")
    """Words, each after a space, that must be one token: label words of tasks to come."""

    lowercase: bool = True
    """Whether the tokenizer makes text lower case."""

    n_positions: int = 128
    """Longest sequence, in tokens; also the length of the packed rows."""

    n_embd: int = 128
    """Width of the hidden state."""

    n_layer: int = 6
    """Blocks."""

    n_head: int = 4
    """Attention heads a block."""

    dropout: float = 0.0
    """Dropout rate while training, in [0, 1)."""

    steps: int = 4000
    """Optimizer steps."""

    batch_size: int = 32
    """Packed rows a step."""

    learning_rate: float = 2e-3
    """Peak learning rate of AdamW."""

    warmup_steps: int = 200
    """Steps over which the learning rate rises from zero, before it falls to a tenth by a cosine."""

    weight_decay: float = 0.1
    """Decay of the weight matrices, as a multiple of the learning rate."""

    clip_norm: float = 1.0
    """Norm to which the batch's gradient is cut."""

    held_out_fraction: float = 0.02
    """Share of the text's pages that is held out, in (0, 0.5]."""

    evaluate_every: int = 250
    """Steps between evaluations; there is one before the first step and after the last."""

    checkpoint_every: int = 250
    """Steps between checkpoints."""

    seed: int = 0
    """Seed of initial weights, order and dropout."""

    quick: bool = False
    """Whether to shrink model, text and steps to what takes seconds."""

    resume: bool = False
    """Continue the run in the folder from its last checkpoint, if it has one."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluate_every", "checkpoint_every"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            _require(0.0 < value < math.inf, name, value, "positive and finite")
        _require(
            self.vocab_size >= 300, "vocab_size", self.vocab_size, "at least 300, of which 257 are bytes"
        )
        _require(self.n_positions >= 2, "n_positions", self.n_positions, "at least 2")
        _require(0 <= self.warmup_steps < self.steps, "warmup_steps", self.warmup_steps, "in [0, steps)")
        _require(0.0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "at least 0")
        fraction = self.held_out_fraction
        _require(0.0 < fraction <= 0.5, "held_out_fraction", fraction, "in (0, 0.5]")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "in [0, 2**32)")
        self.model_config(self.vocab_size)

    def effective(self) -> "PretrainConfig":
        """The settings that hold: with `quick`, small ones."""
        if not self.quick:
            return self
        shape: dict[str, Any] = {
            "vocab_size": 512,
            "n_positions": 32,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
        }
        course: dict[str, Any] = {
            "steps": 20,
            "warmup_steps": 2,
            "batch_size": 8,
            "evaluate_every": 10,
            "checkpoint_every": 10,
        }
        return dataclasses.replace(self, **shape, **course)

    def model_config(self, vocab_size: int) -> GPT2Config:
        """The model's shape, for a vocabulary."""
        return GPT2Config(
            vocab_size=vocab_size,
            n_positions=self.n_positions,
            n_embd=self.n_embd,
            n_layer=self.n_layer,
            n_head=self.n_head,
            dropout=self.dropout,
        )

    def to_json(self) -> dict[str, Any]:
        """All settings as JSON values."""
        listed = {"text": list(self.text), "words": list(self.words)}
        return dataclasses.asdict(self) | listed | {"data_dir": str(self.data_dir), "out": str(self.out)}


class Text(NamedTuple):
    """The pages to train on, and those held out."""

    train: list[str]
    held_out: list[str]


# With --quick, so many pages of each.
_QUICK_PAGES = 20


def main(config: PretrainConfig) -> None:
    """Reads the text, trains, and leaves a run folder with the model in Hugging Face form."""
    config = config.effective()
    with cli.one_line_errors(ValueError, OSError):
        files = corpus.find_text_files(config.text, config.data_dir)
        text = Text(*corpus.hold_out(corpus.read_stretches(files), config.held_out_fraction))
        if config.quick:
            text = Text(text.train[:_QUICK_PAGES], text.held_out[:_QUICK_PAGES])
        prints = {f"{name}_text": corpus.fingerprint(part) for name, part in text._asdict().items()}
        record = {"settings": config.to_json(), "identity": {**prints, **report.computation()}}
        folder = RunFolder(config.out)
        with folder.claimed(record, resume=config.resume):
            write_json(folder.config, record)
            with Checkpoints(folder.checkpoints, record) as checkpoints:
                pretrain(config, text, files, folder, checkpoints)


def pretrain(
    config: PretrainConfig, text: Text, files: list[Path], folder: RunFolder, checkpoints: Checkpoints
) -> None:
    """Trains in a folder that is this process's own."""
    tokenizer = _tokenizer(config, text, folder.path / "tokenizer")
    train_rows, held_out_rows = (corpus.pack(part, tokenizer, config.n_positions) for part in text)
    model = GPT2(config.model_config(len(tokenizer)))
    training = Training(config, model, train_rows, held_out_rows, checkpoints)
    print(
        f"{training.num_parameters:,} parameters, vocabulary {len(tokenizer)}, "
        f"{train_rows.size:,} tokens to train on, {held_out_rows.size:,} held out",
        flush=True,
    )
    with MetricsLog(folder.metrics, keep_through_step=training.logged) as log:
        training.take_all(log)
    rows = read_metrics(folder.metrics)
    exported = GPT2(dataclasses.replace(model.config, dropout=0.0))
    save_pretrained(folder.model, exported, training.state.trained, tokenizer)
    report.plot_curves(folder.curves, rows)
    results = {
        "loss": rows[-1]["eval_loss"],
        "perplexity": rows[-1]["eval_perplexity"],
        "steps": config.steps,
        "parameters": training.num_parameters,
        "vocabulary": len(tokenizer),
        "train_tokens": train_rows.size,
        "held_out_tokens": held_out_rows.size,
        "epochs": config.steps * config.batch_size / len(train_rows),
        "files": [str(path) for path in files],
        "median_step_seconds": report.speed(rows, config.batch_size)["median_step_seconds"],
        **runs.environment(),
    }
    write_json(folder.results, results)
    print(f"held-out perplexity {results['perplexity']:.2f}; the model is in {folder.model}")


class Training:
    """The steps of one run, from its beginning or from its last checkpoint."""

    def __init__(
        self,
        config: PretrainConfig,
        model: GPT2,
        train_rows: np.ndarray,
        held_out_rows: np.ndarray,
        checkpoints: Checkpoints,
    ) -> None:
        self.config, self.checkpoints = config, checkpoints
        self.train_rows, self.held_out_rows = train_rows, held_out_rows
        loss_fn, optimizer = lm_loss(model), make_optimizer(config)
        params = jax.jit(model.init)(jax.random.key(config.seed), train_rows[:1])["params"]
        self.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.state = TrainState(
            trained=params, opt_state=optimizer.init(params), streams=new_streams(config.seed)
        )
        restored = checkpoints.restore(like=self.state)
        self.done, self.state = (0, self.state) if restored is None else restored
        self.logged = -1 if restored is None else self.done
        self.sampler = ShuffledBatches(
            num_examples=len(train_rows),
            batch_size=min(config.batch_size, len(train_rows)),
            physical_batch_size=config.batch_size,
            entropy=config.seed,
        )

        def step(params: Params, opt_state: Any, batch: Any, is_padding: Any) -> tuple[Params, Any, Any]:
            def mean_loss(params: Params) -> jax.Array:
                losses = jnp.where(is_padding, 0.0, loss_fn(params, batch))
                return jnp.sum(losses) / jnp.sum(~is_padding)

            loss, gradient = jax.value_and_grad(mean_loss)(params)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        self.step = jax.jit(step, donate_argnums=(0, 1))
        self.losses = jax.jit(loss_fn)

    def take_all(self, log: MetricsLog) -> None:
        """Takes the steps that are left."""
        total = self.config.steps
        if self.logged < 0:
            self._log_and_save(log, {})
        with tqdm.tqdm(total=total, initial=self.done, disable=None, unit="step") as progress:
            while self.done < total:
                self._log_and_save(log, self._take_step())
                progress.update()

    def _take_step(self) -> dict[str, float]:
        """Takes one step, and returns what it measured."""
        started = time.perf_counter()
        ((indices, is_padding),) = self.sampler.batches(self.done)
        batch = _batch(self.train_rows[indices])
        state = self.state
        if self.config.dropout > 0:
            batch["dropout_key"] = dropout_keys(state.streams.dropout_key, self.done, 0, len(indices))
        params, opt_state, loss = self.step(state.trained, state.opt_state, batch, is_padding)
        self.state = dataclasses.replace(state, trained=params, opt_state=opt_state)
        self.done += 1
        if not math.isfinite(loss):
            raise ValueError(
                f"loss must be finite, got {float(loss)} in step {self.done}: lower learning_rate"
            )
        return {"seconds": time.perf_counter() - started, "non_private_loss": float(loss)}

    def _log_and_save(self, log: MetricsLog, row: dict[str, float]) -> None:
        """Logs a step, and evaluates and saves where due."""
        is_last = self.done == self.config.steps
        if is_last or self.done % self.config.evaluate_every == 0:
            loss = self.held_out_loss()
            row = {**row, "eval_loss": loss, "eval_perplexity": math.exp(loss)}
        log.append(self.done, **row)
        if is_last or self.done % self.config.checkpoint_every == 0:
            log.sync()
            self.checkpoints.save(self.done, self.state)

    def held_out_loss(self) -> float:
        """Mean loss a token of the held-out rows, in nats."""
        total = 0.0
        for batch, is_padding in padded_batches(_batch(self.held_out_rows), self.config.batch_size):
            losses = np.asarray(self.losses(self.state.trained, batch), np.float64)
            total += float(np.sum(losses[~is_padding]))
        return total / len(self.held_out_rows)


def make_optimizer(config: PretrainConfig) -> optax.GradientTransformation:
    """AdamW with warmup and a cosine; biases and LayerNorms, being vectors, do not decay."""
    peak = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        peak / max(config.warmup_steps, 1), peak, config.warmup_steps, config.steps, end_value=peak / 10
    )

    def decays(params: Params) -> Params:
        # Blocks are stacked, so a vector of theirs has two axes: names tell better than shapes.
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key in ("kernel", "embedding"), params
        )

    adamw = optax.adamw(schedule, b2=0.99, weight_decay=config.weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def _tokenizer(config: PretrainConfig, text: Text, folder: Path) -> Any:
    """The run's tokenizer: trained when it begins, and read again when it is resumed."""
    if not (folder / "tokenizer.json").exists():
        words, lowercase = config.words, config.lowercase
        trained = corpus.train_tokenizer(
            text.train, vocab_size=config.vocab_size, words=words, lowercase=lowercase
        )
        trained.save_pretrained(folder)
    return load_tokenizer(folder)


def _batch(rows: np.ndarray) -> dict[str, Any]:
    """Packed rows as a batch of `lm_loss`: every token but the first is predicted."""
    return {"ids": rows, "weights": np.ones(rows.shape, np.float32)}


def _require(holds: bool, name: str, value: Any, requirement: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {requirement}, got {value}")


if __name__ == "__main__":
    main(cli.parse(PretrainConfig))
