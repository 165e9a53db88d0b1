"""Command lines with anything in them: settings that can be written down, or one line and status 2."""

import contextlib
import dataclasses
import io
import json
import sys
from unittest import mock

from hypothesis import example
from hypothesis import strategies as st

from tests.fuzz.cases import count, drawn
from tests.fuzz.loading import assert_one_line
from wtdp_jax import cli
from wtdp_jax.config import TrainConfig

_FIELDS = [field.name for field in dataclasses.fields(TrainConfig)]

_values = st.one_of(
    st.sampled_from(
        ("0", "1", "-1", "32", "0.5", "1e-3", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000)
    ),
    st.sampled_from(("None", "True", "full", "dp", "ghost", "adam", "1_000", "0x10", " 3", "3 ", "١")),
    st.sampled_from(
        ("", "(", "[", "a{99999999999}", "(" * 5000, "wte|", "\udcff", "two\nlines", "\x1b[31m", "--", "-h")
    ),
    st.text(st.characters(exclude_characters="\0"), max_size=6),
)


@st.composite
def _arguments(draw: st.DrawFn) -> list[str]:
    arguments = []
    for name in draw(st.lists(st.sampled_from(_FIELDS), min_size=1, max_size=3)):
        flag = draw(
            st.sampled_from((f"--{name.replace('_', '-')}",) * 4 + (f"--{name}", f"--{name}x", f"-{name}"))
        )
        arguments += [
            flag,
            *draw(st.lists(_values, min_size=0, max_size=2).map(lambda found: found or ["1"])),
        ]
    return arguments


@drawn("command lines", arguments=_arguments())
@example(arguments=["--trainable", "a{99999999999}"])
@example(arguments=["--double-noise", "(" * 5000])
@example(arguments=["--steps", "9" * 5000])
@example(arguments=["--steps", "9" * 400])
@example(arguments=["--task", "\udcff", "--nowhere"])
def test_a_command_line_is_read_or_refused(arguments: list[str]) -> None:
    count("command lines")
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["finetune.py", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            config = cli.parse(TrainConfig)
        except SystemExit as leaving:
            if leaving.code != 0:
                assert leaving.code == cli.USAGE_ERROR
                said = err.getvalue()
                assert said.startswith("error: ") and said.endswith("\n") and not out.getvalue()
                assert len(said) < 600
                fields = [argument.lstrip("-").replace("-", "_") for argument in arguments]
                assert_one_line(said[:-1], *arguments, *fields, "Unrecognized options")
            return
    assert not err.getvalue()
    assert json.loads(json.dumps(config.to_json()))["task"] == config.task
