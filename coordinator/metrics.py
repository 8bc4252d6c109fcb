"""Prometheus metrics in a registry of their own. Never a label by peer: strangers would decide how many there are."""

from __future__ import annotations

from collections import Counter as CountOf
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from coordinator.overview import Overview


class Metrics:
    """What /metrics answers: the swarm at the moment of asking, and how the coordinator itself is doing."""

    def __init__(self, look: Callable[[], Overview], viewers: Callable[[], int]):
        self._registry = CollectorRegistry()
        self._calls = Counter("cairn_grpc_calls", "gRPC calls answered.", ["method", "code"], registry=self._registry)
        self._seconds = Histogram(
            "cairn_grpc_seconds", "How long gRPC calls took.", ["method"], registry=self._registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
        )  # fmt: skip
        self._registry.register(_Swarm(look, viewers))

    def counted(self, method: str, code: str, seconds: float) -> None:
        """One gRPC call was answered. Methods and codes are the service's own: few."""
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


class _Swarm:
    """Gauges computed from an overview when they are asked for."""

    def __init__(self, look: Callable[[], Overview], viewers: Callable[[], int]):
        self._look = look
        self._viewers = viewers

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        o = self._look()
        for name, what, value in (
            ("cairn_healthy", "1 while the swarm is healthy (or the run is finished).", o.health in _GOOD),
            ("cairn_round", "The round being trained.", o.round),
            ("cairn_final_rounds", "Rounds that are final.", 0 if o.final_round is None else o.final_round + 1),
            ("cairn_tokens", "Tokens accepted by the chain.", o.tokens),
            ("cairn_tokens_per_second", "Accepted tokens per second over the last rounds.", o.tokens_per_second),
            ("cairn_micro_credits_settled", "Micro-credits in final rounds.", o.settled),
            ("cairn_micro_credits_pending", "Micro-credits in rounds that are not final yet.", o.pending),
            ("cairn_page_viewers", "Open live views of the page.", self._viewers()),
            ("cairn_chain_problem", "1 while the chain cannot be followed.", bool(o.problem)),
        ):
            yield GaugeMetricFamily(name, what, value=float(value))
        if o.loss is not None:
            yield GaugeMetricFamily("cairn_loss", "Training loss of the newest round.", value=o.loss)
        peers = GaugeMetricFamily("cairn_peers", "Peers by state.", labels=["phase"])
        for phase, count in CountOf(p.phase for p in o.peers).items():
            peers.add_metric([phase], count)
        yield peers


_GOOD = ("healthy", "finished", "waiting")
