"""Norm and weighted sum of one layer, from records made by hand, by NumPy in float64."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wtdp_jax import capture
from wtdp_jax.clipping import layers
from wtdp_jax.coverage import Layer

_B, _T, _I, _O, _V = 3, 4, 3, 5, 7
_RNG = np.random.default_rng(0)
_A, _D = _RNG.standard_normal((_B, _T, _I)), _RNG.standard_normal((_B, _T, _O))
_IDS = _RNG.integers(0, _V, (_B, _T))
_IDS[:, 1] = _IDS[:, 0]  # a token that is repeated
_D_IN, _D_OUT = _RNG.standard_normal((_B, _T, _I)), _RNG.standard_normal((_B, _T, _V))
_FACTORS = np.array([0.5, 0.0, 2.0])


def _call(kind: Any, module: nn.Module, inputs: Any) -> capture.Call:
    outputs = jax.ShapeDtypeStruct((_T, _O), jnp.float32)
    return capture.Call(kind=kind, module=module, inputs=inputs, outputs=outputs)


_HIDDEN, _TOKENS = jax.ShapeDtypeStruct((_T, _I), jnp.float32), jax.ShapeDtypeStruct((_T,), jnp.int32)
_DENSE = _call("dense", nn.Dense(_O), _HIDDEN)
_EMBED, _KNOWN, _ATTEND = (
    _call(kind, nn.Embed(_V, _I), inputs)
    for kind, inputs in (("embed", _TOKENS), ("embed", np.arange(_T)), ("attend", _HIDDEN))
)

_KERNELS, _BIASES = np.einsum("bti,bto->bio", _A, _D), _D.sum(1)
_HEADS = np.einsum("btv,bti->bvi", _D_OUT, _A)


def _embeddings() -> np.ndarray:
    found = np.zeros((_B, _V, _I))
    for row in range(_B):
        np.add.at(found[row], _IDS[row], _D_IN[row])
    return found


def _layer(kind: str, leaves: tuple[str, ...], *calls: capture.Call) -> Layer:
    return Layer(path="layer", kind=kind, leaves=leaves, stack=(), calls=calls)


def _arrays(**values: np.ndarray) -> dict[str, Any]:
    return {name: jnp.asarray(value) for name, value in values.items()}


def _squares(gradients: np.ndarray) -> np.ndarray:
    return np.sum(gradients.reshape(_B, -1) ** 2, 1)


def _check(
    layer: Layer, records: Any, gradients: dict[str, np.ndarray], tied_norm: Any = "cross_term"
) -> None:
    """Norms of each example, and the weighted sum, against the gradients (B, ...) of the layer's leaves."""
    norms = jax.vmap(lambda record: layers.squared_norm(layer, record, tied_norm))(records)
    np.testing.assert_allclose(norms, sum(_squares(g) for g in gradients.values()), rtol=1e-5)
    _check_sums(layer, records, gradients)


def _check_sums(layer: Layer, records: Any, gradients: dict[str, np.ndarray]) -> None:
    sums = layers.gradient_sums(layer, records, jnp.asarray(_FACTORS, jnp.float32))
    assert sums.keys() == gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(sums[name], np.tensordot(_FACTORS, gradient, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("leaves", [("kernel", "bias"), ("kernel",), ("bias",)])
def test_dense(leaves: tuple[str, ...]) -> None:
    gradients = {"kernel": _KERNELS, "bias": _BIASES}
    _check(_layer("dense", leaves, _DENSE), _arrays(a=_A, d=_D), {name: gradients[name] for name in leaves})


def test_a_dense_layer_whose_gradient_was_kept() -> None:
    a_squares, d_squares = (np.sum(x**2, -1) for x in (_A, _D))
    records = _arrays(
        kernel=_KERNELS,
        kernel_parts=np.sum(a_squares * d_squares, 1),
        bias=_BIASES,
        bias_parts=d_squares.sum(1),
    )
    gradients = {"kernel": _KERNELS, "bias": _BIASES}
    layer = _layer("dense", ("kernel", "bias"), _DENSE)
    # The parts raise the norm by the rounding of the sums that were kept, never lower it.
    norms = jax.vmap(lambda record: layers.squared_norm(layer, record, "cross_term"))(records)
    true = sum(_squares(g) for g in gradients.values())
    assert np.all(norms >= true * (1 - 1e-6)) and np.all(norms <= true * (1 + 1e-4))
    _check_sums(layer, records, gradients)


def test_embedding() -> None:
    _check(_layer("embed", ("embedding",), _EMBED), _arrays(ids=_IDS, d=_D_IN), {"embedding": _embeddings()})


def test_an_embedding_of_distinct_ids() -> None:
    d = np.zeros((_B, _V, _I))
    d[:, :_T] = _D_IN
    records = _arrays(ids=np.broadcast_to(np.arange(_T), (_B, _T)), d=_D_IN)
    _check(_layer("embed", ("embedding",), _KNOWN), records, {"embedding": d})


def _tied(head: dict[str, Any]) -> tuple[Layer, dict[str, Any]]:
    layer = _layer("tied", ("embedding",), _EMBED, _ATTEND)
    return layer, {"embedding": _arrays(ids=_IDS, d=_D_IN), "head": head}


@pytest.mark.parametrize("tied_norm", ["cross_term", "materialize"])
def test_a_tied_matrix(tied_norm: Any) -> None:
    _check(*_tied(_arrays(a=_A, d=_D_OUT)), {"embedding": _embeddings() + _HEADS}, tied_norm)


@pytest.mark.parametrize("tied_norm", ["cross_term", "materialize"])
def test_a_tied_matrix_whose_head_gives_a_loss(tied_norm: Any) -> None:
    # The gradient is kept at cotangent 1; norm and rows are at the cotangent itself.
    g = np.array([0.5, 1.0, 3.0])
    scaled = g[:, None, None] * _HEADS
    rows = np.take_along_axis(scaled, _IDS[..., None], 1)
    head = _arrays(gradient=_HEADS, g=g, squared_norm=_squares(scaled), rows=rows)
    _check(*_tied(head), {"embedding": _embeddings() + scaled}, tied_norm)


def test_the_naive_and_the_safe_norm_of_a_tied_matrix() -> None:
    layer, records = _tied(_arrays(a=_A, d=_D_OUT))
    inner, outer = _squares(_embeddings()), _squares(_HEADS)
    expected = {"omit": inner + outer, "triangle": (np.sqrt(inner) + np.sqrt(outer)) ** 2}
    for tied_norm, squared in expected.items():
        found = jax.vmap(lambda record, kind=tied_norm: layers.squared_norm(layer, record, kind))(records)
        np.testing.assert_allclose(found, squared, rtol=1e-5)
