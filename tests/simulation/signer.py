"""A cheap signer: the same `Signed` objects, named by a hash of what matters, without Ed25519."""

from __future__ import annotations

from dataclasses import astuple, replace

from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import (
    Certificate,
    Directive,
    Finalization,
    Goodbye,
    Heartbeat,
    RoundRecord,
    ShardAttestation,
    Signed,
    UpdateHeader,
    Vote,
    WorkReport,
    shards_digest,
)


def number(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)


LABELS = {
    Heartbeat: b"Heartbeat", Goodbye: b"Goodbye", UpdateHeader: b"Header", RoundRecord: b"Record", Vote: b"Vote",
    Finalization: b"Final", Directive: b"Directive", ShardAttestation: b"Reduced", WorkReport: b"Report",
}  # fmt: skip
"""Labels that begin digests of each kind. Proposer order follows from digests, so another label is another seed."""


class FakeSigner:
    """Signs as one peer. Its proofs are hashes: that of the real one is tested by itself."""

    def __init__(self, key: PeerKey):
        self.key = key

    def sign(self, body):
        if isinstance(body, RoundRecord):
            body = replace(body, proof=sha256(b"proof", self.key, body.draw_input if body.updates else b""))
        match body:
            case Heartbeat() | Goodbye():
                content = (number(body.sequence),)
            case UpdateHeader():
                content = (body.parent, body.blob, body.base_state, number(body.first_window), number(body.end_window))
                content += (b"rebase", number(body.rebase_window)) if body.rebase_window != body.first_window else ()
                content += (number(body.epoch),) if body.epoch else ()
            case RoundRecord():
                content = (body.parent, number(body.attempt), *(u.digest for u in body.updates))
                content += (body.directive.digest,) if body.directive is not None else ()
                content += tuple(r.digest for r in body.reports) + tuple(d.record for d in body.decisions)
            case Vote():
                content = (body.record, number(body.round), body.shards_digest or b"")
            case Finalization():
                content = (body.record, number(body.round), *((number(body.epoch),) if body.epoch else ()))
            case Directive():
                content = (repr(astuple(body)).encode(),)
            case ShardAttestation():
                content = (body.record, number(body.shard), body.blob or b"", *body.missing)
            case WorkReport():
                content = (body.record, body.update, body.check.encode(), bytes([body.passed]))
            case _:
                raise TypeError(f"the simulator signs no {type(body).__name__}")
        digest = Digest(sha256(LABELS[type(body)], self.key, *content))
        return Signed(body, self.key, digest, bytes(digest))


def certificate(record: Signed[RoundRecord], keys, parts: tuple[Digest, ...] = ()) -> Certificate:
    """Return the certificate of a record with votes of these contributors."""
    vote = Vote(record.body.run, record.body.round, record.digest, shards_digest(parts))
    return Certificate(record, tuple(FakeSigner(k).sign(vote) for k in sorted(keys)), parts)
