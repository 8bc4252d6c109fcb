"""The test vectors, from the product's own code: plain data, without a clock or chance."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from google.protobuf.message import Message
from torch import Tensor

from protocol import vrf
from protocol.assignment import windows_of
from protocol.audits import AuditRule, AuditSeeds, Jury, draw_auditors, draw_by_stake, draw_jury, due_audits
from protocol.blob_sizes import HEADER
from protocol.chain import Chain, ChainLimits, genesis_digest
from protocol.codec import Codec, make_codec
from protocol.codec.bits import pack
from protocol.codec.positions import Positions
from protocol.codec.sparse import SparseCodec
from protocol.compact_record import compact
from protocol.coordinator_address import CoordinatorAddress, sign_coordinator_address
from protocol.directive_codec import encode_directive
from protocol.envelope import Envelope, open_envelope, pae, seal
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.invite import HostPort, Invite
from protocol.layout import BLOCK, MOMENTUM, REFERENCE_NORMS, Layout
from protocol.ledger.credits import CreditRule, RoundCredits
from protocol.ledger.fold import CreditFold
from protocol.ledger.statements import BindAccount, BindPeer, Receipt, sign
from protocol.merkle import CHUNK, blob_digest, leaf_hash, tree_hash
from protocol.message_codec import KINDS, KeySigner, encode_certificate
from protocol.messages import (
    Admission,
    AuditDecision,
    Certificate,
    Directive,
    Finalization,
    Goodbye,
    Heartbeat,
    Pardon,
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
    quorum,
    shards_digest,
)
from protocol.outer import Contribution, apply
from protocol.rebase_rule import rebase_refusal
from protocol.record_node import RecordNode
from protocol.reduce import Reduction, apply_reduced
from protocol.reduce_plan import ReducePlan, committees, shard_count
from protocol.report_rule import decide, may_refute
from protocol.rounds.round_state import proposer_order
from protocol.spec import CodecSpec, OuterSpec, RunSpec, sign_spec
from protocol.stake import StakeRule
from protocol.state import state_digest
from protocol.update_weights import AuthorHistory, weigh
from protocol.version import PROTOCOL
from protocol.wire import coordinator_pb2, ledger_pb2
from protocol.wire import swarm_pb2 as wire
from tests.simulation.signer import FakeSigner, certificate
from tests.support.audited import certificate as audited_certificate
from tests.support.specs import tiny_spec
from tests.vectors.wire_messages import fields_of, wire_messages

# -- where values come from ----------------------------------------------------------------------------------


def identity(name: str) -> Identity:
    """Return the identity whose seed is the SHA-256 of its name."""
    return Identity(sha256(name.encode()))


def digest(name: str) -> Digest:
    return Digest(sha256(name.encode()))


def stream(name: str, count: int) -> bytes:
    """Return bytes that only depend on a name."""
    return hashlib.shake_256(name.encode()).digest(count)


def numbers(name: str, count: int, scale: float) -> Tensor:
    """fp32 [count] from -1 to 1, with all bits of their mantissas, times the scale, a power of two."""
    raw = torch.frombuffer(bytearray(stream(name, 4 * count)), dtype=torch.int32)
    return raw.to(torch.float32) * (scale / 2**31)


def base64_of(data: bytes | bytearray | Tensor) -> str:
    raw = data.contiguous().numpy().tobytes() if isinstance(data, Tensor) else bytes(data)
    return base64.b64encode(raw).decode()


def plain(value: Any) -> Any:
    """Return a message's fields as JSON has them: bytes in hexadecimal, without those that are absent."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Signed):
        return value.encoded.hex()
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    if dataclasses.is_dataclass(value):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {k: v for k, v in fields.items() if v is not None and v != {}}
    return value


# -- hashes ---------------------------------------------------------------------------------------------------


