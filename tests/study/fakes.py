"""Finished runs made up, in memory or as folders."""

from pathlib import Path
from typing import Any

import numpy as np

from wtdp_jax.run_folder import write_json
from wtdp_jax.study import arms as a
from wtdp_jax.study.evidence import Place
from wtdp_jax.study.folder import Run

LABELS = [0, 1] * 100
PLACE = Place("m", "t", "label_words")


def run(
    arm: str,
    rights: int,
    *,
    seed: int = 0,
    epsilon: float | None = 8.0,
    steps: int = 100,
    losses: tuple[float, ...] = (1.0, 0.5),
    norm: float = 6.0,
) -> Run:
    """A run whose first `rights` of 200 examples are right; each step's clipped sum has one norm."""
    has_epsilon = a.ARMS[arm].has_epsilon
    target = epsilon if has_epsilon else None
    folder = f"cells/m/t/label_words/{arm}/{target}/seed-{seed}"
    return Run(
        cell={
            "folder": folder,
            "model": "m",
            "task": "t",
            "loss": "label_words",
            "arm": arm,
            "epsilon": target,
            "purpose": "final",
            "seed": seed,
        },
        results={
            "steps": steps,
            "accuracy": rights / 200,
            "epsilon": 11.0 if arm == a.TIED_NAIVE else target,
            "epsilon_claimed": target,
            "noise_multiplier": 0.5 if has_epsilon else None,
            "num_trained_parameters": 16,
            "device": {"kind": "cpu"},
            "versions": {"jax": "1"},
        },
        privacy={},
        settings={"batch_size": 256, "learning_rate": 1e-3, "l2_clip_norm": 3.0},
        right=np.repeat([1, 0], [rights, 200 - rights]).tolist(),
        labels=LABELS,
        rows=[
            {"step": 0},
            *(
                {
                    "step": step,
                    "non_private_loss": loss,
                    "non_private_clipped_sum_norm": norm,
                    "non_private_clipped_fraction": 1 / step,
                }
                for step, loss in enumerate(losses, start=1)
            ),
        ],
    )


def _identity(run: Run) -> dict[str, str]:
    """Fingerprints of what it began with: those of tied and untied models differ."""
    tie = a.ARMS[run.cell["arm"]].tie
    return {
        "initial_model": "tied model" if tie else "untied model",
        "non_private_train_data": "training rows",
        "eval_data": "evaluation rows",
    }


def study(folder: Path, runs: list[Run], grid: dict[str, Any]) -> None:
    """Writes what a study leaves, as far as a report reads it."""
    begun = [
        {"command": f"python experiments/study.py --seeds {seeds}", "date": "2026-01-01", "commit": "0" * 40}
        for seeds in (1, 2)
    ]
    record = {"begun": begun, "grid": grid, "num_examples": {"t": 1000}, "data_dir": "None"}
    write_json(folder / "study.json", record)
    write_json(folder / "cells.json", [run.cell for run in runs])
    for made in runs:
        place = folder / made.folder
        place.mkdir(parents=True)
        write_json(place / "results.json", made.results)
        write_json(place / "privacy.json", made.privacy)
        write_json(place / "config.json", {"settings": made.settings, "identity": _identity(made)})
        write_json(place / "predictions.json", {"labels": made.labels, "right": made.right})
        lines = [f"{row}\n".replace("'", '"') for row in made.rows]
        (place / "metrics.jsonl").write_text("".join(lines))
