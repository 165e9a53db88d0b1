"""The notebook for Colab runs from end to end, stops where a command fails, and is stored clean."""

import base64
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest
import tyro
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from experiments.check_norms import CheckConfig
from experiments.study import StudyConfig
from wtdp_jax.study.cells import cell_examples, cells_of
from wtdp_jax.study.evidence import DEMONSTRATION_BELOW
from wtdp_jax.study.grid import Grid

_ROOT = Path(__file__).parents[1]
_NOTEBOOK = _ROOT / "experiments" / "colab.ipynb"

_SST2_TRAINING_ROWS = 67_349

_QUICK_CHECK = ["--engines", "ghost", "--models", "tied", "--batch-size", "2", "--length", "4"]
_QUICK_STUDY = [
    *("--preset", "smoke", "--arms", "tied-exact", "untied-exact", "--learning-rates", "0.01"),
    *("--steps", "2", "--batch-size", "16", "--physical-batch-size", "8", "--jobs", "1"),
    "--measured",  # only steps without privacy
]


def _read() -> NotebookNode:
    return nbformat.read(_NOTEBOOK, as_version=nbformat.NO_CONVERT)


def _cell(notebook: NotebookNode, name: str) -> NotebookNode:
    (cell,) = [cell for cell in notebook.cells if cell.id == name]
    return cell


def _parameters() -> dict[str, Any]:
    """The parameters as the notebook is stored."""
    found: dict[str, Any] = {}
    exec(_cell(_read(), "parameters").source, found)
    del found["__builtins__"]
    return found


def _client(folder: Path, check: list[str] = _QUICK_CHECK) -> NotebookClient:
    """Executes the notebook in a folder of its own, with parameters that make it small."""
    small = {
        "PROJECT": str(_ROOT),
        "INSTALL": False,
        "CHECK": check,
        "STUDY": _QUICK_STUDY,
        "OUT": str(folder / "study"),
    }
    assert small.keys() == _parameters().keys()
    notebook = _read()
    _cell(notebook, "parameters").source = "\n".join(f"{name} = {value!r}" for name, value in small.items())
    return NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(folder)}})


def _execute(client: NotebookClient, folder: Path) -> None:
    client.execute(
        env={
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "JAX_PLATFORMS": "cpu",
            "IPYTHONDIR": str(folder / "ipython"),
        }
    )


def _printed(cell: NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def _shown(cell: NotebookNode, kind: str) -> list[str]:
    """What a cell displays of a MIME type."""
    shown = [output.data for output in cell.outputs if output.output_type == "display_data"]
    return [data[kind] for data in shown if kind in data]


@pytest.mark.slow
def test_all_cells_run_and_show_the_report(tmp_path: Path) -> None:
    client = _client(tmp_path)
    _execute(client, tmp_path)
    notebook, report = client.nb, (tmp_path / "study" / "report.md").read_text(encoding="utf-8")

    device = _printed(_cell(notebook, "device"))
    assert device.startswith("jax sees CPU: cpu\nWarning: this is only a CPU")
    check = _printed(_cell(notebook, "check"))
    assert "1 of 1 within 1e-04" in check and "OFF" not in check
    assert "all runs are finished" in _printed(_cell(notebook, "study"))

    (answer,) = _shown(_cell(notebook, "report"), "text/markdown")
    assert "epsilon 8: cannot tell" in answer
    accuracy, gap = _shown(_cell(notebook, "accuracy"), "text/markdown")
    (memory,) = _shown(_cell(notebook, "memory"), "text/markdown")
    assert "| tied-exact | 8 | 1 |" in accuracy and "| untied-exact | 8 | 1 |" in accuracy
    assert "| untied - tied with exact norms | 8 | 1 |" in gap
    assert "| untied nonprivate |" in memory
    tables = [line for text in (accuracy, gap, memory) for line in text.splitlines() if line.startswith("|")]
    assert [line for line in tables if line not in report] == []
    for name in ("accuracy", "memory"):
        (image,) = _shown(_cell(notebook, name), "image/png")
        assert base64.b64decode(image) == (tmp_path / "study" / f"{name}.png").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "message"),
    [
        (["--batch-size", "0"], "error: batch_size must be at least 1, got 0"),
        ([*_QUICK_CHECK, "--tolerance", "1e-30"], "0 of 1 within 1e-30"),
    ],
)
def test_a_command_that_fails_stops_the_notebook(check: list[str], message: str, tmp_path: Path) -> None:
    client = _client(tmp_path, check)
    with pytest.raises(CellExecutionError, match=r"check_norms\.py"):
        _execute(client, tmp_path)
    assert message in _printed(_cell(client.nb, "check"))
    assert _cell(client.nb, "device").execution_count and not _cell(client.nb, "study").execution_count
    assert not (tmp_path / "study").exists()


def test_it_is_stored_valid_and_without_outputs() -> None:
    notebook = _read()
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.id


def test_a_sentence_stands_before_each_cell_and_parameters_stand_in_one() -> None:
    kinds = [cell.cell_type for cell in _read().cells]
    assert kinds == ["markdown", *["markdown", "code"] * (len(kinds) // 2)]
    tagged = [cell.id for cell in _read().cells if "parameters" in cell.metadata.get("tags", ())]
    assert tagged == ["parameters"]


def test_the_default_flags_are_a_demonstration_of_the_preset() -> None:
    parameters = _parameters()
    assert (parameters["PROJECT"], parameters["INSTALL"]) == ("wtdp_jax", True)
    tyro.cli(CheckConfig, args=parameters["CHECK"])
    config = tyro.cli(StudyConfig, args=[*parameters["STUDY"], "--out", parameters["OUT"]])
    assert config.preset == "colab" and config.out == Path("runs/colab")

    def longest(grid: Grid) -> int:
        return max(cell_examples(grid, cell, _SST2_TRAINING_ROWS) for cell in cells_of(grid))

    grid, whole = config.grid(), StudyConfig(preset="colab").grid()
    assert grid.models == whole.models == ("distilgpt2",) and grid.tasks == whole.tasks == ("sst2",)
    assert longest(grid) < DEMONSTRATION_BELOW < longest(whole)
    # What the text beside it says of both.
    assert (grid.seeds, grid.steps, len(grid.learning_rates)) == (1, 10, 2)
    assert (whole.seeds, len(whole.learning_rates) * len(whole.clip_norms)) == (3, 12)
    assert "python experiments/study.py --preset colab" in _cell(_read(), "about-study").source


@pytest.mark.parametrize(
    ("device", "driver", "requirements"),
    [
        ("nothing", "", [f"{_ROOT}"]),
        ("/dev/nvidia0", "580.65.06\n", [f"{_ROOT}[gpu]"]),
        ("/dev/nvidia0", "550.54.15\n", [f"{_ROOT}", "jax[cuda12]"]),
        ("/dev/accel0", "", [f"{_ROOT}[tpu]"]),
        ("/dev/vfio/0", "", [f"{_ROOT}[tpu]"]),
    ],
)
def test_the_install_fits_the_hardware(
    device: str, driver: str, requirements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {"INSTALL": False, "project": _ROOT, "run": lambda *command: driver}
    exec(_cell(_read(), "install").source, names)
    monkeypatch.setattr("glob.glob", lambda pattern: [device] if Path(device).match(pattern) else [])
    assert names["requirements"]() == requirements
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = re.findall(r"\[(\w+)\]", requirements[0])
    assert set(own) <= extras["optional-dependencies"].keys()
