"""The one reader of JSON that strangers wrote: bounded, and with one meaning for every reader.

Other readers disagree about what this one refuses: keys that occur twice, NaN and Infinity, numbers that overflow,
text that is not Unicode. An integer stays an integer, and is never read from a float, a boolean or text.
"""

from __future__ import annotations

import json
import math
from typing import Any

from protocol.errors import MalformedError

MAX_JSON_DEPTH = 64
"""Maximum lists and objects around a value."""

MAX_JSON_FIELDS = 1024
"""Maximum keys of one object."""

MAX_JSON_VALUES = 1_000_000
"""Maximum values in a document, of about 64 bytes of memory each. The separators count, also those within text."""

MAX_DIGITS = 20
"""Maximum characters of an integer: reading one takes time that grows with the square of its length."""


def read_json(data: bytes, what: str, limit: int) -> Any:
    """Return the value in a JSON document of at most `limit` bytes. `what` names the document in errors.

    Raises MalformedError, in one line.
    """
    if len(data) > limit:
        raise MalformedError(f"{what} is larger than {limit:,} bytes")
    if sum(data.count(separator) for separator in (b",", b"[", b"{")) > MAX_JSON_VALUES:
        raise MalformedError(f"{what} holds more than {MAX_JSON_VALUES:,} values")
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_float,
        )
        _check_depth(value)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except RecursionError:
        raise MalformedError(f"{what} is nested more than {MAX_JSON_DEPTH} deep") from None
    except UnicodeError:
        raise MalformedError(f"{what} is not Unicode text") from None
    except json.JSONDecodeError as e:
        raise MalformedError(f"{what} is not JSON: {e}") from None
    except ValueError as e:
        raise MalformedError(f"{what}: {e}") from None
    return value


def integer_field(fields: dict[str, Any], name: str, top: int) -> int:
    """Return a field that is an integer from 0 to `top`, and no boolean. Raises MalformedError."""
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= top:
        raise MalformedError(f"{name} is not an integer from 0 to {top}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_JSON_FIELDS:
        raise ValueError(f"an object has more than {MAX_JSON_FIELDS} keys")
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:60]!a} occurs twice")
    return found


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        nested = [v for v in level if isinstance(v, dict | list)]
        if not nested:
            return
        level = [inner for v in nested for inner in (v.values() if isinstance(v, dict) else v)]
    raise RecursionError
