"""GPT-2 against its own definition: shapes, causality, the tie, dropout, dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wtdp_jax.models import GPT2, GPT2Config

TINY = GPT2Config(vocab_size=11, n_positions=8, n_embd=12, n_layer=3, n_head=2)
IDS = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]], np.int32)


def key(seed):
    """A key whose generator compiles in a moment, which threefry does not."""
    return jax.random.key(seed, impl="unsafe_rbg")


@functools.partial(jax.jit, static_argnames=("model", "deterministic", "method"))
def apply(model, params, ids, *args, rngs=None, **static):
    """The model, compiled once for each set of shapes in this file."""
    return model.apply({"params": params}, ids, *args, rngs=rngs, **static)


@functools.partial(jax.jit, static_argnames=("model", "select"))
def init(model, seed, select):
    """The leaves that `select` picks of the initial parameters; the others are never computed."""
    return select(model.init(key(seed), IDS)["params"])


@functools.partial(jax.jit, static_argnums=0)
def grad(model, params):
    return jax.grad(lambda p: model.apply({"params": p}, IDS, method="token_losses").sum())(params)


def make(**overrides):
    """A model with every parameter far from its initial value, so that no zero bias hides a fault."""
    model = GPT2(dataclasses.replace(TINY, **overrides))
    shapes = jax.eval_shape(model.init, key(0), IDS)["params"]
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda s: rng.normal(0.0, 0.2, s.shape).astype(np.float32), shapes)


def assert_trees_close(actual, expected, **tolerance):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, **tolerance), actual, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_tree(tied):
    _, params = make(tie_embeddings=tied)
    shapes = jax.tree.map(np.shape, params)
    block = shapes.pop("h")
    head = {} if tied else {"lm_head": {"kernel": (12, 11)}}
    assert shapes == {
        "wte": {"embedding": (11, 12)},
        "wpe": {"embedding": (8, 12)},
        "ln_f": {"scale": (12,), "bias": (12,)},
        **head,
    }
    assert block["c_attn"] == {"kernel": (3, 12, 36), "bias": (3, 36)}
    assert block["mlp_c_proj"] == {"kernel": (3, 48, 12), "bias": (3, 12)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("distilgpt2", 81_912_576),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_the_published_parameter_counts(name, expected):
    for tied in (True, False):
        model = GPT2(GPT2Config.preset(name, tie_embeddings=tied))
        params = jax.eval_shape(model.init, key(0), IDS)["params"]
        head = 0 if tied else model.config.vocab_size * model.config.n_embd
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected + head


def test_preset_takes_overrides():
    assert GPT2Config.preset("tiny", vocab_size=7, remat=True).vocab_size == 7
    with pytest.raises(ValueError, match="preset must be one of tiny, .* got 'gpt3'"):
        GPT2Config.preset("gpt3")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 0, "vocab_size must be at least 1, got 0"),
        ("n_layer", -1, "n_layer must be at least 1, got -1"),
        ("n_head", 5, "n_embd must be a multiple of n_head, got 12 and 5"),
        ("dropout", 1.0, r"dropout must be in \[0, 1\), got 1.0"),
        ("dropout", float("nan"), r"dropout must be in \[0, 1\), got nan"),
        ("layer_norm_epsilon", 0.0, "layer_norm_epsilon must be positive and finite, got 0.0"),
    ],
)
def test_config_is_validated(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **{field: value})


def test_initialization_scales():
    config = GPT2Config(vocab_size=500, n_positions=100, n_embd=128, n_layer=8, n_head=2)
    leaves = {
        "wte": (lambda p: p["wte"]["embedding"], 0.02),
        "wpe": (lambda p: p["wpe"]["embedding"], 0.02),
        "c_fc": (lambda p: p["h"]["c_fc"]["kernel"], 0.02),
        "attn_c_proj": (lambda p: p["h"]["attn_c_proj"]["kernel"], 0.02 / np.sqrt(2 * 8)),
        "mlp_c_proj": (lambda p: p["h"]["mlp_c_proj"]["kernel"], 0.02 / np.sqrt(2 * 8)),
    }
    drawn = init(GPT2(config), 0, lambda p: {name: select(p) for name, (select, _) in leaves.items()})
    for name, (_, stddev) in leaves.items():
        # At least 12,800 values each: four deviations of their sample deviation are 2.5%.
        assert np.std(drawn[name]) == pytest.approx(stddev, rel=0.03), name
    assert not np.array_equal(drawn["c_fc"][0], drawn["c_fc"][1])


@pytest.mark.parametrize("tied", [True, False])
def test_a_later_token_changes_no_earlier_logit(tied):
    model, params = make(tie_embeddings=tied)
    changed = IDS.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before = apply(model, params, IDS)
    after = apply(model, params, changed)
    assert before.shape == (2, 6, 11)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (np.abs(before - after)[:, 4:].max(-1) > 1e-4).all()


def test_examples_do_not_mix():
    model, params = make()
    batched = apply(model, params, IDS)
    one_by_one = jax.vmap(lambda ids: apply(model, params, ids[None])[0])(IDS)
    np.testing.assert_allclose(one_by_one, batched, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_positions_pick_from_the_whole_logits(tied):
    model, params = make(tie_embeddings=tied)
    positions = np.array([5, 2], np.int32)
    whole = apply(model, params, IDS)
    picked = apply(model, params, IDS, positions)
    np.testing.assert_allclose(picked, whole[np.arange(2), positions], rtol=1e-5, atol=1e-6)


def test_positions_spare_the_other_logits():
    model, params = make()
    program = jax.make_jaxpr(lambda p, ids, at: model.apply({"params": p}, ids, at))
    text = str(program(params, IDS, np.zeros(2, np.int32)))
    assert "f32[2,11]" in text
    assert "f32[2,6,11]" not in text


def test_tied_gradient_is_the_sum_of_both_uses():
    model, params = make()
    untied = GPT2(dataclasses.replace(TINY, tie_embeddings=False))
    untied_params = {**params, "lm_head": {"kernel": params["wte"]["embedding"].T}}
    tied_grad, untied_grad = grad(model, params), grad(untied, untied_params)
    head = untied_grad.pop("lm_head")["kernel"].T
    assert np.linalg.norm(head) > 1.0
    untied_grad["wte"]["embedding"] += head
    assert_trees_close(tied_grad, untied_grad, rtol=1e-4, atol=1e-5)


def test_untied_starts_as_the_tied_function():
    untied = GPT2(dataclasses.replace(TINY, tie_embeddings=False))
    embedding, kernel = init(untied, 3, lambda p: (p["wte"]["embedding"], p["lm_head"]["kernel"]))
    np.testing.assert_array_equal(kernel, embedding.T)
    np.testing.assert_array_equal(embedding, init(GPT2(TINY), 3, lambda p: p["wte"]["embedding"]))
    model, params = make()
    untied_params = {**params, "lm_head": {"kernel": params["wte"]["embedding"].T}}
    np.testing.assert_allclose(
        apply(untied, untied_params, IDS), apply(model, params, IDS), rtol=1e-5, atol=1e-6
    )


def test_remat_changes_nothing_but_what_is_kept():
    model, params = make(tie_embeddings=False)
    remat = GPT2(dataclasses.replace(model.config, remat=True))
    assert_trees_close(grad(remat, params), grad(model, params), rtol=1e-5, atol=1e-6)


def test_remat_keeps_the_dense_outputs_alone():
    """The scan's residuals: (L, B, T, features) of the dense layers, no (L, B, H, T, T) scores."""
    model, params = make()
    remat = GPT2(dataclasses.replace(model.config, remat=True))
    scores, dense = "f32[3,2,2,6,6]", "f32[3,2,6,48]"
    plain_text, remat_text = (str(jax.make_jaxpr(grad, static_argnums=0)(m, params)) for m in (model, remat))
    assert scores in plain_text and dense in plain_text
    assert scores not in remat_text and dense in remat_text


