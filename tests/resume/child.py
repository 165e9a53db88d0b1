"""Runs experiments/finetune.py in a process of its own, with a fault planted in it.

The processes are forked from a server that has imported everything and has not started JAX: a run then takes
seconds. They share a folder of compiled programs.
"""

import dataclasses
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from tests.resume import small
from wtdp_jax import report

_SCRIPT = Path(__file__).parents[2] / "experiments" / "finetune.py"

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status, negative for a signal's number, and what it said."""

    status: int
    stdout: str
    stderr: str


class Started:
    """A process that is under way."""

    def __init__(self, process: Any, outputs: tuple[Connection, Connection]) -> None:
        self._process, self._outputs = process, outputs

    def wait(self) -> Ended:
        """Waits for its end."""
        stdout, stderr = map(_read, self._outputs)
        self._process.join()
        return Ended(self._process.exitcode, stdout, stderr)


def start(arguments: list[str], cache: Path, fault: Callable[[], None] | None = None) -> Started:
    """Starts the script.

    Args:
      arguments: its command line.
      cache: folder of compiled programs.
      fault: called in the process before the script is; can be pickled.
    """
    (out, out_there), (err, err_there) = (_processes.Pipe(duplex=False) for _ in range(2))
    process = _processes.Process(target=_main, args=(arguments, str(cache), fault, out_there, err_there))
    process.start()
    out_there.close()
    err_there.close()
    return Started(process, (out, err))


def run(arguments: list[str], cache: Path, fault: Callable[[], None] | None = None) -> Ended:
    """Runs the script to its end; see `start`."""
    return start(arguments, cache, fault).wait()


def _read(output: Connection) -> str:
    parts = iter(lambda: os.read(output.fileno(), 2**16), b"")
    return b"".join(parts).decode()


def _main(
    arguments: list[str], cache: str, fault: Callable[[], None] | None, out: Connection, err: Connection
) -> None:
    os.dup2(out.fileno(), sys.stdout.fileno())
    os.dup2(err.fileno(), sys.stderr.fileno())
    out.close()
    err.close()
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # To draw takes longer than to train.
    report.plot_curves = small.no_curves
    if fault is not None:
        fault()
    sys.argv = [str(_SCRIPT), *arguments]
    runpy.run_path(str(_SCRIPT), run_name="__main__")
