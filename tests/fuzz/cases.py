"""How many cases are drawn, by kind: planned in a table, counted as they run, printed after the tests."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

PLANNED = {
    "engine batches": 960,
    "batches of one naive norm": 200,
    "ascended batches": 120,
    "tables": 300,
    "texts": 100,
    "task files": 300,
    "command lines": 150,
    "model configurations": 300,
    "safetensors files": 300,
    "indices of shards": 100,
    "tokenizer files": 80,
    "plans": 80,
}
"""Cases of each kind in a whole run."""

RUN: Counter[str] = Counter()
"""Cases run so far in this process; those of others are added where tests are spread over processes."""

# Drawn the same way each time, so that a run fails for a change in the code alone. Without the phase that
# explains a failure: for that all cases run traced, several times slower.
_SETTINGS: dict[str, Any] = {
    "derandomize": True,
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


def drawn(kind: str, *, share: float = 1, **strategies: Any) -> Callable[[Callable], Callable]:
    """Runs a test on drawn values.

    Args:
        kind: a key of `PLANNED`.
        share: the test's part of what is planned, of which each parametrization is one test.
        **strategies: of the values, by the test's arguments.
    """
    number = round(PLANNED[kind] * share)
    return lambda test: settings(max_examples=number, **_SETTINGS)(given(**strategies)(test))


def count(kind: str, number: int = 1) -> None:
    """Counts cases that a test has begun."""
    if kind not in PLANNED:
        raise ValueError(f"kind must be one of {', '.join(PLANNED)}, got {kind!r}")
    RUN[kind] += number


def summary() -> str | None:
    """One line on what was run; None if nothing was."""
    if not RUN:
        return None
    listed = ", ".join(f"{kind} {RUN[kind]}" for kind in PLANNED if RUN[kind])
    return f"fuzz: {listed}; in all {RUN.total()}"