def test_token_losses_by_hand():
    model, params = make()
    logits = np.asarray(apply(model, params, IDS), np.float64)
    losses = apply(model, params, IDS, method="token_losses")
    assert losses.shape == (2, 6)
    np.testing.assert_array_equal(losses[:, 0], 0.0)
    for b in range(2):
        for t in range(1, 6):
            expected = np.log(np.exp(logits[b, t - 1]).sum()) - logits[b, t - 1, IDS[b, t]]
            assert losses[b, t] == pytest.approx(expected, rel=1e-5)


def test_token_losses_of_one_token():
    model, params = make()
    losses = apply(model, params, IDS[:, :1], method="token_losses")
    np.testing.assert_array_equal(losses, np.zeros((2, 1)))


def test_too_long_a_sequence_is_refused():
    model, params = make()
    with pytest.raises(ValueError, match="sequence length must be at most n_positions=8, got 9"):
        apply(model, params, np.zeros((1, 9), np.int32))


def test_dropout_is_off_unless_asked_for():
    model, params = make(dropout=0.3)
    plain = apply(GPT2(TINY), params, IDS)
    np.testing.assert_array_equal(apply(model, params, IDS), plain)

    def dropped(seed, config=model.config):
        return apply(GPT2(config), params, IDS, deterministic=False, rngs={"dropout": key(seed)})

    assert not np.allclose(dropped(0), plain)
    assert not np.allclose(dropped(0), dropped(1))
    np.testing.assert_array_equal(dropped(0), dropped(0))
    remat = dataclasses.replace(model.config, remat=True)
    np.testing.assert_allclose(dropped(0, remat), dropped(0), rtol=1e-5, atol=1e-6)


