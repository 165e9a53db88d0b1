import json
from pathlib import Path

from wtdp_jax.metrics import MetricsLog, read_metrics


def test_one_json_object_a_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(0, eval_loss=0.5)
        log.append(1, seconds=2.0, examples=3)
        # Readable while the run is under way.
        assert len(read_metrics(path)) == 2
    assert path.read_text() == '{"step": 0, "eval_loss": 0.5}\n{"step": 1, "seconds": 2.0, "examples": 3}\n'


def test_values_that_json_cannot_hold_become_null(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(1, a=float("inf"), b=float("nan"), c=1.0)
    # `parse_constant` sees Infinity and NaN, which are not JSON.
    (row,) = [json.loads(line, parse_constant=lambda name: name) for line in path.read_text().splitlines()]
    assert row == {"step": 1, "a": None, "b": None, "c": 1.0}


def test_cut_back_to_a_step(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(5):
            log.append(step, loss=step / 3)
    before = path.read_text().splitlines()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # what a crash leaves
    with MetricsLog(path, keep_through_step=2) as log:
        log.append(3, loss=9.0)
    assert path.read_text().splitlines() == [*before[:3], '{"step": 3, "loss": 9.0}']


def test_a_new_log_starts_empty(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(0, loss=1.0)
    with MetricsLog(path):
        pass
    assert read_metrics(path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
