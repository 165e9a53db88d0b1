"""Settings that every test runs under: strict promotion, checked shapes, float64 on request."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jaxtyping import install_import_hook

from tests.fuzz import cases

# Shapes and dtypes in the package's signatures are checked in every test. The hook must come before
# the package is first imported, which is why it stands here.
install_import_hook("wtdp_jax", "beartype.beartype")

jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests compile many programs and run each once. A test that reads a compiled program asks for the
# optimizations.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def float64() -> Iterator[None]:
    """Runs one test with 64-bit types, where an engine must agree with the oracle to 1e-10."""
    with jax.enable_x64(True):
        yield


# What was fuzzed is counted where tests run, which with pytest-xdist are processes of their own, and is
# printed where they are summed up.


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["fuzz_cases"] = dict(cases.RUN)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    cases.RUN.update(getattr(node, "workeroutput", {}).get("fuzz_cases", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if line := cases.summary():
        terminalreporter.write_line(line)
