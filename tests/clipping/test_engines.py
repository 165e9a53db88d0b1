"""Every engine against the oracle, in float64 and in float32."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import linen as nn

from tests.clipping import oracle, small
from wtdp_jax import head_rules
from wtdp_jax.clipping import ClippedGrad, clipped_grad
from wtdp_jax.clipping.factors import NARROW_MARGIN
from wtdp_jax.losses import label_word_loss, lm_loss, next_token_loss

ENGINES = ("materialized", "microbatched", "ghost", "bookkeeping")
GHOSTLY = ("ghost", "bookkeeping")
FAMILIES = ("gpt2", "llama")

# The batch's last rows: padding that holds NaN and a token that does not exist, and a real row whose gradient
# is not finite. Neither may leave a trace.
REAL = 5
PADDING, BROKEN = REAL, REAL + 1


def _scaled(loss_fn: Any) -> Any:
    """A loss with a float leaf, which a NaN can reach."""
    return lambda params, batch: batch["scale"] * loss_fn(params, batch)


def _loss(name: str, model: Any) -> Any:
    return _scaled({"next_token": next_token_loss, "lm": lm_loss}[name](model))


def _batch_with_odd_rows(dtype: Any = jnp.float64) -> tuple[dict[str, Any], jax.Array]:
    batch = small.token_batch(REAL + 2, dtype=dtype)
    batch["scale"] = batch["scale"].at[PADDING].set(jnp.nan).at[BROKEN].set(jnp.inf)
    batch["ids"] = batch["ids"].at[PADDING].set(1000)
    return batch, jnp.arange(REAL + 2) == PADDING


def _rows(batch: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {name: leaf[rows] for name, leaf in batch.items()}


def _expected(clipping: str, gradients: Any, l2_clip_norm: float) -> Any:
    norms = oracle.norms(gradients)
    if clipping == "per_layer":
        return oracle.per_layer_clipped_sum(gradients, l2_clip_norm)
    factors = {"flat": oracle.flat_factors, "automatic": oracle.automatic_factors}[clipping]
    return oracle.clipped_sum(gradients, factors(norms, l2_clip_norm))


@functools.cache
def _setting(family: str, tie: bool, loss: str) -> tuple[Any, ...]:
    """A loss with parameters and a batch in float64, and the per-example gradients of its real rows."""
    model = small.decoder(family, tie=tie)
    loss_fn = _loss(loss, model)
    batch, is_padding = _batch_with_odd_rows()
    params = small.random_params(model, batch["ids"])
    gradients = oracle.per_example_gradients(loss_fn, params, _rows(batch, slice(REAL)))
    return loss_fn, params, batch, is_padding, gradients


def _exact_cases() -> Iterator[Any]:
    """All; of the second family's the default run has only those that meet other rules than the first's."""
    clippings, losses = ("flat", "per_layer", "automatic"), ("next_token", "lm")
    for family, tie, loss, clipping, engine in itertools.product(
        FAMILIES, (True, False), losses, clippings, ENGINES
    ):
        is_slow = clipping == "automatic" or loss == "lm"
        is_more = family != "gpt2" and (is_slow or engine not in GHOSTLY)
        marks = [pytest.mark.slow] * is_slow + [pytest.mark.exhaustive] * is_more
        yield pytest.param(family, tie, loss, clipping, engine, marks=marks)


@pytest.mark.parametrize(("family", "tie", "loss", "clipping", "engine"), list(_exact_cases()))
def test_exact_in_float64(
    float64: None, family: str, tie: bool, loss: str, clipping: Any, engine: Any
) -> None:
    loss_fn, params, batch, is_padding, gradients = _setting(family, tie, loss)
    norms = oracle.norms(gradients)
    l2_clip_norm = float(np.median(norms))
    grad_fn = clipped_grad(
        loss_fn, engine=engine, l2_clip_norm=l2_clip_norm, clipping=clipping, microbatch_size=3
    )
    total, per_example = jax.jit(grad_fn)(params, batch, is_padding)
    assert oracle.relative_error(total, _expected(clipping, gradients, l2_clip_norm)) < 1e-10
    assert oracle.relative_error(per_example.norm[:REAL], norms) < 1e-10
    assert per_example.norm[PADDING] == 0 and per_example.loss[PADDING] == 0
    assert jnp.isinf(per_example.norm[BROKEN])


@pytest.mark.parametrize("engine", GHOSTLY)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("tied_norm", ["cross_term", pytest.param("materialize", marks=pytest.mark.slow)])
@pytest.mark.parametrize("remat", [False, pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.exhaustive)])
def test_long_sequences(
    float64: None,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    tie: bool,
    engine: Any,
    tied_norm: Any,
    remat: Any,
) -> None:
    """With more tokens than features gradients are kept for records. Also: heads in tiles, remat."""
    monkeypatch.setattr(head_rules, "_TILE", 8)
    tokens = 20
    decoder = small.decoder(family, tie=tie)
    config = dataclasses.replace(decoder.config, n_positions=tokens)
    plain, model = (type(decoder)(dataclasses.replace(config, remat=r)) for r in (False, remat))
    batch = small.token_batch(3, tokens=tokens)
    params = small.random_params(model, batch["ids"])
    gradients = oracle.per_example_gradients(lm_loss(plain), params, batch)
    norms = oracle.norms(gradients)
    l2_clip_norm = float(np.median(norms))
    grad_fn = clipped_grad(
        lm_loss(model),
        engine=engine,
        l2_clip_norm=l2_clip_norm,
        tied_norm=tied_norm,
        uncovered="error",
    )
    total, per_example = jax.jit(grad_fn)(params, batch)
    assert oracle.relative_error(per_example.norm, norms) < 1e-10
    assert oracle.relative_error(total, _expected("flat", gradients, l2_clip_norm)) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("loss", [next_token_loss, lm_loss])
@pytest.mark.parametrize("engine", GHOSTLY)
def test_a_rule_covers_every_leaf(family: str, tie: bool, loss: Any, engine: Any) -> None:
    model = small.decoder(family, tie=tie)
    batch = small.token_batch(2, dtype=jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), batch["ids"])["params"]
    coverage = clipped_grad(loss(model), engine=engine, l2_clip_norm=1.0).check(params, batch)
    assert coverage.leaves and not coverage.uncovered and not coverage.unused, coverage


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("remat", [True, False], ids=["remat", "kept"])
def test_the_ghost_passes_share_one_forward_pass(tie: bool, remat: bool) -> None:
    model = small.gpt2(tie=tie, remat=remat)
    batch = small.token_batch(2, dtype=jnp.float32)
    params = small.random_params(model, batch["ids"], dtype=jnp.float32)
    traces = []
    loss_fn = lm_loss(model)

    def counting(params: Any, batch: Any) -> Any:
        traces.append(1)
        return loss_fn(params, batch)

    grad_fn = clipped_grad(counting, engine="ghost", l2_clip_norm=1.0)
    grad_fn.check(params, batch)
    to_check = len(traces)
    jax.eval_shape(grad_fn, params, batch)
    assert len(traces) - to_check == to_check + 1


@pytest.mark.slow
def test_ghost_op_by_op(float64: None) -> None:
    """Without compilation a scan's slices are arrays of their own, so the second pass runs forward again."""
    loss_fn, params, batch, is_padding, gradients = _setting("gpt2", True, "next_token")
    grad_fn = clipped_grad(loss_fn, engine="ghost", l2_clip_norm=0.5)
    with jax.disable_jit():
        total, _ = grad_fn(params, batch, is_padding)
    assert oracle.relative_error(total, _expected("flat", gradients, 0.5)) < 1e-10


