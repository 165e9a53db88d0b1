"""Keys outlive a kill, are kept in one place, and serve one run; no file tells of private rows unnamed."""

import json
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import tiny
from tests.resume import small
from tests.resume.conftest import Finetune
from tests.resume.faults import KillBeforeChange, KillWhileSaving, KillWithinLine
from wtdp_jax import train
from wtdp_jax.checkpoint import Checkpoints
from wtdp_jax.run_folder import read_json
from wtdp_jax.streams import Streams


def _streams(out: Path) -> Streams:
    """The streams in a run's newest checkpoint."""
    like, _ = train._initial_state(None, tiny.inputs().params, small.plan())
    with Checkpoints(out / "checkpoints", read_json(out / "config.json")) as checkpoints:
        restored = checkpoints.restore(like)
    assert restored is not None
    return restored.state.streams


def _words(streams: Streams) -> dict[str, np.ndarray]:
    """All that is random in a run, as 32-bit words."""
    return {
        "noise": np.asarray(jax.random.key_data(streams.noise_key)),
        "dropout": np.asarray(jax.random.key_data(streams.dropout_key)),
        "sampling": np.asarray(streams.entropy_words),
    }


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unseeded run with one checkpoint, before its first step."""
    out = tmp_path_factory.mktemp("begun") / "run"
    with pytest.raises(small.Stopped):
        small.run(out, seed=None, stop_before=1)
    return out


def _copy(out: Path, to: Path) -> Path:
    shutil.copytree(out, to)
    return to


def test_interrupted_or_not_the_noise_is_the_same(begun: Path, tmp_path: Path):
    """Without a seed: two copies of one checkpoint, one interrupted twice more, end in the same bits."""
    once, often = (_copy(begun, tmp_path / name) for name in ("once", "often"))
    small.run(once, seed=None, resume=True)
    for step in (2, 3):
        with pytest.raises(small.Stopped):
            small.run(often, seed=None, resume=True, stop_before=step)
    small.run(often, seed=None, resume=True)
    assert small.ending(often) == small.ending(once)
    for name, words in _words(_streams(once)).items():
        np.testing.assert_array_equal(words, _words(_streams(begun))[name])


def test_each_run_has_keys_of_its_own(begun: Path, tmp_path: Path):
    small.run(tmp_path / "run", seed=None)
    ours, theirs = _words(_streams(tmp_path / "run")), _words(_streams(begun))
    for name in ours:
        assert not np.any(ours[name] == theirs[name])
    assert len({words.tobytes()[:8] for words in ours.values()}) == 3


@pytest.mark.slow
def test_the_noise_outlives_a_kill(finetune: Finetune, tmp_path: Path):
    """As above, by SIGKILL in processes that share nothing but the folder."""
    once, often = tmp_path / "once", tmp_path / "often"
    assert finetune(once, KillWithinLine(1), seed=None).status == -signal.SIGKILL
    shutil.copytree(once, often)
    assert finetune(once, seed=None, resume=True).status == 0
    for fault in (KillWithinLine(3), KillWhileSaving(1, 0.01), KillBeforeChange(12, often)):
        assert finetune(often, fault, seed=None, resume=True).status == -signal.SIGKILL
    assert finetune(often, seed=None, resume=True).status == 0
    assert small.ending(often) == small.ending(once)
    assert stat.S_IMODE((often / "checkpoints").stat().st_mode) == 0o700


@pytest.fixture(scope="module")
def resumed(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unseeded run that was interrupted, and has ended."""
    out = _copy(begun, tmp_path_factory.mktemp("resumed") / "run")
    out.joinpath("checkpoints").chmod(0o755)
    small.run(out, seed=None, resume=True)
    return out


def _outside_checkpoints(out: Path) -> dict[str, bytes]:
    files = small.contents(out)
    return {name: files[name] for name in files if not name.startswith("checkpoints")}


def _spellings(words: np.ndarray) -> list[bytes]:
    """How the words of a key might stand in a file: as bytes, in either order, or as text."""
    pair = int(words[0]) << 32 | int(words[1])
    texts = [spelt for word in (*map(int, words), pair) for spelt in (str(word), f"{word:x}", f"{word:X}")]
    return [words.astype("<u4").tobytes(), words.astype(">u4").tobytes(), *(text.encode() for text in texts)]


def test_keys_are_in_checkpoints_alone(resumed: Path):
    assert stat.S_IMODE((resumed / "checkpoints").stat().st_mode) == 0o700
    files = _outside_checkpoints(resumed)
    assert len(files) > 7
    for words in _words(_streams(resumed)).values():
        for spelling in (spelling for spelling in _spellings(words) if len(spelling) > 6):
            assert not [name for name, content in files.items() if spelling in content]


def test_no_file_holds_a_row(resumed: Path):
    """Neither its token ids nor the words that they stand for."""
    files = small.contents(resumed)
    for row in tiny.inputs().train_data.arrays["ids"]:
        ids, words = row.tolist(), [tiny.WORDS[token] for token in row]
        texts = [" ".join(words), json.dumps(words), json.dumps(ids), json.dumps(ids, indent=2), str(row)]
        binary = [row.astype(dtype).tobytes() for dtype in (np.uint8, np.int32, np.int64)]
        for spelling in (*(text.encode() for text in texts), *binary):
            assert not [name for name, content in files.items() if spelling in content]


@pytest.mark.slow
def test_no_word_of_a_row_is_said(finetune: Finetune, whole: Path, place: Path, tmp_path: Path):
    """A word that the rows alone have is in no file, and neither on stdout nor on stderr."""
    data = tmp_path / "SST-2"
    shutil.copytree(place / "SST-2", data)
    rows = (data / "train.tsv").read_text()
    (data / "train.tsv").write_text(rows.replace("film", "xylographer film"))
    ended = finetune(tmp_path / "run", data_dir=tmp_path)
    assert ended.status == 0 and "xylographer" not in ended.stdout + ended.stderr
    files = small.contents(tmp_path / "run")
    assert files and not [name for name, content in files.items() if b"xylographer" in content]


# Of public rows, of the settings, of the computer, or noised.
_NOT_OF_PRIVATE_ROWS = {
    "accuracy", "loss", "steps", "epsilon", "epsilon_claimed", "delta", "noise_multiplier",
    "median_step_seconds", "steps_per_second", "examples_per_second", "peak_memory_bytes", "peak_memory_of",
    "num_trained_parameters", "num_train_examples", "num_eval_examples", "num_eval_cut", "versions", "device",
    "eval_data", "initial_model", "wtdp_jax", "jax", "jax_enable_x64", "jax_default_matmul_precision",
    "jax_threefry_partitionable", "num_steps", "sensitivity", "sampling_prob",
}  # fmt: skip


def test_what_is_told_of_private_rows_says_so(resumed: Path):
    """metrics.jsonl has its own test beside `train`."""
    config: dict[str, Any] = read_json(resumed / "config.json")
    told = {*read_json(resumed / "results.json"), *config["identity"], *config["plan"]}
    assert {name for name in told if name.startswith("non_private_")} == {
        "non_private_not_finite",
        "non_private_num_train_cut",
        "non_private_train_data",
    }
    assert {name for name in told if not name.startswith("non_private_")} <= _NOT_OF_PRIVATE_ROWS
