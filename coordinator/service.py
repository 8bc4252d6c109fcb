"""The coordinator as one thing that starts and stops: ledger, follower, gRPC, page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from coordinator import tls
from coordinator.admission import Admitter
from coordinator.announcing import Announcer
from coordinator.control import Control
from coordinator.credits import Balance
from coordinator.errors import CoordinatorError
from coordinator.follower import Follower, wait_at_most
from coordinator.history import charts
from coordinator.ledger_thread import LedgerThread
from coordinator.metrics import Metrics
from coordinator.overview import Overlooker, Overview, PeerView
from coordinator.page import json_view
from coordinator.page.app import make_app
from coordinator.page.feed import Feed
from coordinator.page.server import PageServer
from coordinator.peers import PeerBook
from coordinator.rpc import Service, start_server
from coordinator.swarm import SwarmView
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, RunId
from protocol.invite import MAX_SWARM_ADDRESSES, Endpoint, Invite, one_of_each
from protocol.messages import MAX_ADDRESSES
from protocol.spec import RunSpec
from protocol.wire import coordinator_pb2 as wire

log = logging.getLogger(__name__)

LEDGER_FILE = "ledger.sqlite"
MAX_STATUS_PEERS = 1000
MAX_ENTRIES = 50
STOP_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Where the coordinator keeps its files, where it listens, and how it is reached from outside.

    `listen` is gRPC's, for peers; `page` is HTTP's, for people; port 0 takes any free one. `public` are the addresses
    that invites name (none: the listening address), `page_url` is what people are told ("": the page's address).
    `ledger` is a postgresql:// URL ("": a file of SQLite in the folder).
    """

    folder: Path
    listen_host: str = "0.0.0.0"
    listen_port: int = 7100
    page_host: str = "0.0.0.0"
    page_port: int = 7180
    public: tuple[Endpoint, ...] = ()
    page_url: str = ""
    codes: tuple[str, ...] = ()
    ledger: str = ""


