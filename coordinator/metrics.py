"""Prometheus metrics in a registry of their own. No label names a peer: strangers would decide how many there are.

Names follow https://prometheus.io/docs/practices/naming: the unit at the end, `_total` for counters.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter as CountOf
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.overview import Overview
from coordinator.peer_registry import PHASES
from coordinator.round_observations import RoundObservation
from coordinator.traffic_counter import TrafficCounter

LAG_SECONDS = 0.5
HEALTHS = (
    "healthy", "waiting", "idle", "stalled", "split", "catching up", "trouble", "finished", "paused", "ended",
)  # fmt: skip
_GOOD = ("healthy", "finished", "waiting", "paused", "ended")

_CALL = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_ROUND = (1, 3, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
_SHOWN = ("static", "api", "events", "metrics", "checkpoints")
_LASTING = ("events", "checkpoints")


@dataclass(frozen=True, slots=True)
class MetricSources:
    """The sources of the numbers.

    `alerts` are the names of all alert rules, `archive` the name, help and value of each metric of the archive.
    """

    overview: Callable[[], Overview]
    viewers: Callable[[], int]
    folder: Path
    admitted: Callable[[], int]
    rounds_credited: Callable[[], int]
    alerts: Callable[[], tuple[str, ...]]
    archive: Callable[[], Awaitable[Sequence[tuple[str, str, float]]]]


class Metrics:
    """Makes the text of /metrics: the swarm at this moment, and the coordinator's own state."""

    def __init__(self, sources: MetricSources):
        self.registry = registry = CollectorRegistry()
        self._sources = sources
        self._calls = Counter("cairn_grpc_calls", "gRPC calls answered.", ["method", "code"], registry=registry)
        self._seconds = Histogram(
            "cairn_grpc_call_seconds", "How long gRPC calls took.", ["method"], registry=registry, buckets=_CALL
        )
        self._requests = Counter(
            "cairn_http_requests", "HTTP requests answered.", ["handler", "code"], registry=registry
        )
        self._http = Histogram(
            "cairn_http_request_seconds", "How long HTTP requests took, live views and downloads not counted.",
            ["handler"], registry=registry, buckets=_CALL,
        )  # fmt: skip
        self._lag = Histogram(
            "cairn_event_loop_lag_seconds", "By how much a timer of the event loop is late.", registry=registry,
            buckets=_CALL,
        )  # fmt: skip
        self._rounds = Histogram(
            "cairn_round_duration_seconds", "How long rounds, and their parts, took that were seen.", ["phase"],
            registry=registry, buckets=_ROUND,
        )  # fmt: skip
        self._deliveries = Counter(
            "cairn_webhook_deliveries", "Events posted to webhooks.", ["result"], registry=registry
        )
        for phase in ("train", "exchange", "all"):
            self._rounds.labels(phase)
        for result in ("delivered", "failed", "dropped"):
            self._deliveries.labels(result)
        self._traffic = TrafficCounter()
        self._swarm = _Swarm(sources, self._traffic)
        registry.register(self._swarm)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

    def counted(self, method: str, code: str, seconds: float) -> None:
        """Count a gRPC call. Methods and codes are the service's own: few."""
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)

    def delivered(self, result: str) -> None:
        """Count a delivery to a webhook: delivered, failed (to be retried), dropped."""
        self._deliveries.labels(result).inc()

    def round_decided(self, o: RoundObservation) -> None:
        """Count the durations of a round; those that were not observed are left out."""
        for phase, seconds in (("train", o.train), ("exchange", o.after), ("all", o.whole)):
            if seconds is not None:
                self._rounds.labels(phase).observe(seconds)

    def update(self, o: Overview, now: float) -> None:
        self._traffic.update(o, now)

    async def text(self) -> bytes:
        """Return the exposition format."""
        self._swarm.archive = await self._sources.archive()  # it reads the disk
        return generate_latest(self.registry)

    async def watch_loop(self) -> None:
        """Measure how late the event loop is, for ever."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(LAG_SECONDS)
            self._lag.observe(max(0.0, time.monotonic() - began - LAG_SECONDS))

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Return the application with its requests counted, by the first segment of the path.

        No label is a stranger's text.
        """

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            first = scope["path"].split("/", 2)[1] if scope["path"].startswith("/") else ""
            handler = first if first in _SHOWN else "other" if first else "page"
            began, code = time.monotonic(), 500

            async def watched(message: Message) -> None:
                nonlocal code
                if message["type"] == "http.response.start":
                    code = message["status"]
                await send(message)

            try:
                await app(scope, receive, watched)
            finally:
                self._requests.labels(handler, str(code)).inc()
                if handler not in _LASTING:
                    self._http.labels(handler).observe(time.monotonic() - began)

        return counted


