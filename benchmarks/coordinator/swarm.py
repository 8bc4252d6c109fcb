"""A swarm that is simulated for the coordinator: keys, heartbeats and rounds of as many peers as one likes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.swarm import AnnouncedUpdate, ReceivedHeartbeat
from protocol.chain import genesis_digest
from protocol.errors import CairnError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.message_codec import KeySigner, encode_certificate
from protocol.messages import (
    Admission,
    Certificate,
    Directive,
    Finalization,
    Heartbeat,
    RoundRecord,
    Signed,
    UpdateHeader,
)
from protocol.spec import RunSpec

OWNER = Identity(sha256(b"the benchmark's owner"))
WINDOWS = 64
"""In an update."""


def make_spec() -> RunSpec:
    """Return a run of a small model; the coordinator's work does not depend on the model's size."""
    digest = sha256(b"x").hex()
    return RunSpec.model_validate({
        "name": "benchmark", "owner": OWNER.key.hex(), "seed": 1,
        "model": {"config": {
            "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
        }, "tensors": [["model.embed_tokens.weight", [256, 32]], ["model.norm.weight", [32]]]},
        "genesis": {"digest": digest, "size": 524_288}, "tokenizer": {"digest": sha256(b"t").hex(), "size": 1000},
        "data": {"window": 1024, "dtype": "uint16",
                 "train": [{"digest": sha256(b"s").hex(), "size": 2_000_000, "tokens": 1_000_000}], "validation": []},
        "inner": {"batch": 4, "lr": 0.001, "schedule": {"kind": "constant"}}, "codec": {"kind": "sparse", "k": 256},
        "round": {"target_tokens": 1_000_000, "max_seconds": 120, "exchange_seconds": 30, "propose_seconds": 5,
                  "patience_seconds": 20, "heartbeat_seconds": 10, "member_seconds": 60,
                  "max_update_tokens": 1_000_000},
        "checkpoint": {"final_depth": 3, "every": 5},
    })  # fmt: skip


def identity(number: int) -> Identity:
    """Return the peer key of a number."""
    return Identity(sha256(b"benchmark", number.to_bytes(8, "big")))


class SimulatedSwarm:
    """A `SwarmView`. Its chain is believed, not signed: verifying is the observer's work, not the coordinator's."""

    def __init__(self, spec: RunSpec, peers: int):
        self.spec = spec
        self.keys: list[PeerKey] = [identity(n).key for n in range(peers)]
        self.head = genesis_digest(spec.run_id)
        self.final: Signed[Finalization] | None = None
        self.coordinator_address: Signed[Any] | None = None
        self.directive: Signed[Directive] | None = None
        self.certificates: list[Certificate] = []
        self._admissions: dict[PeerKey, bytes] = {}
        self._at: dict[Digest, int] = {self.head: 0}
        self._heard: dict[PeerKey, tuple[Heartbeat, float]] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._random = random.Random(1)
        self._sequence = 0

    # -- what the coordinator asks ---------------------------------------------------------------------------

    async def certificates_after(self, record: Digest, limit: int) -> Sequence[Certificate] | None:
        first = self._at.get(record)
        return None if first is None else self.certificates[first : first + limit]

    def certificate(self, record: Digest) -> Certificate | None:
        at = self._at.get(record, 0)
        return self.certificates[at - 1] if at else None

    async def encoded_certificate(self, record: Digest) -> bytes | None:
        found = self.certificate(record)
        return None if found is None else encode_certificate(found)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def heartbeats(self) -> Mapping[PeerKey, ReceivedHeartbeat]:
        now = time.monotonic()
        return {k: ReceivedHeartbeat(h, max(0.0, now - at)) for k, (h, at) in self._heard.items()}

    def addresses(self) -> Sequence[str]:
        return [f"/ip4/203.0.113.{n}/tcp/7412/p2p/12D3KooW{n:044}" for n in range(32)]

    def own_addresses(self) -> Sequence[str]:
        return self.addresses()[:1]

    async def publish_final(self, final: Signed[Finalization]) -> None:
        self.final = final

    async def publish_coordinator_address(self, word: Signed[Any]) -> None:
        self.coordinator_address = word

    def held_state(self) -> int:
        return len(self.certificates)

    def count_backed(self, path: Sequence[Digest]) -> int:
        return len(path)

    def resting_state(self) -> None:
        """Return None: the run goes on."""

    def has_blob(self, digest: Digest) -> bool:
        return False

    def listen(self, callback: Callable[[Signed[Any]], None]) -> None:
        """Messages are not passed on one by one."""

    def announced(self, parent: Digest) -> Sequence[AnnouncedUpdate]:
        return ()

    async def publish_directive(self, word: Signed[Directive]) -> None:
        self.directive = word

    async def offer_state(self, state: Digest, record: Digest) -> None:
        raise CairnError("no state is kept here")

    # -- what happens ----------------------------------------------------------------------------------------

    def beat(self, part: int, parts: int) -> None:
        """Send a heartbeat of each peer whose number is `part` modulo `parts`."""
        now, round_ = time.monotonic(), Round(len(self.certificates))
        self._sequence += 1
        for key in self.keys[part::parts]:
            exchanging = self._random.random() < 0.1
            self._heard[key] = (Heartbeat(
                self.spec.run_id, self._sequence, round_, self.head, 0, 0, "exchanging" if exchanging else "training",
                5e4, 3.0 + self._random.random(), self._sequence * 10**6, self._sequence * 10**7, (), (), b"",
                "NVIDIA GeForce RTX 4090",
            ), now)  # fmt: skip

    def _admission(self, key: PeerKey) -> bytes:
        if key not in self._admissions:
            self._admissions[key] = KeySigner(OWNER).sign(Admission(self.spec.run_id, key, 0, 2**33, "")).encoded
        return self._admissions[key]

    def round(self, contributors: int, loss: float = 3.0) -> None:
        """Add the next round, with updates of a number of peers."""
        number = Round(len(self.certificates))
        keys = sorted(self._random.sample(self.keys, min(contributors, len(self.keys))))
        base = Digest(sha256(b"state", number.to_bytes(8, "big")))
        headers = []
        for key in keys:
            name = Digest(sha256(b"update", key, self.head))
            body = UpdateHeader(
                self.spec.run_id, number, self.head, base, 0, 0, WINDOWS, 16, name, 10**7, loss, self._admission(key)
            )  # fmt: skip
            headers.append(Signed(body, key, name, b""))
        record = RoundRecord(self.spec.run_id, number, self.head, base, 0, tuple(headers))
        digest = Digest(sha256(b"record", self.head, number.to_bytes(8, "big")))
        certificate = Certificate(Signed(record, keys[0], digest, b""), ())
        self.certificates.append(certificate)
        self.head = certificate.digest
        self._at[self.head] = len(self.certificates)
        for callback in list(self._callbacks):
            callback()
