"""An audit of a whole training run by many canaries (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846).

Each canary is in the data or not by a coin of its own. The auditor sees every noisy sum, scores each canary
by how far the sums point along its gradients, and guesses: the best scores were in, the worst were not. One
run gives one bound, weaker by far than the stated epsilon, but of the real loop: Poisson sampling, fixed
physical batches, noise, composition.

Dimension key: M canaries, N rows of data.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from wtdp_jax.audit import bounds
from wtdp_jax.clipping import Engine, clipped_grad
from wtdp_jax.losses import next_token_loss
from wtdp_jax.models import GPT2, GPT2Config
from wtdp_jax.noise import add_gaussian_noise, divide_by, key_from_seed
from wtdp_jax.privacy import PrivacyStatement
from wtdp_jax.sampling import PoissonSampler

_TOKENS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run and its canaries.

    Attributes:
        engine: how gradients are clipped.
        canaries: M; about half of them are in the data.
        guesses: of how many canaries the auditor says something; even.
        rows: other rows of data.
        expected_batch_size: rows a step.
        steps: logical steps.
        noise_multiplier: as in training.
        delta: of the stated epsilon.
        confidence: of the bound.
        seed: of everything.
    """

    engine: Engine
    canaries: int = 400
    guesses: int = 100
    rows: int = 100
    expected_batch_size: int = 100
    steps: int = 30
    noise_multiplier: float = 1.0
    delta: float = 1e-5
    confidence: float = 0.999
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunAudit:
    """What one run gave away.

    Attributes:
        stated_epsilon: of its privacy statement.
        epsilon: the lower bound.
        correct: correct guesses.
        guesses: all guesses.
    """

    stated_epsilon: float
    epsilon: float
    correct: int
    guesses: int


def audit_one_run(config: RunConfig) -> RunAudit:
    """Trains once and guesses."""
    rng = np.random.default_rng(config.seed)
    model = GPT2(GPT2Config(vocab_size=64, n_positions=_TOKENS, n_embd=16, n_layer=1, n_head=2))
    canaries, others = (_random_rows(rng, rows) for rows in (config.canaries, config.rows))
    is_in = rng.random(config.canaries) < 0.5
    data = {name: np.concatenate([others[name], canaries[name][is_in]]) for name in others}
    scores, statement = _train(config, model, data, canaries)
    order = np.argsort(scores)
    half = config.guesses // 2
    correct = int(np.sum(~is_in[order[:half]]) + np.sum(is_in[order[-half:]]))
    epsilon = bounds.one_run_epsilon_lower_bound(
        correct, 2 * half, canaries=config.canaries, delta=config.delta, confidence=config.confidence
    )
    return RunAudit(stated_epsilon=statement.epsilon, epsilon=epsilon, correct=correct, guesses=2 * half)


def _random_rows(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    return {
        "ids": rng.integers(0, 64, (rows, _TOKENS), np.int32),
        "positions": np.full(rows, _TOKENS - 1, np.int32),
        "targets": rng.integers(0, 64, rows, np.int32),
    }


def _train(
    config: RunConfig, model: GPT2, data: dict[str, np.ndarray], canaries: dict[str, np.ndarray]
) -> tuple[np.ndarray, PrivacyStatement]:
    """Trains as anyone would, but for the canaries' scores (M,)."""
    rows = len(data["ids"])
    loss_fn = next_token_loss(model)
    grad_fn = clipped_grad(loss_fn, engine=config.engine, l2_clip_norm=0.1)
    statement = PrivacyStatement(
        num_examples=rows,
        expected_batch_size=config.expected_batch_size,
        steps=config.steps,
        noise_multiplier=config.noise_multiplier,
        l2_clip_norm=grad_fn.l2_clip_norm,
        sensitivity=grad_fn.sensitivity,
        delta=config.delta,
        reproducible_randomness=True,
    )
    sampler = PoissonSampler(
        num_examples=rows,
        sampling_prob=statement.sampling_prob,
        physical_batch_size=64,
        entropy=config.seed,
    )
    noise = add_gaussian_noise(statement.noise_stddev, key_from_seed(config.seed, "noise"))
    optimizer = optax.chain(divide_by(config.expected_batch_size), optax.sgd(0.5))
    params = jax.jit(model.init)(jax.random.key(config.seed), canaries["ids"][:1])["params"]
    noise_state, opt_state = noise.init(params), optimizer.init(params)

    @jax.jit
    def update(params: Any, states: Any, total: Any) -> tuple[Any, Any, Array]:
        noised, noise_state = noise.update(total, states[0])
        scores = _scores(loss_fn, params, canaries, noised)
        updates, opt_state = optimizer.update(noised, states[1], params)
        return optax.apply_updates(params, updates), (noise_state, opt_state), scores

    sum_gradients, states, scores = jax.jit(grad_fn), (noise_state, opt_state), np.zeros(config.canaries)
    for step in range(config.steps):
        total = jax.tree.map(jnp.zeros_like, params)
        for indices, is_padding in sampler.batches(step):
            batch = {name: leaf[indices] for name, leaf in data.items()}
            total = jax.tree.map(jnp.add, total, sum_gradients(params, batch, is_padding)[0])
        params, states, of_step = update(params, states, total)
        scores += np.asarray(of_step)
    return scores, statement


def _scores(loss_fn: Any, params: Any, canaries: dict[str, np.ndarray], noised: Any) -> Array:
    """How far a noisy sum points along each canary's gradient, (M,)."""

    def of_one(canary: Any) -> Array:
        gradient = jax.grad(lambda p: loss_fn(p, jax.tree.map(lambda leaf: leaf[None], canary))[0])(params)
        return optax.tree.vdot(gradient, noised) / optax.tree.norm(gradient)

    return jax.vmap(of_one)(canaries)
