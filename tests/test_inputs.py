"""What a run works on, as the settings say."""

import numpy as np
import pytest

from wtdp_jax import inputs
from wtdp_jax.config import TrainConfig


def test_held_out_rows_are_evaluated_on_and_dev_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    splits, load_split = [], inputs.load_split

    def counted(task, split, data_dir):
        splits.append(split)
        return load_split(task, split, data_dir)

    monkeypatch.setattr(inputs, "load_split", counted)
    loaded = inputs.load(TrainConfig(held_out_fraction=0.02))
    assert splits == ["train"] and len(loaded.eval_data) == 200 and len(loaded.train_data) == 9800
    width = min(loaded.train_data.arrays["ids"].shape[1], loaded.eval_data.arrays["ids"].shape[1])
    trained = {tuple(row[:width]) for row in loaded.train_data.arrays["ids"]}
    assert not trained & {tuple(row[:width]) for row in loaded.eval_data.arrays["ids"]}


def test_an_untied_head_starts_as_a_copy_of_the_embedding() -> None:
    tied, untied = (inputs.load(TrainConfig(tie_embeddings=tie)) for tie in (True, False))
    assert not untied.model.config.tie_embeddings
    embedding = np.asarray(tied.params["wte"]["embedding"])
    np.testing.assert_array_equal(untied.params["wte"]["embedding"], embedding)
    np.testing.assert_array_equal(untied.params["lm_head"]["kernel"], embedding.T)
