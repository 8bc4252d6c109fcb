"""Bounds on what a message's fields may hold. Each raises MalformedError, which names the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from protocol.errors import MalformedError
from protocol.ids import MAX_COUNT, PeerKey

M = TypeVar("M", bound=Message)


def bounded(what: str, value: int, top: int = MAX_COUNT) -> int:
    if value > top:
        raise MalformedError(f"{what} is {value}: at most {top} is accepted")
    return value


def finite(what: str, value: float) -> float:
    if not math.isfinite(value):
        raise MalformedError(f"{what} is not a finite number")
    return value


def rate(what: str, value: float) -> float:
    if not 0 <= value <= MAX_COUNT:
        raise MalformedError(f"{what} is not a number from 0 to {MAX_COUNT}")
    return value


def text(what: str, value: str, top: int) -> str:
    if len(value.encode()) > top or not value.isprintable():
        raise MalformedError(f"{what} is longer than {top} bytes or not printable")
    return value


def ascending(keys: Sequence[PeerKey]) -> bool:
    return all(a < b for a, b in zip(keys, keys[1:], strict=False))


def parsed(message: M, payload: bytes) -> M:
    try:
        message.ParseFromString(payload)
    except DecodeError:
        raise MalformedError(f"the payload is not a {type(message).__name__}") from None
    return message
