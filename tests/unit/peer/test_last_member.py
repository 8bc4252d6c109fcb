"""The last member to leave gives the coordinator what it fetches; any other leaves at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from peer.node import last_member
from peer.node.last_member import QUIET_BYTES, serve_coordinator
from protocol.messages import Certificate
from tests.support.signed import CERTIFICATE
from tests.support.waiting import ended


class Uplink:
    """Sends as a test says, by the number of looks at it."""

    def __init__(
        self, sent: Callable[[int], int], alone: Callable[[int], bool] = lambda looks: True, followed_after: int = 0
    ):
        self.looks = 0
        self._sent, self._alone, self._followed_after = sent, alone, followed_after

    @property
    def bytes_up(self) -> int:
        return self._sent(self.looks)

    def is_alone_with_coordinator(self) -> bool:
        self.looks += 1
        return self._alone(self.looks)

    async def coordinator_follows(self, newest: Certificate) -> bool:
        return newest is CERTIFICATE and self.looks > self._followed_after


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch):
    """Let each look take a tenth of a second of a time of its own."""
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        await real_sleep(0)

    real_sleep = asyncio.sleep
    monkeypatch.setattr(last_member.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(last_member.asyncio, "sleep", sleep)


@pytest.mark.parametrize(
    "uplink, looks",
    [
        (Uplink(lambda looks: 0), range(20, 23)),
        (Uplink(lambda looks: QUIET_BYTES * 2 * min(looks, 100)), range(120, 123)),
        (Uplink(lambda looks: QUIET_BYTES * 2 * looks), range(300, 303)),
        (Uplink(lambda looks: QUIET_BYTES * 2 * looks, lambda looks: looks < 50), range(50, 51)),
        (Uplink(lambda looks: 10**9, lambda looks: False), range(1, 2)),
        (Uplink(lambda looks: 0, followed_after=5), range(26, 29)),
        (Uplink(lambda looks: 0, followed_after=10**9), range(30, 33)),
    ],
    ids=[
        "nothing is fetched",
        "until it is given",
        "not for ever",
        "until another is back",
        "not the last",
        "until the record is followed",
        "not for ever for that",
    ],  # fmt: skip
)
async def test_the_last_member_stays_while_the_coordinator_fetches(uplink: Uplink, looks: range):
    await ended(serve_coordinator(uplink, CERTIFICATE))
    assert uplink.looks in looks
