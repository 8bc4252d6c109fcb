"""A coordinator with a swarm made by hand, on a thread of its own: what a browser in a test looks at, live or still."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from starlette.routing import Route
from starlette.types import ASGIApp

from coordinator import service
from coordinator.checkpoints.settings import AboutTable
from coordinator.observation_file import ObservationFile
from coordinator.page.api import PageApi
from coordinator.page.app import make_app
from coordinator.round_observations import RoundObservation
from coordinator.service import OBSERVATIONS_FILE, Coordinator, CoordinatorConfig
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.message_codec import KeySigner
from protocol.messages import (
    AuditDecision,
    Certificate,
    Directive,
    RoundRecord,
    Score,
    Signed,
    UpdateHeader,
    WorkReport,
)
from protocol.spec import sign_spec
from tests.support.bindings import bind
from tests.support.coordinator_fakes import ChainMaker, FakeSwarm, make_archiver, make_spec, peer, state
from tests.support.specs import OWNER, spec_fields
from tests.support.waiting import until

T = TypeVar("T")
DEVICES = ("NVIDIA H200", "NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB", "cpu, 8 threads", "Apple M3 Max")
NAMES = (
    "ada",
    "grace",
    "edsger",
    "barbara",
    "alan",
    "donald",
    "margaret",
    "tony",
    "frances",
    "john",
    "radia",
    "leslie",
)
ABOUT = AboutTable(description="<b>Stories</b>", contact="ada@example.org", license="data: CC0")
ROUND_SECONDS = 48.0

ROUND_FIELDS = spec_fields()["round"] | {
    "target_tokens": 400_000, "max_seconds": 600, "exchange_seconds": 60, "patience_seconds": 60,
    "heartbeat_seconds": 2, "member_seconds": 20, "max_update_tokens": 10**7, "max_members": 1024,
}  # fmt: skip


def world_spec(**changes: Any):
    """Return a run of 60M tokens whose rounds take about a minute."""
    return make_spec(**({"name": "tiny stories", "round": ROUND_FIELDS, "total_tokens": 60_000_000} | changes))


class Clock:
    """Wall time, shifted at will."""

    def __init__(self, shift: float = 0.0):
        self.shift = shift

    def __call__(self) -> float:
        return time.time() + self.shift


class World:
    """`act` runs something on the coordinator's event loop; `stop` and `start` are a restart under the browser."""

    def __init__(self, folder: Path, swarm: FakeSwarm | None = None, clock: Clock | None = None, *, peers: int = 12):
        self.folder = folder
        self.swarm = swarm or FakeSwarm(world_spec())
        self.clock = clock or Clock()
        self.peers = peers
        self.port = 0
        self.random = random.Random(7)
        self.barred: set[int] = set()
        self.round_seconds = ROUND_SECONDS
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.coordinator: Coordinator | None = None
        self.routes: Sequence[Route] = ()
        """In the place of those about credits, from the next start on."""
        self.app: ASGIApp
        """The page, once it is started."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def act(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def do(self, work: Callable[[], T]) -> T:
        async def now() -> T:
            return work()

        return self.act(now())

    def start(self) -> World:
        spec = self.swarm.spec
        self.swarm.forget_subscribers()

        async def start() -> Coordinator:
            config = CoordinatorConfig(
                self.folder, listen_host="127.0.0.1", listen_port=0, page_host="127.0.0.1", page_port=self.port,
                about=ABOUT,
            )  # fmt: skip
            with patch.object(service, "make_app", self._make_app):
                made = Coordinator(
                    config,
                    spec,
                    sign_spec(OWNER, spec).encoded,
                    OWNER,
                    self.swarm,
                    make_archiver(spec, self.folder, self.swarm),
                    now=self.clock,
                    monotonic=self.clock,
                )
            await made.start()
            return made

        self.coordinator = self.act(start())
        self.port = self.coordinator.page_port
        return self

    def _make_app(self, api: PageApi, routes: Sequence[Route]) -> ASGIApp:
        self.app = make_app(api, self.routes or routes)
        return self.app

    def stop(self) -> None:
        if self.coordinator is not None:
            self.act(self.coordinator.stop())
            self.coordinator = None

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)

    def name_peers(self, count: int | None = None) -> None:
        """Admits peers under names, as the ledger remembers them."""
        from coordinator.ledger import AdmissionRow

        rows = [
            AdmissionRow(peer(n).key, NAMES[n] if n < len(NAMES) else f"{NAMES[n % len(NAMES)]}-{n}", 0, 0, 2**33, b"")
            for n in range(self.peers if count is None else count)
        ]

        def admit(ledger: Any) -> None:
            for row in rows:
                ledger.add_admission(row)

        assert self.coordinator is not None
        self.act(self.coordinator.ledger.run(admit))
        self.act(self.coordinator.admitter.load())

    def bind(self, number: int, account: Identity, name: str, team: str = "") -> None:
        """Let the credits of a peer count for an account."""
        assert self.coordinator is not None
        binding = bind(peer(number), account, self.swarm.spec.run_id, int(self.clock()), name, team)
        self.act(self.coordinator.credits.leaderboard.bind(binding.encoded))

    # -- what happens ------------------------------------------------------------------------------------------

    def beats(self, **each: Any) -> None:
        """Let every peer send a heartbeat."""
        rounds = len(self.swarm.chain.certificates)
        for n in range(self.peers):
            fields: dict[str, Any] = dict(
                device=DEVICES[n % len(DEVICES)], tokens_per_second=900.0 + 61 * (n % 17),
                loss=_loss(rounds) + n * 0.002, windows=400 + 10 * (n % 40),
                bytes_up=(rounds + 1) * (2_500_000 + 9000 * n),
                bytes_down=(rounds + 1) * (24_000_000 + 9000 * n),
            )  # fmt: skip
            self.swarm.beat(n, **(fields | each))

    def says(self, number: int, **changes: Any) -> None:
        """One peer's newest heartbeat, changed."""
        heard = self.swarm.heard[peer(number).key]
        self.swarm.heard[peer(number).key] = replace(heard, heartbeat=replace(heard.heartbeat, **changes))

    async def round(self, *, out: tuple[int, ...] = (), late: tuple[int, ...] = (), **audits: Any) -> Certificate:
        """One round as a swarm has it: trained, announced, proposed, certified; the clock goes on by itself.

        `audits`: the reports and decisions that its record carries.
        """
        assert self.coordinator is not None
        rounds = len(self.swarm.chain.certificates)
        work = {n: 1400 + 37 * (n % 29) for n in range(self.peers) if n not in out}
        tardy = self.swarm.chain.fork(rounds).add(dict.fromkeys(late, 900), loss=3.0) if late else None
        certificate = self.swarm.chain.add(work, loss=_loss(rounds) + self.random.gauss(0, 0.02), **audits)
        for _ in range(4):  # it is looked at in between, as it would be
            self.clock.shift += (self.round_seconds * 0.9 + self.random.uniform(-4, 4)) / 4
            self.coordinator.overview()
        for update in certificate.record.body.updates:
            self.clock.shift += 1.5 / len(work)
            self.swarm.hear(update)
        self.clock.shift += self.random.uniform(2, 5)
        self.swarm.hear(certificate.record)
        for update in tardy.record.body.updates if tardy else ():
            self.clock.shift += 1.2
            self.swarm.hear(update)
        self.clock.shift += self.random.uniform(0.5, 1.5)
        self.swarm.changed()
        chain = self.coordinator.chain
        await until(lambda: chain.head is not None and chain.head[1] == certificate.digest, every=0.005)
        self.beats()
        for number in self.barred:
            self.says(number, phase="paused")
        self.swarm.changed()
        return certificate

    def judge(self, author: int, *, convicted: bool = True, jury: Sequence[int] = (3, 4, 6, 7, 8)) -> AuditDecision:
        """Let two auditors accuse the newest update of a peer, and a jury decide; two rounds."""
        chain, out = self.swarm.chain, tuple(self.barred)
        record = next(c for c in reversed(chain.certificates) if peer(author).key in c.record.body.contributors)

        def report(by: int, failed: bool) -> Signed[WorkReport]:
            signs = 0.7 + 0.012 * by if failed else 0.99 + 0.001 * by
            scores = (Score("scale", 0.93 - by / 100, 0.8), Score("signs", round(signs, 4), 0.97))
            return chain.report(record, author, by, *scores)

        self.act(self.round(out=out, reports=[report(by, True) for by in (0, 1)]))
        refuted = () if convicted else tuple(sorted(peer(n).key for n in (0, 1)))
        decision = AuditDecision(record.digest, peer(author).key, convicted, refuted)
        self.barred |= {author} if convicted else set()
        reports = [report(by, convicted) for by in jury]
        self.act(self.round(out=tuple(self.barred), reports=reports, decisions=[decision]))
        return decision

    def order(self, status: str, reason: str = "") -> None:
        """Let the run's owner pause, resume or end the run."""
        assert self.coordinator is not None
        now = self.clock()
        directive = Directive(self.swarm.spec.run_id, int(now * 1000), status, int(now), reason)
        self.act(self.coordinator.control.accept(KeySigner(OWNER).sign(directive).encoded))

    def pause(self, seconds: float, reason: str) -> None:
        """Let the run be paused for a time, in which nobody trains."""
        coordinator = self.coordinator
        assert coordinator is not None
        self.order("paused", reason)
        for number in range(self.peers):
            self.says(number, phase="paused")
        self.clock.shift += seconds
        self.do(coordinator.observations.note_pause)
        self.order("running")
        self.beats()

    def play(self, rounds: int) -> None:
        """Add a number of rounds with the events of swarms: one peer is away, one is late, one has just come."""

        async def play() -> None:
            for r in range(rounds):
                if self.barred:
                    await self.round(out=tuple(self.barred))
                    continue
                if r % 7 == 3:
                    self.says(2, phase="syncing")
                if r % 5 == 2:
                    self.says(4, windows=0)
                out = (2,) if r % 7 == 3 else (4,) if r % 5 == 2 else (5,) if r % 4 == 1 else ()
                await self.round(out=out, late=(5,) if 5 in out else ())

        self.beats()
        self.act(play())


