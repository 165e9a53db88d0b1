"""The benchmark of noise, at the smallest size."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments import bench_noise
from experiments.bench_noise import NoiseConfig


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_noise.main(NoiseConfig(out=tmp_path / "run", quick=True, repeats=2))
    saved = json.loads((tmp_path / "run" / "results.json").read_text())
    shapes = bench_noise.gradient_shapes("tiny")
    assert saved["num_parameters"] == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert [row["name"] for row in saved["rows"]] == list(bench_noise.ways())
    for row in saved["rows"]:
        assert len(row["all_seconds"]) == 2 and row["seconds"] > 0
        assert row["ns_per_normal"] == pytest.approx(1e9 * row["seconds"] / saved["num_parameters"])
    assert (tmp_path / "run" / "table.md").read_text().strip() in capsys.readouterr().out


def test_every_way_gives_standard_normals() -> None:
    total = {"a": jnp.zeros((300, 200)), "b": jnp.full((40_000,), 5.0)}
    for add, key, reach in bench_noise.ways().values():
        noised = jax.jit(add)(total, key)
        sample = jnp.concatenate([jnp.ravel(noised["a"]), noised["b"] - 5])
        assert abs(float(sample.std()) - 1) < 0.02 and abs(float(sample.mean())) < 0.02
        assert float(jnp.abs(sample).max()) < reach


def test_reaches() -> None:
    # Inverse normal at 2^-24, nearly; and sqrt(80 log 2), see the tests of noise.
    ours, _, theirs, _ = (reach for _, _, reach in bench_noise.ways().values())
    assert theirs == pytest.approx(5.22, abs=0.01) and ours == pytest.approx(7.4467, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "huge"}, "preset must be one of .*, got 'huge'"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseConfig(**settings)
