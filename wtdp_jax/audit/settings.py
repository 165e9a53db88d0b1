"""What is audited: a tiny GPT-2, a batch with a canary that pulls against another row, and claims.

Dimension key: B examples, T tokens.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from wtdp_jax.audit import worst_case
from wtdp_jax.audit.faults import Fault, faults
from wtdp_jax.audit.white_box import Audit, Mechanism, Neighbours, audit
from wtdp_jax.clipping import Engine, clipped_grad
from wtdp_jax.clipping.factors import Clipping
from wtdp_jax.losses import next_token_loss
from wtdp_jax.models import GPT2, GPT2Config
from wtdp_jax.noise import add_gaussian_noise, key_from_seed
from wtdp_jax.privacy import PrivacyStatement
from wtdp_jax.rules import TiedNorm

# Far below any gradient's norm here, so that clipping is what bounds the canary.
L2_CLIP_NORM = 0.01
NOISE_MULTIPLIER = 1.0
EXPECTED_BATCH_SIZE = 2
DELTA = 1e-5

_TIED = ("wte", "embedding")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One configuration.

    Attributes:
        name: in words.
        engine, tied_norm, clipping: as in `clipped_grad`.
        tie: whether the head is the embedding.
        worst_params: whether parameters are those at which the naive norm is most wrong.
        claims_exact: whether the clip norm is claimed for the sensitivity, whatever it is.
        fault: what is planted, if anything.
    """

    name: str
    engine: Engine
    tied_norm: TiedNorm = "cross_term"
    clipping: Clipping = "flat"
    tie: bool = True
    worst_params: bool = False
    claims_exact: bool = False
    fault: Fault | None = None

    @property
    def is_sound(self) -> bool:
        """Whether its stated epsilon must hold."""
        return self.fault is None and not self.claims_exact


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What an audit found of a setting.

    Attributes:
        setting: the setting.
        stated_epsilon: that of its privacy statement, at DELTA.
        audit: the bound.
    """

    setting: Setting
    stated_epsilon: float
    audit: Audit

    @property
    def is_refuted(self) -> bool:
        """Whether epsilon is shown to be larger than stated."""
        return self.audit.epsilon > self.stated_epsilon

    @property
    def is_as_expected(self) -> bool:
        """Whether a sound setting stands, or a faulty one is found out."""
        return self.is_refuted != self.setting.is_sound


def sound_settings() -> tuple[Setting, ...]:
    """What must stand: each engine, clipping and tied norm."""
    engines: tuple[Engine, ...] = ("materialized", "microbatched", "ghost", "bookkeeping")
    fast: tuple[Engine, ...] = ("ghost", "bookkeeping")
    kinds: tuple[Clipping, ...] = ("automatic", "per_layer")
    norms: tuple[TiedNorm, ...] = ("materialize", "triangle")
    return (
        *(Setting(name=f"{e}, tied", engine=e, worst_params=True) for e in engines),
        *(Setting(name=f"{e}, untied", engine=e, tie=False) for e in fast),
        *(Setting(name=f"{e}, {kind}", engine=e, clipping=kind) for e in fast for kind in kinds),
        *(Setting(name=f"ghost, {n}", engine="ghost", tied_norm=n, worst_params=True) for n in norms),
        Setting(name="ghost, naive, honest epsilon", engine="ghost", tied_norm="omit", worst_params=True),
    )


def faulty_settings() -> tuple[Setting, ...]:
    """What must be found out."""
    naive = Setting(
        name="fault: naive norm, claimed exact",
        engine="ghost",
        tied_norm="omit",
        worst_params=True,
        claims_exact=True,
    )
    planted = faults(EXPECTED_BATCH_SIZE)
    return (naive, *(Setting(name=f"fault: {f.name}", engine=f.engine, fault=f) for f in planted))


def examine(setting: Setting, *, seed: int, draws: int, ascent_steps: int) -> Finding:
    """Audits a setting.

    Args:
        setting: the setting.
        seed: of parameters, batch and noise.
        draws: of either neighbour, see `wtdp_jax.audit.white_box.audit`.
        ascent_steps: towards the parameters at which the naive norm is most wrong.
    """
    model = _model(setting.tie)
    neighbours = _neighbours(model, seed)
    if setting.worst_params:
        neighbours = dataclasses.replace(neighbours, params=_worst_params(seed, ascent_steps))
    grad_fn = clipped_grad(
        _scaled_loss(model),
        engine=setting.engine,
        l2_clip_norm=L2_CLIP_NORM,
        tied_norm=setting.tied_norm,
        clipping=setting.clipping,
        microbatch_size=3,
    )
    statement = PrivacyStatement(
        num_examples=EXPECTED_BATCH_SIZE,
        expected_batch_size=EXPECTED_BATCH_SIZE,
        steps=1,
        noise_multiplier=NOISE_MULTIPLIER,
        l2_clip_norm=L2_CLIP_NORM,
        sensitivity=L2_CLIP_NORM if setting.claims_exact else grad_fn.sensitivity,
        delta=DELTA,
        reproducible_randomness=False,
    )

    def noised(total: Any, key: Array) -> Any:
        noise = add_gaussian_noise(statement.noise_stddev, key)
        return noise.update(total, noise.init(total))[0]

    mechanism = Mechanism(release=lambda *inputs: grad_fn(*inputs)[0], noised=noised)
    with setting.fault.patch() if setting.fault else contextlib.nullcontext():
        found = audit(mechanism, neighbours, key_from_seed(seed, "audit"), draws=draws, delta=DELTA)
    return Finding(setting=setting, stated_epsilon=statement.epsilon, audit=found)


def _model(tie: bool) -> GPT2:
    return GPT2(GPT2Config(vocab_size=12, n_positions=6, n_embd=8, n_layer=1, n_head=2, tie_embeddings=tie))


def _scaled_loss(model: GPT2) -> Callable[[Any, Any], Array]:
    """Each example's loss times a number of its own, by which one example can pull against another."""
    loss_fn = next_token_loss(model)
    return lambda params, batch: batch["scale"] * loss_fn(params, batch)


def _neighbours(model: GPT2, seed: int) -> Neighbours:
    """A row; a row of padding; and the canary, the first row once more, pulling the other way and harder."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(rng.integers(0, model.config.vocab_size, (1, 6), np.int32), 3, axis=0)
    batch = {
        "ids": jnp.asarray(ids),
        "positions": jnp.full(3, 5, jnp.int32),
        "targets": jnp.full(3, ids[0, 0]),
        "scale": jnp.asarray([1.0, 1.0, -3.0]),
    }
    params = jax.jit(model.init)(jax.random.key(seed), batch["ids"])["params"]
    return Neighbours(params=params, batch=batch, others=jnp.asarray([False, True]))


@functools.cache
def _worst_params(seed: int, steps: int) -> Any:
    """Parameters at which the tied model's naive norm of the canary is most wrong."""
    neighbours = _neighbours(_model(tie=True), seed)
    example = jax.tree.map(lambda leaf: leaf[-1:], neighbours.batch)
    untied = _scaled_loss(_model(tie=False))

    def loss(params: Any, embedding: Array, head: Array) -> Array:
        apart = {**params, "wte": {"embedding": embedding}, "lm_head": {"kernel": head.T}}
        return untied(apart, example)[0]

    def ratio(params: Any) -> Array:
        return worst_case.norm_ratio(loss, params, _TIED)

    ascend = jax.jit(lambda params: worst_case.ascend(ratio, params, steps=steps, learning_rate=0.03))
    return ascend(neighbours.params)
