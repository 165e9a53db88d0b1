"""Measures ways to add Gaussian noise to a sum of gradients: time, memory, and how far their tails reach.

The largest model whose steps README measures, GPT-2 with a head of its own, 163 million parameters:

    python experiments/bench_noise.py --out runs/noise
    python experiments/bench_noise.py --quick --out runs/noise-quick

All write the noised sum over the sum. They are timed together, each once a round, in an order shuffled each
round. The reach is the largest normal that a way can draw, in standard deviations: what noise cannot reach,
an observer can rule out.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wtdp_jax import cli, compiled
from wtdp_jax.benchmark import runs, tables, timing
from wtdp_jax.benchmark.tables import GB, Column, Row
from wtdp_jax.models import GPT2, GPT2Config
from wtdp_jax.noise import add_gaussian_noise, key_from_seed, normals_from_bits

_COLUMNS = (
    Column("noise", "name"),
    Column("seconds", "seconds", ".4g"),
    Column("ns a normal", "ns_per_normal", ".3g"),
    Column("temp (GB)", "temp_bytes", ".4g", GB),
    Column("over the sum's own memory", "temp_over_sum", ".3f"),
    Column("reach (standard deviations)", "reach", ".2f"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """Measures ways to add Gaussian noise to a sum of gradients."""

    out: Path = Path("runs/bench_noise")
    """Folder for results.json and table.md; must not exist."""

    preset: str = "gpt2"
    """Model size: tiny, distilgpt2, gpt2, gpt2-medium, gpt2-large or gpt2-xl; its head is free."""

    repeats: int = 7
    """Timed rounds; the figures are medians over them."""

    seed: int = 0
    """Seed of the order."""

    quick: bool = False
    """Whether to replace the model by a tiny one."""

    def __post_init__(self) -> None:
        GPT2Config.preset(self.preset)
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")


def main(config: NoiseConfig) -> None:
    """Measures, and writes results.json and table.md."""
    runs.new_folder(config.out)
    shapes = gradient_shapes("tiny" if config.quick else config.preset)
    rows = measure(config, shapes)
    table = tables.markdown_table(_COLUMNS, rows)
    record = {
        **runs.environment(),
        "settings": dataclasses.asdict(config) | {"out": str(config.out)},
        "num_parameters": _count(shapes),
        "rows": rows,
    }
    runs.write_results(config.out, record, table)
    print(f"{_count(shapes):,} parameters, float32\n\n{table}\n\neverything is in {config.out}")


def gradient_shapes(preset: str) -> Any:
    """The shapes of an untied model's parameters, and so of a sum of their gradients."""
    model = GPT2(GPT2Config.preset(preset, tie_embeddings=False))
    ids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), ids)["params"]


def measure(config: NoiseConfig, shapes: Any) -> list[Row]:
    """A row for each way."""
    rows, calls = [], {}
    for name, (add, key, reach) in ways().items():
        program = jax.jit(add, donate_argnums=0).lower(shapes, key).compile()
        temp = compiled.memory(program).temporaries
        row: Row = {"name": name, "temp_bytes": temp, "reach": reach}
        rows.append(row | {"temp_over_sum": temp / (4 * _count(shapes))})
        calls[name] = functools.partial(lambda program, key, total: program(total, key), program, key)
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def call(name: str) -> Any:
        nonlocal total
        total = calls[name](total)
        return total

    seconds = timing.interleaved_seconds(
        {name: functools.partial(call, name) for name in calls}, repeats=config.repeats, seed=config.seed
    )
    medians = timing.medians(seconds)
    return [
        row
        | {
            "seconds": medians[row["name"]],
            "ns_per_normal": medians[row["name"]] / _count(shapes) * 1e9,
            "all_seconds": seconds[row["name"]],
        }
        for row in rows
    ]


def ways() -> dict[str, tuple[Callable[[Any, Any], Any], Any, float]]:
    """By name: (sum, key) -> noised sum; a key for it; and its reach."""
    key = key_from_seed(0, "noise")
    by_zero_words = normals_from_bits(*jnp.zeros((2, 1), jnp.uint32))
    reach = float(jnp.max(jnp.abs(jnp.stack(by_zero_words))))
    return {
        "wtdp_jax: in chunks, a threefry block a pair": (_ours, key, reach),
        "the same normals from jax.random.bits, a leaf at once": (_by_leaf(_box_muller), key, reach),
        "jax.random.normal, threefry": (_by_leaf(jax.random.normal), key, _reach_of_jax()),
        "jax.random.normal, rbg": (
            _by_leaf(jax.random.normal),
            jax.random.key(0, impl="rbg"),
            _reach_of_jax(),
        ),
    }


def _ours(total: Any, key: Any) -> Any:
    noise = add_gaussian_noise(1.0, key)
    return noise.update(total, noise.init(total))[0]


def _by_leaf(normal: Callable[[Any, tuple[int, ...]], jax.Array]) -> Callable[[Any, Any], Any]:
    def add(total: Any, key: Any) -> Any:
        leaves, structure = jax.tree.flatten(total)
        keys = jax.random.split(key, len(leaves))
        noised = [leaf + normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, noised)

    return add


def _box_muller(key: Any, shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    words = jax.random.bits(key, (2, -(-size // 2)))
    return jnp.concatenate(normals_from_bits(*words))[:size].reshape(shape)


def _reach_of_jax() -> float:
    """The largest of `jax.random.normal`: sqrt(2) erf^-1 of the largest of 2^23 numbers in (-1, 1)."""
    lowest = np.nextafter(np.float32(-1), np.float32(0))
    highest = np.float32(1 - 2.0**-23) * (np.float32(1) - lowest) + lowest
    return float(math.sqrt(2) * jax.lax.erf_inv(jnp.float32(highest)))


def _count(shapes: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


if __name__ == "__main__":
    given = cli.parse(NoiseConfig)
    with cli.one_line_errors(ValueError, OSError):
        main(given)
