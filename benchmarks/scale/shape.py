"""One row of the table: model, codec, links, the round's policy, and the trainer's times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cairn.commands.options import parse_count
from protocol.blob_sizes import HEADER, blob_size, mean_size
from protocol.layout import BLOCK, Layout, TensorShape
from protocol.merkle import CHUNK
from protocol.reduce_plan import ReducePlan, shard_count
from protocol.rounds.policy import RoundPolicy
from protocol.spec import CodecSpec

COMMITTEE = 3
STEPS = 30
"""Inner steps that a round asks of each peer."""

STEP_SECONDS = {"1B": 2.0, "25M": 0.5}
"""An inner step. 1B: 131,072 tokens (64 windows of 2,048) at 40% of an H200's 989 TFLOP/s; 25M: on a small GPU."""

MEMORY_RATE = 1e12
"""Bytes a second of a GPU's memory: an RTX 4090's; data centres' have two to five times that."""

DIGEST_SECONDS = 12.0e-9
"""To digest the state: of one core, a parameter, measured (docs/results/codec.md)."""

CHECK_SECONDS = 0.75e-9
"""To check an update: of one core, a parameter, measured there too."""

REDUCE_SECONDS = 3.0e-9
"""To check a slice of an update and add it to a sum: of one core, a parameter, measured there too."""

EFFICIENCY = 0.82
"""Share of the lines that blobs fill, without packets' headers: what four real peers fill (docs/results/scale.md)."""

MACHINES = 32

CORES = 4
"""Cores that check updates and digest the state."""


@dataclass(frozen=True)
class Shape:
    """One row."""

    peers: int
    parameters: str
    codec: str
    up: float = 100e6
    down: float = 100e6
    """Bits a second."""
    rtt: float = 0.1
    exchange: str = "gather"
    names: bool = True
    """Records travel as names of the headers that the receiver holds."""
    blob_bytes: int = 0
    """Of an update; 0: what the codec makes of the parameters."""
    step_seconds: float = 0.0
    heartbeat: float = 0.0
    efficiency: float = EFFICIENCY
    """Share of the lines that blobs fill."""
    watched: int = 0
    """Peers with a round machine of their own; the others do as these do. 0: all, up to 32."""

    @property
    def machines(self) -> int:
        return min(self.peers, self.watched or MACHINES)

    @property
    def numel(self) -> int:
        return parse_count(self.parameters, "--parameters")

    @cached_property
    def layout(self) -> Layout:
        return Layout((TensorShape("weights", (max(1, self.numel // 2048), 2048)),))

    @cached_property
    def coder(self) -> CodecSpec:
        return CodecSpec.model_validate({"kind": self.codec})

    @cached_property
    def blob(self) -> int:
        """Bytes of an update."""
        return self.blob_bytes or blob_size(self.coder, self.layout)

    @cached_property
    def mean(self) -> int:
        """Bytes of the whole mean, when it is reduced."""
        return mean_size(self.coder, self.layout)

    @property
    def parts(self) -> int:
        """Into which the mean is cut."""
        return shard_count(self.peers, self.blob)

    def slice_bytes(self, part: int) -> int:
        """Bytes of an update's Merkle chunks that cover a part."""
        blocks, size = self.numel // BLOCK, (self.blob - HEADER) / (self.numel // BLOCK)
        start, stop = (HEADER + size * (blocks * p // self.parts) for p in (part, part + 1))
        covering = range(int(start) // CHUNK, -(-int(stop) // CHUNK))
        return sum(min(CHUNK, self.blob - i * CHUNK) for i in covering)

    @property
    def step(self) -> float:
        """Seconds of an inner step."""
        return self.step_seconds or STEP_SECONDS.get(self.parameters, self.numel / 0.5e9)

    @property
    def floor(self) -> float:
        """Seconds that the bytes of an exchange need, into the peer that gets most, and two round trips.

        Reduced: the slices for its parts, then the whole mean (and two round trips more).
        """
        rate = min(self.up, self.down) / 8
        if self.exchange == "gather":
            return (self.peers - 1) * self.blob / rate + 2 * self.rtt
        seats = -(-min(COMMITTEE, self.peers) * self.parts // self.peers)
        slices = seats * (self.peers - 1) * self.slice_bytes(0)
        others = self.mean * max(0, self.parts - seats) / self.parts
        return (slices + others) / rate + 4 * self.rtt

    @property
    def needed(self) -> float:
        """Seconds of an exchange as it is modelled: the share of the lines that is filled, and the sums on one core."""
        return self.floor / self.efficiency + (self.reduce if self.exchange == "reduce" else 0)

    @cached_property
    def policy(self) -> RoundPolicy:
        """As an owner would set it: time for the exchange, and heartbeats that leave the lines to the blobs."""
        beat = self.heartbeat or max(2.0, self.peers / 50, self.floor / 30)
        exchange = max(60.0, 2 * self.floor, 2 * self.needed)
        return RoundPolicy(
            target_windows=STEPS * self.peers,
            max_update_windows=10**6,
            max_seconds=max(60.0, 20 * STEPS * self.step),
            exchange_seconds=exchange,
            propose_seconds=max(10.0, exchange / 10),
            patience_seconds=2 * exchange,
            heartbeat_seconds=beat,
            member_seconds=10 * beat,
            max_members=max(256, self.peers + 24),
            exchange=ReducePlan(self.exchange, COMMITTEE, self.blob, self.mean),
        )

    # -- what the trainer takes, in seconds: of the GPU's time, and until the node is answered --------------------

    @property
    def announce_gpu(self) -> float:
        """An estimate: 100 bytes a parameter (pseudo-gradient, feedback, encoding, in unfused passes)."""
        return 100 * self.numel / MEMORY_RATE

    @property
    def announce(self) -> float:
        """And the blob's way to the disk, with its digest, at 0.3 GB/s."""
        return self.announce_gpu + self.blob / 0.3e9

    def apply_gpu(self, updates: int) -> float:
        """Estimate the bytes: 24 a parameter, and 16 for each update (reduced: for their mean)."""
        return (24 + 16 * (updates if self.exchange == "gather" else 1)) * self.numel / MEMORY_RATE

    def apply(self, updates: int) -> float:
        """And the state's digest."""
        return self.apply_gpu(updates) + DIGEST_SECONDS * self.numel

    @property
    def reduce(self) -> float:
        """To make a part of the mean, on one core."""
        return REDUCE_SECONDS * self.numel * self.peers / self.parts

    @property
    def check(self) -> float:
        """To check one update, on one of CORES cores."""
        return CHECK_SECONDS * self.numel
