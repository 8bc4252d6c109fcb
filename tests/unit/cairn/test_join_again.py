"""A peer that was in a run enters it again whatever its network does meanwhile; for others the error is final."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cairn.commands import join
from peer.coordinator_client import CoordinatorRefused, CoordinatorUnreachable

MEMBERSHIP = cast(Any, SimpleNamespace())


class Entry:
    """Fails with each of these errors, then succeeds."""

    def __init__(self, *errors: Exception):
        self.errors = list(errors)

    async def __call__(self) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return MEMBERSHIP


async def test_a_peer_that_was_in_the_run_tries_again_while_nobody_answers(monkeypatch, caplog):
    monkeypatch.setattr(join, "AGAIN_SECONDS", 0.01)
    stopping = asyncio.get_running_loop().create_future()
    entry = Entry(CoordinatorUnreachable("no route to host"), CoordinatorUnreachable("no route to host"))
    assert await join.entered(entry, stopping, again=True) is MEMBERSHIP
    assert caplog.text.count("no route to host. This peer was in the run: it tries again") == 2


@pytest.mark.parametrize(("error", "again"), [(CoordinatorUnreachable("x"), False), (CoordinatorRefused("x"), True)])
async def test_what_waiting_does_not_mend_is_told_at_once(error: Exception, again: bool):
    stopping = asyncio.get_running_loop().create_future()
    with pytest.raises(type(error)):
        await join.entered(Entry(error), stopping, again=again)


async def test_a_stop_ends_the_waiting(monkeypatch):
    monkeypatch.setattr(join, "AGAIN_SECONDS", 3600.0)
    stopping: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    entering = asyncio.ensure_future(join.entered(Entry(CoordinatorUnreachable("x")), stopping, again=True))
    await asyncio.sleep(0)
    stopping.set_result(None)
    assert await entering is None