def merkle() -> dict[str, Any]:
    leaves = [leaf_hash(bytes([i])) for i in range(20)]
    sizes = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 7)
    return {
        "tree_hash": [
            {"leaves": n, "root": tree_hash(leaves[:n]).hex()} for n in (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20)
        ],
        "blob_digest": [
            {"bytes": n, "digest": blob_digest((bytes(range(251)) * (n // 251 + 1))[:n]).hex()} for n in sizes
        ],
    }


LAYOUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "one tensor": {"w": (3,)},
    "a scalar, and order by bytes": {"b": (), "B": (2, 2), "a/b": (1, 2, 3), "a.b": (2,)},
    "names beyond ASCII": {"é": (2,), "z": (1,), '"quoted\\"': (1,), "日本": (1, 1)},
    "momentum among the others": {"lm_head": (2, 2), "transformer.w": (3,)},
}


def layouts() -> dict[str, Any]:
    cases = []
    for name, shapes in LAYOUTS.items():
        layout = Layout.of(shapes)
        for whole in (layout, layout.with_momentum().with_reference_norms()):
            state = {t.name: numbers(f"{name} {t.name}", t.numel, 2.0).view(t.shape) for t in whole.tensors}
            header = whole.checkpoint_header()
            cases.append(
                {
                    "name": name,
                    "tensors": [[t.name, list(t.shape)] for t in whole.tensors],
                    "layout_digest": whole.digest.hex(),
                    "values": {t.name: base64_of(state[t.name]) for t in whole.tensors},
                    "header": header[8:].decode().rstrip(" "),
                    "header_bytes": len(header),
                    "file_bytes": whole.checkpoint_size,
                    "state_digest": state_digest(whole, state).hex(),
                }
            )
    return {"cases": cases}


# -- messages -------------------------------------------------------------------------------------------------

SPEC = tiny_spec()
RUN = SPEC.run_id
PEERS = sorted((identity(f"peer {i}") for i in range(4)), key=lambda i: i.key)
OWNER = Identity(sha256(b"test identity owner"))
"""The owner that `tiny_spec` names."""

MEMBER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWCiGGbW1j3yRcRiony9ahXSamT8voUkBxWSHSkxhnrcnf"
SEEDS = {i.key: i.seed for i in (OWNER, *PEERS)}


def admission(peer: Identity) -> Signed[Admission]:
    return KeySigner(OWNER).sign(Admission(RUN, peer.key, 1_700_000_000, 1_700_086_400, "ada"))


def header(peer: Identity, parent: Digest, round: int, **changes: Any) -> Signed[UpdateHeader]:
    body = UpdateHeader(
        run=RUN, round=Round(round), parent=parent, base_state=digest(f"state {round}"), first_window=64 * round,
        rebase_window=64 * round, end_window=64 * round + 10, inner_steps=5,
        blob=digest(f"blob {peer.key.hex()} {round}"), blob_size=1000, loss=3.5, admission=admission(peer).encoded,
    )  # fmt: skip
    return KeySigner(peer).sign(dataclasses.replace(body, **changes))


def certified(
    round: int, parent: Digest, shards: Sequence[Digest] = (), *, author: Identity = PEERS[1], epoch: int = 0
) -> Certificate:
    headers = tuple(header(p, parent, round, epoch=epoch) for p in PEERS[:3])
    record = KeySigner(author).sign(RoundRecord(RUN, Round(round), parent, digest(f"state {round}"), 2, headers))
    vote = Vote(RUN, Round(round), record.digest, shards_digest(shards))
    return Certificate(record, tuple(KeySigner(p).sign(vote) for p in PEERS[:3]), tuple(shards))


FIRST = certified(0, genesis_digest(RUN))
SECOND = certified(1, FIRST.digest, [digest("shard 0"), digest("shard 1")])
WEIGHED = KeySigner(PEERS[1]).sign(dataclasses.replace(FIRST.record.body, weights=(10, 4, 300)))
"""Two of its updates weigh otherwise than they claim; the last has a backlog."""

SCORES = (Score("mean", 0.97, 0.6), Score("worst quarter", -0.5, 0.0))
REPORTS = tuple(
    KeySigner(p).sign(WorkReport(RUN, Round(0), FIRST.digest, FIRST.record.body.updates[0].digest, "replay", SCORES))
    for p in PEERS[1:3]
)
JUDGED = KeySigner(PEERS[1]).sign(
    dataclasses.replace(
        SECOND.record.body, updates=SECOND.record.body.updates[1:2], reports=REPORTS,
        decisions=(AuditDecision(FIRST.digest, PEERS[0].key, True, (PEERS[3].key,)),),
        voided=7,
    )
)  # fmt: skip
"""It carries two reports, and a decision that they alone would not make: that is for the chain to check."""

DIRECTIVE = Directive(
    RUN, 1_700_000_000_000, "paused", 1_700_000_000, "moving house", tuple(p.key for p in PEERS[:2]), Round(7),
    RoundChanges(target_tokens=4096, max_seconds=2.5), Rollback(2, digest("back"), Round(5), digest("state")),
    tuple(Verdict(digest("false"), p.key, "412 teraflops a second") for p in PEERS[:2]),
    (Pardon(PEERS[0].key, Round(4)), Pardon(PEERS[0].key, Round(6))),
)  # fmt: skip


def _signed() -> list[Signed[Any]]:
    peer, owner = KeySigner(PEERS[1]), KeySigner(OWNER)
    beat = Heartbeat(
        run=RUN, sequence=1_700_000_000_000, round=Round(3), head=digest("head"), weight=100, windows=7,
        phase="training", tokens_per_second=2000.0, loss=3.25, bytes_up=10, bytes_down=20,
        known_headers=(1, 2**64 - 1), addresses=("/ip4/127.0.0.1/tcp/1",), admission=admission(PEERS[1]).encoded,
        device="cpu", state=digest("state"), unreachable=(3,), directive_sequence=9,
    )  # fmt: skip
    return [
        admission(PEERS[1]),
        header(PEERS[1], digest("parent"), 3),
        header(PEERS[1], digest("parent"), 3, loss=0.0, epoch=2),
        FIRST.record,
        WEIGHED,
        JUDGED,
        FIRST.votes[0],
        SECOND.votes[1],
        peer.sign(ShardAttestation(RUN, Round(1), SECOND.record.digest, 1, digest("shard 1"))),
        peer.sign(ShardAttestation(RUN, Round(1), SECOND.record.digest, 0, None, (PEERS[0].key, PEERS[3].key))),
        owner.sign(WorkReport(RUN, Round(1), SECOND.digest, digest("update"), "loss", SCORES)),
        owner.sign(Finalization(RUN, Round(1), SECOND.digest, 1)),
        owner.sign(DIRECTIVE),
        peer.sign(beat),
        peer.sign(Goodbye(RUN, 5)),
    ]


def _statements() -> Iterator[tuple[Identity, Envelope, type[Message]]]:
    """Yield who signs, the envelope and the message of each kind that is not among the swarm's."""
    peer, account = PEERS[1], identity("account")
    coordinators = (HostPort("coordinator.example", 7410), HostPort("2001:db8::1", 443))
    place = CoordinatorAddress(RUN, 1_700_000_000_000, coordinators, digest("certificate"), (MEMBER,))
    accepted = Receipt(
        RUN, peer.key, Round(1), SECOND.digest, digest("update"), True, "", 7, 112, 5_000_000, 3, 15
    )  # fmt: skip
    refused = dataclasses.replace(accepted, accepted=False, reason="it was voided", windows=0, tokens=0)
    refused = dataclasses.replace(refused, micro_credits=0, pending_until=0)
    consent = sign(peer, BindPeer(RUN, account.key, 1_700_000_000))
    bound = sign(account, BindAccount(RUN, consent.encoded, 1_700_000_001, "ada", "the engine"))
    request = coordinator_pb2.AdmissionRequest(
        run=RUN, time=1_700_000_000, code="letmein", name="ada", nonce=2**40, protocol=PROTOCOL
    )
    sealed = seal(peer, "admission-request", request.SerializeToString(deterministic=True))
    for signer, encoded, kind, message in (
        (OWNER, sign_coordinator_address(OWNER, place).encoded, "coordinator-address", wire.CoordinatorAddress),
        (OWNER, sign(OWNER, accepted).encoded, "receipt", ledger_pb2.Receipt),
        (OWNER, sign(OWNER, refused).encoded, "receipt", ledger_pb2.Receipt),
        (peer, consent.encoded, "bind-peer", ledger_pb2.BindPeer),
        (account, bound.encoded, "bind-account", ledger_pb2.BindAccount),
        (peer, sealed.encoded, "admission-request", coordinator_pb2.AdmissionRequest),
    ):
        yield signer, open_envelope(encoded, kind), message


def messages() -> dict[str, Any]:
    cases = []
    for signed in _signed():
        kind = KINDS[type(signed.body)].name
        content = wire.Envelope.FromString(signed.encoded).payload
        cases.append(
            {
                "kind": kind,
                "seed": SEEDS[signed.author].hex(),
                "key": signed.author.hex(),
                "fields": plain(signed.body),
                "payload": content.hex(),
                "envelope": signed.encoded.hex(),
                "digest": signed.digest.hex(),
            }
        )
    for signer, envelope, message in _statements():
        cases.append(
            {
                "kind": envelope.kind,
                "seed": signer.seed.hex(),
                "key": signer.key.hex(),
                "fields": fields_of(message.FromString(envelope.payload)),
                "payload": envelope.payload.hex(),
                "envelope": envelope.encoded.hex(),
                "digest": envelope.digest.hex(),
            }
        )
    return {
        "run": RUN.hex(),
        "owner": OWNER.key.hex(),
        "pae": {"kind": "vote", "payload": "00ff", "bytes": pae("vote", b"\x00\xff").decode("latin-1")},
        "largest_envelope": {kind.name: kind.limit for kind in KINDS.values()},
        "messages": cases,
        "refused": _refused(),
    }


def _refused() -> list[dict[str, str]]:
    """Return envelopes that verify, or nearly, and must not be accepted."""
    good = header(PEERS[1], digest("parent"), 3)
    whole = wire.Envelope.FromString(good.encoded)

    def setting(**fields: Any) -> bytes:
        m = wire.UpdateHeader.FromString(whole.payload)
        for field, value in fields.items():
            setattr(m, field, value)
        return seal(PEERS[1], "update-header", m.SerializeToString(deterministic=True)).encoded

    signature = bytearray(whole.signature)
    signature[0] ^= 1
    order = 2**252 + 27742317777372353535851937790883648493
    scalar = (int.from_bytes(whole.signature[32:], "little") + order).to_bytes(32, "little")
    forged = wire.Envelope(kind="update-header", payload=whole.payload, key=whole.key)
    forged.signature = bytes(signature)
    malleable = wire.Envelope(kind="update-header", payload=whole.payload, key=whole.key)
    malleable.signature = whole.signature[:32] + scalar
    cases = {
        "a bit of the signature is another": forged.SerializeToString(deterministic=True),
        "the scalar of the signature is not below the group's order": malleable.SerializeToString(deterministic=True),
        "the kind is not UTF-8": good.encoded.replace(b"update-header", b"update-heade\xff", 1),
        "a byte follows the envelope's fields": good.encoded + b"\x2a\x00",
        "signed for another kind": seal(PEERS[1], "vote", whole.payload).encoded,
        "the payload has an unknown field": seal(PEERS[1], "update-header", whole.payload + b"\xf8\x07\x01").encoded,
        "the payload has a field twice": seal(PEERS[1], "update-header", whole.payload + whole.payload[:34]).encoded,
        "the payload has a varint that is too long": seal(
            PEERS[1], "update-header", whole.payload.replace(b"\x10\x03", b"\x10\x83\x00", 1)
        ).encoded,
        "no window": setting(end_window=192),
        "no inner step": setting(inner_steps=0),
        "a window beyond 2^53": setting(end_window=2**53 + 1),
        "a rebase window beyond 2^53": setting(rebase_window=2**53 + 1),
        "a round beyond 2^40": setting(round=2**40 + 1),
        "a loss that is not a number": setting(loss=float("nan")),
        "a loss of -0": setting(loss=-0.0),
        "a digest of 31 bytes": setting(blob=bytes(31)),
        "the admission of another peer": setting(admission=admission(PEERS[0]).encoded),
        "another run": setting(run=digest("another run")),
    }
    refused = [("update-header", why, data) for why, data in cases.items()]
    return [{"why": why, "kind": kind, "envelope": data.hex()} for kind, why, data in (*refused, *_refused_lists())]


def _refused_lists() -> Iterator[tuple[str, str, bytes]]:
    """Yield kind, reason and envelope of records and directives with lists that break a rule."""
    record = wire.Envelope.FromString(FIRST.record.encoded).payload
    for why, changes in {
        "work reports in descending order": {"reports": [r.encoded for r in reversed(REPORTS)]},
        "a work report twice": {"reports": [REPORTS[0].encoded] * 2},
        "two decisions about one update": {"decisions": 2 * [{"record": FIRST.digest, "author": PEERS[0].key}]},
        "a key refuted twice": {
            "decisions": [{"record": FIRST.digest, "author": PEERS[0].key, "refuted": [PEERS[3].key] * 2}]
        },
    }.items():
        m = wire.RoundRecord.FromString(wire.Envelope.FromString(JUDGED.encoded).payload)
        m.ClearField("reports")
        m.ClearField("decisions")
        m.MergeFrom(wire.RoundRecord(**changes))
        yield "round-record", why, seal(PEERS[1], "round-record", m.SerializeToString(deterministic=True)).encoded
    lone = RoundRecord(RUN, Round(3), digest("parent"), digest("state 3"), 0, (header(PEERS[1], digest("parent"), 3),))
    own, later = PEERS[1].prove(lone.draw_input), dataclasses.replace(lone, round=Round(4))
    for why, proof in {
        "no proof": b"",
        "a bit of the proof is another": own[:79] + bytes([own[79] ^ 1]),
        "the proof of another peer": PEERS[0].prove(lone.draw_input),
        "the proof of another round": PEERS[1].prove(later.draw_input),
    }.items():
        m = wire.RoundRecord.FromString(wire.Envelope.FromString(KeySigner(PEERS[1]).sign(lone).encoded).payload)
        m.proof = proof
        yield "round-record", why, seal(PEERS[1], "round-record", m.SerializeToString(deterministic=True)).encoded
    two = tuple(header(p, digest("parent"), 3, epoch=i) for i, p in enumerate(PEERS[:2]))
    yield (
        "round-record",
        "updates of two epochs",
        KeySigner(PEERS[1]).sign(dataclasses.replace(lone, updates=two)).encoded,
    )
    for why, weights in {
        "weights that are what the updates claim": (10, 10, 10),
        "a weight of 0": (10, 0, 10),
        "fewer weights than updates": (10, 4),
        "a weight beyond 2^53": (10, 4, 2**53 + 1),
    }.items():
        m = wire.RoundRecord.FromString(record)
        m.weights[:] = weights
        yield "round-record", why, seal(PEERS[1], "round-record", m.SerializeToString(deterministic=True)).encoded
    first, second = DIRECTIVE.verdicts
    for why, verdicts in {
        "verdicts in descending order": (second, first),
        "a verdict twice": (first, first),
        "a verdict without a reason": (dataclasses.replace(first, reason=""),),
        "a reason of 81 bytes": (dataclasses.replace(first, reason="x" * 81),),
    }.items():
        m = encode_directive(dataclasses.replace(DIRECTIVE, verdicts=verdicts))
        yield "directive", why, seal(OWNER, "directive", m.SerializeToString(deterministic=True)).encoded
    m = encode_directive(dataclasses.replace(DIRECTIVE, verdicts=(), pardons=DIRECTIVE.pardons[::-1]))
    descending = seal(OWNER, "directive", m.SerializeToString(deterministic=True))
    yield "directive", "pardons in descending order", descending.encoded


def chain() -> dict[str, Any]:
    good = wire.Certificate.FromString(encode_certificate(FIRST))
    descending = wire.Certificate(record=good.record, votes=list(reversed(good.votes)))
    few = wire.Certificate(record=good.record, votes=list(good.votes[:2]))
    without = wire.Certificate(record=SECOND.record.encoded, votes=[v.encoded for v in SECOND.votes])
    return {
        "run": RUN.hex(),
        "owner": OWNER.key.hex(),
        "genesis": genesis_digest(RUN).hex(),
        "genesis_seed": RecordNode(genesis_digest(RUN)).seed.hex(),
        "certificates": [
            {
                "round": c.record.body.round,
                "parent": c.record.body.parent.hex(),
                "record_digest": c.record.digest.hex(),
                "shards": [s.hex() for s in c.shards],
                "shards_digest": (shards_digest(c.shards) or b"").hex(),
                "certificate_digest": c.digest.hex(),
                "proof": c.record.body.proof.hex(),
                "seed": node.seed.hex(),
                "bytes": encode_certificate(c).hex(),
            }
            for c, node in _nodes([FIRST, SECOND])
        ],
        "refused": [
            {"why": "votes are not in ascending order", "bytes": descending.SerializeToString().hex()},
            {"why": "two votes of three contributors", "bytes": few.SerializeToString().hex()},
            {"why": "votes name shards that the certificate does not have", "bytes": without.SerializeToString().hex()},
        ],
    }


def _nodes(branch: Sequence[Certificate]) -> Iterator[tuple[Certificate, RecordNode]]:
    """Yield each certificate of a branch, from round 0 on, with its place in the tree."""
    node = RecordNode(genesis_digest(RUN))
    for c in branch:
        node = RecordNode(c.digest, node, c)
        yield c, node


# -- verifiable random outputs and seeds ----------------------------------------------------------------------

RFC_INPUTS = [
    ("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60", ""),
    ("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb", "72"),
    ("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7", "af82"),
]
"""Secret seeds and inputs of RFC 9381's examples 16, 17 and 18."""

FORGED = [
    (
        "Gamma has a part of order 2",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "faeae32c7d23bd6f62e613aeefb961b0151e7cff16b0cfba6f542312b7512a6c563e7cbd04415820"
        "ff4811716a1f42d948666f221c4e80964a47027719d12f62fe16d2134a7e45a7271e5b21f9411d02",
    ),
    (
        "the key has a part of order 2",
        "b0bfe83c17bc76a56d48f558b2e481436367d330d13b69733f32aa0ed50b99f3",
        "b9143a18db5c5aec83634688b6e2beba40f59c8555a51073045613182e329049fc94619bfd79612e"
        "68f9c365d8fd9a10e3738f612d098f4d60be3a11e04402dd5645f18011a07021663bfbe669995301",
    ),
    (
        "the key and Gamma are the neutral point",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000c5a7b8fff2925873"
        "7efe1b06c52d236be803000000000000000000000000000000000000000000000000000000000000",
    ),
]
"""Keys and proofs for the input 72 that satisfy the equations of RFC 9381, with points outside the prime-order group.

They would give a key a second output. They are written down, since the code that refuses them cannot make them.
"""


def verifiable_draws() -> dict[str, Any]:
    draws = [(PEERS[0], 0, 0), (PEERS[1], 0, 0), (PEERS[1], 1, 0), (PEERS[1], 2**40, 3)]
    authors = [(PEERS[0], 0), (PEERS[2], 0), (PEERS[1], 0), (PEERS[1], 1)]
    branch: list[Certificate] = []
    for number, (author, epoch) in enumerate(authors):
        parent = branch[-1].digest if branch else genesis_digest(RUN)
        branch.append(certified(number, parent, author=author, epoch=epoch))
    return {
        "run": RUN.hex(),
        "rfc9381": [
            {
                "secret_seed": seed, "key": Identity(bytes.fromhex(seed)).key.hex(), "input": alpha,
                "proof": vrf.prove(bytes.fromhex(seed), bytes.fromhex(alpha)).hex(),
            }
            for seed, alpha in RFC_INPUTS
        ],
        "draws": [
            {
                "secret_seed": peer.seed.hex(), "key": peer.key.hex(), "round": round, "epoch": epoch,
                "input": _draw_input(round, epoch).hex(), "proof": peer.prove(_draw_input(round, epoch)).hex(),
                "output": vrf.output(peer.prove(_draw_input(round, epoch))).hex(),
            }
            for peer, round, epoch in draws
        ],
        "refused": [
            {"why": why, "key": key.hex(), "input": alpha.hex(), "proof": proof.hex(), "solves_equations": solves}
            for why, key, alpha, proof, solves in _refused_proofs()
        ],
        "seeds": {
            "genesis": genesis_digest(RUN).hex(),
            "genesis_seed": RecordNode(genesis_digest(RUN)).seed.hex(),
            "records": [
                {
                    "author": c.record.author.hex(), "round": c.record.body.round,
                    "epoch": c.record.body.updates[0].body.epoch, "proof": c.record.body.proof.hex(),
                    "output": vrf.output(c.record.body.proof).hex(), "seed": node.seed.hex(),
                }
                for c, node in _nodes(branch)
            ],
        },
    }  # fmt: skip


def _draw_input(round: int, epoch: int) -> bytes:
    headers = (header(PEERS[1], digest("parent"), round, epoch=epoch),)
    return RoundRecord(RUN, Round(round), digest("parent"), digest(f"state {round}"), 0, headers).draw_input


def _refused_proofs() -> Iterator[tuple[str, bytes, bytes, bytes, bool]]:
    """Yield reason, key, input and proof of what must be refused, and whether the equations of RFC 9381 hold."""
    peer, alpha = PEERS[1], _draw_input(1, 0)
    key, good = peer.key, peer.prove(alpha)
    gamma, c, s = good[:32], good[32:48], good[48:]
    for why, at in {"Gamma": 0, "c": 32, "s": 48}.items():
        yield f"a bit of {why} is another", key, alpha, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :], False
    yield "the sign of Gamma is another", key, alpha, gamma[:31] + bytes([gamma[31] ^ 128]) + c + s, False
    yield "Gamma is that of another input", key, alpha, peer.prove(_draw_input(2, 0))[:32] + c + s, False
    raised = (int.from_bytes(s, "little") + 2**252 + 27742317777372353535851937790883648493).to_bytes(32, "little")
    yield "s is not below the group's order", key, alpha, gamma + c + raised, True
    yield "another key", PEERS[0].key, alpha, good, False
    yield "another round", key, _draw_input(2, 0), good, False
    yield "another epoch", key, _draw_input(1, 1), good, False
    yield "a byte is missing", key, alpha, good[:-1], False
    yield "a byte follows", key, alpha, good + b"\0", False
    yield "no proof", key, alpha, b"", False
    for why, forged, proof in FORGED:
        yield why, bytes.fromhex(forged), b"\x72", bytes.fromhex(proof), True


# -- rounds ---------------------------------------------------------------------------------------------------


REBASES = [[8, rebase, 16] for rebase in (4, 8, 10, 12, 16, 20)] + [[9, 9, 17], [9, 13, 17], [8, 8, 14], [8, 12, 14]]
"""First window, rebase window and end of updates."""


def is_rebase(batch: int | None, continues: bool, windows: list[int]) -> bool:
    first, rebase, end = windows
    body = dataclasses.replace(
        header(PEERS[1], digest("parent"), 3).body, first_window=first, rebase_window=rebase, end_window=end
    )
    return rebase_refusal(body, batch, continues=continues) is None


def rounds() -> dict[str, Any]:
    keys = [identity(f"contributor {i}").key for i in range(7)]
    seeds = [digest("seed"), digest("another seed")]
    plan = ReducePlan("auto", committee=3, update_size=1_000_000, mean_size=5_400_000)
    sizes = (1, CHUNK, CHUNK + 1, 10 * CHUNK, 5000 * CHUNK)
    return {
        "keys": [k.hex() for k in keys],
        "quorum": {str(n): quorum(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 10, 100, 4096)},
        "proposers": [
            {
                "seed": seed.hex(), "stakes": stakes, "recent": recent,
                "order": [
                    k.hex() for k in proposer_order(
                        seed, keys, dict(zip(keys, stakes, strict=True)), [keys[i] for i in recent]
                    )
                ],
            }
            for seed in seeds
            for stakes, recent in (([0] * 7, []), ([0, 0, 5, 0, 0, 9, 0], [0, 3, 5]), ([1, 2, 4, 8, 16, 32, 10**9], []))
        ],
        "committees": [
            {
                "seed": seeds[0].hex(), "attempt": attempt, "contributors": n, "shards": shards, "committee": size,
                "members": [
                    [keys.index(k) for k in members]
                    for members in committees(seeds[0], attempt, keys[:n], shards, size)
                ],
            }
            for attempt, n, shards, size in ((0, 7, 7, 3), (1, 7, 7, 3), (256, 7, 3, 3), (0, 2, 2, 3), (0, 1, 1, 3))
        ],
        "shard_count": [
            {"contributors": n, "update_bytes": size, "shards": shard_count(n, size)}
            for n in (1, 5, 2000) for size in sizes
        ],
        "auto": {
            "committee": plan.committee, "update_bytes": plan.update_size, "mean_bytes": plan.mean_size,
            "reduced": {str(n): plan.is_reduced(n) for n in (0, 1, 2, 17, 18, 100)},
        },
        "rebase_windows": [
            {
                "replay_batch": batch, "continues": continues,
                "accepted": [w for w in REBASES if is_rebase(batch, continues, w)],
                "refused": [w for w in REBASES if not is_rebase(batch, continues, w)],
            }
            for batch, continues in ((None, True), (4, False), (4, True))
        ],
    }  # fmt: skip


def audits() -> dict[str, Any]:
    stakes = {identity(f"contributor {i}").key: stake for i, stake in enumerate((5, 0, 900, 2**60, 70, 70))}
    return {
        "stakes": {key.hex(): stake for key, stake in stakes.items()},
        "draws": [
            {"seed": seed.hex(), "count": n, "keys": [key.hex() for key in draw_by_stake(seed, stakes, n)]}
            for n in (1, 3, 9) for seed in (digest("seed"), digest("another seed"))
        ],
        "due": [_due(name, windows) for name in range(8) for windows in ((64, 64, 300, 20), (700, 2000, 5000, 900))],
        "decisions": {
            "authors": [key.hex() for key in _authors(9)],
            "stakes": DECIDING,
            "cases": [_decision(name) for name in (*range(16), 45, 113)],  # the last two leave convictions open
        },
    }  # fmt: skip


DECIDING = [5, 40, 43, 38, 41, 40, 37, 40, 0]
"""Stakes of nine authors; the last one has none."""


def _authors(count: int) -> list[PeerKey]:
    return sorted(identity(f"contributor {i}").key for i in range(count))


def _due(name: int, windows: Sequence[int]) -> dict[str, Any]:
    """Return the audits that are due for a record of four authors: one without stake, and clean and short records."""
    authors = _authors(4)
    rounds = (0, 64, 64, 9)
    stakes = {key: n * r for key, n, r in zip(authors, windows, rounds, strict=True)}
    made = audited_certificate(f"{name} {windows}", dict(zip(authors, windows, strict=True)))
    seed = sha256(f"seed {name} {windows}".encode())
    due = {audit.author: audit for audit in due_audits(made.record.body, AuditSeeds(seed, seed), stakes, AuditRule())}
    return {
        "seed": seed.hex(), "authors": [key.hex() for key in authors],
        "windows": list(windows),
        "stakes": list(stakes.values()),
        "checks": [due[key].check if key in due else None for key in authors],
        "auditors": [[authors.index(k) for k in draw_auditors(seed, key, stakes, AuditRule())] for key in authors],
        "jury": [_votes(authors, draw_jury(seed, key, stakes, AuditRule())) for key in authors],
        "small_jury": [_votes(authors, draw_jury(seed, key, stakes, AuditRule(jury=2))) for key in authors],
    }  # fmt: skip


VALUES = {True: (0.999, 0.985, 0.9849, 0.97), False: (0.5, 0.955, 0.9551, 0.9699)}
"""Signs that pass and that fail: a clear value, one that is just clear, and two that are close to the threshold."""


def _decision(name: int) -> dict[str, Any]:
    """Return reports about the update of the first of nine authors, each in its own record, and what these decide.

    Two auditors accuse it, or one in every eighth case. All others agree but for about one of six. Reports that no
    record carries after a decision are left out. `open`: whether it carries any.
    """
    authors = _authors(9)
    stakes = dict(zip(authors, DECIDING, strict=True))
    made = audited_certificate(f"decision {name}", dict.fromkeys(authors, 64))
    update, seed = made.record.body.updates[0], sha256(f"seed {name}".encode())
    accusers = draw_auditors(seed, authors[0], stakes, AuditRule())[: 1 if name % 8 == 7 else 2]
    jury = draw_jury(seed, authors[0], stakes, AuditRule(jury=64))
    rows, reports, said = [], [], list[dict[str, Any]]()
    for turn, reporter in enumerate([*map(authors.index, accusers), *range(8, 0, -1)]):
        kind, other, close = sha256(f"report {name} {turn}".encode())[:3]
        passed = turn >= len(accusers) and (name % 2 == 0) is (other >= 40)
        value = VALUES[passed][close % 4 if name % 4 < 2 and turn < 6 else close % 2]
        scores, check = (Score("scale", 0.99, 0.8), Score("signs", value, 0.97)), "loss" if kind < 20 else "replay"
        if said and (not said[-1]["open"] or check != "replay" or passed is said[0]["convicted"]):
            continue
        body = WorkReport(made.record.body.run, Round(3), made.digest, update.digest, check, scores)
        reports.append(Signed(body, authors[reporter], digest(f"report {name} {turn}"), b""))
        rows.append({"by": reporter, "check": check, "scores": [[s.value, s.threshold] for s in scores]})
        decision = decide(made, seed, update, reports, stakes, AuditRule(jury=64), is_decided=bool(said))
        if decision is not None:
            refuted = [authors.index(k) for k in decision.refuted]
            is_open = not refuted and may_refute(decision, reports, jury, stakes)
            said.append({"reports": len(reports), "convicted": decision.convicted, "refuted": refuted, "open": is_open})
    return {"seed": seed.hex(), "reports": rows, "decisions": said}


def _votes(authors: Sequence[PeerKey], jury: Jury) -> list[int]:
    """Return the votes of each author, and last how many decide."""
    return [*(jury.votes.get(key, 0) for key in authors), jury.needed]


def windows() -> dict[str, Any]:
    keys = [identity("peer 0").key, PeerKey(bytes(32))]
    totals = (1, 2, 3, 4, 5, 16, 17, 1000, 2**20 + 1, 2**40 + 12345)
    return {
        "cases": [
            {
                "seed": seed, "key": key.hex(), "windows": total, "first": first,
                "assigned": windows_of(seed, key, first, 12, total).tolist(),
            }
            for seed, key in zip((1, 2**53), keys, strict=True) for total in totals for first in (0, total - 1)
        ]
    }  # fmt: skip


# -- weights, stake, fork choice --------------------------------------------------------------------------------


def weighing() -> dict[str, Any]:
    known = [AuthorHistory(height=h, weighed=(w,), backlog=b) for h, w, b in ((90, 10, 0), (36, 4, 70), (99, 1, 5))]
    old = {name: AuthorHistory(height=99, weighed=w) for name, w in {
        "grows": (8, 8, 9, 16, 16), "shrank": (9, 9, 9, 9, 2), "has grown": (3, 5, 10, 20, 40), "is young": (3, 5, 7, 9)
    }.items()}  # fmt: skip
    rounds = {
        "all are newcomers": [(n, AuthorHistory()) for n in (7, 100, 3, 5, 8)],
        "a newcomer among three": [(30, known[0]), (3, known[2]), (9, known[1]), (100, AuthorHistory())],
        "an author of 64 rounds ago is a newcomer": [(30, known[0]), (9, AuthorHistory(height=35, weighed=(50,)))],
        "limits, and the largest claim": [(100, AuthorHistory(height=99, weighed=(80,), backlog=40)), (1, known[1])],
        "a newcomer's backlog": [(20, known[0]), (2, AuthorHistory(height=20, weighed=(3,), backlog=30))],
        **{f"an author that {name}": [(100, history), (10, known[0])] for name, history in old.items()},
    }
    return {
        "cases": [
            {
                "name": name, "round": 99, "most": 100, "claims": [n for n, _ in claims],
                "histories": [[h.height, list(h.weighed), h.backlog] for _, h in claims],
                "weighed": list(weigh(claims, 99, 100)),
            }
            for name, claims in rounds.items()
        ]
    }  # fmt: skip


def stake() -> dict[str, Any]:
    trees = [_tree("one branch", 75, 0, hold=3), *(_tree(f"forks {i}", 16, 4, hold=1) for i in range(3))]
    trees.append(_tree("a verdict before forks 20", 12, 3, hold=1, owner={4: ("verdict", 0)}))
    orders = {5: ("finalize", 1), 8: ("rollback", 3), 11: ("finalize", 1)}
    trees.append(_tree("finalizations, and a rollback to before one", 14, 4, hold=1, owner=orders))
    return {"cases": trees}


def _tree(
    name: str, count: int, depth: int, *, hold: int, owner: Mapping[int, tuple[str, int]] = MappingProxyType({})
) -> dict[str, Any]:
    """Return a tree of records drawn from a name, with weights and stakes at each, and the head after each.

    A record's parent is drawn from the newest `depth` records; 0: it is the newest. `owner`: by number of records, what
    the owner does, and a number of rounds before the head. "verdict": the next record carries one on the largest
    contribution to its parent. "rollback": it begins the branch. "finalize": when it has arrived.
    """
    drawn = iter(stream(name, 100 * count))
    keys = sorted(identity(f"{name} {i}").key for i in range(6))
    rule = StakeRule(hold, (keys[0], keys[1]), 9)
    limits = ChainLimits(max_update_windows=100, max_members=6, min_main_records=200, stake=rule)
    chain = Chain(RUN, digest("state"), limits)
    made, shown = [chain.genesis], []
    for i in range(count):
        order, back = owner.get(i, ("", 0))
        floor, left = chain.required_ancestor or chain.genesis, chain.rollback
        open_ = [d for d in made if chain.is_ancestor(floor, d) and (left is None or d != left.record)]
        parent = open_[-1 - next(drawn) % min(len(open_), depth or 1)]
        if order in ("rollback", "verdict"):
            parent = list(islice(chain.ancestors(chain.head), back + 1))[-1]
        banned = chain.directives(parent).banned
        some = [k for k in keys if next(drawn) % 4 and k not in banned]
        some = some if len(some) > 1 else [k for k in keys if k not in banned]
        updates = []
        for key in some:
            first = chain.next_window(key, parent) + next(drawn) % 3
            blob = digest(f"{name} {i} {key.hex()}")
            end = first + 1 + next(drawn) % 100
            round_ = chain.height(parent)
            epoch = chain.epoch(parent) + (order == "rollback")
            body = UpdateHeader(RUN, round_, parent, digest("state"), first, first, end, 1, blob, 1, 1.0, b"", epoch)
            updates.append(FakeSigner(key).sign(body))
        directive = None
        if depth == 0 and i in (10, 30):
            others = [v for v in (Verdict(made[at], keys[2], "a copy") for at in (i - 5, i - 2)) if v.record in made]
            body = Directive(
                RUN, i, banned=(keys[5],) if i == 30 else (), verdicts=tuple(sorted(others, key=lambda v: v.record))
            )
            directive = FakeSigner(OWNER.key).sign(body)
        if order == "verdict":
            body = chain.certificate(parent).record.body
            most = max(zip(body.weighed, body.contributors, strict=True))[1]
            directive = FakeSigner(OWNER.key).sign(Directive(RUN, i, verdicts=(Verdict(parent, most, "a copy"),)))
        if order == "rollback":
            rollback = Rollback(1, parent, chain.height(parent), digest("state"))
            directive = FakeSigner(OWNER.key).sign(Directive(RUN, i, rollback=rollback))
        weights = chain.weights(parent, updates)
        body = RoundRecord(
            RUN, chain.height(parent), parent, digest("state"), 0, tuple(updates), directive, weights,
            voided=chain.voided(parent, directive, ()),
        )  # fmt: skip
        voters = some[: quorum(len(some)) + next(drawn) % (len(some) - quorum(len(some)) + 1)]
        added = certificate(FakeSigner(some[0]).sign(body), voters)
        chain.add(added)
        made.append(added.digest)
        final = None
        if order == "finalize":
            final = list(islice(chain.ancestors(chain.head), back + 1))[-1]
            signed = Finalization(RUN, Round(chain.height(final) - 1), final, chain.epoch(final))
            chain.add_finalization(FakeSigner(OWNER.key).sign(signed))
        stakes, audit_stakes = chain.stakes(added.digest), chain.audit_stakes(added.digest)
        instructions = directive.body if directive is not None else None
        shown.append(
            {
                "record": added.digest.hex(), "parent": made.index(parent),
                "authors": [keys.index(k) for k in some], "claims": [u.body.windows for u in updates],
                "ends": [u.body.end_window for u in updates], "weighed": list(body.weighed),
                "voters": [keys.index(k) for k in voters],
                "banned": None if instructions is None else [keys.index(k) for k in instructions.banned],
                "verdicts": [] if instructions is None else
                    [[made.index(v.record), keys.index(v.peer)] for v in instructions.verdicts],
                "stakes": [stakes.get(k, 0) for k in keys],
                "audit_stakes": [audit_stakes.get(k, 0) for k in keys], "weight": chain.weight(added.digest),
                "head": made.index(chain.head),
                **({} if order != "rollback" else {"rollback": True}),
                **({} if final is None else {"finalized": made.index(final)}),
            }
        )  # fmt: skip
    return {
        "name": name, "hold_rounds": hold, "founders": [0, 1], "founder_windows": 9, "max_update_windows": 100,
        "keys": len(keys), "records": shown,
    }  # fmt: skip


# -- updates --------------------------------------------------------------------------------------------------

SCALES = [b"\x00\x00", b"\x80\x3f", b"\x9a\x3e", b"\x01\x3d", b"\x80\x21", b"\x00\x40"]
"""bfloat16, little endian: 0, 1, 0.30078125, 0.031494140625, 2^-60, 2."""


def made_blob(codec: Codec, name: str, exponent: int = 0) -> bytes:
    """Return a valid blob whose fields are drawn from a name. `exponent` is added to those of its scales."""
    blob = bytearray(codec.header)
    for tensor in codec.layout.tensors:
        for start in range(0, tensor.numel, BLOCK):
            blob += _made_block(codec, min(BLOCK, tensor.numel - start), f"{name} {tensor.name} {start}", exponent)
    codec.check(blob)
    return codec.with_author(blob, PeerKey(sha256(name.encode())))


def _made_block(codec: Codec, m: int, name: str, exponent: int) -> bytes:
    drawn = stream(name, 8 * m + 8)

    def scale(at: int) -> bytes:
        raw = int.from_bytes(SCALES[drawn[at] % len(SCALES)], "little")
        return (raw + (exponent << 7) if raw else 0).to_bytes(2, "little")

    if codec.identifier == 3:
        return numbers(name, m, 2.0**exponent).numpy().tobytes()
    if codec.identifier == 2:
        return scale(0) + bytes(b if b != 128 else 0 for b in drawn[8 : 8 + m])
    if codec.identifier == 4:
        signs = torch.tensor([[b & 1 for b in drawn[8 : 8 + m]]], dtype=torch.uint8)
        return scale(0) + pack(signs, 1).numpy().tobytes()
    assert isinstance(codec, SparseCodec)
    coding: Positions = codec.positions(m)
    order = sorted(range(m), key=lambda i: drawn[8 + 2 * i : 16 + 2 * i] + i.to_bytes(2, "big"))
    positions = torch.tensor([sorted(order[: coding.k])])
    levels = sorted((scale(0), scale(1)), key=lambda b: int.from_bytes(b, "little"))
    codes = torch.tensor([[b & 3 for b in drawn[8 : 8 + coding.k]]], dtype=torch.uint8)
    where = b"" if coding.dense else coding.encode(positions).numpy().tobytes()
    return b"".join(levels) + where + pack(codes, 2).numpy().tobytes()


CODECS = [CodecSpec(kind="sign"), CodecSpec(kind="int8"), CodecSpec(kind="none")]
CODECS += [CodecSpec(kind="sparse", k=k) for k in (64, 1500, 4096)]
SMALL = {"matrix": (5, 13), "scalar": (), "é": (70,)}


def codec() -> dict[str, Any]:
    cases = []
    for spec in CODECS:
        for shapes in (SMALL, {"w": (4097,)}):
            layout = Layout.of(shapes)
            made = make_codec(spec, layout)
            if made.size > 3000:
                continue
            blob = made_blob(made, f"codec {spec.kind} {spec.k}")
            decoded = [made.decode_tensor(blob, i) for i in range(len(layout.tensors))]
            cases.append(
                {
                    "kind": spec.kind,
                    "k": spec.k,
                    "tensors": [[t.name, list(t.shape)] for t in layout.tensors],
                    "blob": blob.hex(),
                    "author": made.author_of(blob).hex(),
                    "values": [base64_of(d.values) for d in decoded],
                    "positions": [None if d.positions is None else d.positions.tolist() for d in decoded],
                    "sum_squares": made.sum_squares(blob),
                    "refused": _refused_blobs(made, bytearray(blob)),
                }
            )
    return {"cases": cases}


def _refused_blobs(codec: Codec, good: bytearray) -> list[dict[str, Any]]:
    """Return each defect as the offset and the bytes to put there."""
    scale = HEADER
    edits = {"a magic of another format": (0, b"CRN2"), "another layout": (8, bytes([good[8] ^ 1]))}
    if codec.identifier != 3:
        edits |= {
            "a negative scale": (scale, b"\x80\xbf"), "a scale of -0": (scale, b"\x00\x80"),
            "an infinite scale": (scale, b"\x80\x7f"), "a scale below 2^-60": (scale, b"\x7f\x21"),
        }  # fmt: skip
    if codec.identifier == 2:
        edits |= {"a value of -128": (HEADER + 2, b"\x80"), "a scale above 2^23": (scale, b"\x01\x4b")}
    if codec.identifier == 1:
        edits["the low scale is above the high one"] = (scale, b"\x80\x40\x80\x3f")
    if codec.identifier == 3:
        edits |= {
            "a value that is not a number": (HEADER, b"\0\0\xc0\x7f"),
            "a value above 2^30": (HEADER, b"\x01\0\x80\x4e"),
        }
    return [{"why": why, "offset": at, "bytes": data.hex()} for why, (at, data) in edits.items()]


# -- the outer step -------------------------------------------------------------------------------------------

DEFAULTS = {"mean": "senders", "clip": "median", "weight_cap": 1 / 3, "optimizer": "plain", "lr": 1.0, "momentum": 0.9}
STEPS: list[tuple[str, CodecSpec, dict[str, Any], list[int]]] = [
    ("sign, nesterov", CODECS[0], {"optimizer": "nesterov", "momentum": 0.5}, [30, 10, 20]),
    ("sign, plain, a sole update", CODECS[0], {"lr": 1.8}, [7]),
    ("int8, a cap of 0.4", CODECS[1], {"weight_cap": 0.4, "optimizer": "nesterov", "lr": 0.7}, [1000, 1, 2, 3]),
    ("int8, a cap that no shares keep", CODECS[1], {"weight_cap": 0.2}, [5, 1, 1]),
    ("none, two updates", CODECS[2], {"lr": 0.3}, [2**53 - 1, 1]),
    ("none, unclipped", CODECS[2], {"clip": "none", "lr": 0.7}, [3, 4, 5]),
    ("sparse, the senders' mean", CODECS[3], {}, [30, 10, 20, 7]),
    ("sparse, no cap", CODECS[3], {"weight_cap": 1.0}, [30, 10, 20, 7]),
    ("sparse, everybody's mean", CODECS[3], {"mean": "all"}, [30, 10, 20, 7]),
    ("sparse, all sent", CODECS[5], {"optimizer": "nesterov", "lr": 1.1}, [30, 10, 20]),
]


def _state(layout: Layout, outer: OuterSpec) -> dict[str, Tensor]:
    whole = layout.with_momentum() if outer.optimizer == "nesterov" else layout
    state = {
        t.name: numbers(f"state {t.name}", t.numel, 0.25 if t.name.startswith(MOMENTUM) else 4.0).view(t.shape)
        for t in whole.tensors
    }
    # As after a first round, below the norms of the updates, and above them.
    references = {REFERENCE_NORMS: torch.tensor([0.0, 0.30078125, 2.0**12])} if outer.clip == "median" else {}
    return state | references


def _shown(state: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: base64_of(tensor) for name, tensor in sorted(state.items(), key=lambda item: item[0].encode())}


def outer_steps() -> dict[str, Any]:
    layout, cases = Layout.of(SMALL), []
    for name, spec, changes, claimed in STEPS:
        made, outer = make_codec(spec, layout), OuterSpec.model_validate(DEFAULTS | changes)
        authors = [identity(f"author {i}").key for i in range(len(claimed))]
        blobs = [made_blob(made, f"{name} {i}", exponent=3 * i) for i in range(len(claimed))]
        updates = [Contribution(*u) for u in zip(authors, claimed, blobs, strict=True)]
        state = _state(layout, outer)
        case: dict[str, Any] = {
            "name": name, "kind": spec.kind, "k": spec.k, "outer": outer.model_dump(mode="json"),
            "tensors": [[t.name, list(t.shape)] for t in layout.tensors], "before": _shown(state),
            "updates": [{"author": u.author.hex(), "windows": u.windows, "blob": u.blob.hex()} for u in updates],
        }  # fmt: skip
        apply(state, updates, made, outer)
        case["after"] = _shown(state)
        reduced, reduction = _state(layout, outer), Reduction(made)
        shards = [reduction.reduce(updates, outer, 2, shard) for shard in range(2)]
        apply_reduced(reduced, shards, reduction, outer)
        case["two_shards"] = {"blobs": [s.hex() for s in shards], "after": _shown(reduced)}
        cases.append(case)
    return {"cases": cases}


# -- credits --------------------------------------------------------------------------------------------------


def credit() -> dict[str, Any]:
    rules = [CreditRule(6, 28_832, 16), CreditRule(6, 1_000_000_000, 2048), CreditRule(1, 999_999_999, 1)]
    return {
        "micro_credits": [
            {
                "flops_per_parameter_token": r.flops_per_parameter_token, "parameters": r.parameters,
                "window": r.window_tokens, "windows": n, "micro_credits": r.micro_credits(n),
            }
            for r in rules for n in (1, 2, 3, 361, 362, 10**6)
        ],
        "fold": _fold(),
    }  # fmt: skip


def _fold() -> dict[str, Any]:
    """Return final records in order, and all balances after each.

    Some verdicts come in time, one too late, one a second time. A rollback leaves two records behind.
    """
    rule = CreditRule(6, 1_000_000_000, 16, hold_rounds=2, total_tokens=5000)
    fold = CreditFold(RUN, rule)
    keys = [p.key for p in PEERS]
    records = [digest(f"record {i}") for i in range(8)]
    parents = [genesis_digest(RUN), *records[:4], records[2], *records[5:7]]
    rounds = [0, 1, 2, 3, 4, 3, 4, 5]
    verdicts = {2: [(0, 1), (1, 3)], 4: [(1, 0), (3, 2)], 6: [(3, 2), (4, 0)]}
    steps = []
    for i, record in enumerate(records):
        windows = {keys[j]: 5 * i + 3 * j + 1 for j in range(4) if (i + j) % 3}
        lines = tuple(rule.line(key, digest(f"update {i} {key.hex()}"), n) for key, n in windows.items())
        given = tuple(Verdict(records[of], keys[j], "a copy") for of, j in verdicts.get(i, ()))
        back = Rollback(1, records[2], Round(3), digest("state")) if i == 5 else None
        fold.add(RoundCredits(Round(rounds[i]), record, parents[i], digest("state"), 3.5, lines, given, back))
        steps.append(
            {
                "record": record.hex(), "parent": parents[i].hex(), "round": rounds[i],
                "windows": {key.hex(): n for key, n in windows.items()},
                "verdicts": [[v.record.hex(), v.peer.hex()] for v in given],
                "rollback": None if back is None else {"record": back.record.hex(), "round": back.round},
                "balances": {
                    key.hex(): [b.pending.micro_credits, b.settled.micro_credits, b.voided.micro_credits]
                    for key, b in sorted(fold.balances.items())
                },
            }
        )  # fmt: skip
    return {
        "flops_per_parameter_token": 6, "parameters": 1_000_000_000, "window": 16, "hold_rounds": 2,
        "total_tokens": 5000, "genesis": genesis_digest(RUN).hex(), "steps": steps,
    }  # fmt: skip


def spec() -> dict[str, Any]:
    return {
        "canonical": SPEC.canonical().decode(),
        "run_id": RUN.hex(),
        "envelope": sign_spec(OWNER, SPEC).encoded.hex(),
    }


def wire_forms() -> dict[str, Any]:
    """Return each message with each field set, and what is not a message of the schemas."""
    long = Invite(
        RUN, digest("certificate"), (HostPort("coordinator.example", 7410), HostPort("2001:db8::1", 443)), "letmein",
        (MEMBER, "/ip6/2001:db8::7/udp/4001/quic-v1/p2p/12D3KooW"),
    )  # fmt: skip
    invites = [Invite(RUN, digest("certificate"), (HostPort("192.0.2.1", 7410),)), long]
    compacted = compact(FIRST.record)
    assert compacted is not None
    return {
        "messages": wire_messages(),
        "compact_record": {"record": FIRST.record.encoded.hex(), "bytes": compacted.hex()},
        "invites": [
            {
                "text": str(invite),
                "fields": {
                    "run": invite.run.hex(),
                    "fingerprint": invite.fingerprint.hex(),
                    "coordinators": [str(place) for place in invite.coordinators],
                    "code": invite.code,
                    "addresses": list(invite.addresses),
                },
            }
            for invite in invites
        ],
    }


VECTORS: dict[str, Callable[[], dict[str, Any]]] = {
    "merkle.json": merkle,
    "layouts.json": layouts,
    "messages.json": messages,
    "wire.json": wire_forms,
    "chain.json": chain,
    "vrf.json": verifiable_draws,
    "rounds.json": rounds,
    "weighing.json": weighing,
    "audits.json": audits,
    "stake.json": stake,
    "windows.json": windows,
    "codec.json": codec,
    "outer_step.json": outer_steps,
    "credits.json": credit,
    "spec.json": spec,
    "spec.schema.json": RunSpec.model_json_schema,
}
