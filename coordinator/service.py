"""The coordinator as one thing that starts and stops: constructed bottom-up, then ledger, chain, gRPC and page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage

import grpc.aio

from coordinator import tls
from coordinator.address_publisher import AddressPublisher
from coordinator.admission import TEND_SECONDS, Admitter
from coordinator.alerts.config import AlertConfig
from coordinator.alerts.rules import AlertInput
from coordinator.alerts.watcher import AlertWatcher
from coordinator.chain_indexer import ChainIndexer
from coordinator.checkpoints.archiver import CheckpointArchiver
from coordinator.checkpoints.settings import AboutTable
from coordinator.control import RunControl
from coordinator.credits.leaderboard import Leaderboard
from coordinator.credits.log import CreditLog
from coordinator.credits.plausibility import PlausibilityCheck
from coordinator.credits.receipts import Receipts
from coordinator.directive_file import DirectiveFile
from coordinator.directives import DirectiveEffects
from coordinator.errors import CoordinatorError
from coordinator.finalizer import Finalizer
from coordinator.health import Health
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger_thread import LedgerThread
from coordinator.metrics import Metrics, MetricSources
from coordinator.observation_file import ObservationFile
from coordinator.overview import Overview, OverviewBuilder
from coordinator.page import json_view
from coordinator.page.api import PageApi
from coordinator.page.app import make_app
from coordinator.page.credit_routes import credit_routes
from coordinator.page.feed import Feed
from coordinator.page.server import PageServer
from coordinator.page.spec_route import spec_route
from coordinator.peer_registry import PeerRegistry
from coordinator.round_observations import RoundObservations
from coordinator.rpc import CoordinatorService, start_server
from coordinator.swarm import SwarmView
from coordinator.tasks import supervise, wait_at_most
from protocol.audits import AuditRule
from protocol.identity import Identity
from protocol.ids import Digest, RunId
from protocol.invite import MAX_SWARM_ADDRESSES, HostPort, Invite, one_per_peer_first
from protocol.ledger.credits import RoundCredits
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.spec import RunSpec

log = logging.getLogger(__name__)

LEDGER_FILE = "ledger.sqlite"
OBSERVATIONS_FILE = "observations.jsonl"
STOP_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The coordinator's folder, the addresses on which it listens, and those at which it is reached.

    `listen_*` is gRPC's, for peers; `page_*` is HTTP's, for people; port 0 is any free one. `public` are the addresses
    in invites (none: the listening address), `page_url` is published as the page's address ("": the listening address).
    `ledger` is a postgresql:// URL ("": a file of SQLite in the folder).
    """

    folder: Path
    listen_host: str = "0.0.0.0"
    listen_port: int = 7410
    page_host: str = "0.0.0.0"
    page_port: int = 7411
    public: tuple[HostPort, ...] = ()
    page_url: str = ""
    codes: tuple[str, ...] = ()
    alerts: AlertConfig = AlertConfig()
    ledger: str = ""
    about: AboutTable = AboutTable()
    begins: bool = True
    """The run begins here and now: nobody can have orders of its owner. Else members may know newer ones than ours."""


