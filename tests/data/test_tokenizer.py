"""Loading a tokenizer, and the line that says why it could not be."""

import pytest

from wtdp_jax.data import load_tokenizer


def test_loads_from_a_folder(reference_data):
    assert load_tokenizer(reference_data / "tokenizer_gpt2")("Hello world")["input_ids"] == [15496, 995]


@pytest.mark.parametrize("name", ["no/such/folder", "empty"])
def test_a_folder_without_a_tokenizer_gives_one_line(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="tokenizer cannot be loaded from") as caught:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(caught.value) and name in str(caught.value)
