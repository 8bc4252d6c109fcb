"""Work that others wait for is done to its end, and its failure is one line."""

from __future__ import annotations

import asyncio
import logging

import pytest

from coordinator.errors import RefusedError
from coordinator.tasks import finish
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio


async def test_work_goes_on_though_the_caller_goes_away_and_a_failure_then_is_one_line(caplog):
    caplog.set_level(logging.WARNING)
    may_end, ended = asyncio.Event(), []

    async def work(fails: bool) -> int:
        await may_end.wait()
        ended.append(fails)
        if fails:
            raise RefusedError("too many peers")
        return 7

    callers = [asyncio.create_task(finish(work(fails))) for fails in (False, True)]
    await asyncio.sleep(0)
    for caller in callers:
        caller.cancel()
    assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*callers, return_exceptions=True))
    may_end.set()
    await until(lambda: len(ended) == 2 and caplog.records)
    assert ended == [False, True]
    assert [(r.getMessage(), r.exc_info) for r in caplog.records] == [
        ("after its caller was gone, a call failed: too many peers", None)
    ]


async def test_a_caller_that_stays_gets_result_and_failure():
    async def work(fails: bool) -> int:
        if fails:
            raise RefusedError("too many peers")
        return 7

    assert await finish(work(False)) == 7
    with pytest.raises(RefusedError, match="too many"):
        await finish(work(True))
