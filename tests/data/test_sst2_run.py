"""A private run on the real SST-2, with GPT-2's tokenizer and a small random GPT-2, as a user starts it."""

from pathlib import Path

import dp_accounting
import jax
import numpy as np
import pytest

from wtdp_jax import train
from wtdp_jax.config import TrainConfig
from wtdp_jax.data import load_tokenizer
from wtdp_jax.models import GPT2, GPT2Config, save_pretrained
from wtdp_jax.run_folder import read_json


@pytest.mark.slow
def test_the_statement_holds_by_an_independent_accountant(reference_data: Path, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=50257, n_positions=64, n_embd=8, n_layer=1, n_head=1)
    model = GPT2(config)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
    save_pretrained(tmp_path / "model", model, params, load_tokenizer(str(reference_data / "tokenizer_gpt2")))
    settings = TrainConfig(
        task="sst2",
        data_dir=reference_data,
        model=str(tmp_path / "model"),
        tie_embeddings=False,
        epsilon=3.0,
        steps=3,
        batch_size=48,
        physical_batch_size=32,
        out=tmp_path / "run",
    )
    outcome = train.run(*train.prepare(settings))
    assert outcome.results.num_train_examples == 67_349 and outcome.results.num_eval_examples == 872

    statement = read_json(tmp_path / "run" / "privacy.json")
    assert 2.9 < statement["epsilon"] <= 3.0
    assert statement["sampling_prob"] == 48 / 67_349
    assert statement["sensitivity"] == statement["l2_clip_norm"] == 1.0
    event = dp_accounting.PoissonSampledDpEvent(
        statement["sampling_prob"], dp_accounting.GaussianDpEvent(statement["effective_noise_multiplier"])
    )
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(event, statement["steps"])
    epsilon = accountant.get_epsilon(statement["delta"])
    np.testing.assert_allclose(statement["epsilon"], epsilon, rtol=1e-6)
