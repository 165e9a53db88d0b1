"""Models against transformers' own, in torch: logits and gradients of tiny random ones, both ways."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import small
from wtdp_jax.models import GPT2Config, LlamaConfig, from_pretrained, save_pretrained
from wtdp_jax.models.hf_tensors import tensors_from_params

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = np.random.default_rng(0).integers(0, 31, (3, 10)).astype(np.int32)


TOKENS = dict(vocab_size=31, bos_token_id=None, eos_token_id=None)
GPT2_SHAPE = dict(TOKENS, n_positions=12, n_embd=24, n_layer=3, n_head=4)
LLAMA_SHAPE = dict(
    TOKENS,
    max_position_embeddings=12,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=50.0,
    factor=4.0,
    low_freq_factor=0.5,
    high_freq_factor=2.0,
    original_max_position_embeddings=8,
)
REFERENCES = {
    "gpt2-tied": lambda: transformers.GPT2Config(**GPT2_SHAPE),
    "gpt2-untied": lambda: transformers.GPT2Config(**GPT2_SHAPE, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**LLAMA_SHAPE, tie_word_embeddings=True),
    "llama-untied": lambda: transformers.LlamaConfig(**LLAMA_SHAPE, rms_norm_eps=1e-3),
    "llama3": lambda: transformers.LlamaConfig(**LLAMA_SHAPE, rope_parameters=LLAMA3),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA_SHAPE, tie_word_embeddings=True),
}


@pytest.fixture(params=REFERENCES)
def reference(request):
    """A tiny model with large random weights, so that activations and softmax leave their linear range."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(REFERENCES[request.param]()).eval()
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
        prefix = "" if name.startswith("lm_head") else f"{reference.base_model_prefix}."
        assert relative_error(gradient, expected[prefix + name].grad.numpy()) < 1e-5, name


OURS = dict(vocab_size=31, n_positions=12, n_embd=24, n_layer=2, n_head=4)
EXPORTED = {
    "gpt2": GPT2Config(**OURS),
    "llama": LlamaConfig(**OURS, n_kv_head=2, n_inner=40, rope_theta=50.0, rope_scaling=small.SCALING),
    "qwen2": LlamaConfig(**OURS, n_kv_head=1, n_inner=40, qkv_bias=True),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_logits(tmp_path, name, tied):
    model = small.of(dataclasses.replace(EXPORTED[name], tie_embeddings=tied))
    shapes = jax.eval_shape(model.init, jax.random.key(0), IDS)["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(0.0, 0.3, s.shape), np.float32), shapes)
    save_pretrained(tmp_path / "model", model, params)
    exported, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report.values())
    assert (exported.config.model_type, exported.config.tie_word_embeddings) == (name, tied)
    assert exported.dtype == torch.float32
    expected = torch_logits(exported.eval()).detach().numpy()
    assert relative_error(jax_logits(model, params), expected) < 1e-5
