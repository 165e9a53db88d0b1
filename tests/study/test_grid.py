import dataclasses

import pytest

from tests.study.small import GRID
from wtdp_jax.study import arms as a
from wtdp_jax.study import grid as grids


def test_names_are_fit_for_folders() -> None:
    assert [grids.model_name(m) for m in ("a b=x/y", "org/distil gpt2", "runs/m/")] == [
        "a-b",
        "distil-gpt2",
        "m",
    ]
    assert [grids.model_folder(m) for m in ("a=x/y", "gpt2", "embedded")] == ["x/y", "gpt2", None]
    assert grids.task_name("tasks/mine.json") == "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ("tied",)}, "arms must be among tied-nonprivate, .*, got 'tied'"),
        (
            {"arms": (a.TIED_STANDARD,)},
            "arms must be with tied-exact, whose choice it takes, got tied-standard",
        ),
        ({"models": ()}, "models must be at least one, got none"),
        ({"models": ("a=x", "a=y")}, "models must be of different names"),
        ({"epsilons": ()}, "epsilons must be at least one with private arms, got none"),
        ({"learning_rates": (0.0,)}, r"learning_rates must be positive and finite, got \(0.0,\)"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"steps": 3}, "epochs must be given, or else steps"),
        ({"selection_share": 0.0}, r"selection_share must be in \(0, 1\], got 0.0"),
        ({"held_out_fraction": 1.0}, r"held_out_fraction must be in \(0, 1\), got 1.0"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GRID, **changes)
