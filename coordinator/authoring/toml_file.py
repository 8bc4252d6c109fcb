"""The reading of TOML files that people write: bounded, and with a line for each mistake."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from protocol.errors import CairnError, os_reason

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

MAX_FILE = 1024 * 1024


def read_tables(path: Path, error: type[CairnError], remedy: str) -> tuple[dict[str, Any], str]:
    """Return the tables of a TOML file, and its text. Raises `error`, with the remedy where the file is none."""
    text = read_text(path, error, remedy)
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as e:
        raise error(f"{path}: not TOML: {e}") from None
    except RecursionError:
        raise error(f"{path}: not TOML that can be read: nested too deep") from None


def read_text(path: Path, error: type[CairnError], remedy: str) -> str:
    """Return the text of a file of at most MAX_FILE bytes. Raises `error`."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise error(f"{path}: larger than {MAX_FILE >> 10} KiB: {remedy}")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise error(f"{path}: cannot be read: {os_reason(e)}: {remedy}") from None
    except UnicodeDecodeError:
        raise error(f"{path}: not UTF-8 text: {remedy}") from None


def problems(
    error: ValidationError,
    path: Path,
    text: str,
    model: type[BaseModel],
    *,
    missing: str = "is missing",
    shows_values: bool = True,
    filled_in: Mapping[tuple[int | str, ...], Collection[tuple[int | str, ...]]] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield one line for each problem of a file that `model` describes: file:line: field: problem (value).

    `missing` is said of a missing field. A mistake in a field that others follow from (`filled_in`) is reported once.
    Without `shows_values` no value is shown: it may be a secret.
    """
    errors = error.errors()
    wrong = {e["loc"] for e in errors}
    for e in errors:
        if not wrong.isdisjoint(filled_in.get(e["loc"], ())):
            continue
        loc = [p for p in e["loc"] if p not in ("str", "list[str]")]
        field, message = ".".join(map(str, loc)), e["msg"].removeprefix("Value error, ")
        if e["type"] == "missing":
            message = missing
        elif e["type"] == "extra_forbidden":
            meant = _meant(str(loc[-1]), loc[:-1], model)
            message = f"is not a field; did you mean {meant}?" if meant else "is not a field: remove it"
        elif e["type"] != "value_error" and shows_values:
            message = f"{message} (found {str(e['input'])[:60]!r})"
        elif not loc and ": " in message:  # a check over several tables begins with the name of its field
            field, message = message.split(": ", 1)
            loc = field.split(".")
        line = _line_of(loc, text)
        yield f"{path}{f':{line}' if line else ''}: {field or 'the file'}: {message}"


def _meant(name: str, table: list[Any], model: type[BaseModel]) -> str:
    """Return the field that an unknown one of a table may stand for, with its table if that is another; else ""."""
    fields = _fields_at(table, model)
    if near := difflib.get_close_matches(name, fields, n=1):
        return near[0]
    words = name.split("_")
    initials = "".join(word[:1] for word in words)
    if alike := [f for f in fields if f == initials or f in words or name in f.split("_")]:
        return alike[0]
    elsewhere = [t for t in model.model_fields if [t] != table and name in _fields_at([t], model)]
    return f"{elsewhere[0]}.{name}" if elsewhere else ""


def _fields_at(loc: list[Any], model: type[BaseModel]) -> list[str]:
    """Return the names of the fields in a table of such a file."""
    found: type[BaseModel] | None = model
    for part in loc:
        annotation = found.model_fields[part].annotation if found and part in found.model_fields else None
        candidates = (annotation, *get_args(annotation))
        found = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return list(found.model_fields) if found else []


def _line_of(loc: list[Any], text: str) -> int | None:
    """Return the line that sets a field or begins its table; None if neither is found."""
    names = [p for p in loc if isinstance(p, str)]
    table, table_line = [], None
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split("#", 1)[0].strip()
        if bare.startswith("["):
            table = [p.strip().strip("\"'") for p in bare.strip("[]").split(".")]
            if table == names:
                return number
            if table and table == names[: len(table)]:
                table_line = number
        elif "=" in bare:
            key = [p.strip().strip("\"'") for p in bare.split("=", 1)[0].split(".")]
            if table + key == names or (table + key == names[: len(table + key)]):
                return number
    return table_line
