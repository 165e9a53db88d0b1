"""A user's own task as a JSON file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from wtdp_jax.data.tasks import HubSource, Task

_FIELDS = ("name", "prompt", "label_words", "label_column", "folder", "hub")


def read_task(path: Path) -> Task:
    """Reads a task from a JSON file.

    The file must hold ``prompt`` and ``label_words``; it may hold ``name`` (default: the file's),
    ``label_column``, ``folder`` and ``hub``, with the meaning they have in ``Task`` and ``HubSource``::

        {
          "prompt": "{review} Overall:",
          "label_words": {"neg": " bad", "pos": " good"},
          "label_column": "opinion"
        }

    The user's ``train.tsv`` and ``dev.tsv`` then have the columns ``review`` and ``opinion``.

    Raises:
      ValueError: in one line that names the file, if it is missing, not JSON, or not a valid task.
    """
    try:
        return _parse_task({"name": path.stem, **_json_object(path.name, json.loads(path.read_bytes()))})
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: must be JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError(f"{path}: must be JSON that is not nested this deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse_task(fields: dict[str, Any]) -> Task:
    _check_names(fields, allowed=_FIELDS, required=("prompt", "label_words"))
    words = _strings("label_words", _json_object("label_words", fields.pop("label_words")))
    hub = _parse_hub(fields.pop("hub")) if "hub" in fields else None
    return Task(**_strings("task", fields), label_words=words, hub=hub)


def _parse_hub(value: Any) -> HubSource:
    fields = _strings("hub", _json_object("hub", value))
    allowed = tuple(field.name for field in dataclasses.fields(HubSource))
    _check_names(fields, allowed=allowed, required=("path",))
    return HubSource(**fields)


def _check_names(fields: dict[str, Any], *, allowed: tuple[str, ...], required: tuple[str, ...]) -> None:
    for name in fields:
        if name not in allowed:
            raise ValueError(f"field must be one of {', '.join(allowed)}, got {name!r}")
    for name in required:
        if name not in fields:
            raise ValueError(f"field {name!r} must be given, got only {', '.join(fields)}")


def _json_object(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, got {value!r}")
    return value


def _strings(what: str, fields: dict[str, Any]) -> dict[str, Any]:
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ValueError(f"{what} must hold strings, got {name!r}: {value!r}")
    return fields
