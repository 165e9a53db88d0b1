"""GPT-2 against transformers' own, in torch: logits and gradients of tiny random models, both ways."""

import jax
import numpy as np
import pytest

from wtdp_jax.models import GPT2, GPT2Config, from_pretrained, save_pretrained
from wtdp_jax.models.hf_tensors import tensors_from_params

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = np.random.default_rng(0).integers(0, 31, (3, 10)).astype(np.int32)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def reference(request):
    """A tiny GPT2LMHeadModel with large random weights, so that gelu and softmax leave their linear range."""
    config = transformers.GPT2Config(
        vocab_size=31,
        n_positions=12,
        n_embd=24,
        n_layer=3,
        n_head=4,
        tie_word_embeddings=request.param,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def torch_logits(model):
    return model(torch.tensor(IDS, dtype=torch.long)).logits


def jax_logits(model, params):
    return model.apply({"params": params}, IDS)


def relative_error(actual, expected):
    """Largest deviation over the largest value."""
    return np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("shard_size", ["1GB", "10KB"])
def test_imported_logits(reference, tmp_path, shard_size):
    reference.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "1GB")
    model, params = from_pretrained(tmp_path)
    assert model.config.tie_embeddings == reference.config.tie_word_embeddings
    expected = torch_logits(reference).detach().numpy()
    assert relative_error(jax_logits(model, params), expected) < 1e-5


def test_imported_gradients(reference, tmp_path):
    reference.save_pretrained(tmp_path)
    model, params = from_pretrained(tmp_path)
    losses = torch.nn.functional.cross_entropy(
        torch_logits(reference)[:, :-1].flatten(0, 1), torch.tensor(IDS, dtype=torch.long)[:, 1:].flatten()
    )
    losses.backward()

    def loss(params):
        return model.apply({"params": params}, IDS, method="token_losses")[:, 1:].mean()

    gradients = tensors_from_params(jax.jit(jax.grad(loss))(params), model.config)
    expected = dict(reference.named_parameters())
    assert len(gradients) == len(expected)
    for name, gradient in gradients.items():
        prefix = "" if name.startswith("lm_head") else "transformer."
        assert relative_error(gradient, expected[prefix + name].grad.numpy()) < 1e-5, name


@pytest.mark.parametrize("tied", [True, False])
def test_exported_logits(tmp_path, tied):
    model = GPT2(
        GPT2Config(vocab_size=31, n_positions=12, n_embd=24, n_layer=2, n_head=3, tie_embeddings=tied)
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0), IDS)["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda s: rng.normal(0.0, 0.3, s.shape).astype(np.float32), shapes)
    save_pretrained(tmp_path / "model", model, params)
    exported, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report.values())
    assert exported.config.tie_word_embeddings == tied
    assert exported.dtype == torch.float32
    expected = torch_logits(exported.eval()).detach().numpy()
    assert relative_error(jax_logits(model, params), expected) < 1e-5
