"""Models and losses that break what ghost norms assume: exact or refused by name, never silently wrong."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.clipping import oracle, small
from wtdp_jax.clipping import clipped_grad, tapped

VOCAB, WIDTH, TOKENS = 11, 6, 5


class Model(nn.Module):
    """A tied bag of layers with one oddity switched on."""

    odd: str = ""

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        wte = nn.Embed(VOCAB, WIDTH, name="wte")
        x = wte(ids) + nn.Embed(9, WIDTH, name="wpe")(np.arange(ids.shape[1])[None])
        x = _ODDITIES[self.odd](x, wte, ids)
        x = nn.LayerNorm(name="ln")(x)
        return wte.attend(x)


class Block(nn.Module):
    """What is scanned: a dense layer; its own embedding, if asked for."""

    embeds: bool = False

    @nn.compact
    def __call__(self, x: Any, ids: Any) -> tuple[Any, None]:
        if self.embeds:
            x = x + nn.Embed(VOCAB, WIDTH, name="inner")(ids)
        return x + nn.Dense(WIDTH, name="dense")(nn.RMSNorm(name="norm")(x)), None


class Shared(nn.Module):
    """A dense layer to be run in several lanes of a vmap."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(WIDTH, name="dense")(x)


class Raw(nn.Module):
    """A raw parameter."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x * self.param("gain", nn.initializers.ones, (WIDTH,)).reshape(1, 1, -1)


def _twice(x: Any, wte: Any, ids: Any) -> Any:
    dense = nn.Dense(WIDTH, name="twice")
    return dense(jnp.tanh(dense(x)))


def _scan(axes: dict[str, int], broadcast: Any, block: Any, x: Any, ids: Any, **settings: Any) -> Any:
    scanned = nn.scan(
        block,
        variable_axes=axes,
        variable_broadcast=broadcast,
        split_rngs={"params": bool(axes)},
        in_axes=nn.broadcast,
        length=3,
    )
    return scanned(name="h", **settings)(x, ids)[0]


def _lanes(params_axis: int | None, x: Any) -> Any:
    lanes = nn.vmap(
        Shared,
        variable_axes={"params": params_axis},
        split_rngs={"params": params_axis is not None},
        axis_size=2,
    )
    return jnp.sum(lanes(name="lanes")(jnp.stack([x, 2 * x])), 0)


_ODDITIES: dict[str, Callable] = {
    "": lambda x, wte, ids: x,
    "raw": lambda x, wte, ids: Raw(name="raw")(x),
    "twice": _twice,
    "direct": lambda x, wte, ids: x + 0.3 * wte.embedding[5].reshape(1, 1, -1),
    "scan": lambda x, wte, ids: _scan({"params": 0}, False, Block, x, ids),
    "scan embeds": lambda x, wte, ids: _scan({"params": 0}, False, Block, x, ids, embeds=True),
    "scan remat embeds": lambda x, wte, ids: _scan(
        {"params": 0}, False, nn.remat(Block), x, ids, embeds=True
    ),
    "remat": lambda x, wte, ids: nn.remat(Block)(embeds=True, name="h")(x, ids)[0],
    "loop": lambda x, wte, ids: _scan({}, "params", Block, x, ids),
    "lanes of one layer": lambda x, wte, ids: _lanes(None, x),
    "lanes of their own": lambda x, wte, ids: _lanes(0, x),
    "custom product": lambda x, wte, ids: nn.Dense(
        WIDTH, name="custom", dot_general=lambda a, b, *args, **kw: 2 * jax.lax.dot_general(a, b, *args, **kw)
    )(x),
    "group axes": lambda x, wte, ids: nn.LayerNorm(name="odd", reduction_axes=(-2, -1))(x),
    "ids as a slice": lambda x, wte, ids: x + nn.Embed(VOCAB, WIDTH, name="other")(ids[:, ::-1][:, :1]),
    "negative ids": lambda x, wte, ids: x + nn.Embed(VOCAB, WIDTH, name="other")(ids - VOCAB),
    "three uses": lambda x, wte, ids: x + wte(ids[:, ::-1]),
    "cond": lambda x, wte, ids: nn.cond(
        ids[0, 0] > 4, lambda m, y: m(y), lambda m, y: -m(y), nn.Dense(WIDTH, name="branch"), x
    ),
    "unused": lambda x, wte, ids: (nn.Dense(WIDTH, name="unused")(x), x)[1],
    "complex inputs": lambda x, wte, ids: x + jnp.abs(nn.Dense(WIDTH, name="complex")(x + 1j * x[:, ::-1])),
    "no positions": lambda x, wte, ids: x + jnp.sum(nn.Dense(WIDTH, name="none")(x[:, :0]), 1, keepdims=True),
    "dense on positions": lambda x, wte, ids: (
        x + nn.Dense(WIDTH, name="pos")(jnp.ones((1, TOKENS, 2), x.dtype))
    ),
}


def _token_loss(model: nn.Module, params: Any, ids: Any) -> Any:
    logits = model.apply({"params": params}, ids)
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_probs, ids[:, 1:, None], -1)[..., 0], -1)


def _plain(model: nn.Module, params: Any, batch: Any) -> Any:
    return _token_loss(model, params, batch["ids"])


def _regularized(model: nn.Module, params: Any, batch: Any) -> Any:
    return _plain(model, params, batch) + 0.1 * jnp.sum(params["h"]["dense"]["kernel"] ** 2)


def _all_leaves_regularized(model: nn.Module, params: Any, batch: Any) -> Any:
    return _plain(model, params, batch) + 0.1 * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))


def _pulled_to_start(model: nn.Module, params: Any, batch: Any) -> Any:
    start = jax.tree.map(jnp.ones_like, small.random_params(model, batch["ids"]))
    apart = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), params, start)
    return _plain(model, params, batch) + 0.1 * sum(jax.tree.leaves(apart))


def _scaled_weight(model: nn.Module, params: Any, batch: Any) -> Any:
    ln = params["ln"] | {"scale": 2 * params["ln"]["scale"]}
    return _plain(model, params | {"ln": ln}, batch)


def _vmapped(model: nn.Module, params: Any, batch: Any) -> Any:
    return jax.vmap(lambda ids: _token_loss(model, params, ids[None])[0])(batch["ids"])


def _two_passes_over_one_model(model: nn.Module, params: Any, batch: Any) -> Any:
    return _plain(model, params, batch) + _token_loss(model, params, batch["ids"][:, ::-1])


def _swapped(model: nn.Module, params: Any, batch: Any) -> Any:
    """Two models whose modules have the same names, one with the other's LayerNorm."""
    return _plain(model, params["a"], batch) + _plain(model, params["b"] | {"ln": params["a"]["ln"]}, batch)


