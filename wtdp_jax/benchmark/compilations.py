"""How often a run compiles."""

from typing import Any

import jax
import numpy as np

from wtdp_jax import clipped_grad
from wtdp_jax.benchmark import step_cost
from wtdp_jax.losses import next_token_loss
from wtdp_jax.models import GPT2, GPT2Config
from wtdp_jax.noise import key_from_seed
from wtdp_jax.sampling import PoissonSampler
from wtdp_jax.step import make_step


def compilations_in_a_run(steps: int = 50) -> dict[str, int]:
    """Takes Poisson-sampled steps of a tiny model, and counts the compilations of a step's functions."""
    model = GPT2(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    rng = np.random.default_rng(0)
    data = {
        "ids": rng.integers(0, 16, (64, 8), np.int32),
        "positions": rng.integers(0, 8, 64, np.int32),
        "targets": rng.integers(0, 16, 64, np.int32),
    }
    sampler = PoissonSampler(num_examples=64, sampling_prob=0.15, physical_batch_size=8, entropy=0)
    grad_fn = clipped_grad(next_token_loss(model), engine="ghost", l2_clip_norm=1.0)
    step = make_step(grad_fn, lambda key: step_cost.optimizer(10, key), l2_clip_norm=1.0)
    key = key_from_seed(0, "noise")
    trained = jax.jit(model.init)(jax.random.key(0), data["ids"][:1])["params"]
    frozen = jax.tree.map(lambda leaf: None, trained)
    opt_state = step_cost.optimizer(10, key).init(trained)
    trained, opt_state, key = jax.device_put((trained, opt_state, key), jax.local_devices()[0])
    for number in range(steps):
        batches = [
            (trained, frozen, {name: leaf[rows] for name, leaf in data.items()}, is_padding)
            for rows, is_padding in sampler.batches(number)
        ]
        sums = step.sum_over(batches)
        trained, opt_state, _ = step.update(trained, opt_state, sums.gradient, key)
    counts: Any = {"accumulate": step.accumulate, "update": step.update}
    return {"steps": steps, **{name: function._cache_size() for name, function in counts.items()}}
