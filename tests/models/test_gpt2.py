"""GPT-2 against its own definition: parameters, presets, initialization, dropout."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.models import small
from tests.models.small import IDS, apply, grad, init, key
from wtdp_jax.models import GPT2, GPT2Config

TINY = small.TINY_GPT2
make = functools.partial(small.make, TINY)


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
        head = 0 if tied else model.config.vocab_size * model.config.n_embd
        assert small.number_of_parameters(model) == expected + head


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


def test_remat_keeps_the_dense_outputs_alone():
    """The scan's residuals: (L, B, T, features) of the dense layers, no (L, B, H, T, T) scores."""
    model, params = make()
    remat = GPT2(dataclasses.replace(model.config, remat=True))
    scores, dense = "f32[3,2,2,6,6]", "f32[3,2,6,48]"
    plain_text, remat_text = (str(jax.make_jaxpr(grad, static_argnums=0)(m, params)) for m in (model, remat))
    assert scores in plain_text and dense in plain_text
    assert scores not in remat_text and dense in remat_text


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