def test_dropout_scales_what_it_keeps_and_differs_from_layer_to_layer():
    model, params = make(dropout=0.25)
    params["h"] = jax.tree.map(np.zeros_like, params["h"])

    def hidden(params):
        rngs = {"dropout": key(0)}
        return np.asarray(apply(model, params, IDS, deterministic=False, rngs=rngs, method="_hidden"))

    # Blocks that add nothing leave the embedding's dropout alone.
    embedded = params["wte"]["embedding"][IDS] + params["wpe"]["embedding"][None, :6]
    from_embedding = hidden(params)
    kept = from_embedding != 0
    assert 0.6 < kept.mean() < 0.9
    np.testing.assert_allclose(from_embedding[kept], embedded[kept] / 0.75, rtol=1e-6)
    # Three blocks that each add 1: with one mask for all of them no partial sum would be found.
    params["h"]["mlp_c_proj"]["bias"] += 1.0
    added = (hidden(params) - from_embedding) * 0.75
    np.testing.assert_allclose(added, added.round(), atol=1e-5)
    assert set(added.round().ravel()) == {0.0, 1.0, 2.0, 3.0}


def test_float64_is_float64_throughout(float64):
    """Examples alone and batched differ by rounding: at 1e-7 if any step inside were in float32."""
    model, params = make()
    params = jax.tree.map(lambda p: p.astype(np.float64), params)
    program = str(jax.make_jaxpr(grad, static_argnums=0)(model, params))
    assert "f64[" in program
    assert "f32[" not in program
    logits = apply(model, params, IDS)
    assert logits.dtype == np.float64
    one_by_one = jax.vmap(lambda ids: apply(model, params, ids[None])[0])(IDS)
    np.testing.assert_allclose(one_by_one, logits, rtol=1e-12, atol=1e-13)


def test_bfloat16_parameters_compute_in_bfloat16():
    model, params = make()
    small = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    logits = apply(model, small, IDS)
    assert logits.dtype == jnp.bfloat16
    reference = apply(model, params, IDS)
    np.testing.assert_allclose(logits.astype(np.float32), reference, atol=0.1)
    assert apply(model, small, IDS, method="token_losses").dtype == jnp.float32
