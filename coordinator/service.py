"""The coordinator as one thing that starts and stops: ledger, follower, gRPC, page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio

from coordinator import tls
from coordinator.address_publisher import AddressPublisher
from coordinator.admission import Admitter
from coordinator.alerts.config import AlertConfig
from coordinator.alerts.inputs import alert_input
from coordinator.alerts.rules import AlertInput
from coordinator.alerts.watcher import AlertWatcher
from coordinator.chain_indexer import ChainIndexer, wait_at_most
from coordinator.checkpoints.archiver import CheckpointArchiver
from coordinator.checkpoints.shown import ModelKept
from coordinator.control import RunControl
from coordinator.credits.log import CreditLog
from coordinator.errors import CoordinatorError, LedgerError, TooManyError
from coordinator.history import charts
from coordinator.ledger.integrity import REMEDY
from coordinator.ledger_thread import LedgerThread
from coordinator.metrics import Metrics, MetricSources
from coordinator.observation_file import ObservationFile
from coordinator.overview import Overview, OverviewBuilder, PeerOverview
from coordinator.page import json_view
from coordinator.page.api import PageApi
from coordinator.page.app import make_app
from coordinator.page.credit_paths import LOG_PATHS
from coordinator.page.credit_routes import leaderboard_of, log_routes
from coordinator.page.feed import Feed
from coordinator.page.server import PageServer
from coordinator.peer_registry import PeerRegistry
from coordinator.round_observations import RoundObservations
from coordinator.rpc import CoordinatorService, start_server
from coordinator.swarm import SwarmView
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.invite import MAX_SWARM_ADDRESSES, Endpoint, Invite, one_of_each
from protocol.ledger.credits import Balance
from protocol.messages import MAX_ADDRESSES
from protocol.spec import RunSpec
from protocol.wire import coordinator_pb2 as wire

log = logging.getLogger(__name__)

LEDGER_FILE = "ledger.sqlite"
SIGHTINGS_FILE = "sightings.jsonl"
MAX_STATUS_PEERS = 1000
MAX_ABSENT = 8
MAX_LOSSES = 120
MAX_ENTRIES = 50
LOG_SECONDS = 15.0
STOP_SECONDS = 3.0
AGAIN_SECONDS = 5.0
FIRST_CHECK_SECONDS = 60.0
CHECK_SECONDS = 86_400.0
"""From the start to the first check of the whole ledger, and between two."""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Where the coordinator keeps its files, where it listens, and how it is reached from outside.

    `listen` is gRPC's, for peers; `page` is HTTP's, for people; port 0 takes any free one. `public` are the addresses
    that invites name (none: the listening address), `page_url` is what people are told ("": the page's address).
    `ledger` is a postgresql:// URL ("": a file of SQLite in the folder).
    """

    folder: Path
    listen_host: str = "0.0.0.0"
    listen_port: int = 7410
    page_host: str = "0.0.0.0"
    page_port: int = 7411
    public: tuple[Endpoint, ...] = ()
    page_url: str = ""
    codes: tuple[str, ...] = ()
    alerts: AlertConfig = AlertConfig()
    ledger: str = ""


