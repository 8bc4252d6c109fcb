"""A peer that cannot be admitted yet follows the chain, says so, and is admitted when the coordinator is back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peer.coordinator_client import CoordinatorRefused, CoordinatorUnreachable, GrantedAdmission
from peer.node import admission_wait
from peer.node.admission_wait import wait_until_admitted
from peer.node.builder import build_node
from peer.node.enrollment import Enrollment
from peer.node.network import Network
from peer.node.node import Node
from peer.node.options import NodeOptions
from peer.store import Store
from peer.swarm.pace import Paces
from protocol.coordinator_address import CoordinatorAddress, sign_coordinator_address
from protocol.errors import CairnError
from protocol.ids import Digest
from protocol.invite import HostPort
from tests.support.coordinator_fakes import make_spec, state
from tests.support.specs import OWNER, admission, identity
from tests.support.waiting import LIMIT, NEVER, ended, until

PACES = Paces()
SPEC = make_spec(genesis={"digest": state(0).hex(), "size": 524_288})
ME = identity("me")


async def forever(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


async def at_once(*_: Any, **__: Any) -> None:
    return


class Away:
    """A coordinator that is away until the client receives a new address of it, or for good."""

    def __init__(self):
        self.asked = 0
        self.says: CairnError | None = CoordinatorUnreachable("nobody answers")
        self.closed = False

    def moved(self, to: CoordinatorAddress) -> None:
        self.says = None

    async def admit(self, who, name: str, *, nonce: int) -> GrantedAdmission:
        self.asked += 1
        if self.says is not None:
            raise self.says
        return GrantedAdmission(admission(SPEC, who, not_after=int(time.time()) + 86_400), (), 0.0)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch):
    """A membership whose network finds nobody, and whose blobs are fetched at once."""
    for name in ("start", "stop"):
        monkeypatch.setattr(Network, name, at_once)
    for name in ("discover", "keep_running"):
        monkeypatch.setattr(Network, name, forever)
    monkeypatch.setattr(admission_wait, "fetch_assets", at_once)
    monkeypatch.setattr(admission_wait, "REQUEST_SECONDS", 0.05)
    with Store(tmp_path / "store", 1 << 30) as store:
        client: Any = Away()
        yield Enrollment(ME, SPEC, store, client, "me", b"")


async def asked(newcomer: Enrollment, times: int) -> None:
    """Wait until the coordinator has been asked this number of times."""
    client: Any = newcomer.client
    await until(lambda: client.asked >= times, f"the coordinator is asked {times} times")


async def test_it_asks_again_says_so_and_leaves_the_swarm_when_it_is_admitted(newcomer, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    nodes: list[Node] = []
    monkeypatch.setattr(
        admission_wait,
        "build_node",
        lambda *given, paces: nodes.append(build_node(*given, paces=paces)) or nodes[-1],
    )
    waits = asyncio.create_task(wait_until_admitted(newcomer, NodeOptions(tmp_path), PACES))
    await asked(newcomer, 3)
    (node,) = nodes
    assert node.network.paces is PACES
    assert not waits.done() and node.snapshot().phase == "observing" and not newcomer.seconds_left()
    assert caplog.text.count("waiting for the coordinator") == 1  # not at each attempt
    monkeypatch.setattr(admission_wait, "REQUEST_SECONDS", NEVER)
    await asyncio.sleep(0.1)
    word = sign_coordinator_address(OWNER, CoordinatorAddress(SPEC.run_id, 5, (HostPort("c", 1),), Digest(bytes(32))))
    node.membership.locator.accept(word.encoded)  # a member tells: it is asked at once, not after an hour
    await ended(waits)
    assert newcomer.seconds_left() > 80_000 and newcomer.locator.newest == word
    assert node.snapshot().finished and not newcomer.client.closed


async def test_the_coordinators_own_words_are_told_as_they_may_hold_the_remedy(newcomer, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(admission_wait, "REPORT_SECONDS", 0.0)
    newcomer.client.says = CoordinatorUnreachable("the coordinator is busy: start a peer that was admitted before")
    waits = asyncio.create_task(wait_until_admitted(newcomer, NodeOptions(tmp_path), PACES))
    await until(lambda: "admitted before. Nobody else can admit" in caplog.text, "the reason is told")
    assert "away" not in caplog.text
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(waits)


async def test_a_refusal_ends_it_with_the_coordinators_reason(newcomer, tmp_path):
    newcomer.client.says = CoordinatorRefused("the invite's code is not valid")
    with pytest.raises(CoordinatorRefused, match="not valid"):
        await ended(wait_until_admitted(newcomer, NodeOptions(tmp_path), PACES))


async def test_ctrl_c_ends_it(newcomer, tmp_path):
    waits = asyncio.create_task(wait_until_admitted(newcomer, NodeOptions(tmp_path), PACES))
    await asked(newcomer, 1)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(waits)


async def test_a_long_chain_is_read_beside_the_event_loop(newcomer, tmp_path, monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()

    def certificates(self: Store) -> Iterator[bytes]:
        begun.set()
        assert goes_on.wait(LIMIT if threading.current_thread() is not threading.main_thread() else 0)
        yield from ()

    monkeypatch.setattr(Store, "certificates", certificates)
    waits = asyncio.create_task(wait_until_admitted(newcomer, NodeOptions(tmp_path), PACES))
    await until(lambda: begun.is_set() or waits.done(), "the chain is read")
    assert not waits.done()
    goes_on.set()
    await asked(newcomer, 1)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(waits)


async def test_what_ends_the_observer_ends_the_waiting(newcomer, tmp_path, monkeypatch):
    async def broken(*_: Any) -> None:
        raise CairnError("libp2p's daemon did not start")

    monkeypatch.setattr(Network, "start", broken)
    with pytest.raises(CairnError, match="did not start"):
        await ended(wait_until_admitted(newcomer, NodeOptions(tmp_path), PACES))
