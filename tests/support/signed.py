"""A round's signed messages of a tiny run, and what no honest signer would make: for the tests of messages."""

from __future__ import annotations

import dataclasses
from typing import Any

from protocol.envelope import seal
from protocol.identity import Identity
from protocol.ids import Round
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import (
    Certificate,
    Directive,
    Finalization,
    Goodbye,
    Heartbeat,
    Rollback,
    RoundChanges,
    RoundRecord,
    Score,
    ShardAttestation,
    Signed,
    UpdateHeader,
    Verdict,
    Vote,
    WorkReport,
    shards_digest,
)
from protocol.wire import swarm_pb2 as wire
from tests.support.specs import OWNER, admission, digest, identity, tiny_spec

SPEC = tiny_spec()
RUN = SPEC.run_id
OTHER_RUN = tiny_spec(seed=2).run_id
PEERS = sorted((identity(i) for i in range(7)), key=lambda i: i.key)
STRANGER = identity("stranger")
ADMISSIONS = {i.key: admission(SPEC, i).encoded for i in PEERS}


def decoder(**options: int) -> MessageDecoder:
    return MessageDecoder(RUN, OWNER.key, **options)


def header(peer: Identity, **changes: Any) -> Signed[UpdateHeader]:
    body = UpdateHeader(
        run=RUN, round=Round(3), parent=digest("parent"), base_state=digest("state"), first_window=10,
        rebase_window=10, end_window=20, inner_steps=5, blob=digest(f"blob {peer.key.hex()}"), blob_size=1000, loss=3.5,
        admission=ADMISSIONS.get(peer.key, b""),
    )  # fmt: skip
    return KeySigner(peer).sign(dataclasses.replace(body, **changes))


def record(headers: list[Signed[UpdateHeader]], author: Identity = PEERS[0], **changes: Any) -> Signed[RoundRecord]:
    body = RoundRecord(RUN, Round(3), digest("parent"), digest("state"), 0, tuple(headers))
    return KeySigner(author).sign(dataclasses.replace(body, **changes))


def vote(voter: Identity, of: Signed[RoundRecord], **changes: Any) -> Signed[Vote]:
    return KeySigner(voter).sign(dataclasses.replace(Vote(RUN, Round(3), of.digest), **changes))


def heartbeat(peer: Identity, **changes: Any) -> Signed[Heartbeat]:
    body = Heartbeat(
        run=RUN, sequence=1, round=Round(3), head=digest("head"), weight=100, windows=7, phase="training",
        tokens_per_second=2000.0, loss=3.5, bytes_up=10, bytes_down=20, known_headers=(1, 2**64 - 1),
        addresses=("/ip4/127.0.0.1/tcp/1",), admission=ADMISSIONS.get(peer.key, b""), device="cpu",
    )  # fmt: skip
    return KeySigner(peer).sign(dataclasses.replace(body, **changes))


HEADERS = [header(p) for p in PEERS]
RECORD = record(HEADERS)
VOTES = [vote(p, RECORD) for p in PEERS]
CERTIFICATE = Certificate(RECORD, tuple(VOTES[:5]))
PARTS = tuple(digest(f"part {i}") for i in range(7))
REDUCED_CERTIFICATE = Certificate(
    RECORD, tuple(vote(p, RECORD, shards_digest=shards_digest(PARTS)) for p in PEERS[:5]), PARTS
)
DIRECTIVE = Directive(
    RUN, 1_700_000_000_000, "paused", 1_700_000_000, "moving house", tuple(sorted(p.key for p in PEERS[:2])), Round(7),
    RoundChanges(target_tokens=4096, max_seconds=2.5, max_members=9),
    Rollback(2, digest("back"), Round(5), digest("state")),
    (Verdict(digest("false"), PEERS[0].key, "412 teraflops a second"),),
)  # fmt: skip

ONE_OF_EACH: list[Signed[Any]] = [
    admission(SPEC, PEERS[1]), HEADERS[1], RECORD, VOTES[1], heartbeat(PEERS[1]),
    KeySigner(OWNER).sign(Finalization(RUN, Round(3), RECORD.digest)), KeySigner(PEERS[1]).sign(Goodbye(RUN, 2)),
    REDUCED_CERTIFICATE.votes[1], KeySigner(PEERS[1]).sign(ShardAttestation(RUN, Round(3), RECORD.digest, 4, PARTS[4])),
    KeySigner(PEERS[1]).sign(ShardAttestation(RUN, Round(3), RECORD.digest, 4, None, (PEERS[0].key, PEERS[3].key))),
    KeySigner(OWNER).sign(DIRECTIVE),
    KeySigner(PEERS[1]).sign(
        WorkReport(RUN, Round(3), RECORD.digest, HEADERS[1].digest, "replay", (Score("warm", 0.97, 0.92),))
    ),
]  # fmt: skip


def raw(signer: Identity, kind: str, message: Any) -> bytes:
    """Return a signed message that no honest signer would make."""
    return seal(signer, kind, message.SerializeToString()).encoded


def wire_header(peer: Identity = PEERS[1], **changes: Any) -> wire.UpdateHeader:
    m = wire.UpdateHeader.FromString(wire.Envelope.FromString(header(peer).encoded).payload)
    for field, value in changes.items():
        setattr(m, field, value)
    return m


def wire_record(headers: list[bytes], **changes: Any) -> wire.RoundRecord:
    m = wire.RoundRecord(run=RUN, round=3, parent=digest("parent"), base_state=digest("state"), updates=headers)
    m.proof = PEERS[0].prove(RECORD.body.draw_input)
    for field, value in changes.items():
        setattr(m, field, value)
    return m


SENT = [h.encoded for h in HEADERS]