class Coordinator:
    """One run's coordinator. `start`, then `stop`; the properties below are there in between."""

    def __init__(
        self, config: CoordinatorConfig, spec: RunSpec, spec_envelope: bytes, owner: Identity, view: SwarmView, *,
        now: Callable[[], float] = time.time, keeper: CheckpointArchiver | None = None,
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
        self._follower = ChainIndexer(spec, owner, view, self._ledger, now)
        self.control = RunControl(spec, view, self._follower, self._ledger, config.folder)
        self._admitter = Admitter(spec, owner, config.codes, self._ledger, now, self.control.refusal)
        self._log = CreditLog(spec, owner, view, self._ledger, self._admitter, now)
        self._book = PeerRegistry(spec.round.member_seconds)
        self._sightings = RoundObservations(spec.round.member_seconds, now)
        self._sightings_file = ObservationFile(config.folder / SIGHTINGS_FILE)
        self.keeper = keeper
        """What looks after the archive, where there is one."""
        self._news = asyncio.Event()
        self._watcher = AlertWatcher(
            config.folder, config.alerts, spec.name, lambda: self.page_url, self._sight,
            self._news.set, lambda result: self._metrics.delivered(result),
        )  # fmt: skip
        self._overlooker = OverviewBuilder(
            spec, self._follower, self._book, self._sightings, self._admitter.name_of, lambda: self._watcher.standing
        )
        self._metrics = Metrics(MetricSources(
            look=self.overview, viewers=lambda: len(self.feed), folder=config.folder,
            admitted=lambda: self._admitter.count, ledger_entries=lambda: self._entries,
            head_seconds=lambda: self._log.head_seconds, alerts=lambda: self._watcher.names,
            kept=lambda: self.keeper.facts() if self.keeper else [],
        ))  # fmt: skip
        self._showing = PageApi(
            feed=self.feed, look=self.overview, follower=self._follower, sightings=self._sightings, ledger=self._ledger,
            view=view, name_of=self._admitter.name_of, checkpoints=config.folder / "checkpoints",
            metrics_text=self._metrics.text, now=now, standings=leaderboard_of(self._log),
            model=None if keeper is None else ModelKept(keeper),
        )  # fmt: skip
        self._page = PageServer(self._metrics.counting(make_app(self._showing, log_routes(self), LOG_PATHS)))
        self._announcer = AddressPublisher(owner, view, self.invite, now)
        self._tasks: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None
        self._service: CoordinatorService | None = None
        self._overview: tuple[float, Overview] | None = None
        self._lasts = 0.25
        self._status: tuple[Overview, wire.StatusReply] | None = None
        self._entries: int | None = None
        self._thinned: tuple[tuple[Round, Digest] | None, list[float]] | None = None
        self._began = now()
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
        self._sightings.restore(await asyncio.to_thread(self._sightings_file.read))
        self._view.listen(self._sightings.hear)
        self._follower.changed = self._changed
        self._follower.noted = lambda account: self._sightings.decide(account, self._view.heartbeats())
        await self.control.start()
        await self._follower.start()
        if self.keeper is not None:
            self.keeper.start(self._is_settled)
        await self._log.start()
        self._service = service = CoordinatorService(self, self._metrics.counted)
        self._server, self.grpc_port = await start_server(service, certificate, c.listen_host, c.listen_port)
        self.page_port = await self._page.start(c.page_host, c.page_port)
        self._began = self._now()
        await self._watcher.start()
        for name, work in {
            "publisher": self._publish_on, "ledger check": self._check_on, "announcer": self._announcer.publish_forever,
            "credits": lambda: self._log.keep_on(self._follower.newest), "event loop": self._metrics.watch_loop,
            "log": self._look_at_log,
        }.items():  # fmt: skip
            self._tasks.append(asyncio.create_task(_go_on(name, work), name=name))

    def _changed(self) -> None:
        self._news.set()
        self._log.news.set()

    async def stop(self) -> None:
        """Within seconds: what is under way is answered or cut, what was settled is on disk."""
        self.feed.close()
        if self._service is not None:
            self._service.serving = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stops = [self._page.stop(), self.control.stop(), self._follower.stop(), self._watcher.stop()]
        stops += [self.keeper.stop()] if self.keeper else []
        if self._server is not None:
            stops.append(self._server.stop(STOP_SECONDS))
        for result in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(result, BaseException):
                log.error("while stopping: %r", result)
        await self._save_sightings()
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

    async def _look_at_log(self) -> None:
        """For ever."""
        while True:
            try:
                self._entries = await self._ledger.read(lambda ledger: ledger.size())
            except (LedgerError, TooManyError) as e:
                log.warning("the log's size is not known: %s", e)
            await asyncio.sleep(LOG_SECONDS)

    def _sight(self) -> AlertInput:
        now, f = self._now(), self._follower
        return alert_input(
            self.overview(), f.rules, self._config.folder, now=now, up=now - self._began, caught_up=f.caught_up,
            head_age=self._log.head_seconds, judged=self.keeper.judged() if self.keeper else (),
            log_problem=self._log.problem,
        )  # fmt: skip

    # -- what is told ----------------------------------------------------------------------------------------

    @property
    def credit_log(self) -> CreditLog:
        """Receipts, proofs, accounts: what `log_rpc` and `page.log_routes` answer from."""
        return self._log

    def export_credits(self, form: str) -> AsyncIterator[bytes]:
        """All credits as "csv" or "parquet"."""
        return self._log.export(form)

    def overview(self) -> Overview:
        """The swarm now; made anew at most four times a second, and in a tenth of the time, whoever asks."""
        now = self._now()
        if self._overview is None or not 0 <= now - self._overview[0] < self._lasts:
            began = time.monotonic()
            self._book.member_seconds = self._sightings.member_seconds = self._follower.rules.member_seconds
            self._book.update(self._view.heartbeats(), now)
            self._overview = (now, self._with_archive(self._overlooker.look(now)))
            self._lasts = max(0.25, 10 * (time.monotonic() - began))
        return self._overview[1]

    def _with_archive(self, o: Overview) -> Overview:
        if self.keeper is None:
            return o
        round_, loss = self.keeper.validation or (None, None)
        return replace(o, validation_round=round_, validation_loss=loss, archive_problem=self.keeper.problem)

    async def _is_settled(self, round_: Round, record: Digest) -> bool:
        """Whether the ledger has this record as that of the round."""
        if self._follower.settled is None or self._follower.settled[0] < round_:
            return False
        rows = await self._ledger.read(lambda ledger: ledger.rounds(after=round_ - 1, limit=1))
        return bool(rows) and (rows[0].round, rows[0].record) == (round_, record)

    async def _save_sightings(self) -> None:
        if unsaved := self._sightings.take_unsaved():
            await asyncio.to_thread(self._sightings_file.append, unsaved)

    async def _publish_on(self) -> None:
        while True:
            self._overview, began = None, time.monotonic()
            self.feed.publish(json_view.encode(self._showing.event()))
            self._metrics.looked(self.overview(), self._now())
            if self.overview().rests:
                self._sightings.rest()
            took = time.monotonic() - began
            await self._save_sightings()
            await wait_at_most(self._news, 2)  # news at once; else the ages of heartbeats move on
            self._news.clear()
            # A burst of news is one; and a large swarm is looked at less often, so that peers are answered in between.
            await asyncio.sleep(max(0.3 if len(self.feed) <= 20 else 3, 20 * took))

    async def _check_on(self) -> None:
        """The whole ledger against itself, soon and each day: a start looks at all of it only while it is small."""
        await asyncio.sleep(FIRST_CHECK_SECONDS)
        while True:
            try:
                if found := await self._ledger.check():
                    self._follower.damage = f"the ledger is damaged: {'; '.join(found[:3])}: {REMEDY}"
                    log.error("%s", self._follower.damage)
            except LedgerError as e:
                log.error("the ledger could not be checked: %s", e)
            await asyncio.sleep(CHECK_SECONDS)

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
        if self._status is not None and self._status[0] is o:
            return self._status[1]  # hundreds of kilobytes for those who watch: made once a look
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
        for r in o.rounds:
            absent = r.absent or ()
            reply.newest.add(
                round=r.round, tokens=r.tokens, loss=r.loss, contributors=len(r.contributors),
                absent=absent[:MAX_ABSENT], absent_in_all=len(absent), final=r.final,
            )  # fmt: skip
        reply.losses.extend(self._losses())
        for a in o.alerts:
            reply.alerts.add(name=a.name, since=int(a.since), words=a.words)
        self._status = (o, reply)
        return reply

    def _losses(self) -> list[float]:
        """Of the whole run, thinned; made once a round."""
        head = self._follower.head
        if self._thinned is None or self._thinned[0] != head:
            points = [*self._follower.history.points(), *self._follower.open_points()]
            self._thinned = (head, charts(points, MAX_LOSSES).loss)
        return self._thinned[1]

    def _newest_checkpoint(self) -> tuple[Digest, int] | None:
        """The newest state that is a checkpoint (every `checkpoint.every` rounds) and is in the observer's store."""
        for account in self._follower.newest(len(self._follower.open) + len(self._follower.recent)):
            if account.round % self._spec.checkpoint.every == 0 and self._view.has_blob(account.base_state):
                return account.base_state, account.round
        genesis = self._spec.genesis.name
        return (genesis, 0) if self._view.has_blob(genesis) else None

    async def directive_reply(self, sent: bytes) -> wire.DirectiveReply:
        if sent:
            await self.control.take(sent)
        newest, o = self.control.newest, self.overview()
        peers = [p for p in o.peers if p.heartbeat is not None and p.phase not in ("silent", "gone")]
        heard = sum(
            newest is not None and p.heartbeat.directive_sequence == newest.body.sequence for p in peers if p.heartbeat
        )
        return wire.DirectiveReply(
            directive=newest.sent if newest is not None else b"", round=o.round, peers=len(peers), heard=heard
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


async def _go_on(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """For ever: the work has no end of its own, and a fault in it ends neither it nor what else goes on."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s: a fault of the coordinator; it goes on in %.0f s", name, AGAIN_SECONDS)
        await asyncio.sleep(AGAIN_SECONDS)


def _peer_status(p: PeerOverview) -> wire.PeerStatus:
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
