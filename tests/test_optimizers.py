from pathlib import Path

import numpy as np
import pytest

from wtdp_jax.config import TrainConfig
from wtdp_jax.optimizers import learning_rate_schedule


def _rates(num_steps: int, **changes) -> list[float]:
    schedule = learning_rate_schedule(
        TrainConfig(learning_rate=1.0, out=Path("unused"), **changes), num_steps
    )
    return [float(schedule(step)) for step in range(num_steps)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 3 / 4, 1 / 2, 1 / 4]),
        ({"schedule": "linear", "warmup_steps": 2}, [1 / 2, 1, 1, 1 / 2]),
        # (1 + cos(pi t / 4)) / 2
        ({"schedule": "cosine"}, [1, 0.8535534, 0.5, 0.1464466]),
        ({"schedule": "linear", "schedule_steps": 8}, [1, 7 / 8, 6 / 8, 5 / 8]),
        ({"schedule": "linear", "schedule_steps": 8, "warmup_steps": 2}, [1 / 2, 1, 1, 5 / 6]),
        ({"schedule": "constant", "warmup_steps": 3}, [1 / 3, 2 / 3, 1, 1]),
    ],
)
def test_course_of_the_learning_rate(changes: dict, expected: list[float]):
    np.testing.assert_allclose(_rates(4, **changes), expected, rtol=1e-6)


def test_a_warmup_that_never_ends_is_refused():
    with pytest.raises(ValueError, match=r"warmup_steps must be below the number of steps \(4\), got 4"):
        _rates(4, warmup_steps=4)


def test_a_schedule_of_fewer_steps_than_are_taken_is_refused():
    with pytest.raises(ValueError, match=r"schedule_steps must be at least the number of steps \(4\), got 3"):
        _rates(4, schedule_steps=3)
