"""A peer without the last state leaves once the coordinator has that state, and not for an earlier one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.coordinator_client import LastState, RunInfo
from peer.node import end_of_run
from peer.node.end_of_run import EndOfRun
from protocol.ids import Digest
from protocol.messages import Directive
from protocol.rounds import events as ev
from tests.simulation.signer import FakeSigner, certificate
from tests.support.rounds_bench import OTHERS, RUN, STATE, Bench
from tests.support.specs import digest, tiny_spec
from tests.support.waiting import ended


class Client:
    """A coordinator that gives the same answer each time."""

    def __init__(self, last: LastState | None):
        self.info = RunInfo(tiny_spec(), b"", (), "", "ended by its owner", last)
        self.asked = 0
        self.twice = asyncio.Event()

    async def get_run_again(self) -> RunInfo:
        self.asked += 1
        if self.asked == 2:
            self.twice.set()
        return self.info


def behind() -> Bench:
    """Return a machine of a run that is over, which has the last record and not its state."""
    b = Bench()
    record: Any = b.record(OTHERS[0], [b.header(OTHERS[0])])
    b.step(ev.CertificateReceived(certificate(record, [OTHERS[0]]), OTHERS[0]))
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, run_status="ended"))))
    assert b.machine.summary(b.now).head == b.chain.genesis != b.chain.head
    return b


@pytest.mark.parametrize(
    "record, archived, leaves",
    [
        ("head", True, True),
        ("head", False, False),
        ("before", True, False),
        ("another branch", True, True),
        (None, False, False),
    ],
)
async def test_who_is_behind_leaves_for_the_state_of_the_head_or_of_another_branch(
    record: str | None, archived: bool, leaves: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(end_of_run, "POLL_SECONDS", 0.01)
    b = behind()
    records: dict[str, Digest] = {"head": b.chain.head, "before": b.chain.genesis, "another branch": digest("other")}
    client = Client(None if record is None else LastState(records[record], 1, STATE if archived else None))
    end = EndOfRun(cast(Any, SimpleNamespace(client=client, spec=client.info.spec)), b.machine)
    reasons: list[str] = []

    async def ask_members() -> None:
        raise AssertionError("the coordinator answers")

    running = asyncio.create_task(end.run(ask_members, reasons.append))
    twice = asyncio.create_task(client.twice.wait())
    await ended(asyncio.wait({running, twice}, return_when=asyncio.FIRST_COMPLETED))
    assert reasons == (["the run is ended by its owner"] if leaves else [])
    running.cancel()
    twice.cancel()
    await asyncio.gather(running, twice, return_exceptions=True)
