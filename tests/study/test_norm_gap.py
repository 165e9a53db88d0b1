import json
import math
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import norm_gap as script
from experiments.norm_gap import NormGapConfig
from tests import tiny
from wtdp_jax.losses import next_token_loss
from wtdp_jax.study.norm_gap import NormGap, figures


def test_what_two_norms_say() -> None:
    naive = np.array([1.0, 2.0, 2.0, 4.0, 0.0, np.inf])
    exact = np.array([1.25, 2.5, 2.0, 3.0, 0.0, np.inf])
    found = figures(naive, exact, l2_clip_norm=2.0)
    # Contributions over C: 1.25 / 2, 2.5 / 2 (factor 1), 2 / 2, 3 (2 / 4) / 2; two examples don't count.
    assert found["non_private_examples"] == 4
    assert found["non_private_share_over_c"] == 0.25
    assert found["non_private_mean_over_c"] == found["non_private_largest_over_c"] == 1.25
    assert found["non_private_clipped_share"] == 0.5
    quantiles = found["non_private_ratio_quantiles"]
    assert quantiles["0.0"] == 0.8 and quantiles["1.0"] == pytest.approx(4 / 3)
    with pytest.raises(ValueError, match="norms must be finite and positive"):
        figures(np.zeros(2), np.zeros(2), 1.0)


def test_it_measures_what_the_gradients_are() -> None:
    inputs = tiny.inputs()
    loss_fn, clip = next_token_loss(inputs.model), 0.5
    data = {name: leaf[:5] for name, leaf in inputs.train_data.arrays.items()}
    found = NormGap(loss_fn, data, l2_clip_norm=clip, batch_size=2)(inputs.params)

    exact_sum, naive_sum, ratios = 0.0, 0.0, []
    untied = tiny.inputs(tie_embeddings=False)
    start = {**inputs.params, "lm_head": {"kernel": inputs.params["wte"]["embedding"].T}}
    untied_loss = next_token_loss(untied.model)
    for row in range(5):
        batch = {name: jnp.asarray(leaf[row : row + 1]) for name, leaf in data.items()}
        apart = jax.grad(lambda params, batch=batch: untied_loss(params, batch)[0])(start)
        head = apart.pop("lm_head")["kernel"].T
        apart["wte"]["embedding"], uses = apart["wte"]["embedding"] + head, (apart["wte"]["embedding"], head)
        flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(apart)])
        cross = 2 * float(np.sum(uses[0] * uses[1]))
        exact = float(np.linalg.norm(flat))
        naive = math.sqrt(exact**2 - cross)
        ratios.append(naive / exact)
        exact_sum = exact_sum + flat * min(1, clip / exact)
        naive_sum = naive_sum + flat * min(1, clip / naive)
    assert found["non_private_ratio_quantiles"]["0.5"] == pytest.approx(np.median(ratios), rel=1e-4)
    lengths = np.linalg.norm(naive_sum), np.linalg.norm(exact_sum)
    assert found["non_private_length_ratio"] == pytest.approx(lengths[0] / lengths[1], rel=1e-4)
    cosine = float(naive_sum @ exact_sum) / (lengths[0] * lengths[1])
    assert found["non_private_cosine"] == pytest.approx(cosine, abs=1e-5)


@pytest.mark.slow
def test_the_script_measures_before_during_and_after(tmp_path: Path) -> None:
    out = tmp_path / "gap"
    script.main(
        NormGapConfig(out=out, steps=3, every=2, batch_size=64, measured_examples=40, physical_batch_size=32)
    )
    record = json.loads((out / "results.json").read_text())
    assert [row["step"] for row in record["rows"]] == [0, 2, 3]
    for row in record["rows"]:
        assert row["non_private_examples"] == 40 and row["non_private_largest_over_c"] <= math.sqrt(2)
        assert 0.99 < row["non_private_cosine"] <= 1 + 1e-6
    privacy = record["privacy"]
    assert privacy["epsilon_claimed"] == pytest.approx(8.0, rel=2e-3) and privacy["epsilon"] > 8.5
    table = (out / "table.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:5]] == ["| 0", "| 2", "| 3"]
    last = record["rows"][-1]["non_private_ratio_quantiles"]
    assert f"| {last['0.0']:.4f} | {last['0.5']:.4f} | {last['1.0']:.4f} |" in table[4]
    assert table[-1].startswith("Loss `next_token`, 192 example gradients (a demonstration), C 1.0, claimed ")
    assert f"honest epsilon {privacy['epsilon']:.3g}." in table[-1]
    assert (out / "norm_gap.png").read_bytes().startswith(b"\x89PNG")


def test_the_script_complains_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments, message in (
        (["--out", str(tmp_path)], f"out must not exist, got {tmp_path}"),
        (["--every", "0"], "every must be at least 1, got 0"),
        (["--epsilon", "-1"], "epsilon must be positive and finite, got -1.0"),
    ):
        monkeypatch.setattr(sys, "argv", ["norm_gap.py", *arguments])
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(script.__file__), run_name="__main__")
        assert leaving.value.code == 2
        assert capsys.readouterr().err == f"error: {message}\n"