def _gradient_penalty(model: nn.Module, params: Any, batch: Any) -> Any:
    """The loss reads the gradient in its own weights: a use that no tap sees."""

    def at(scale: Any) -> Any:
        ln = params["ln"] | {"scale": scale * params["ln"]["scale"]}
        return jnp.sum(_plain(model, params | {"ln": ln}, batch))

    return _plain(model, params, batch) + jax.grad(at)(1.0) ** 2


def _rounded_and_back(model: nn.Module, params: Any, batch: Any) -> Any:
    """Params as they would be after storage in bfloat16: the probes would go the same way."""
    return _plain(model, jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params), batch)


def _times_number_of_leaves(model: nn.Module, params: Any, batch: Any) -> Any:
    return len(jax.tree.leaves(params)) * _plain(model, params, batch)


def _over_number_of_weights(model: nn.Module, params: Any, batch: Any) -> Any:
    return _plain(model, params, batch) / sum(p.size for p in jax.tree.leaves(params) if p.ndim > 1)


def _by_path(model: nn.Module, params: Any, batch: Any) -> Any:
    """Code that walks the params and knows dicts alone."""
    walked = jax.tree_util.tree_map_with_path(lambda keys, p: p if [k.key for k in keys] else None, params)
    return _plain(model, walked, batch)


