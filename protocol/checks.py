"""Bounds on what a message's fields may hold. Each raises MalformedError, which names the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from protocol.errors import MalformedError
from protocol.ids import MAX_COUNT
from protocol.plain_text import is_plain

M = TypeVar("M", bound=Message)

PARSE_ERRORS = (DecodeError, UnicodeDecodeError)
"""The errors of protobuf's parsers. The one in pure Python raises the second for a string that is not UTF-8."""


def bounded(what: str, value: int, top: int = MAX_COUNT) -> int:
    """Return the value, if it is at most `top`."""
    if value > top:
        raise MalformedError(f"{what} is {value}: at most {top} is accepted")
    return value


def finite(what: str, value: float) -> float:
    """Return the value, if it is a finite number: 0 for -0."""
    if not math.isfinite(value):
        raise MalformedError(f"{what} is not a finite number")
    return unsigned_zero(value)


def rate(what: str, value: float) -> float:
    """Return the value, if it is a number from 0 to MAX_COUNT."""
    if not 0 <= value <= MAX_COUNT:
        raise MalformedError(f"{what} is not a number from 0 to {MAX_COUNT}")
    return unsigned_zero(value)


def unsigned_zero(value: float) -> float:
    """Return the value; 0 for -0, which some implementations of protobuf write and others leave out as the default."""
    return value + 0.0


def text(what: str, value: str, top: int) -> str:
    """Return the value, if it is plain and has at most `top` bytes in UTF-8."""
    if len(value.encode()) > top or not is_plain(value):
        raise MalformedError(f"{what} is longer than {top} bytes or not printable")
    return value


def ascending(keys: Sequence[Any]) -> bool:
    """Return whether each key is greater than the one before it."""
    return all(a < b for a, b in zip(keys, keys[1:], strict=False))


def check_canonical(what: str, encoded: Message, payload: bytes) -> None:
    """Raise MalformedError unless the payload is the deterministic serialisation of what was decoded from it.

    Parsers of protobuf differ in what they overlook: unknown fields, a field that stands twice, another order. One
    message has one form, so all peers accept the same bytes.
    """
    if encoded.SerializeToString(deterministic=True) != payload:
        raise MalformedError(
            f"a {what} message is not in canonical form, or has fields that this version does not know: update the "
            "software"
        )


def parsed(message: M, payload: bytes) -> M:
    """Fill a protobuf message from its bytes and return it."""
    try:
        message.ParseFromString(payload)
    except PARSE_ERRORS:
        raise MalformedError(f"the payload is not a {type(message).__name__}") from None
    return message