@pytest.mark.parametrize("engine", GHOSTLY)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_in_float32(engine: Any, tie: bool) -> None:
    model = small.gpt2(tie=tie, remat=tie)
    loss_fn = _loss("next_token" if tie else "lm", model)
    with jax.enable_x64(True):
        batch, is_padding = _batch_with_odd_rows()
        params = small.random_params(model, batch["ids"])
        gradients = oracle.per_example_gradients(loss_fn, params, _rows(batch, slice(REAL)))
    norms = oracle.norms(gradients)
    l2_clip_norm = float(np.median(norms))
    batch, params = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else None),
        (batch, params),
    )
    compiled = jax.jit(clipped_grad(loss_fn, engine=engine, l2_clip_norm=l2_clip_norm))
    total, per_example = compiled(params, batch, is_padding)
    assert {leaf.dtype for leaf in jax.tree.leaves(total)} == {jnp.dtype(jnp.float32)}
    assert oracle.relative_error(total, _expected("flat", gradients, l2_clip_norm)) < 1e-4
    assert oracle.relative_error(per_example.norm[:REAL], norms) < 1e-4

    # The same program when no row is broken, where the two-pass engine needs no second round.
    fine = {name: leaf.at[BROKEN].set(leaf[0]) for name, leaf in batch.items()}
    total, per_example = compiled(params, fine, is_padding | (jnp.arange(REAL + 2) == BROKEN))
    assert oracle.relative_error(total, _expected("flat", gradients, l2_clip_norm)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_tied_norms(float64: None, family: str) -> None:
    tied, untied = (small.decoder(family, tie=tie) for tie in (True, False))
    batch = small.token_batch(3)
    params = small.random_params(tied, batch["ids"])
    apart = params | {"lm_head": {"kernel": params["wte"]["embedding"].T}}
    # The untied model with equal matrices has g_in and g_out as separate leaves.
    separate = oracle.per_example_gradients(next_token_loss(untied), apart, batch)
    squared_in, squared_out, squared_all = (
        oracle.norms(leaf) ** 2 for leaf in (separate["wte"], separate["lm_head"], separate)
    )
    joint = separate["wte"]["embedding"] + np.swapaxes(separate["lm_head"]["kernel"], 1, 2)
    shared = {
        "materialize": oracle.norms(joint) ** 2,
        "omit": squared_in + squared_out,
        "triangle": (np.sqrt(squared_in) + np.sqrt(squared_out)) ** 2,
    }
    gradients = oracle.per_example_gradients(next_token_loss(tied), params, batch)
    for tied_norm, engine in itertools.product(shared, GHOSTLY):
        norms = np.sqrt(squared_all - squared_in - squared_out + shared[tied_norm])
        expected = oracle.clipped_sum(gradients, oracle.flat_factors(norms, 0.5))
        grad_fn = clipped_grad(next_token_loss(tied), engine=engine, l2_clip_norm=0.5, tied_norm=tied_norm)
        total, per_example = jax.jit(grad_fn)(params, batch)
        assert oracle.relative_error(per_example.norm, norms) < 1e-10, (tied_norm, engine)
        assert oracle.relative_error(total, expected) < 1e-10, (tied_norm, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_single_token_and_label_words(float64: None, engine: Any) -> None:
    model = small.gpt2(tie=True)
    batch = small.token_batch(3, tokens=1)
    batch["targets"] = jnp.asarray([4, 7, 4], jnp.int32)
    params = small.random_params(model, batch["ids"])
    loss_fn = label_word_loss(model, [4, 7])
    gradients = oracle.per_example_gradients(loss_fn, params, batch)
    norms = oracle.norms(gradients)
    grad_fn = clipped_grad(loss_fn, engine=engine, l2_clip_norm=0.1)
    total, per_example = jax.jit(grad_fn)(params, batch)
    assert oracle.relative_error(per_example.norm, norms) < 1e-10
    expected = oracle.clipped_sum(gradients, oracle.flat_factors(norms, 0.1))
    assert oracle.relative_error(total, expected) < 1e-10


@pytest.mark.parametrize("engine", ENGINES)
def test_physical_batches_sum_to_the_logical_one(float64: None, engine: Any) -> None:
    model = small.gpt2(tie=True)
    batch = small.token_batch(6)
    params = small.random_params(model, batch["ids"])
    grad_fn = clipped_grad(next_token_loss(model), engine=engine, l2_clip_norm=0.5)
    compiled = jax.jit(grad_fn)
    whole, _ = compiled(params, batch)
    none = jnp.zeros(3, bool)
    first, _ = compiled(params, _rows(batch, slice(3)), none)
    second, _ = compiled(params, _rows(batch, slice(3, 6)), none)
    assert (
        oracle.relative_error(jax.tree.map(jnp.add, first, second), jax.tree.map(np.asarray, whole)) < 1e-12
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_batch_of_padding_gives_exact_zeros(float64: None, engine: Any, clipping: Any) -> None:
    model = small.gpt2(tie=True)
    batch = small.token_batch(2)
    batch["scale"] = jnp.full(2, jnp.nan)
    params = small.random_params(model, batch["ids"])
    loss_fn = _scaled(next_token_loss(model))
    grad_fn = clipped_grad(loss_fn, engine=engine, l2_clip_norm=0.5, clipping=clipping)
    total, per_example = jax.jit(grad_fn)(params, batch, jnp.ones(2, bool))
    assert all(not jnp.any(leaf) for leaf in jax.tree.leaves(total))
    assert not jnp.any(per_example.norm) and not jnp.any(per_example.loss)


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_leaves_have_no_part(float64: None, engine: Any) -> None:
    model = small.gpt2(tie=True)
    batch = small.token_batch(3)
    params = small.random_params(model, batch["ids"])

    def trainable(path: str) -> bool:
        return path == "wte/embedding" or path.endswith("bias")

    gradients = oracle.per_example_gradients(next_token_loss(model), params, batch)
    kept = jax.tree_util.tree_map_with_path(
        lambda keys, g: g if trainable("/".join(k.key for k in keys)) else None, gradients
    )
    norms = oracle.norms(kept)
    grad_fn = clipped_grad(next_token_loss(model), engine=engine, l2_clip_norm=0.5, trainable=trainable)
    total, per_example = jax.jit(grad_fn)(params, batch)
    assert oracle.relative_error(per_example.norm, norms) < 1e-10
    assert oracle.relative_error(total, oracle.clipped_sum(kept, oracle.flat_factors(norms, 0.5))) < 1e-10


def _grad_fn(**settings: Any) -> ClippedGrad:
    return clipped_grad(_linear_loss, **settings)


def _linear_loss(params: Any, batch: Any) -> Any:
    return batch["x"] @ params["w"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("l2_clip_norm", "clipping", "factors"),
    [
        # Gradients are the rows (3, 4), norm 5, and (0, 0), norm 0.
        (0.0, "flat", 0.0),
        (float("inf"), "flat", 1.0),
        (2.0, "flat", 2 / 5),
        (10.0, "flat", 1.0),
        (2.0, "automatic", 2 / 5.01),
        (0.0, "automatic", 0.0),
        (2.0, "per_layer", 2 / 5),  # one group: C / sqrt(1)
    ],
)
def test_edge_cases_by_hand(engine: Any, l2_clip_norm: float, clipping: Any, factors: float) -> None:
    batch = {"x": jnp.asarray([[3.0, 4.0], [0.0, 0.0]])}
    grad_fn = _grad_fn(engine=engine, l2_clip_norm=l2_clip_norm, clipping=clipping)
    total, per_example = grad_fn({"w": jnp.ones(2)}, batch)
    np.testing.assert_allclose(total["w"], factors * np.array([3.0, 4.0]), rtol=1e-5)
    np.testing.assert_allclose(per_example.norm, [5, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "fast"}, "engine must be one of materialized, .*, got 'fast'"),
        ({"tied_norm": "none"}, "tied_norm must be one of"),
        ({"clipping": "layer"}, "clipping must be one of"),
        ({"uncovered": "ignore"}, "uncovered must be one of"),
        ({"l2_clip_norm": -1.0}, "l2_clip_norm must be at least 0, got -1.0"),
        ({"l2_clip_norm": float("nan")}, "l2_clip_norm must be at least 0, got nan"),
        ({"l2_clip_norm": float("inf"), "clipping": "automatic"}, "must be finite"),
        ({"microbatch_size": 0}, "microbatch_size must be at least 1, got 0"),
        ({"trainable": lambda path: False}, "trainable must choose at least one leaf"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # a user has no type checks at run time
    try:
        with pytest.raises(ValueError, match=message):
            _grad_fn(**{"engine": "ghost", "l2_clip_norm": 1.0, **settings})(
                {"w": jnp.ones(2)}, {"x": jnp.ones((1, 2))}
            )
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("batch", "mask", "message"),
    [
        ({"x": jnp.ones((0, 2))}, None, "at least one row"),
        ({"x": jnp.ones((3, 2)), "y": jnp.ones(2)}, None, "share a first axis"),
        (
            {"x": jnp.ones((3, 2))},
            jnp.zeros(2, bool),
            r"must be bool of shape \(3,\), got bool of shape \(2,\)",
        ),
    ],
)
def test_batches_are_checked(engine: Any, batch: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _grad_fn(engine=engine, l2_clip_norm=1.0)({"w": jnp.ones(2)}, batch, mask)


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_over_devices_are_refused(engine: Any) -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    grad_fn = _grad_fn(engine=engine, l2_clip_norm=1.0)

    def run(check_vma: bool) -> Any:
        specs = {"in_specs": (spec(), spec("data")), "out_specs": spec()}
        sharded = jax.shard_map(lambda p, b: grad_fn(p, b)[0], mesh=mesh, check_vma=check_vma, **specs)
        return sharded({"w": jnp.ones(2)}, {"x": jnp.ones((3, 2))})

    np.testing.assert_allclose(run(False)["w"], np.full(2, 3 / np.sqrt(2)), rtol=1e-4)
    with pytest.raises(ValueError, match="must be called with check_vma=False"):
        run(True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mean_loss_is_refused(engine: Any) -> None:
    grad_fn = clipped_grad(
        lambda params, batch: jnp.mean(batch["x"] @ params["w"]), engine=engine, l2_clip_norm=1.0
    )
    with pytest.raises(ValueError, match="loss_fn must return one loss an example"):
        grad_fn({"w": jnp.ones(2)}, {"x": jnp.ones((3, 2))})


def test_hashable_and_compiled_once() -> None:
    one, same = (_grad_fn(engine="ghost", l2_clip_norm=1.0) for _ in range(2))
    assert hash(one) == hash(same) and one == same
    compiled = jax.jit(one)
    for rows in range(3):
        compiled({"w": jnp.ones(2)}, {"x": jnp.full((3, 2), rows)}, jnp.arange(3) < rows)
    assert compiled._cache_size() == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_integer_leaves_are_refused_by_name(engine: Any) -> None:
    params = {"w": jnp.ones(2), "n": jnp.asarray(3)}
    with pytest.raises(ValueError, match="trained leaves must be real floats, got n of int32"):
        _grad_fn(engine=engine, l2_clip_norm=1.0)(params, {"x": jnp.ones((3, 2))})


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_dicts_stay_what_they_are(float64: None, engine: Any) -> None:
    model = small.gpt2(tie=True)
    batch = small.token_batch(2)
    params = flax.core.freeze(small.random_params(model, batch["ids"]))
    grad_fn = clipped_grad(next_token_loss(model), engine=engine, l2_clip_norm=1.0)
    total, _ = jax.jit(grad_fn)(params, batch)
    assert jax.tree.structure(total) == jax.tree.structure(params)


@pytest.mark.parametrize("narrow", ["dtype", "param_dtype"])
def test_layers_in_16_bits_are_summed_in_32(narrow: str) -> None:
    layer = nn.Dense(4, **{narrow: jnp.bfloat16})
    x = jnp.ones((2, 3, 5))
    params = layer.init(jax.random.key(0), x)["params"]

    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum(layer.apply({"params": params}, batch["x"]).astype(jnp.float32), (1, 2))

    totals = [
        jax.jit(clipped_grad(loss_fn, engine=engine, l2_clip_norm=1.0))(params, {"x": x})[0]
        for engine in ("ghost", "bookkeeping")
    ]
    for total in totals:
        assert {leaf.dtype for leaf in jax.tree.leaves(total)} == {jnp.dtype(jnp.float32)}
    # Each example's gradient is 3 in all 20 + 4 entries; bfloat16 would round its two 24^-0.5 to 0.40820.
    np.testing.assert_allclose(totals[1]["kernel"], 2 / np.sqrt(24), rtol=2e-5)
    margin = NARROW_MARGIN if narrow == "dtype" else 0  # float32 inputs make a layer compute in float32
    np.testing.assert_allclose(totals[0]["kernel"], 2 / np.sqrt(24) / (1 + margin), rtol=2e-5)