class _Swarm:
    """Gauges computed from an overview each time that the text is made."""

    def __init__(self, sources: MetricSources, traffic: TrafficCounter):
        self._sources = sources
        self._traffic = traffic
        self.archive: Sequence[tuple[str, str, float]] = ()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        s = self._sources
        o, disk = s.overview(), shutil.disk_usage(s.folder)
        newest = o.rounds[0] if o.rounds else None
        for name, what, value in (
            ("cairn_healthy", "1 while the swarm is healthy, or rightly at rest.", o.health in _GOOD),
            ("cairn_round", "The round being trained.", o.round),
            ("cairn_rounds_final", "Rounds that are final.", 0 if o.final_round is None else o.final_round + 1),
            ("cairn_tokens_progress", "Accepted tokens that were not voided: a run ends at its goal.", o.tokens),
            ("cairn_tokens_goal", "Tokens that the run is to be trained on; 0: no end.", o.total_tokens),
            ("cairn_tokens_per_second", "Accepted tokens per second over the last rounds.", o.tokens_per_second),
            ("cairn_loss", "Training loss of the newest round.", o.loss),
            ("cairn_round_contributors", "Peers in the newest round.", newest and len(newest.credits.lines)),
            ("cairn_round_absent", "Peers that trained and were not in the newest round.",
             len(newest.absent) if newest and newest.absent is not None else None),
            ("cairn_peers_diverged", "Peers whose state differs from the chain's.", len(o.diverged)),
            ("cairn_peers_admitted", "Peers that hold or held an admission and are remembered.", s.admitted()),
            ("cairn_chain_problem", "1 if the chain is not followed, or there are two coordinators.", bool(o.problem)),
            ("cairn_page_viewers", "Open live views of the page.", s.viewers()),
            ("cairn_disk_free_bytes", "Free where the run's folder is.", disk.free),
            ("cairn_disk_size_bytes", "Size of the disk where the run's folder is.", disk.total),
            ("cairn_rounds_credited", "Final rounds in the ledger, on any branch.", s.rounds_credited()),
        ):  # fmt: skip
            if value is not None:
                yield GaugeMetricFamily(name, what, value=float(value))
        for name, what, value in self.archive:
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(name.removesuffix("_total"), what, value=value)
        text = "Tokens accepted by the chain, also those that were voided later."
        yield CounterMetricFamily("cairn_tokens", text, value=o.tokens_with_voided)
        yield _by("cairn_state", "1 for the state that the swarm is in.", "state",
                  {h: float(h == o.health) for h in dict.fromkeys([*HEALTHS, o.health])})  # fmt: skip
        phases = CountOf(p.phase for p in o.peers)
        text = "Peers that are here or were lately, by what they do."
        yield _by("cairn_peers", text, "phase", {p: phases.pop(p, 0) for p in PHASES} | phases)
        yield _by("cairn_micro_credits", "Micro-credits by whether they are final.", "status",
                  {"settled": o.settled, "pending": o.pending})  # fmt: skip
        active = {a.name for a in o.alerts}
        yield _by("cairn_alert", "1 while the coordinator's own alert stands.", "name",
                  {name: float(name in active) for name in s.alerts()})  # fmt: skip
        traffic = CounterMetricFamily(
            "cairn_peer_bytes", "Bytes that peers say they sent and received.", labels=["direction"]
        )
        traffic.add_metric(["up"], self._traffic.up)
        traffic.add_metric(["down"], self._traffic.down)
        yield traffic


def _by(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    gauge = GaugeMetricFamily(name, what, labels=[label])
    for key, value in values.items():
        gauge.add_metric([key], value)
    return gauge
