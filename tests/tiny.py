"""The smallest inputs that a run can have: a word-level tokenizer, one-block models, made-up rows."""

import functools

import jax
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from wtdp_jax.data import Encoded
from wtdp_jax.inputs import Inputs
from wtdp_jax.models import GPT2, GPT2Config

WORDS = ("[UNK]", "good", "bad", "film", "not", "great", "terrible", "it", "was", "<|endoftext|>")


def tokenizer() -> PreTrainedTokenizerFast:
    """Splits at white space."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="<|endoftext|>")


def encoded(num_examples: int, seed: int) -> Encoded:
    """Rows of 2 to 5 tokens whose label is told by their first."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, num_examples).astype(np.int32)
    positions = rng.integers(1, 5, num_examples).astype(np.int32)
    ids = rng.integers(3, 9, (num_examples, 6)).astype(np.int32)
    ids[:, 0] = 1 + labels
    label_ids = np.array([6, 5], np.int32)
    ids[np.arange(num_examples), positions + 1] = label_ids[labels]
    tokens = np.arange(6)
    arrays = {
        "ids": ids,
        "positions": positions,
        "targets": label_ids[labels],
        "labels": labels,
        "weights": ((tokens > 0) & (tokens < positions[:, None] + 2)).astype(np.float32),
    }
    return Encoded(arrays=arrays, label_ids=label_ids, num_cut=0)


@functools.cache
def inputs(num_train: int = 40, num_eval: int = 7, **overrides: object) -> Inputs:
    """A model of one block, with its data; `overrides` go to GPT2Config."""
    shape = {"vocab_size": len(WORDS), "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2(GPT2Config(**{**shape, **overrides}))
    train_data, eval_data = encoded(num_train, seed=0), encoded(num_eval, seed=1)
    params = jax.jit(model.init)(jax.random.key(0), train_data.arrays["ids"][:1])["params"]
    return Inputs(
        model=model, params=params, tokenizer=tokenizer(), train_data=train_data, eval_data=eval_data
    )
