"""Worker processes: results in order, failures in one line, a process that dies replaced."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wtdp_jax.study.workers import Call, Failure, run_all


def _double(value: int) -> int:
    if value < 0:
        raise ValueError(f"value must be positive, got {value}\nand more")
    return 2 * value


def _process(place: int) -> int:
    return os.getpid()


def _die_once(marker: Path) -> str:
    if not marker.exists():
        marker.touch()
        os._exit(9)
    return "alive"


def _die() -> None:
    os._exit(9)


def test_all_are_done_and_failures_are_one_line() -> None:
    ended = []
    results = run_all(
        {value: Call(_double, (value,)) for value in (3, -1, 2)},
        jobs=2,
        isolate=False,
        retries=0,
        on_end=lambda key, value, seconds: ended.append(key),
    )
    assert results == {3: 6, -1: Failure("value must be positive, got -1"), 2: 4}
    assert list(results) == [3, -1, 2] and sorted(ended) == [-1, 2, 3]
    assert run_all({}, jobs=2, isolate=False) == {}


@pytest.mark.slow
def test_a_process_that_dies_is_replaced_and_its_call_tried_again(tmp_path: Path) -> None:
    calls = {
        "dies": Call(_die, ()),
        "once": Call(_die_once, (tmp_path / "marker",)),
        "fine": Call(_double, (1,)),
    }
    results = run_all(calls, jobs=1, isolate=False)
    assert results == {"dies": Failure("its process ended with exit code 9"), "once": "alive", "fine": 2}


@pytest.mark.parametrize("isolate", [True, False])
def test_calls_share_a_process_unless_isolated(isolate: bool) -> None:
    results = run_all({place: Call(_process, (place,)) for place in range(2)}, jobs=1, isolate=isolate)
    assert (results[0] == results[1]) == (not isolate) and os.getpid() not in results.values()


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys, time\n"
        "from wtdp_jax.study.workers import Call, run_all\n"
        "def wait(path):\n"
        "    open(path, 'w').write(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    run_all({0: Call(wait, (sys.argv[1],))}, jobs=1, isolate=False)\n"
    )
    file = tmp_path / "pid"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, str(script), str(file)], env=environment)
    deadline = time.monotonic() + 30
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    child = int(file.read_text())
    parent.kill()
    parent.wait()
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()
