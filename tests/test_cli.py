"""What a script says when it stops early."""

import pytest

from wtdp_jax import cli


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (
            ValueError("epsilon must be positive, got -1\nmore"),
            2,
            "error: epsilon must be positive, got -1\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_one_line(raised: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving, cli.one_line_errors(ValueError):
        raise raised
    assert leaving.value.code == status
    assert capsys.readouterr().err == said


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(KeyError), cli.one_line_errors(ValueError):
        raise KeyError("labels")
