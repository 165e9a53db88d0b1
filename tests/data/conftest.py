"""Where the public data sets and GPT-2's tokenizer lie beside the repository, if they do."""

from pathlib import Path

import pytest

_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """The folder with the data sets; skips the test where there is none."""
    if not _FOLDER.is_dir():
        pytest.skip(f"needs the public data sets in {_FOLDER}")
    return _FOLDER
