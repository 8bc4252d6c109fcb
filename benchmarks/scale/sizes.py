"""Sizes of messages on the wire: the product's own encoding of messages with realistic contents."""

from __future__ import annotations

from typing import TypeVar

from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, RunId, sha256
from protocol.message_codec import KeySigner
from protocol.messages import (
    Admission,
    Body,
    Goodbye,
    Heartbeat,
    RoundRecord,
    ShardAttestation,
    Signed,
    UpdateHeader,
    Vote,
)

PACKET = 450
"""Bytes of a call beside what it carries, both ways together: stream and call frames, Noise, TCP and IP headers, the
answer. Real peers over emulated links sent 18 kB a second beside updates (docs/results/wan_convergence.md). With
eight heartbeats a second each way this is 1.1 kB for each, 0.65 of them the heartbeat."""

NAME = 16
"""Bytes of a header's name in a record that travels as names."""


class Sizes:
    """Bytes of each kind of message, by its contents."""

    def __init__(self) -> None:
        owner, me = Identity(bytes(31) + b"\x01"), Identity(bytes(31) + b"\x02")
        run, digest = RunId(sha256(b"run")), Digest(sha256(b"digest"))
        signer = KeySigner(me)
        admission = KeySigner(owner).sign(Admission(run, me.key, 1_790_000_000, 1_790_086_400, "a-name")).encoded
        number, windows = Round(1000), 1_000_000
        header = signer.sign(
            UpdateHeader(
                run, number, digest, digest, windows, windows, windows + 30, 30, digest, 125_000_000, 2.5, admission
            )
        )
        address = "/ip4/203.0.113.117/tcp/41123/p2p/12D3KooWGRUfYyJfW2d9HkWKvL1Xr6m8bH7fZ1Fq9YcE3tQ4vTzN"
        beat = Heartbeat(
            run, 1_790_000_000_000, number, digest, 10**9, 30, "exchanging", 65_536.0, 2.5, 10**11, 10**11, (),
            (address,) * 2, admission, "NVIDIA H200", digest,
        )  # fmt: skip
        record = RoundRecord(run, number, digest, digest, 0, (header,))
        self.header = len(header.encoded)
        self.vote = len(signer.sign(Vote(run, number, digest, digest)).encoded)
        self.heartbeat = len(signer.sign(beat).encoded)
        self.record = len(signer.sign(record).encoded) - self.header
        self.reduced = len(signer.sign(ShardAttestation(run, number, digest, 100, digest)).encoded)
        self.goodbye = len(signer.sign(Goodbye(run, 1_790_000_000_000)).encoded)

    def of(self, message: Signed, *, names: bool) -> int:
        """Bytes of a message as it travels. `names`: a record lists names of headers, not headers."""
        body = message.body
        if isinstance(body, Heartbeat):
            return self.heartbeat + 8 * len(body.known_headers)
        if isinstance(body, UpdateHeader):
            return self.header
        if isinstance(body, Vote):
            return self.vote
        if isinstance(body, ShardAttestation):
            return self.reduced
        if isinstance(body, RoundRecord):
            return self.record + len(body.updates) * (NAME + 2 if names else self.header + 3)
        return self.goodbye


T = TypeVar("T", bound=Body)


class CheapSigner:
    """Signs as one peer, without cryptography: what it signs is named by its own count."""

    def __init__(self, key: PeerKey):
        self.key = key
        self._count = 0

    def sign(self, body: T) -> Signed[T]:
        self._count += 1
        digest = Digest(sha256(self.key, self._count.to_bytes(8, "big")))
        return Signed(body, self.key, digest, bytes(digest))


def key_of(index: int) -> PeerKey:
    """Return the key of the peer with a number."""
    return PeerKey(sha256(b"peer", index.to_bytes(4, "big")))