def _edited(model: nn.Module, params: Any, batch: Any) -> Any:
    """Another interceptor changes what a layer computes."""

    def edit(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        y = next_fun(*args, **kwargs)
        return 3 * y if isinstance(context.module, nn.LayerNorm) else y

    with nn.intercept_methods(edit):
        return _plain(model, params, batch)


def _passes_jit(model: nn.Module, params: Any, batch: Any) -> Any:
    return jax.jit(lambda p: _plain(model, p, batch))(params)


# oddity, loss, what must be materialized (None: everything)
CASES: dict[str, tuple[str, Callable, set[str] | None]] = {
    **{odd or "plain": (odd, _plain, leaves) for odd, leaves in {
        "": set(),
        "raw": {"raw/gain"},
        "twice": {"twice/kernel", "twice/bias"},
        "direct": {"wte/embedding"},
        "scan": set(),
        "scan embeds": set(),
        "scan remat embeds": set(),
        "remat": set(),
        "loop": {"h/dense/kernel", "h/dense/bias", "h/norm/scale"},
        "lanes of one layer": {"lanes/dense/kernel", "lanes/dense/bias"},
        "lanes of their own": set(),
        "custom product": {"custom/kernel", "custom/bias"},
        "group axes": {"odd/scale", "odd/bias"},
        "ids as a slice": set(),
        "negative ids": set(),
        "three uses": {"wte/embedding"},
        "cond": {"branch/kernel", "branch/bias"},
        "unused": set(),
        "complex inputs": {"complex/kernel", "complex/bias"},
        "no positions": {"none/kernel", "none/bias"},
        "dense on positions": set(),
    }.items()},
    "regularizer": ("scan", _regularized, {"h/dense/kernel", "h/dense/bias"}),
    "regularizer on all": ("scan", _all_leaves_regularized, None),
    "structure of params": ("", _pulled_to_start, None),
    "scaled weight": ("", _scaled_weight, {"ln/scale", "ln/bias"}),
    "loss by vmap": ("scan", _vmapped, set()),
    "loss by jit": ("scan", _passes_jit, set()),
    "two passes": ("", _two_passes_over_one_model, None),
    "gradient penalty": ("", _gradient_penalty, None),
    "rounded and back": ("", _rounded_and_back, None),
    "times the number of leaves": ("", _times_number_of_leaves, None),
    "over the number of weights": ("scan", _over_number_of_weights, None),
    "walked by path": ("scan", _by_path, set()),
    "another interceptor": ("", _edited, None),
}  # fmt: skip


def _params(odd: str, batch: Any) -> Any:
    return small.random_params(Model(odd=odd), batch["ids"])


def _batch() -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(0, VOCAB, (3, TOKENS)).astype(np.int32)
    ids[0] = ids[0, 0]
    return {"ids": jnp.asarray(ids)}


@pytest.mark.parametrize("case", CASES)
def test_covered_as_expected(float64: None, case: str) -> None:
    odd, loss, expected = CASES[case]
    batch, model = _batch(), Model(odd=odd)
    params = _params(odd, batch)
    grad_fn = clipped_grad(lambda p, b: loss(model, p, b), engine="ghost", l2_clip_norm=1.0)
    coverage = grad_fn.check(params, batch)
    leaves = {"/".join(key.key for key in keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)}
    assert set(coverage.uncovered) == (leaves if expected is None else expected), str(coverage)


@pytest.mark.parametrize("case", CASES)
def test_exact(float64: None, case: str) -> None:
    odd, loss, _ = CASES[case]
    batch, model = _batch(), Model(odd=odd)
    oracle.assert_exact(lambda p, b: loss(model, p, b), _params(odd, batch), batch)


def test_leaves_of_two_models_are_told_apart(float64: None) -> None:
    batch, model = _batch(), Model()
    params = {"a": _params("", batch), "b": small.random_params(model, batch["ids"], seed=3)}

    def loss_fn(params: Any, batch: Any) -> Any:
        return _swapped(model, params, batch)

    coverage = clipped_grad(loss_fn, engine="ghost", l2_clip_norm=1.0).check(params, batch)
    assert set(coverage.uncovered) == {"a/ln/scale", "a/ln/bias"}
    assert set(coverage.unused) == {"b/ln/scale", "b/ln/bias"}
    oracle.assert_exact(loss_fn, params, batch)


@pytest.mark.parametrize("engine", ["ghost", "bookkeeping"])
def test_uncovered_leaves_are_refused_by_name(engine: Any) -> None:
    batch, model = _batch(), Model(odd="raw")
    params = small.random_params(model, batch["ids"], dtype=jnp.float32)
    grad_fn = clipped_grad(
        lambda p, b: _plain(model, p, b), engine=engine, l2_clip_norm=1.0, uncovered="error"
    )
    with pytest.raises(ValueError, match="no rule covers raw/gain: read by "):
        grad_fn(params, batch)


def test_the_table() -> None:
    batch, model = _batch(), Model(odd="raw")
    params = small.random_params(model, batch["ids"], dtype=jnp.float32)
    coverage = clipped_grad(lambda p, b: _plain(model, p, b), engine="ghost", l2_clip_norm=1.0).check(
        params, batch
    )
    assert coverage.bytes_materialized == 6 * 4  # one gain of 6 float32 entries
    lines = {line.split()[0]: line for line in str(coverage).splitlines()}
    assert "tied" in lines["wte/embedding"] and " 2 " in lines["wte/embedding"]
    assert "none: read by" in lines["raw/gain"] and lines["raw/gain"].endswith("24")


def test_an_error_of_the_loss_is_shown_as_it_is() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        clipped_grad(loss_fn, engine="ghost", l2_clip_norm=1.0).check({"w": jnp.ones(2)}, _batch())


_LAYER = nn.Dense(4)


def _apply_layer(params: Any, x: Any) -> Any:
    return jnp.sin(_LAYER.apply({"params": params}, x))


# Made once, so that JAX remembers from an earlier pass how it traced them.
_KEPT = {
    "jit": jax.jit(_apply_layer),
    "remat": jax.checkpoint(_apply_layer),
    "vmap over the last axis": jax.vmap(_apply_layer, in_axes=(-1, None)),
}


@pytest.mark.parametrize(
    ("kept", "clipping"),
    [("jit", "flat"), ("jit", "per_layer"), ("remat", "per_layer"), ("vmap over the last axis", "flat")],
)
def test_functions_that_outlive_a_trace(float64: None, kept: str, clipping: Any) -> None:
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 4), "bias": (4,)}
    if kept.startswith("vmap"):
        shapes = {name: (*shape, 4) for name, shape in shapes.items()}
    params = {"d": {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}}
    batch = {"x": jnp.asarray(rng.standard_normal((3, 4, 4)))}

    def loss_fn(params: Any, batch: Any) -> Any:
        out = _KEPT[kept](params["d"], batch["x"].reshape(-1, 4))
        return 5 * jnp.sum(out**2).reshape(1)

    gradients = oracle.per_example_gradients(loss_fn, params, batch)
    norms = oracle.norms(gradients)  # one module, so one group: per_layer is flat
    expected = oracle.clipped_sum(gradients, oracle.flat_factors(norms, 0.1))
    for engine in ("ghost", "bookkeeping", "ghost"):
        grad_fn = clipped_grad(loss_fn, engine=engine, l2_clip_norm=0.1, clipping=clipping)
        grad_fn.check(params, batch)
        total, per_example = grad_fn(params, batch)
        assert oracle.relative_error(per_example.norm, norms) < 1e-10, engine
        assert oracle.relative_error(total, expected) < 1e-10, engine


class DeadCall(nn.Module):
    """Embeds twice and uses one."""

    @nn.compact
    def __call__(self, ids: Any) -> tuple[Any, Any]:
        wte = nn.Embed(VOCAB, WIDTH, name="wte")
        return wte.attend(2 * wte(ids)), wte(ids[:, ::-1])


def test_a_second_embedding_whose_output_is_unused(float64: None) -> None:
    batch, model = _batch(), DeadCall()
    params = small.random_params(model, batch["ids"])

    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum(jax.nn.log_softmax(model.apply({"params": params}, batch["ids"])[0])[..., 0], -1)

    oracle.assert_exact(loss_fn, params, batch)


def test_programs_are_compared_without_their_arguments_trees() -> None:
    program = "scan[ ft_in=((), (A(B(None)),)) jaxpr={ a = mul b c } ft_out=(None,) length=3 ]"
    assert tapped._without_trees(program) == "scan[  jaxpr={ a = mul b c }  length=3 ]"
