"""The common setting of all rows, the floor of each, and the definition of a row. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.layout import Layout

SIDE = 1024
"""Side of the model's square matrices: 2**20 parameters each."""

WINDOW = 8
TARGET = 1000
"""Windows that end a round: far more than all peers have done before it is to begin."""
PACKAGE = "benchmarks.exchange_wan"
PAUSE = 2.5


@dataclass(frozen=True)
class Setting:
    """The same for all rows: `mbit` each way for each host, `rtt_ms` between any two, and the congestion control `tcp`.

    `pause` is the seconds before each round, more than a heartbeat. With `ordinary` the peers are an ordinary user's
    processes, whose socket buffers are limited by `net.core.rmem_max`. `warm` is the number of warm-up rounds, one or
    more.
    """

    parameters: int
    peers: int
    mbit: float = 100.0
    rtt_ms: float = 100.0
    rounds: int = 5
    tcp: str = "cubic"
    pause: float = PAUSE
    ordinary: bool = False
    warm: int = 1

    @property
    def layout(self) -> Layout:
        """Matrices of 2**20 parameters: the fewest that are `parameters` or more."""
        count = -(-self.parameters // SIDE**2)
        return Layout.of({f"matrix.{i:04d}": (SIDE, SIDE) for i in range(count)})

    @property
    def two_round_trips(self) -> float:
        """Seconds."""
        return 2 * self.rtt_ms / 1e3

    def seconds_of(self, size: float) -> float:
        """Return the seconds of a number of bytes on one link."""
        return size * 8 / (self.mbit * 1e6)


@dataclass(frozen=True)
class System:
    """One row: the module that each peer runs, its job, and the flow of its bytes.

    `codec`: of updates that each sends to all. Otherwise `width` is the bytes of a value in an all-reduce. Without
    `udp` firewalls drop it, and Cairn's peers have TCP alone.
    """

    module: str
    says: str
    options: Mapping[str, Any] = field(default_factory=dict)
    codec: Mapping[str, Any] | None = None
    width: float = 0.0
    udp: bool = True

    def size(self, layout: Layout) -> int:
        """Bytes of what one peer gives: an update, or its values as they go over the wire."""
        if self.codec is None:
            return int(self.width * layout.numel)
        from protocol.codec import make_codec
        from protocol.spec import CodecSpec

        return make_codec(CodecSpec.model_validate(self.codec), layout).size

    def sent(self, setting: Setting) -> float:
        """Bytes that each peer must send, and receive: to all others, or of the best all-reduce."""
        n, size = setting.peers, self.size(setting.layout)
        return (n - 1) * size if self.codec is not None else 2 * (n - 1) / n * size

    def floor(self, setting: Setting) -> float:
        """Seconds below which no exchange of these bytes can be: bytes / bandwidth and two round trips."""
        return setting.seconds_of(self.sent(setting)) + setting.two_round_trips


def _codec(kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, **more}


def _cairn(says: str, kind: str, *, udp: bool = True, **more: Any) -> System:
    says = f"Cairn, {says}" + ("" if udp else ", UDP blocked")
    return System(f"{PACKAGE}.cairn_peer", says, codec=_codec(kind, **more), udp=udp)


def _tcp(kind: str, **more: Any) -> System:
    return System(
        f"{PACKAGE}.tcp_peer", f"the same bytes between plain TCP processes ({kind})", codec=_codec(kind, **more)
    )


def _hivemind(says: str, wire: str, width: float, *, quic: bool = False) -> System:
    return System(f"{PACKAGE}.hivemind_peer", says, {"compression": wire, "quic": quic}, width=width)


def _pccl(says: str, width: float, *, quantised: bool = False) -> System:
    return System(f"{PACKAGE}.pccl_peer", says, {"quantised": quantised}, width=width)


SYSTEMS: dict[str, System] = {
    "sparse": _cairn("sparse, 64 of 4096", "sparse", k=64),
    "sign": _cairn("sign (the default)", "sign"),
    "int8": _cairn("int8", "int8"),
    "none": _cairn("none (fp32)", "none"),
    "sparse-no-udp": _cairn("sparse, 64 of 4096", "sparse", udp=False, k=64),
    "sign-no-udp": _cairn("sign (the default)", "sign", udp=False),
    "int8-no-udp": _cairn("int8", "int8", udp=False),
    "tcp-sparse": _tcp("sparse", k=64),
    "tcp-sign": _tcp("sign"),
    "tcp-int8": _tcp("int8"),
    "hivemind-u8": _hivemind("hivemind's averager, u8", "uint8", 1.0),
    "hivemind-u8-quic": _hivemind("hivemind's averager, u8, also by QUIC", "uint8", 1.0, quic=True),
    "hivemind-fp16": _hivemind("hivemind's averager, fp16", "fp16", 2.0),
    "hivemind-none": _hivemind("hivemind's averager, fp32", "none", 4.0),
    "gloo": System(f"{PACKAGE}.gloo_peer", "torch.distributed, gloo, fp32", width=4.0),
    "pccl": _pccl("PCCL, fp32", 4.0),
    "pccl-u8": _pccl("PCCL, u8", 1.0, quantised=True),
}
"""In the order of the table."""


@dataclass(frozen=True)
class Round:
    """One measured round. Seconds from the first peer's announcement (or start) until the last peer was done.

    `held`: every other's update is held and checked; `certified`; `applied`. A reducer has `applied` only: its values
    are what they should be. `own`: from a peer's own announcement until it held all, the median of the peers.
    `up`, `down`: IP bytes on a peer's line, the median; `cpu`: CPU seconds of a peer, the mean, by kind of process.
    """

    round: int
    held: float
    certified: float
    applied: float
    own: float
    up: int
    down: int
    cpu: dict[str, float]
    taking_part: int
    right: bool


@dataclass(frozen=True)
class Death:
    """One peer was killed `after` seconds into a round.

    `seconds` is the time until the last of the others was done, None if it exceeded the limit. `right`: all others
    hold the same, right result. `says` describes the result in words. `next_seconds` is the next round of the others,
    None if there was none.
    """

    after: float
    seconds: float | None
    right: bool
    says: str
    next_seconds: float | None


@dataclass(frozen=True)
class Row:
    """A system's result; of its rounds the medians.

    `ratio`: of `exchange` to `floor`. `matchmaking`: hivemind's search for a group, which is not in `seconds`.
    `router_late_ms`: above a few, the emulated lines were slower than they say. `warming`: `exchange` of each round
    before those that are measured, the first of which had cold lines. `searches`: number of times that hivemind's
    peers had to search again for a group, in all rounds, warm-up included.
    """

    name: str
    says: str
    parameters: int
    peers: int
    mbit: float
    rtt_ms: float
    tcp: str
    size: int
    floor: float
    exchange: float
    certified: float
    applied: float
    own: float
    ratio: float
    up: float
    down: float
    cpu: dict[str, float]
    matchmaking: float | None
    right: bool
    taking_part: list[int]
    rounds: list[Round]
    death: Death | None
    router_late_ms: float
    load: list[float]
    pause: float = PAUSE
    ordinary: bool = False
    warming: list[float] = field(default_factory=list)
    searches: int = 0
