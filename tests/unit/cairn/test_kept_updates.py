"""The observer keeps the updates since the newest archived state, within its bound, and says what it has not got."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cairn.kept_updates import KeptUpdates
from coordinator.checkpoints.settings import ArchiveTable
from peer.errors import PeerError
from peer.node.peer_table import PeerEntry
from peer.store import StoreFull
from protocol.ids import Digest, PeerKey, Round
from protocol.message_codec import KeySigner
from protocol.messages import Certificate, Directive, Rollback
from tests.support.coordinator_fakes import peer, state
from tests.support.observer_world import SPEC, Observed
from tests.support.signed import PEERS, heartbeat
from tests.support.specs import OWNER
from tests.support.waiting import until

SIZE = 1000
NAMES = {peer(1).key: "ada", peer(2).key: "bob"}
HEARTBEAT = heartbeat(PEERS[1])


class Kept(Observed):
    """A chain with two contributors a round; a state is archived every 5 rounds. `given`: the rounds that come."""

    def __init__(self, folder: Path, **settings: Any):
        super().__init__(folder)
        self.given: Callable[[int], bool] = lambda number: True
        self.reason: Exception = PeerError("no holder is left")
        self.asked: list[int] = []
        self.blobs: set[Digest] = set()
        self.protected = self.state = frozenset[Digest]()
        self.here: list[int] = []
        self.looks = 0
        self.free = 10**12
        node = cast(Any, self.node)
        node.membership = SimpleNamespace(spec=SPEC)
        node.work = SimpleNamespace(jobs=SimpleNamespace(files=self))
        node.retention = SimpleNamespace(protect_blobs=self._protect, prune=self._prune)
        node.network.peers = SimpleNamespace(entries=self._entries)
        node.store = self
        self.start = lambda: KeptUpdates(node, self.view, ArchiveTable(**settings), lambda key: NAMES[key])

    def blob_sizes(self, certificate: Certificate) -> dict[Digest, int]:
        return {u.body.blob: SIZE for u in certificate.record.body.updates}

    async def round_files(self, certificate: Certificate) -> None:
        number = certificate.record.body.round
        self.asked.append(number)
        if not self.given(number):
            raise self.reason
        self.blobs |= set(self.blob_sizes(certificate))

    def has(self, digest: Digest) -> bool:
        return digest in self.blobs

    @property
    def free_bytes(self) -> int:
        return self.free - SIZE * len(self.blobs)

    def path(self, digest: Digest) -> Path:
        return self.node.folder / "blob"

    def _entries(self) -> dict[PeerKey, PeerEntry]:
        """Return those of `here`, of whom a heartbeat has just come."""
        now = time.monotonic()
        return {peer(n).key: PeerEntry(HEARTBEAT, now, now) for n in self.here}

    def _protect(self, blobs: frozenset[Digest]) -> None:
        self.looks += 1
        states = {state(number) for number in range(0, 20, 5)}
        self.protected, self.state = blobs - states, blobs & states

    async def _prune(self) -> None:
        self.blobs &= self.protected

    def of(self, *numbers: int) -> set[Digest]:
        """Return the blobs of these rounds."""
        path = self.chain.path(self.chain.root, self.chain.head)
        return {blob for n in numbers for blob in self.blob_sizes(path[n])}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run it as after a start."""
        task = asyncio.create_task(self.start().run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cairn.kept_updates.wait_at_most", lambda event, seconds: asyncio.sleep(0.005))
    monkeypatch.setattr("cairn.kept_updates.RETRY_SECONDS", 0.01)


def make(folder: Path, rounds: int, **settings: Any) -> Kept:
    k = Kept(folder, **settings)
    k.rounds(rounds, {1: 2, 2: 2})
    return k


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


async def test_the_rounds_since_the_newest_archived_state_are_kept_and_no_others(tmp_path: Path):
    k = make(tmp_path, 4)
    async with k.running():
        await until(lambda: k.blobs == k.of(0, 1, 2, 3), "all are here")
        assert k.asked == [3, 2, 1, 0]  # the newest is needed for the longest
        k.rounds(3, {1: 2, 2: 2})
        await until(lambda: k.of(5, 6) <= k.blobs, "those after the state of round 5 are here")
        assert k.protected == k.of(*range(7)) and 4 not in k.asked  # round 4 leads to a state that is being archived
        await k.archive_newest()
        await until(lambda: k.blobs == k.of(5, 6) == k.protected, "those before the archived state are gone")
        assert k.asked.count(6) == k.asked.count(5) == 1 and k.view.updates_problem == ""


async def test_after_a_restart_what_is_held_is_checked_once_and_nothing_older_is_wanted(tmp_path: Path):
    k = make(tmp_path, 7)
    await k.archive_newest()
    k.blobs = k.of(5, 6)
    async with k.running():
        await until(lambda: k.protected == k.of(5, 6), "all are checked")
        await asyncio.sleep(0.05)
        assert k.asked == [6, 5] and k.view.updates_problem == ""


async def test_the_rounds_before_an_archived_state_stay_until_the_round_that_proves_it_is_here(tmp_path: Path):
    k = make(tmp_path, 5)
    k.given = lambda number: number != 5
    async with k.running():
        await until(lambda: k.blobs == k.of(*range(5)), "all are here")
        k.rounds(1, {1: 2, 2: 2})
        await k.archive_newest()
        await until(lambda: bool(k.view.updates_problem), "round 5 is missing")
        assert k.view.held_state() == 5 and k.blobs == k.of(*range(5)) and k.state == {state(0)}
        k.given = lambda number: True
        await until(lambda: k.blobs == k.of(5), "the state can be reached: those before it are gone")
        assert k.state == {state(5)}


@pytest.mark.parametrize("head", [8, 10])
async def test_the_archived_last_state_of_a_run_is_no_start_for_newcomers(tmp_path: Path, head: int):
    k = make(tmp_path, head)
    await k.archive_newest()
    since = range(5, head)
    async with k.running():
        await until(lambda: k.blobs == k.of(*since), "all are here")
        await k.view.archive(state(head), k.chain.head, 1)
        looks = k.looks
        await until(lambda: k.looks > looks + 2, "it has looked")
        assert k.blobs == k.protected == k.of(*since) and k.state == {state(5)}
        k.rounds(1, {1: 2, 2: 2})
        named = range(5, 9) if head == 8 else [10]  # the record of round 10 names its state
        await until(lambda: k.blobs == k.of(*named), "the run goes on")


@pytest.mark.parametrize("to", [4, 5])
async def test_the_state_that_the_run_was_rolled_back_to_is_a_start_for_newcomers(tmp_path: Path, to: int):
    k = make(tmp_path, to)
    await k.view.archive(state(to), k.chain.head, 1)
    back = Rollback(1, k.chain.head, Round(to), state(to))
    k.rounds(2, {1: 2, 2: 2})
    k.chain.add_directive(KeySigner(OWNER).sign(Directive(SPEC.run_id, 1, rollback=back)))
    assert k.chain.height(k.chain.head) == to
    k.given = lambda number: False
    async with k.running():
        await until(lambda: k.looks > 2, "it has looked")
        assert k.asked == [] and k.protected == frozenset()


async def test_no_more_than_the_bound_is_held_when_the_round_that_proves_a_state_does_not_come(tmp_path: Path):
    k = make(tmp_path, 6, updates=14 * SIZE)
    await k.archive_newest()
    k.given = lambda number: number != 5
    async with k.running():
        await until(lambda: k.blobs == k.of(*range(5)), "all but that round are here")
        k.rounds(3, {1: 2, 2: 2})
        await until(lambda: k.blobs == k.of(6, 7, 8), "the newer state's rounds are kept, and the older ones gone")
        k.given = lambda number: True
        await until(lambda: k.blobs == k.of(5, 6, 7, 8), "all since that state are here")


async def test_the_disk_keeps_its_reserve_when_the_round_that_proves_a_state_does_not_come(tmp_path: Path):
    k = make(tmp_path, 7, reserve=SIZE)
    await k.archive_newest()
    k.free, k.given = 7 * SIZE, lambda number: number != 5
    async with k.running():
        await until(lambda: k.view.updates_problem.startswith("the disk has no room for 4.0 kB"), "it is said")
        assert k.blobs == k.of(4, 6)


async def test_nothing_is_fetched_while_many_members_are_here_and_all_of_it_when_few_are_left(tmp_path: Path):
    k = Kept(tmp_path, few_members=2)
    k.rounds(3, {1: 2, 2: 2, 3: 2})
    k.here = [1, 2, 3]
    async with k.running():
        await until(lambda: k.protected == k.of(0, 1, 2), "it has looked")
        await asyncio.sleep(0.05)
        assert k.asked == [] and k.view.updates_problem == ""
        k.here = [1, 3, 4, 5, 6]  # the last three have contributed nothing
        await until(lambda: k.blobs == k.of(0, 1, 2), "all are here")


async def test_a_blob_that_the_disk_lost_is_fetched_again(tmp_path: Path):
    k = make(tmp_path, 2)
    async with k.running():
        await until(lambda: k.blobs == k.of(0, 1), "all are here")
        k.blobs -= k.of(1)
        await until(lambda: k.blobs == k.of(0, 1), "all are here again")


async def test_who_has_what_nobody_here_gives_is_said_once_in_plain_words(tmp_path: Path, caplog):
    k = make(tmp_path, 4)
    k.given = lambda number: number not in (1, 2)
    async with k.running():
        await until(lambda: k.asked.count(1) >= 5, "it has tried five times")
        said = "the updates of rounds 1 to 2 are held by nobody here: ada, bob have them"
        assert k.view.updates_problem == k.view.problem == said
        assert k.blobs == k.of(0, 3) and len(lines(caplog)) <= 2  # of round 2 alone, for a moment
        assert said in lines(caplog)[-1] and "newcomer" in lines(caplog)[-1]
        k.given = lambda number: True
        await until(lambda: k.view.updates_problem == "" and k.blobs == k.of(0, 1, 2, 3), "ada is back")


async def test_while_contributors_are_here_one_failure_is_no_news_and_two_are(tmp_path: Path, caplog):
    k = make(tmp_path, 1)
    k.given, k.here = (lambda number: False), [2]
    async with k.running():
        await until(lambda: bool(k.view.updates_problem), "it is said")
        assert len(k.asked) >= 2
        assert k.view.updates_problem == "the updates of round 0 do not come: no holder is left"
        k.reason = PeerError("not in 4 s")
        await until(lambda: k.view.updates_problem.endswith("not in 4 s"), "the newest reason is shown")
        assert len(lines(caplog)) == 1


@pytest.mark.parametrize(
    "settings, free, problem",
    [
        ({"updates": 3 * SIZE}, 10**12, "the updates since round 0 take 4.0 kB, and archive.updates allows 3.0 kB"),
        ({"reserve": SIZE}, 4 * SIZE, "the disk has no room for 4.0 kB of updates (4.0 kB are free)"),
    ],
)
async def test_more_than_fits_is_not_fetched_and_said_once(tmp_path: Path, caplog, settings, free, problem):
    k = make(tmp_path, 2, **settings)
    k.free = free
    async with k.running():
        await until(lambda: bool(k.view.updates_problem), "it is said")
        await asyncio.sleep(0.1)
        assert k.asked == [] and k.view.updates_problem.startswith(problem) and len(lines(caplog)) == 1


async def test_a_disk_that_cannot_be_written_is_said_and_ends_nothing(tmp_path: Path):
    k = make(tmp_path, 1)
    k.given, k.reason = (lambda number: False), StoreFull("blob 1a2b needs 5 bytes: allow it more disk")
    async with k.running():
        await until(lambda: k.view.updates_problem == str(k.reason), "it is said")
        k.given = lambda number: True
        await until(lambda: k.blobs == k.of(0) and not k.view.updates_problem, "it goes on")


async def test_an_owner_who_allows_nothing_keeps_nothing(tmp_path: Path):
    k = make(tmp_path, 3, updates=0)
    k.blobs = k.of(1)  # of an earlier start
    async with k.running():
        await asyncio.sleep(0.05)
        assert k.asked == [] and k.protected == frozenset() and k.view.updates_problem == ""
