"""Small models, parameters and batches that the engines' tests share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wtdp_jax.models import GPT2, Decoder, GPT2Config, Llama, LlamaConfig
from wtdp_jax.models.rotary import Llama3Scaling

TOKENS = 6


def gpt2(*, tie: bool, remat: bool = False) -> GPT2:
    # Width 8 and 6 tokens: the rule for dense layers takes its Gram form for some layers, tiles for others.
    return GPT2(
        GPT2Config(
            vocab_size=31, n_positions=9, n_embd=8, n_layer=2, n_head=2, tie_embeddings=tie, remat=remat
        )
    )


def llama(*, tie: bool, remat: bool = False) -> Llama:
    # With all that the family has: shared heads of keys and values, biases on them, scaled frequencies.
    scaling = Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_n_positions=16)
    sizes = {"vocab_size": 31, "n_positions": 9, "n_embd": 8, "n_layer": 2}
    heads = {"n_head": 2, "n_kv_head": 1, "n_inner": 12, "qkv_bias": True, "rope_scaling": scaling}
    return Llama(LlamaConfig(**sizes, **heads, tie_embeddings=tie, remat=remat))


def decoder(family: str, *, tie: bool, remat: bool = False) -> Decoder:
    return {"gpt2": gpt2, "llama": llama}[family](tie=tie, remat=remat)


def random_params(
    model: Any, *inputs: Any, dtype: Any = jnp.float64, seed: int = 0, scale: float = 0.3
) -> Any:
    """Params of a model with every entry normal, so that no gradient is zero by symmetry."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(scale * rng.standard_normal(s.shape), dtype), shapes)


def token_batch(
    rows: int, *, tokens: int = TOKENS, dtype: Any = jnp.float64, seed: int = 1
) -> dict[str, Any]:
    """Rows of all kinds: repeated tokens, a label that is in the text, varying positions and weights."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 31, (rows, tokens)).astype(np.int32)
    ids[0] = ids[0, 0]
    targets = rng.integers(0, 31, rows).astype(np.int32)
    targets[1] = ids[1, 0]
    return {
        "ids": jnp.asarray(ids),
        "positions": jnp.asarray(rng.integers(0, tokens, rows).astype(np.int32)),
        "targets": jnp.asarray(targets),
        "weights": jnp.asarray(rng.uniform(0.1, 2, (rows, tokens)), dtype),
        "scale": jnp.asarray(rng.uniform(0.3, 3, rows), dtype),
    }