EVIL = "<img src=x>"
LIAR, FRAMED, SUSPECT, STRANGER = 5, 9, 2, 10


def audited_world(folder: Path) -> World:
    """Return a run in which one peer was convicted, one acquitted, and two are accused."""
    spec = world_spec(credit={"hold_rounds": 8})
    world = World(folder, FakeSwarm(spec)).start()
    world.name_peers()
    world.play(6)
    world.judge(FRAMED, convicted=False)
    world.judge(LIAR)
    world.play(5)
    chain = world.swarm.chain
    newest = chain.certificates[-1]
    reports = [
        chain.report(newest, SUSPECT, 7, Score("gain", 0.4, 3.0), Score("quarter", -1.25, 1.0), check="loss"),
        chain.report(newest, STRANGER, 8, Score(EVIL, 0.5, 0.97)),
        chain.report(newest, 0, 8, Score("signs", 0.99, 0.97)),
    ]
    world.act(world.round(out=tuple(world.barred), reports=reports))
    return world


def _loss(round_: int) -> float:
    return 2.1 + 7.5 * math.exp(-round_ / 14) + 1.1 * math.exp(-round_ / 160)


class QuickChain(ChainMaker):
    """Certificates whose signatures are made up: the coordinator's observer has checked them before it shows any."""

    def add(self, work: Mapping[int, int], *, loss: float = 5.0, attempt: int = 0) -> Certificate:
        number = Round(len(self.certificates))
        headers = []
        for identity in sorted((_peer(n) for n in work), key=lambda i: i.key):
            windows, first = work[_number(identity.key)], self.next_windows.get(identity.key, 0)
            digest = Digest(sha256(b"header", identity.key, bytes(self.head)))
            body = UpdateHeader(
                self.run, number, self.head, state(number), first, first, first + windows, 1, digest, 100, loss, b""
            )
            headers.append(Signed(body, identity.key, digest, b""))
        record = RoundRecord(self.run, number, self.head, state(number), attempt, tuple(headers))
        signed = Signed(record, headers[0].author, Digest(sha256(b"record", bytes(self.head), bytes([attempt]))), b"")
        certificate = Certificate(signed, tuple(Signed(None, h.author, signed.digest, b"") for h in headers))
        self._take(certificate)
        return certificate


@cache
def _peer(number: int) -> Identity:
    return peer(number)


@cache
def _number(key: PeerKey) -> int:
    return next(n for n in range(10_000) if _peer(n).key == key)


def crowd(folder: Path, *, peers: int = 1000, rounds: int = 10_000) -> World:
    """Start a run of months with a thousand peers: small rounds, and all peers in the newest."""
    swarm = FakeSwarm(world_spec(total_tokens=0))
    swarm.chain = QuickChain(swarm.spec)
    seen = []
    began = time.time() - 40.0 * rounds
    for r in range(rounds):
        c = swarm.chain.add(dict.fromkeys(range(peers), 20) if r >= rounds - 2 else {0: 900, 1: 800}, loss=_loss(r))
        at = began + 40.0 * r
        seen.append(
            RoundObservation(r, c.digest, at - 40, at - 8, at - 2, at, 900 + r % 90, 10**9 + r, 10**10, (), 0)
        )  # fmt: skip
    ObservationFile(folder / OBSERVATIONS_FILE).append(seen)
    world = World(folder, swarm, peers=peers)
    world.beats()
    world.start()
    world.name_peers()
    return world
