"""Data, a model and compiled programs for processes."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.resume import child, small
from wtdp_jax import accounting, report


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """What is the same every time is computed once; to draw takes longer than to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "plot_curves", small.no_curves)
        patch.setattr(accounting, "_rdp_epsilon", functools.cache(accounting._rdp_epsilon))
        yield


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data and a model, see `small.place`."""
    return small.place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="session")
def left_in_peace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in this process that nothing interrupted."""
    return small.run(tmp_path_factory.mktemp("left_in_peace") / "run").folder.path


Finetune = Callable[..., child.Ended]


@pytest.fixture(scope="session")
def start(place: Path) -> Callable[..., child.Started]:
    """Starts the script: `start(out, fault, **settings)`."""

    def start(out: Path, fault: Any = None, **changes: Any) -> child.Started:
        return child.start(small.arguments(place, out, **changes), place / "cache", fault)

    return start


@pytest.fixture(scope="session")
def finetune(start: Callable[..., child.Started]) -> Finetune:
    """Runs the script to its end: `finetune(out, fault, **settings)`."""
    return lambda *args, **changes: start(*args, **changes).wait()


@pytest.fixture(scope="session")
def whole(finetune: Finetune, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run by the script that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    ended = finetune(out)
    assert ended.status == 0, ended.stderr
    return out
