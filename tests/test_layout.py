"""Imports go one way, so that each part can be read, and trusted, without the others."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT / "wtdp_jax"


def _name(path: Path) -> str:
    """A file's module name: "wtdp_jax.clipping" for wtdp_jax/clipping/__init__.py."""
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


_FILES = {_name(path): path for path in sorted(_PACKAGE.rglob("*.py"))}


def _targets(node: ast.AST) -> set[str]:
    """Modules that an import statement names, as far as they are the package's own; others by full name."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    assert node.level == 0, f"imports must be absolute, got level {node.level} from {node.module}"
    inner = {f"{node.module}.{alias.name}" for alias in node.names}
    modules = inner & _FILES.keys()
    return modules | ({str(node.module)} if modules != inner else set())


@functools.cache
def _imports(module: str, *, late: bool = True) -> set[str]:
    """Modules that a module imports; `late`: those inside functions too."""
    tree = ast.parse(_FILES[module].read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if late else tree.body
    return set().union(*map(_targets, nodes))


def _part(module: str) -> str:
    """The part of the package that a module belongs to: its file, or its folder."""
    return module.split(".")[1] if "." in module else "__init__"


def _parts_imported(part: str) -> set[str]:
    """Other parts that any module of a part imports."""
    own = [module for module in _FILES if _part(module) == part]
    assert own, f"no such part: {part}"
    found = {_part(target) for module in own for target in _imports(module) if target in _FILES}
    return found - {part}


def _importers(library: str) -> set[str]:
    """Parts that import a library."""
    return {_part(m) for m in _FILES if any(t.split(".")[0] == library for t in _imports(m))}


# What each part may know of the package. The embedded task is one that `data` knows by name.
_MAY_IMPORT = {
    "rules": set(),
    "accounting": set(),
    "privacy": {"accounting"},
    "noise": set(),
    "sampling": set(),
    "trees": set(),
    "losses": set(),
    "lm_head": set(),
    "messages": set(),
    "models": {"lm_head", "messages"},
    "data": {"embedded", "messages"},
    "head_rules": {"rules"},
    "capture": {"rules", "lm_head"},
    "taps": {"capture", "head_rules", "lm_head", "rules"},
    "reads": {"capture", "trees"},
    "coverage": {"capture", "reads", "rules", "trees"},
    "compiled": set(),
    "clipping": {"capture", "compiled", "coverage", "head_rules", "rules", "taps", "trees"},
}

_COUPLED = _MAY_IMPORT.keys() - {"trees", "losses", "lm_head", "messages"}


@pytest.mark.parametrize("part", _MAY_IMPORT)
def test_a_part_imports_only_what_it_may(part: str) -> None:
    assert _parts_imported(part) <= _MAY_IMPORT[part]


def test_parts_meet_on_the_training_side_alone() -> None:
    others = {_part(module) for module in _FILES} - _MAY_IMPORT.keys()
    couplers = {part for part in others if len(_parts_imported(part) & _COUPLED) > 1}
    # What a step costs, and what it gives away, is seen on a step with noise; a study runs, measures and
    # calibrates whole trainings.
    assert couplers <= {"train", "plan", "inputs", "streams", "benchmark", "audit", "study"}


def test_only_models_and_what_sees_their_layers_import_flax() -> None:
    # The losses and the evaluation name its Module type, and nothing else of it.
    assert _importers("flax") <= {"models", "lm_head", "capture", "reads", "taps", "losses", "evaluate"}


@pytest.mark.parametrize("part", ["accounting", "privacy", "sampling", "data", "config", "cli"])
def test_what_needs_no_accelerator_does_not_import_jax(part: str) -> None:
    assert part not in _importers("jax")


def test_no_torch_at_run_time() -> None:
    assert not _importers("torch")


def test_the_package_imports_no_script_and_no_test() -> None:
    assert not _importers("experiments") | _importers("tests")


def test_imports_have_no_cycle() -> None:
    own = {module: _imports(module, late=False) & _FILES.keys() for module in _FILES}
    assert len(list(graphlib.TopologicalSorter(own).static_order())) == len(_FILES)
