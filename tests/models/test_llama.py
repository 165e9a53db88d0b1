"""Llama against its own definition: parameters, presets, initialization, positions, dropout."""

import dataclasses
import functools

import numpy as np
import pytest

from tests.models import small
from tests.models.small import IDS, apply, init, key
from wtdp_jax.models import Llama, LlamaConfig

TINY = small.TINY_LLAMA
make = functools.partial(small.make, TINY)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_parameter_tree(tied, qkv_bias):
    _, params = make(tie_embeddings=tied, qkv_bias=qkv_bias)
    shapes = {path: leaf.shape for path, leaf in _leaves(params)}
    head = {} if tied else {"lm_head/kernel": (16, 11)}
    biases = {"h/q_proj/bias": (3, 16), "h/k_proj/bias": (3, 8), "h/v_proj/bias": (3, 8)}
    assert shapes == {
        "wte/embedding": (11, 16),
        "h/ln_1/scale": (3, 16),
        "h/q_proj/kernel": (3, 16, 16),
        "h/k_proj/kernel": (3, 16, 8),
        "h/v_proj/kernel": (3, 16, 8),
        "h/o_proj/kernel": (3, 16, 16),
        "h/ln_2/scale": (3, 16),
        "h/gate_proj/kernel": (3, 16, 20),
        "h/up_proj/kernel": (3, 16, 20),
        "h/down_proj/kernel": (3, 20, 16),
        "ln_f/scale": (16,),
        **(biases if qkv_bias else {}),
        **head,
    }


def _leaves(tree, prefix=""):
    for name, value in tree.items():
        yield from _leaves(value, f"{prefix}{name}/") if isinstance(value, dict) else [(prefix + name, value)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("qwen2.5-0.5b", 494_032_768),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_presets_have_the_published_parameter_counts(name, expected):
    for tied in (True, False):
        model = Llama(LlamaConfig.preset(name, tie_embeddings=tied))
        head = 0 if tied else model.config.vocab_size * model.config.n_embd
        assert small.number_of_parameters(model) == expected + head


def test_preset_takes_overrides():
    assert LlamaConfig.preset("tiny-llama", vocab_size=7, remat=True).vocab_size == 7
    with pytest.raises(ValueError, match="preset must be one of tiny-llama, .* got 'tiny'"):
        LlamaConfig.preset("tiny")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_layer", 0, "n_layer must be at least 1, got 0"),
        ("n_head", 3, "n_embd must be a multiple of n_head, got 16 and 3"),
        ("n_head", 16, "n_embd / n_head must be even, got 1"),
        ("n_kv_head", 0, "n_kv_head must be at least 1, got 0"),
        ("n_kv_head", 3, "n_head must be a multiple of n_kv_head, got 4 and 3"),
        ("n_inner", 0, "n_inner must be at least 1, got 0"),
        ("rope_theta", 0.0, "rope_theta must be positive and finite, got 0.0"),
        ("rms_norm_epsilon", float("nan"), "rms_norm_epsilon must be positive and finite, got nan"),
    ],
)
def test_config_is_validated(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **{field: value})


def test_initialization():
    config = dataclasses.replace(TINY, vocab_size=500, n_embd=128, n_inner=160, n_layer=4, qkv_bias=True)
    kernels = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    drawn, bias = init(
        Llama(config),
        0,
        lambda p: (
            {"wte": p["wte"]["embedding"], **{name: p["h"][name]["kernel"] for name in kernels}},
            p["h"]["q_proj"]["bias"],
        ),
    )
    for name, leaf in drawn.items():
        assert np.std(leaf) == pytest.approx(0.02, rel=0.03), name
    assert not np.array_equal(drawn["q_proj"][0], drawn["q_proj"][1])
    assert not bias.any()


def test_the_order_of_earlier_tokens_matters():
    model, params = make()
    swapped = IDS.copy()
    swapped[:, [1, 2]] = swapped[:, [2, 1]]
    assert (np.abs(apply(model, params, IDS) - apply(model, params, swapped))[:, 5] > 1e-5).any()


def test_scaling_of_frequencies_matters():
    model, params = make()
    scaled, _ = make(rope_scaling=small.SCALING)
    assert (np.abs(apply(model, params, IDS) - apply(scaled, params, IDS))[:, 5] > 1e-5).any()


def test_dropout_is_on_attention_alone_and_off_unless_asked_for():
    model, params = make(dropout=0.3)
    plain = apply(Llama(TINY), params, IDS)
    np.testing.assert_array_equal(apply(model, params, IDS), plain)

    def dropped(params, seed, **overrides):
        model = Llama(dataclasses.replace(TINY, dropout=0.3, **overrides))
        return apply(model, params, IDS, deterministic=False, rngs={"dropout": key(seed)})

    assert not np.allclose(dropped(params, 0), plain)
    assert not np.allclose(dropped(params, 0), dropped(params, 1))
    np.testing.assert_allclose(dropped(params, 0, remat=True), dropped(params, 0), rtol=1e-5, atol=1e-6)
    # Without what attention gives, nothing is left to be dropped.
    params["h"]["o_proj"]["kernel"] = np.zeros_like(params["h"]["o_proj"]["kernel"])
    np.testing.assert_array_equal(dropped(params, 0), dropped(params, 1))
