"""What a run works on: a model, its tokenizer, and the encoded data; loaded as the settings say."""

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from wtdp_jax import embedded
from wtdp_jax.config import TrainConfig
from wtdp_jax.data import Encoded, Rows, Task, encode, hold_out, load_split, load_task, load_tokenizer
from wtdp_jax.models import GPT2, Decoder, GPT2Config, from_pretrained

Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run works on.

    Attributes:
      model: the model to fine-tune.
      params: its parameters at the start.
      tokenizer: goes into the exported model's folder.
      train_data: the private rows.
      eval_data: the rows to evaluate on, taken to be public unless they were held out of the private ones.
    """

    model: Decoder
    params: Params
    tokenizer: PreTrainedTokenizerBase
    train_data: Encoded
    eval_data: Encoded

    def fingerprints(self) -> dict[str, str]:
        """Returns a SHA-256 of each part that the result depends on; that of private rows is named so."""
        digest = hashlib.sha256(repr(self.model.config).encode())
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape};".encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return {
            "non_private_train_data": self.train_data.fingerprint(),
            "eval_data": self.eval_data.fingerprint(),
            "initial_model": digest.hexdigest(),
        }


def load(config: TrainConfig) -> Inputs:
    """Loads model, tokenizer and data.

    Raises:
      ValueError: in one line, if something is missing, malformed, or does not fit together.
    """
    task = load_task(config.task).with_overrides(prompt=config.prompt, label_words=config.label_words)
    rows = _load_rows(config, task)
    model, params, tokenizer = _load_model(config, task)
    how = dataclasses.replace(model.config, dropout=config.dropout, remat=config.remat, dtype=config.dtype)
    model = type(model)(how)
    limit = model.config.n_positions
    if config.max_length is not None and config.max_length > limit:
        raise ValueError(
            f"max_length must be at most the model's n_positions ({limit}), got {config.max_length}"
        )
    train_data, eval_data = (
        encode(part, task, tokenizer, max_length=config.max_length or limit, objective=config.loss)
        for part in rows
    )
    for data in (train_data, eval_data):
        _check_vocabulary(data, model)
    return Inputs(model=model, params=params, tokenizer=tokenizer, train_data=train_data, eval_data=eval_data)


def _load_rows(config: TrainConfig, task: Task) -> tuple[Rows, Rows]:
    """The rows to train on, and those to evaluate on: where some are held out, dev is not even read."""
    train = load_split(task, "train", config.data_dir)
    if config.held_out_fraction:
        return hold_out(train, config.held_out_fraction)
    return train, load_split(task, "dev", config.data_dir)


def _load_model(config: TrainConfig, task: Task) -> tuple[Decoder, Params, PreTrainedTokenizerBase]:
    """The model, its parameters and its tokenizer."""
    if config.model is not None:
        return *from_pretrained(config.model, config.tie_embeddings), load_tokenizer(config.model)
    if task.generate is None:
        raise ValueError(f"model must be a folder or a hub name with task {task.name!r}, got none")
    tokenizer = embedded.tokenizer()
    tied = GPT2(GPT2Config.preset("tiny", vocab_size=len(tokenizer), tie_embeddings=True))
    # The same start every time: it is public, and a resumed run is compared with it.
    params = jax.jit(tied.init)(jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
    if config.tie_embeddings:
        return tied, params, tokenizer
    untied = GPT2(dataclasses.replace(tied.config, tie_embeddings=False))
    return untied, {**params, "lm_head": {"kernel": params["wte"]["embedding"].T}}, tokenizer


def _check_vocabulary(data: Encoded, model: Decoder) -> None:
    """A token id that the model has no row for would make its example NaN."""
    largest = max(int(np.max(data.arrays["ids"])), int(np.max(data.label_ids)))
    if largest >= model.config.vocab_size:
        raise ValueError(
            f"tokenizer must fit the model's vocab_size ({model.config.vocab_size}), got id {largest}"
        )