class Coordinator:
    """One run's coordinator. `start`, then `stop`; the properties below are there in between."""

    def __init__(
        self, config: CoordinatorConfig, spec: RunSpec, spec_envelope: bytes, owner: Identity, view: SwarmView, *,
        now: Callable[[], float] = time.time,
    ):  # fmt: skip
        if owner.key != spec.owner_key:
            raise CoordinatorError(
                f"this key ({owner.key.short}) does not own run {spec.name!r} ({spec.owner[:8]} does): start with the "
                "owner's key file"
            )
        self.run: RunId = spec.run_id
        self.feed = Feed()
        self._config = config
        self._spec = spec
        self._spec_envelope = spec_envelope
        self._view = view
        self._now = now
        self._ledger = LedgerThread()
        self._follower = Follower(spec, owner, view, self._ledger, now)
        self.control = Control(spec, view, self._follower, self._ledger, config.folder)
        self._admitter = Admitter(spec, owner, config.codes, self._ledger, now, self.control.refusal)
        self._book = PeerBook(spec.round.member_seconds)
        self._overlooker = Overlooker(spec, self._follower, self._book, self._admitter.name_of)
        self._metrics = Metrics(self.overview, lambda: len(self.feed))
        self._page = PageServer(make_app(self))
        self._news = asyncio.Event()
        self._announcer = Announcer(owner, view, self.invite, now)
        self._tasks: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None
        self._charts: tuple[Digest | None, bytes] | None = None
        self._overview: tuple[float, Overview] | None = None
        self._lasts = 0.25
        self.fingerprint: Digest | None = None
        self.grpc_port = 0
        self.page_port = 0

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ready to be asked when this returns. Raises CairnError with the remedy; nothing is left running then."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        c = self._config
        certificate = await asyncio.to_thread(tls.load_or_make, c.folder)
        self.fingerprint = certificate.fingerprint
        await self._ledger.open(c.ledger or c.folder / LEDGER_FILE, self._spec, self._now)
        await self._admitter.load()
        self._follower.changed = self._news.set
        await self.control.start()
        await self._follower.start()
        service = Service(self, self._metrics.counted)
        self._server, self.grpc_port = await start_server(service, certificate, c.listen_host, c.listen_port)
        self.page_port = await self._page.start(c.page_host, c.page_port)
        self._tasks.append(asyncio.create_task(self._publish_on(), name="publisher"))
        self._tasks.append(asyncio.create_task(self._announcer.announce_on(), name="announcer"))

    async def stop(self) -> None:
        """Within seconds: what is under way is answered or cut, what was settled is on disk."""
        self.feed.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stops = [self._page.stop(), self._follower.stop()]
        if self._server is not None:
            stops.append(self._server.stop(STOP_SECONDS))
        for result in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(result, BaseException):
                log.error("while stopping: %r", result)
        await self._ledger.close()

    @property
    def page_url(self) -> str:
        """Where people find the page."""
        if self._config.page_url:
            return self._config.page_url
        host = self._config.page_host
        if host in ("0.0.0.0", "::"):
            host = self._config.public[0].host if self._config.public else "127.0.0.1"
        return f"http://{Endpoint(host, self.page_port)}/"

    def invite(self, code: str = "", addresses: Sequence[str] | None = None) -> Invite:
        """An invite to this run; `addresses` of the swarm, or those that the view knows now."""
        if self.fingerprint is None:
            raise RuntimeError("the coordinator is not started")
        host = self._config.listen_host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1"
        public = self._config.public or (Endpoint(host, self.grpc_port),)
        found = one_of_each(self._view.addresses() if addresses is None else addresses)[:MAX_SWARM_ADDRESSES]
        return Invite(self.run, self.fingerprint, public, code, found)

    @property
    def problem(self) -> str:
        """Why the chain cannot be followed; empty when it can."""
        return self._follower.problem

    # -- what is told ----------------------------------------------------------------------------------------

    def overview(self) -> Overview:
        """The swarm now; made anew at most four times a second, and in a tenth of the time, whoever asks."""
        now = self._now()
        if self._overview is None or not 0 <= now - self._overview[0] < self._lasts:
            began = time.monotonic()
            self._book.update(self._view.heartbeats(), now)
            self._overview = (now, self._overlooker.look(now))
            self._lasts = max(0.25, 10 * (time.monotonic() - began))
        return self._overview[1]

    async def _publish_on(self) -> None:
        while True:
            self._overview, began = None, time.monotonic()
            self.feed.publish(self.status_json())
            took = time.monotonic() - began
            await wait_at_most(self._news, 2)  # news at once; else the ages of heartbeats move on
            self._news.clear()
            # A burst of news is one; and a large swarm is looked at less often, so that peers are answered in between.
            await asyncio.sleep(max(0.3 if len(self.feed) <= 20 else 3, 20 * took))

    def status_json(self) -> bytes:
        return json_view.encode(json_view.status(self.overview()))

    def charts_json(self) -> bytes:
        """Made once a round."""
        head = self._follower.head
        key = head[1] if head else None
        if self._charts is None or self._charts[0] != key:
            points = [*self._follower.history.points(), *self._follower.open_points()]
            self._charts = (key, json_view.encode(json_view.charts(charts(points))))
        return self._charts[1]

    async def rounds_json(self, after: int, limit: int) -> bytes:
        accounts = await self._ledger.read(lambda ledger: ledger.accounts(after=after, limit=limit))
        final = len(accounts)
        at = accounts[-1].round if accounts else after
        accounts += [a for a in self._follower.open if a.round > at][: limit - final]
        name_of = self._admitter.name_of
        return json_view.encode([json_view.account(a, i < final, name_of) for i, a in enumerate(accounts)])

    def metrics_text(self) -> bytes:
        return self._metrics.text()

    # -- what gRPC answers -----------------------------------------------------------------------------------

    async def run_reply(self) -> wire.GetRunReply:
        return wire.GetRunReply(spec=self._spec_envelope, addresses=self._addresses())

    async def admit_reply(self, sent: bytes) -> wire.AdmitReply:
        admission = await self._admitter.admit(sent)
        return wire.AdmitReply(admission=admission.sent, time=int(self._now()), addresses=self._addresses())

    def _addresses(self) -> list[str]:
        return list(self._view.addresses())[:MAX_ADDRESSES]

    async def status_reply(self) -> wire.StatusReply:
        o = self.overview()
        checkpoint = self._newest_checkpoint()
        reply = wire.StatusReply(
            name=o.name, health=o.health, words=o.words, round=o.round, head=o.head, state=o.state,
            state_round=o.state_round, tokens=o.tokens, total_tokens=o.total_tokens,
            tokens_per_second=o.tokens_per_second, loss=o.loss or 0.0, page=self.page_url,
            peers=[_peer_status(p) for p in o.peers[:MAX_STATUS_PEERS]],
        )  # fmt: skip
        if o.final_round is not None:
            reply.final_round = o.final_round
        if checkpoint is not None:
            reply.checkpoint, reply.checkpoint_round = checkpoint
        return reply

    def _newest_checkpoint(self) -> tuple[Digest, int] | None:
        """The newest state that is a checkpoint (every `checkpoint.every` rounds) and is in the observer's store."""
        for account in self._follower.newest(len(self._follower.open) + len(self._follower.recent)):
            if account.round % self._spec.checkpoint.every == 0 and self._view.has_blob(account.base_state):
                return account.base_state, account.round
        genesis = self._spec.genesis.name
        return (genesis, 0) if self._view.has_blob(genesis) else None

    async def amend_reply(self, sent: bytes) -> wire.AmendReply:
        if sent:
            await self.control.take(sent)
        newest, o = self.control.newest, self.overview()
        peers = [p for p in o.peers if p.heartbeat is not None and p.phase not in ("silent", "gone")]
        heard = sum(newest is not None and p.heartbeat.amended == newest.body.sequence for p in peers if p.heartbeat)
        return wire.AmendReply(
            amendment=newest.sent if newest is not None else b"", round=o.round, peers=len(peers), heard=heard
        )

    async def account_reply(self, peer: PeerKey) -> wire.AccountReply:
        f = self._follower
        newest = [
            wire.AccountEntry(
                round=a.round, record=a.record, tokens=e.tokens, micro_credits=e.micro_credits, settled=False
            )
            for a in reversed(f.open)
            for e in a.entries
            if e.peer == peer
        ]
        settled, pending = f.settled_balances.get(peer, Balance()), f.pending.get(peer, Balance())
        final = f.settled
        entries = await self._ledger.read(lambda ledger: ledger.history_of(peer, limit=MAX_ENTRIES))
        newest += [
            wire.AccountEntry(
                round=e.round, record=e.record, tokens=e.tokens, micro_credits=e.micro_credits,
                settled=e.status == "settled",
            )
            for e in entries
            # Posted since the balances above were read: next time. What was voided earned nothing.
            if final is not None and e.round <= final[0] and e.status != "voided"
        ]  # fmt: skip
        return wire.AccountReply(
            name=self._admitter.name_of(peer),
            micro_credits_settled=settled.micro_credits,
            micro_credits_pending=pending.micro_credits,
            tokens=settled.tokens + pending.tokens,
            rounds=settled.rounds + pending.rounds,
            newest=newest[:MAX_ENTRIES],
        )


def _peer_status(p: PeerView) -> wire.PeerStatus:
    status = wire.PeerStatus(
        peer=p.peer, name=p.name, phase=p.phase, micro_credits_settled=p.settled, micro_credits_pending=p.pending,
        seconds_since_heard=p.seconds_since,
    )  # fmt: skip
    if (h := p.heartbeat) is not None:
        status.round, status.loss, status.tokens_per_second = h.round, h.loss, h.tokens_per_second
        status.bytes_up, status.bytes_down, status.head, status.device = h.bytes_up, h.bytes_down, h.head, h.device
    return status


async def serve(
    config: CoordinatorConfig, spec: RunSpec, spec_envelope: bytes, owner: Identity, view: SwarmView, *,
    until: asyncio.Event, ready: Callable[[Coordinator], None] = lambda _: None,
) -> None:  # fmt: skip
    """Start, say that it is ready, serve until told to stop. Raises CairnError when it cannot start."""
    coordinator = Coordinator(config, spec, spec_envelope, owner, view)
    await coordinator.start()
    try:
        ready(coordinator)
        await until.wait()
    finally:
        await coordinator.stop()
