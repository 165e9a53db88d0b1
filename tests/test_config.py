import json
from pathlib import Path

import pytest

from wtdp_jax.config import TrainConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"epsilon": 0.0}, "epsilon must be positive and finite, got 0.0"),
        ({"epsilon": float("nan")}, "epsilon must be positive and finite, got nan"),
        ({"epsilon": float("inf")}, "epsilon must be positive and finite, got inf"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be positive and finite, got -1.0"),
        ({"l2_clip_norm": 0.0}, "l2_clip_norm must be positive and finite, got 0.0"),
        ({"delta": 1.0}, r"delta must be in \(0, 1\), got 1.0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*63\), got -1"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "give epsilon or noise_multiplier, not both"),
        ({"steps": 1, "epochs": 1.0}, "give steps or epochs, not both"),
        ({"regime": "nonprivate", "epsilon": 1.0}, "epsilon has no meaning with regime nonprivate, got 1.0"),
        ({"momentum": 0.9}, "momentum needs optimizer sgd, got 0.9 with adam"),
        ({"trainable": "("}, "trainable must be a regular expression, got '\\('"),
        ({"double_noise": "["}, "double_noise must be a regular expression, got '\\['"),
        (
            {"regime": "nonprivate", "double_noise": "wte"},
            "double_noise has no meaning with regime nonprivate",
        ),
        ({"held_out_fraction": 1.0}, r"held_out_fraction must be in \[0, 1\), got 1.0"),
    ],
)
def test_refuses_in_one_line(fields: dict, message: str):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        TrainConfig(**fields)
    assert "\n" not in str(caught.value)


def test_the_target_has_a_default():
    assert TrainConfig().target_epsilon == 3.0
    assert TrainConfig(epsilon=1.0).target_epsilon == 1.0


def test_steps_from_epochs_round_up():
    # 2 epochs of 100 examples in batches of 30: 200 / 30 = 6.67.
    assert TrainConfig(epochs=2.0, batch_size=30).num_steps(100) == 7
    assert TrainConfig(steps=5, batch_size=30).num_steps(100) == 5


def test_settings_are_plain_json():
    settings = TrainConfig(out=Path("a/b"), label_words=(" no", " yes")).to_json()
    assert settings == json.loads(json.dumps(settings))
    assert settings["out"] == "a/b" and settings["label_words"] == [" no", " yes"]
