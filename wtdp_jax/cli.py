"""What the scripts share: settings from the command line, and errors in one line."""

import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Iterator
from typing import TypeVar

import tyro

from wtdp_jax.messages import printable

# At every start transformers remarks that there is no PyTorch; a script's stderr is for what matters.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

Config = TypeVar("Config")

USAGE_ERROR = 2
"""Exit status after bad input."""

_SHOWN = 250
"""Characters of an error that are shown of either end; what was wrong may be a file without a line's end."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def parse(config_type: type[Config]) -> Config:
    """Builds a dataclass of settings from the command line; leaves with one line on stderr if it is wrong."""
    box = io.StringIO()
    try:
        # tyro reports a mistake as a box of many lines; `--help` goes to stdout and passes through.
        with contextlib.redirect_stderr(box):
            return tyro.cli(config_type)
    except SystemExit as leaving:
        if leaving.code == USAGE_ERROR:
            fail(_message(box.getvalue(), config_type.__name__))
        raise


def fail(message: object) -> None:
    """Writes one line `error: ...` on stderr and leaves with status 2."""
    line = printable(str(message).strip().partition("\n")[0])
    shown = line if len(line) <= 2 * _SHOWN else f"{line[:_SHOWN]} ... {line[-_SHOWN:]}"
    print(f"error: {shown}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


@contextlib.contextmanager
def one_line_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these kinds, and an interruption, into one line on stderr; others keep their traceback.

    The exit status is 2, or 130 after an interruption, as shells have it.
    """
    try:
        yield
    except kinds as error:
        fail(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _message(box: str, config_name: str) -> str:
    """The first paragraph in one of tyro's boxes, without title, frame and colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    rows = [row.strip(" │") for row in plain.splitlines()[1:]]
    paragraph = itertools.takewhile(_is_text, itertools.dropwhile(lambda row: not _is_text(row), rows))
    message = " ".join(paragraph)
    # What the settings' own checks say stands behind this.
    return message.removeprefix(f"Error parsing {config_name}: ")


def _is_text(row: str) -> bool:
    """Whether a row is more than white space or a rule."""
    return bool(row.strip("─-"))
