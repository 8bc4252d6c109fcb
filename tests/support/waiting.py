"""Wait for events instead of seconds, so that tests pass on a machine of any speed.

A product timeout that a test expects NOT to run out is best set to `NEVER`: the test then fails by `LIMIT` if it does.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import async_timeout

T = TypeVar("T")

LIMIT = 480.0
"""Seconds after which a wait fails. It only has to be longer than the slowest machine needs."""

NEVER = 3600.0
"""Seconds: a product timeout that outlasts every test."""


class NotInTime(AssertionError):
    """An event did not come before the limit."""


async def until(
    predicate: Callable[[], T | Awaitable[T]], what: str = "", *, seconds: float = LIMIT, every: float = 0.01
) -> T:
    """Return the first true value of `predicate`, which may be a coroutine function.

    Raise NotInTime, with `what` was awaited and the last value, when there is none within `seconds`.
    """
    end = time.monotonic() + seconds
    while True:
        seen = predicate()
        if inspect.isawaitable(seen):
            seen = await seen
        if seen:
            return cast(T, seen)
        if time.monotonic() > end:
            raise NotInTime(_missed(what, seconds, seen))
        await asyncio.sleep(every)


def wait_until(predicate: Callable[[], T], what: str = "", *, seconds: float = LIMIT, every: float = 0.01) -> T:
    """Return the first true value of `predicate`, as `until` does, in a test without an event loop."""
    end = time.monotonic() + seconds
    while not (seen := predicate()):
        if time.monotonic() > end:
            raise NotInTime(_missed(what, seconds, seen))
        time.sleep(every)
    return seen


async def ended(awaitable: Awaitable[T], seconds: float = LIMIT) -> T:
    """Return the result of `awaitable`. Raise TimeoutError when it has not ended within `seconds`."""
    async with async_timeout.timeout(seconds):
        return await awaitable


def _missed(what: str, seconds: float, seen: object) -> str:
    return f"not within {seconds:.0f} s: {what or 'what the test waits for'}; last seen: {seen!r}"
