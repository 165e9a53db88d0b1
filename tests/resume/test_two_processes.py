"""Two processes on one run folder: the second is refused, and the first does not notice."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.resume import child, small
from tests.resume.conftest import Finetune
from tests.resume.faults import WaitAtLine


@pytest.mark.slow
def test_the_second_is_refused_in_one_line(
    start: Callable[..., child.Started], finetune: Finetune, whole: Path, tmp_path: Path
):
    out, waiting, go_on = (tmp_path / name for name in ("run", "waiting", "go_on"))
    first = start(out, WaitAtLine(3, waiting, go_on))
    try:
        while not waiting.exists():
            time.sleep(0.05)
        before = small.contents(out)
        second = finetune(out, resume=True)
        assert small.contents(out) == before
    finally:
        go_on.touch()
        ended = first.wait()
    assert (second.status, second.stdout) == (2, "")
    assert second.stderr == f"error: {out} is in use by another process\n"
    assert ended.status == 0 and ended.stderr == ""
    assert small.ending(out) == small.ending(whole)
