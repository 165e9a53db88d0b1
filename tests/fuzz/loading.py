"""What must hold of whatever reads a file or a command line, and how files are damaged."""

import copy
import json
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st

_Loaded = TypeVar("_Loaded")


def loaded_or_refused(load: Callable[[], _Loaded], *names: str) -> _Loaded | None:
    """What a loader returns, or None where it refuses in one line that names the file or the field.

    Any other exception passes, and is a failure.

    Args:
        load: the loader.
        *names: one of them must be in the message.
    """
    try:
        return load()
    except (ValueError, OSError) as error:
        assert_one_line(str(error), *names)
        return None


def assert_one_line(message: str, *names: str) -> None:
    """That a message is one line for a terminal, and says what it is about."""
    assert message.isprintable(), repr(message)
    assert any(name in message for name in names), (message, names)


numbers = st.one_of(
    st.integers(-3, 70),
    st.sampled_from((2**31, 2**63, -(2**63), 10**25, 10**400)),
    st.floats(),
    st.sampled_from((0.0, -0.0, 1e308, 1e-320)),
)
strings = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ("", "\n", "two\nlines", "\0", "\ud800", "\x1b[31m", "../up", "/etc", "x" * 5000, "1", "gpt2")
    ),
)
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, strings),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(strings, inner, max_size=3)),
    max_leaves=6,
)
"""Whatever JSON can hold, and what Python's reader takes besides."""


@st.composite
def damaged_objects(draw: Any, base: Any, *, some: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object with one to three of its entries, at any depth, replaced, taken away or added.

    Args:
        draw: given by hypothesis.
        base: a strategy of sound objects.
        some: for names of entries, strategies of values that are nearly right.
    """
    content = copy.deepcopy(draw(base))
    for _ in range(draw(st.integers(1, 3))):
        inner = content
        while nested := [value for value in inner.values() if isinstance(value, dict) and value]:
            if draw(st.booleans()):
                break
            inner = draw(st.sampled_from(nested))
        known = st.sampled_from(sorted({*inner, *(some or {})}) or [""])
        name = draw(st.one_of(known, known, known, strings))
        nearly = (some or {}).get(name, values)
        what = draw(st.sampled_from(("replace", "replace", "nearly", "nearly", "remove")))
        if what == "remove":
            inner.pop(name, None)
        else:
            inner[name] = draw(values if what == "replace" else nearly)
    return content


@st.composite
def damaged_bytes(draw: Any, base: Any) -> bytes:
    """Bytes that are cut off, or overwritten or extended at some place; or as they were."""
    content = draw(base)
    what = draw(st.sampled_from(("keep", "keep", "cut", "overwrite", "insert")))
    where = draw(st.integers(0, len(content)))
    piece = draw(
        st.one_of(
            st.binary(max_size=4), st.sampled_from((b"\xff", b"\0", b"\xef\xbb\xbf", b"\r", b'"', b"{", b"}"))
        )
    )
    return {
        "keep": content,
        "cut": content[:where],
        "overwrite": content[:where] + piece + content[where + len(piece) :],
        "insert": content[:where] + piece + content[where:],
    }[what]


def to_json(content: Any) -> bytes:
    """JSON as a file holds it, with escapes for what UTF-8 has no place for."""
    return json.dumps(content).encode()