class Coordinator:
    """One run's coordinator: `start`, then `stop`. The properties hold in between."""

    def __init__(
        self, config: CoordinatorConfig, spec: RunSpec, spec_envelope: bytes, owner: Identity, view: SwarmView,
        archiver: CheckpointArchiver, *, now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
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
        self._view = view
        self._archiver = archiver
        self._now = now
        self._monotonic = monotonic
        self._news = asyncio.Event()
        self._credit_news = asyncio.Event()
        self.ledger = ledger = LedgerThread()

        self.chain = chain = IndexedChain(AuditRule.of(spec), spec.credit.hold_rounds)
        self.directives = directives = DirectiveEffects(spec.round, chain)
        self.observations = RoundObservations(self._member_seconds, now)
        self._observation_file = ObservationFile(config.folder / OBSERVATIONS_FILE)
        self._finalizer = Finalizer(spec, owner, view, ledger, chain)
        self.indexer = indexer = ChainIndexer(
            spec, view, ledger, chain, self._finalizer, PlausibilityCheck(spec), directives, now,
            on_pass=self._wake, on_new_head=self._observe,
        )  # fmt: skip
        decoder = MessageDecoder(spec.run_id, spec.owner_key, remember=16)
        # It decodes in threads: a decoder is used by one thread at a time.
        directive_file = DirectiveFile(config.folder, MessageDecoder(spec.run_id, spec.owner_key, remember=16))
        self.control = RunControl(
            decoder, view, directives, indexer, ledger, directive_file, KeySigner(owner), spec.run_id, now,
            archiver.roll_back,
        )  # fmt: skip
        self.admitter = Admitter(
            spec, owner, config.codes, ledger, now, chain.has_credits, chain.has_recent_work, self.control.refusal
        )
        leaderboard = Leaderboard(spec.run_id, ledger, chain, self.admitter.name_of, self.admitter.knows, now)
        self.credits = CreditLog(
            ledger, view, chain, Receipts(spec, owner, view, ledger, now), leaderboard, self._credit_news
        )  # fmt: skip

        self.peers = PeerRegistry(self._member_seconds)
        # The alerts judge an overview, and an overview lists the alerts: the watcher's input closes that circle.
        self._watcher = AlertWatcher(
            config.folder, config.alerts, spec.name, lambda: self.page_url, self.alert_input, self._news.set,
            lambda result: self._metrics.delivered(result),
        )  # fmt: skip
        self._builder = OverviewBuilder(
            spec, chain, indexer, directives, self.peers, self.observations, self.admitter.name_of,
            lambda: self._watcher.active, lambda: view.updates_problem, view.resting_state,
            lambda: self._publisher.problem, monotonic,
        )  # fmt: skip
        self._metrics = Metrics(MetricSources(
            overview=self.overview, viewers=lambda: len(self.feed), folder=config.folder,
            admitted=lambda: self.admitter.count, rounds_credited=lambda: leaderboard.rounds,
            alerts=lambda: self._watcher.names,
            archive=archiver.gauges,
        ))  # fmt: skip
        self.api = PageApi(
            spec=spec, published_invite=self.published_invite, feed=self.feed, overview=self.overview,
            chain=chain, directives=directives, observations=self.observations, ledger=ledger, view=view,
            name_of=self.admitter.name_of, credits=leaderboard, archiver=archiver, metrics_text=self._metrics.text,
            now=now, about=config.about,
        )  # fmt: skip
        app = make_app(self.api, [*credit_routes(self.credits), spec_route(spec_envelope)])
        self._page = PageServer(self._metrics.counting(app))
        self._publisher = AddressPublisher(owner, view, self.invite, now)
        self._service = CoordinatorService(
            spec, spec_envelope, view=view, chain=chain, admitter=self.admitter, control=self.control,
            credits=self.credits, overview=self.overview, page_url=lambda: self.page_url, now=now,
            about=config.about,
        )  # fmt: skip
        self._health = Health()
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._overview: tuple[float, Overview] | None = None
        self._overview_seconds = 0.25
        self._began = monotonic()  # the wall clock may be set while this runs
        self.fingerprint: Digest | None = None
        self.grpc_port = 0
        self.page_port = 0

    async def start(self) -> None:
        """Start to serve: calls are answered when this returns.

        Raises CairnError with the remedy; nothing is left running then.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        c = self._config
        certificate = await asyncio.to_thread(tls.load_or_make, c.folder)
        self.fingerprint = certificate.fingerprint
        await self.ledger.open(c.ledger or c.folder / LEDGER_FILE, self._spec, self._now)
        if (
            any(a.final for a in self._archiver.archive.all())
            and await self.ledger.run(lambda ledger: ledger.last()) is None
        ):
            log.warning(
                "this ledger is empty, and the run has final states: names, refusals and accounts are not in it. If "
                "another one has them, stop, and name that one (CAIRN_LEDGER)"
            )
        await self.admitter.load()
        self.observations.restore(await asyncio.to_thread(self._observation_file.read))
        self._view.listen(self.observations.receive)
        await self.indexer.read_ledger()
        begun = not c.begins or any(a.round for a in self._archiver.archive.all())
        await self.control.start(begun=begun)
        self.indexer.start()
        self._archiver.start(self._finalizer.of_posted)
        await self.credits.start()
        self._server, self.grpc_port = await start_server(
            self._service, self._health, self._metrics.counted, certificate, c.listen_host, c.listen_port
        )  # fmt: skip
        self.page_port = await self._page.start(c.page_host, c.page_port)
        self._began = self._monotonic()
        await self._watcher.start()
        for name, work in {
            "publisher": self._publish_forever, "credits": self.credits.run, "admissions": self._tend_admissions,
            "address publisher": self._publisher.publish_forever, "event loop": self._metrics.watch_loop,
        }.items():  # fmt: skip
            self._tasks.append(asyncio.create_task(supervise(name, work), name=name))

    async def stop(self) -> None:
        """Stop within seconds: calls in progress are answered or cut, and posted rounds are on disk."""
        self.feed.close()
        self._health.serving = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stops = [self._page.stop(), self.control.stop(), self.indexer.stop(), self._watcher.stop()]
        stops.append(self._archiver.stop())
        if self._server is not None:
            stops.append(self._server.stop(STOP_SECONDS))
        for result in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(result, BaseException):
                log.error("while stopping: %r", result)
        await self._save_observations()
        await self.ledger.close()

    def _wake(self) -> None:
        self._news.set()
        self._credit_news.set()
        self.control.tend()

    def _observe(self, credits: RoundCredits) -> None:
        follows = self.observations.is_followed_by(credits)
        seen = self.observations.decide(credits, self._view.heartbeats())
        if follows:  # the time of a round on another branch, or after a rollback, is counted already
            self._metrics.round_decided(seen)

    @property
    def page_url(self) -> str:
        """The page's address for people, and for clients that read credits."""
        if self._config.page_url:
            return self._config.page_url
        host = self._config.page_host
        if host in ("0.0.0.0", "::"):
            host = self._config.public[0].host if self._config.public else "127.0.0.1"
        return f"http://{HostPort(host, self.page_port)}/"

    def invite(self, code: str = "") -> Invite:
        """Return an invite to this run, with the addresses of the swarm that the view knows now."""
        if self.fingerprint is None:
            raise RuntimeError("the coordinator is not started")
        host = self._config.listen_host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1"
        public = self._config.public or (HostPort(host, self.grpc_port),)
        found = one_per_peer_first(self._view.addresses())[:MAX_SWARM_ADDRESSES]
        return Invite(self.run, self.fingerprint, public, code, found)

    def published_invite(self) -> Invite | None:
        """Return the invite for everybody who sees the page; None unless the run admits everybody.

        It never has a code: a code admits whoever reads it.
        """
        return self.invite() if self._spec.admission.mode == "open" else None

    def _member_seconds(self) -> float:
        return self.directives.round_policy.member_seconds

    def overview(self) -> Overview:
        """Return the swarm as it is now.

        It is rebuilt at most four times a second, and takes at most a tenth of the time, however many callers there
        are.
        """
        now = self._now()
        if self._overview is None or not 0 <= now - self._overview[0] < self._overview_seconds:
            began = time.monotonic()
            self.peers.update(self._view.heartbeats(), now)
            round_, loss = self._archiver.validation or (None, None)
            built = self._builder.build(now)
            overview = replace(
                built, validation_round=round_, validation_loss=loss,
                archive_problem="; ".join(p for p in (self._archiver.problem, built.missing_state) if p),
            )  # fmt: skip
            self._overview = (now, overview)
            self._overview_seconds = max(0.25, 10 * (time.monotonic() - began))
        return self._overview[1]

    def alert_input(self) -> AlertInput:
        """Return what the alerts are judged by at this moment."""
        o, now, r = self.overview(), self._now(), self.directives.round_policy
        disk = disk_usage(self._config.folder)
        return AlertInput(
            time=now, up=self._monotonic() - self._began, health=o.health, message=o.message, problem=o.problem,
            caught_up=self.indexer.caught_up, round=o.round,
            round_limit=r.max_seconds + r.exchange_seconds + r.patience_seconds,
            losses=tuple(x.credits.loss for x in o.rounds), training=o.training, diverged=o.diverged,
            resting=sum(p.phase == "resting" and p.last_round is not None for p in o.peers),
            disk_free=disk.free, disk_size=disk.total,
            validation_losses=self._archiver.newest_losses(), archive_problem=o.archive_problem,
            convictions=tuple((str(c.update), c.describe(self.admitter.name_of)) for c in o.convictions),
        )  # fmt: skip

    async def _save_observations(self) -> None:
        if unsaved := self.observations.take_unsaved():
            await asyncio.to_thread(self._observation_file.append, unsaved)

    async def _publish_forever(self) -> None:
        while True:
            self._overview, began = None, time.monotonic()
            self.feed.publish(json_view.encode(self.api.event()))
            self._metrics.update(self.overview(), self._now())
            if self.overview().is_halted:
                self.observations.note_pause()
            took = time.monotonic() - began
            await self._save_observations()
            await wait_at_most(self._news, 2)  # without news the ages of heartbeats change
            self._news.clear()
            # A burst of news gives one event; a large swarm gives fewer, so that peers are answered in between.
            await asyncio.sleep(max(0.3 if len(self.feed) <= 20 else 3, 20 * took))

    async def _tend_admissions(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(TEND_SECONDS)
            try:
                await self.admitter.tend(self._view.heartbeats())
                await self.credits.leaderboard.forget_absent()
            except CoordinatorError as e:  # a database may be away for days: it is logged once
                if not failing:
                    log.warning("peers that are gone are not forgotten: %s. It is tried again", e)
                failing = True
                continue
            if failing:
                log.info("peers that are gone are forgotten again")
            failing = False
