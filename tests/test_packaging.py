"""What the package imports at run time is what installing it brings."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

from wtdp_jax.version import __version__

_ROOT = Path(__file__).parents[1]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# jaxlib comes with jax, which pins it.
_BROUGHT_ALONG = {"jaxlib"}

# Imported inside functions by single scripts.
_OF_EXTRA = {"bench": {"jax_privacy", "opacus", "torch"}, "mutation": {"cosmic_ray"}}


def _imported() -> set[str]:
    """Top-level names that package and scripts import, other than their own and the standard library's."""
    names = set()
    for folder in ("wtdp_jax", "experiments"):
        for path in (_ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names.add(str(node.module).partition(".")[0])
    return names - sys.stdlib_module_names - {"wtdp_jax"}


def _names(requirements: list[str]) -> set[str]:
    """The packages that requirements name."""
    return {re.split(r"[<>=\[; ]", text)[0].lower() for text in requirements}


@pytest.mark.parametrize("extra", _OF_EXTRA)
def test_an_extra_brings_what_its_scripts_import(extra: str) -> None:
    brought = _names(_PROJECT["optional-dependencies"][extra])
    assert {name.replace("-", "_") for name in brought} == _OF_EXTRA[extra]
    assert _OF_EXTRA[extra] <= _imported()


def test_every_import_is_a_declared_dependency() -> None:
    declared = _names(_PROJECT["dependencies"])
    providers = importlib.metadata.packages_distributions()
    undeclared = set()
    for name in _imported() - set().union(*_OF_EXTRA.values()):
        brought_by = {provider.lower().replace("_", "-") for provider in providers.get(name, ())}
        if not brought_by & (declared | _BROUGHT_ALONG):
            undeclared.add(name)
    assert "jax" in declared and undeclared == set()


def test_nothing_is_pinned_at_run_time() -> None:
    assert [text for text in _PROJECT["dependencies"] if "==" in text] == []


def test_the_changelog_knows_the_version() -> None:
    assert f"\n## {__version__} " in (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
