"""What every family promises: causality, the tie, no mixing of examples, remat, losses, dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import small
from tests.models.small import IDS, apply, grad, init, make

FAMILIES = {
    "gpt2": small.TINY_GPT2,
    "llama": dataclasses.replace(small.TINY_LLAMA, qkv_bias=True, rope_scaling=small.SCALING),
}


@pytest.fixture(params=FAMILIES)
def tiny(request):
    """A tiny configuration of each family."""
    return FAMILIES[request.param]


def assert_trees_close(actual, expected, **tolerance):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, **tolerance), actual, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_later_token_changes_no_earlier_logit(tiny, tied):
    model, params = make(tiny, tie_embeddings=tied)
    changed = IDS.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before = apply(model, params, IDS)
    after = apply(model, params, changed)
    assert before.shape == (2, 6, 11)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (np.abs(before - after)[:, 4:].max(-1) > 1e-4).all()


def test_examples_do_not_mix(tiny):
    model, params = make(tiny)
    batched = apply(model, params, IDS)
    one_by_one = jax.vmap(lambda ids: apply(model, params, ids[None])[0])(IDS)
    np.testing.assert_allclose(one_by_one, batched, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_positions_pick_from_the_whole_logits(tiny, tied):
    model, params = make(tiny, tie_embeddings=tied)
    positions = np.array([5, 2], np.int32)
    whole = apply(model, params, IDS)
    picked = apply(model, params, IDS, positions)
    np.testing.assert_allclose(picked, whole[np.arange(2), positions], rtol=1e-5, atol=1e-6)


def test_positions_spare_the_other_logits(tiny):
    model, params = make(tiny)
    program = jax.make_jaxpr(lambda p, ids, at: model.apply({"params": p}, ids, at))
    text = str(program(params, IDS, np.zeros(2, np.int32)))
    assert "f32[2,11]" in text
    assert "f32[2,6,11]" not in text


def test_tied_gradient_is_the_sum_of_both_uses(tiny):
    model, params = make(tiny)
    untied = small.of(dataclasses.replace(tiny, tie_embeddings=False))
    untied_params = {**params, "lm_head": {"kernel": params["wte"]["embedding"].T}}
    tied_grad, untied_grad = grad(model, params), grad(untied, untied_params)
    head = untied_grad.pop("lm_head")["kernel"].T
    assert np.linalg.norm(head) > 1.0
    untied_grad["wte"]["embedding"] += head
    assert_trees_close(tied_grad, untied_grad, rtol=1e-4, atol=1e-5)


def test_untied_starts_as_the_tied_function(tiny):
    untied = small.of(dataclasses.replace(tiny, tie_embeddings=False))
    embedding, kernel = init(untied, 3, lambda p: (p["wte"]["embedding"], p["lm_head"]["kernel"]))
    np.testing.assert_array_equal(kernel, embedding.T)
    np.testing.assert_array_equal(embedding, init(small.of(tiny), 3, lambda p: p["wte"]["embedding"]))
    model, params = make(tiny)
    untied_params = {**params, "lm_head": {"kernel": params["wte"]["embedding"].T}}
    np.testing.assert_allclose(
        apply(untied, untied_params, IDS), apply(model, params, IDS), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("remat", [True, "full"])
def test_remat_changes_nothing_but_what_is_kept(tiny, remat):
    model, params = make(tiny, tie_embeddings=False)
    remat = small.of(dataclasses.replace(model.config, remat=remat))
    assert_trees_close(grad(remat, params), grad(model, params), rtol=1e-5, atol=1e-6)


def test_token_losses_by_hand(tiny):
    model, params = make(tiny)
    logits = np.asarray(apply(model, params, IDS), np.float64)
    losses = apply(model, params, IDS, method="token_losses")
    assert losses.shape == (2, 6)
    np.testing.assert_array_equal(losses[:, 0], 0.0)
    for b in range(2):
        for t in range(1, 6):
            expected = np.log(np.exp(logits[b, t - 1]).sum()) - logits[b, t - 1, IDS[b, t]]
            assert losses[b, t] == pytest.approx(expected, rel=1e-5)


def test_token_losses_of_one_token(tiny):
    model, params = make(tiny)
    losses = apply(model, params, IDS[:, :1], method="token_losses")
    np.testing.assert_array_equal(losses, np.zeros((2, 1)))


def test_too_long_a_sequence_is_refused(tiny):
    model, params = make(tiny)
    with pytest.raises(ValueError, match="sequence length must be at most n_positions=8, got 9"):
        apply(model, params, np.zeros((1, 9), np.int32))


def test_float64_is_float64_throughout(tiny, float64):
    """Examples alone and batched differ by rounding: at 1e-7 if any step inside were in float32."""
    model, params = make(tiny)
    params = jax.tree.map(lambda p: p.astype(np.float64), params)
    program = str(jax.make_jaxpr(grad, static_argnums=0)(model, params))
    assert "f64[" in program
    assert "f32[" not in program
    logits = apply(model, params, IDS)
    assert logits.dtype == np.float64
    one_by_one = jax.vmap(lambda ids: apply(model, params, ids[None])[0])(IDS)
    np.testing.assert_allclose(one_by_one, logits, rtol=1e-12, atol=1e-13)


def test_bfloat16_parameters_compute_in_bfloat16(tiny):
    model, params = make(tiny)
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    logits = apply(model, narrow, IDS)
    assert logits.dtype == jnp.bfloat16
    reference = apply(model, params, IDS)
    np.testing.assert_allclose(logits.astype(np.float32), reference, atol=0.1)
    assert apply(model, narrow, IDS, method="token_losses").dtype == jnp.float32
