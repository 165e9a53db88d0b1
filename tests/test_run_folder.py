import subprocess
import sys
from pathlib import Path

import pytest

from wtdp_jax.run_folder import RunFolder, read_json, write_bytes, write_json

_RECORD = {"settings": {"engine": "ghost", "seed": None, "out": "a"}, "identity": {"jax": "1"}}


def _other(part: str, **changes: object) -> dict:
    return {**_RECORD, part: {**_RECORD[part], **changes}}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    with folder.claimed(_RECORD, resume=False):
        write_json(folder.config, _RECORD)
    return folder


def test_the_same_run_goes_on_only_if_asked(folder: RunFolder):
    folder.check(_RECORD, resume=True)
    folder.check({"settings": _RECORD["settings"]}, resume=True)
    with pytest.raises(ValueError, match="already holds this run: add --resume"):
        folder.check(_RECORD, resume=False)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    ("record", "message"),
    [
        (_other("settings", engine="bookkeeping"), "engine was 'ghost', now 'bookkeeping'"),
        (_other("settings", seed=1), "seed was None, now 1"),
        (_other("settings", added=True), "added was None, now True"),
        (_other("identity", jax="2"), "jax was '1', now '2'"),
    ],
)
def test_another_configuration_is_refused_by_name(
    folder: RunFolder, record: dict, message: str, resume: bool
):
    with pytest.raises(ValueError, match=f"holds a run with another configuration: {message}"):
        folder.check(record, resume=resume)


def test_where_things_lie_may_change(folder: RunFolder):
    folder.check(_other("settings", out="b", model="elsewhere"), resume=True)


def test_foreign_files_are_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="must be empty or hold a run, got .* with 'thesis.tex'"):
        RunFolder(tmp_path).check(_RECORD, resume=True)
    with pytest.raises(ValueError, match="must be a folder"):
        RunFolder(tmp_path / "thesis.tex").check(_RECORD, resume=False)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_one_process_at_a_time(folder: RunFolder):
    claim = (
        "import sys, pathlib, wtdp_jax.run_folder as r\n"
        "folder = r.RunFolder(pathlib.Path(sys.argv[1]))\n"
        "with folder.claimed(r.read_json(folder.config), resume=True): pass\n"
    )
    command = [sys.executable, "-c", claim, str(folder.path)]
    with folder.claimed(_RECORD, resume=True):
        refused = subprocess.run(command, capture_output=True, text=True)
    assert "BlockingIOError" in refused.stderr and "is in use by another process" in refused.stderr
    subprocess.run(command, check=True)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def crash(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="no space"):
        write_bytes(path, b"half")
    assert read_json(path) == {"a": 1}


def test_damaged_json_is_named_with_its_line(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text('{\n"a": }')
    with pytest.raises(ValueError, match=r"config.json:2: must be JSON"):
        read_json(path)
