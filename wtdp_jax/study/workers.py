"""Processes that work off a list of calls, and survive one that breaks.

A process may die of one call (memory runs out, most often): then a new one takes its place, and the call is
tried again. Each process computes on its own share of the cores.
"""

import dataclasses
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)

# On a CPU every call of a compiled program takes its memory anew. With these glibc keeps what was freed, and
# the system need not fill pages with zeros again: for a model of two million parameters a third of the time.
_ALLOCATION = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of a module, with arguments that can be pickled."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a call gave nothing, in one line."""

    message: str


def run_all(
    calls: Mapping[Key, Call],
    *,
    jobs: int,
    isolate: bool,
    retries: int = 1,
    on_end: Callable[[Key, Any, float], None] = lambda key, value, seconds: None,
) -> dict[Key, Any]:
    """Makes all calls in worker processes, in order, and returns what each gave, or a `Failure`.

    Args:
      calls: what to do.
      jobs: processes at once, at least 1.
      isolate: whether each call gets a new process, so that none inherits another's memory.
      retries: how often a call that failed is tried again, in a new process.
      on_end: called with key, value and seconds when a call has ended for good.
    """
    waiting: queue.SimpleQueue[tuple[Key, Call]] = queue.SimpleQueue()
    for item in calls.items():
        waiting.put(item)
    results: dict[Key, Any] = {}
    workers = [_Worker(number, jobs, isolate) for number in range(min(jobs, len(calls)))]
    lock = threading.Lock()

    def serve(worker: _Worker) -> None:
        while True:
            try:
                key, call = waiting.get_nowait()
            except queue.Empty:
                return worker.stop()
            started = time.perf_counter()
            for _ in range(1 + retries):
                value = worker(call)
                if not isinstance(value, Failure):
                    break
                worker.stop()
            with lock:
                results[key] = value
                on_end(key, value, time.perf_counter() - started)

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():  # a join without limit could not be interrupted
                thread.join(0.2)
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    return {key: results[key] for key in calls}


class _Worker:
    """One place for a process, which is started when there is something to do."""

    def __init__(self, number: int, jobs: int, isolate: bool) -> None:
        self._isolate = isolate
        self._cores = _share_of_cores(number, jobs)
        self._process: Any = None
        self._connection: Any = None

    def __call__(self, call: Call) -> Any:
        """Makes a call; a process that dies of it is a failure."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            # glibc reads them when a process starts, so they must be there before; what a user set stays.
            os.environ |= _ALLOCATION | {k: os.environ[k] for k in _ALLOCATION if k in os.environ}
            self._connection, theirs = context.Pipe()
            self._process = context.Process(
                target=_serve, args=(theirs, self._cores, os.getpid()), daemon=True
            )
            self._process.start()
            theirs.close()
        try:
            self._connection.send((call.function, call.arguments))
            value = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            value = Failure(f"its process ended with exit code {self._process.exitcode}")
            self._process = None
        if self._isolate:
            self.stop()
        return value

    def stop(self) -> None:
        """Lets the process end."""
        if self._process is not None:
            self._connection.close()
            self._process.join()
            self._process = None

    def kill(self) -> None:
        """Ends the process now."""
        process = self._process
        if process is not None:
            process.kill()


def _serve(connection: Connection, cores: set[int] | None, parent: int) -> None:
    """Answers calls until the other end closes."""
    os.environ["TQDM_DISABLE"] = "1"
    # Several processes may share one device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if cores is not None:
        os.sched_setaffinity(0, cores)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            value = function(*arguments)
        except KeyboardInterrupt:
            return
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            value = Failure(f"{kind}{first_line}")
        connection.send(value)


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone, however that went."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _share_of_cores(number: int, jobs: int) -> set[int] | None:
    """The cores of one of several processes; None: all."""
    if jobs == 1 or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[number % len(cores) :: jobs]) or None
