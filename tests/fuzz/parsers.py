"""Every parser of foreign input, with valid samples and what mutates them: signed again, checksums mended."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

from coordinator.admission import KIND as ADMIT
from coordinator.admission import open_request
from coordinator.checkpoints import verification
from coordinator.checkpoints.archive import config_json
from coordinator.errors import CoordinatorError
from coordinator.page.credit_routes import CREDIT_ENDPOINTS
from coordinator.page.endpoints import ENDPOINTS
from peer.auditor.job import (
    MAX_ANSWER,
    AuditAnswer,
    AuditJob,
    ClaimedUpdate,
    MeasuredScore,
    Rebase,
    ScreenJob,
    StateFiles,
    answer_line,
    job_line,
    parse_answer,
    parse_job,
)
from peer.auditor.score_words import score_words
from peer.channel import RoundUpdates, UpdateFile
from peer.errors import AuditError
from peer.log_client import LogClient
from peer.node.packet_decoder import PacketDecoder
from peer.swarm.addresses import dial_addresses
from peer.swarm.libp2p.dht import HeartbeatValidator, unpack_records
from peer.swarm.transfer import frames
from protocol import coordinator_address, spec
from protocol.blob_sizes import HEADER
from protocol.chain import Chain, ChainLimits
from protocol.codec import make_codec
from protocol.compact_record import compact, header_id, parse_compact_record
from protocol.coordinator_address import CoordinatorAddress, open_coordinator_address, sign_coordinator_address
from protocol.envelope import seal
from protocol.errors import CairnError, CodecError, MalformedError, ProtocolError, SpecError, UnknownParent
from protocol.ids import PeerKey, Round, RunId, b64url, from_b64url, sha256
from protocol.invite import PREFIX, HostPort, Invite
from protocol.layout import Layout, checkpoint_header_size
from protocol.ledger import statements
from protocol.merkle import CHUNK, blob_digest
from protocol.message_codec import KINDS, KeySigner, MessageDecoder, encode_certificate
from protocol.messages import Certificate, Finalization, RoundRecord, Signed, UpdateHeader, Vote, WorkReport
from protocol.reduce import Reduction
from protocol.spec import CodecSpec, open_spec, parse_spec, sign_spec
from protocol.version import PROTOCOL
from protocol.wire import coordinator_pb2, ledger_pb2
from protocol.wire import swarm_pb2 as wire
from tests.fuzz.harness import Parser
from tests.fuzz.mutation import mutate_bytes, mutate_json, mutate_wire
from tests.support.bindings import bind
from tests.support.signed import (
    CERTIFICATE,
    HEADERS,
    ONE_OF_EACH,
    PEERS,
    RECORD,
    REDUCED_CERTIFICATE,
    RUN,
    SPEC,
    STRANGER,
    record,
)
from tests.support.specs import OWNER, admission, digest, tiny_spec
from tests.vectors import made

MAX_SPEC_MEBIBYTES = 128
"""A spec of 1 MiB, with all its objects and the problems that are found in it."""

T = TypeVar("T")
NOW = 1_700_000_000.0
SIGNERS = {i.key: i for i in (OWNER, STRANGER, *PEERS)}
PAYLOADS: dict[str, type[Message]] = {
    "admission": wire.Admission, "update-header": wire.UpdateHeader, "round-record": wire.RoundRecord,
    "vote": wire.Vote, "shard-attestation": wire.ShardAttestation,
    "work-report": wire.WorkReport, "finalization": wire.Finalization,
    "directive": wire.Directive, "heartbeat": wire.Heartbeat, "goodbye": wire.Goodbye,
    coordinator_address.KIND: wire.CoordinatorAddress, "receipt": ledger_pb2.Receipt, "bind-peer": ledger_pb2.BindPeer,
    "bind-account": ledger_pb2.BindAccount, ADMIT: coordinator_pb2.AdmissionRequest,
}  # fmt: skip


# -- signed messages --------------------------------------------------------------------------------------------


def resigned(rng: random.Random, data: bytes) -> bytes:
    """Mutate an envelope: mostly its payload, which its author signs again, and the envelopes in it likewise."""
    try:
        e = wire.Envelope.FromString(data)
    except DecodeError:
        return mutate_bytes(rng, data)
    signer = SIGNERS.get(PeerKey(e.key) if len(e.key) == 32 else OWNER.key)
    if signer is None or e.kind not in PAYLOADS or rng.random() < 0.2:
        return mutate_wire(rng, wire.Envelope(), data)
    if rng.random() < 0.05:
        signer = rng.choice(list(SIGNERS.values()))
    payload = _inner(rng, e.kind, e.payload) if rng.random() < 0.3 else None
    if payload is None:
        payload = mutate_wire(rng, PAYLOADS[e.kind](), e.payload)
    return seal(signer, e.kind, payload).encoded


INNER = {"update-header": "admission", "heartbeat": "admission", "bind-account": "peer_statement"}


def _inner(rng: random.Random, kind: str, payload: bytes) -> bytes | None:
    """Return the payload with a mutated envelope in it; None if there is none."""
    try:
        message: Any = PAYLOADS[kind].FromString(payload)
    except DecodeError:
        return None
    if kind == "round-record" and message.updates:
        at = rng.randrange(len(message.updates))
        message.updates[at] = resigned(rng, message.updates[at])
    elif kind in INNER:
        setattr(message, INNER[kind], resigned(rng, getattr(message, INNER[kind])))
    else:
        return None
    return message.SerializeToString(deterministic=True)


def _message(data: bytes) -> None:
    signed = PacketDecoder(MessageDecoder(RUN, OWNER.key)).decode_message(data, NOW)
    kind = KINDS[type(signed.body)]
    assert signed.encoded == data and len(data) <= kind.limit
    again = kind.encode(signed.body).SerializeToString(deterministic=True)
    assert signed.body == kind.decode(again, MessageDecoder(RUN, OWNER.key))


def _messages() -> Parser:
    samples = [s.encoded for s in ONE_OF_EACH if type(s.body).__name__ != "Admission"]
    samples.append(record(HEADERS, weights=(1, 2, 3, 4, 5, 6, 7)).encoded)
    return Parser("messages", samples, resigned, _message, (ProtocolError,))


def _packets() -> Parser:
    encoded = [s.encoded for s in ONE_OF_EACH]
    packet = wire.Packet(messages=encoded, certificates=[encode_certificate(CERTIFICATE)])

    def mutate(rng: random.Random, data: bytes) -> bytes:
        p = wire.Packet()
        try:
            p.ParseFromString(data)
        except DecodeError:
            return mutate_bytes(rng, data)
        if not p.messages or rng.random() < 0.2:
            return mutate_wire(rng, wire.Packet(), data)
        at = rng.randrange(len(p.messages))
        p.messages[at] = resigned(rng, p.messages[at])
        return p.SerializeToString()

    def parse(data: bytes) -> None:
        packet = wire.Packet.FromString(data)
        decoder = PacketDecoder(MessageDecoder(RUN, OWNER.key))
        if not any(decoder.decode_packet(STRANGER.key, packet, NOW)):
            raise MalformedError("nothing of it was accepted")

    return Parser("packets", [packet.SerializeToString()], mutate, parse, (ProtocolError, DecodeError), seconds=4)


def _certificates() -> Parser:
    both = [encode_certificate(c) for c in (CERTIFICATE, REDUCED_CERTIFICATE, made.FIRST)]

    def mutate(rng: random.Random, data: bytes) -> bytes:
        c = wire.Certificate()
        try:
            c.ParseFromString(data)
        except DecodeError:
            return mutate_bytes(rng, data)
        choice = rng.random()
        if choice < 0.3 and c.record:
            c.record = resigned(rng, c.record)
        elif choice < 0.6 and c.votes:
            at = rng.randrange(len(c.votes))
            c.votes[at] = resigned(rng, c.votes[at])
        else:
            return mutate_wire(rng, wire.Certificate(), data)
        return c.SerializeToString(deterministic=True)

    def parse(data: bytes) -> None:
        certificate = MessageDecoder(RUN, OWNER.key).decode_certificate(data)
        again = encode_certificate(certificate)
        assert MessageDecoder(RUN, OWNER.key).decode_certificate(again) == certificate
        chain = Chain(RUN, made.digest("state 0"), ChainLimits(max_update_windows=64, max_members=256))
        try:
            assert chain.add(certificate) and chain.head == certificate.digest
        except UnknownParent:
            pass  # of a later round

    return Parser("certificates", both, mutate, parse, (ProtocolError,))


def _compact_records() -> Parser:
    sample = compact(RECORD)
    assert sample is not None
    held = {header_id(h.encoded): h.encoded for h in HEADERS}

    def mutate(rng: random.Random, data: bytes) -> bytes:
        try:
            e = wire.Envelope.FromString(data)
        except DecodeError:
            return mutate_bytes(rng, data)
        if rng.random() < 0.3:
            return mutate_wire(rng, wire.Envelope(), data)
        e.payload = mutate_wire(rng, wire.RoundRecord(), e.payload)
        return e.SerializeToString(deterministic=True)

    def parse(data: bytes) -> None:
        record = parse_compact_record(data)
        headers = [held.get(i, b"") for i in record.header_ids]
        PacketDecoder(MessageDecoder(RUN, OWNER.key)).decode_message(record.reconstruct(headers), NOW)

    return Parser("compact records", [sample], mutate, parse, (ProtocolError,))


def _coordinator_addresses() -> Parser:
    body = CoordinatorAddress(
        RUN, 1000, (HostPort("c.example", 7410), HostPort("::1", 7410)), digest("c"), ("/ip4/1.2.3.4/tcp/7412",)
    )
    sample = sign_coordinator_address(OWNER, body).encoded

    def parse(data: bytes) -> None:
        signed = open_coordinator_address(data, RUN, OWNER.key)
        assert all(str(c).isprintable() for c in signed.body.coordinators)

    return Parser("coordinator addresses", [sample], resigned, parse, (ProtocolError,))


def _dht_values() -> Parser:
    beat = next(s.encoded for s in ONE_OF_EACH if type(s.body).__name__ == "Heartbeat")

    def packed(data: bytes) -> bytes:
        return b"\xc5" + (len(data) % 2**16).to_bytes(2, "big") + data

    def mutate(rng: random.Random, data: bytes) -> bytes:
        return packed(resigned(rng, data[3:])) if rng.random() < 0.8 else mutate_bytes(rng, data)

    def parse(data: bytes) -> None:
        HeartbeatValidator(RUN).author(data)

    # The errors that `validate` catches.
    return Parser("DHT values", [packed(beat)], mutate, parse, (ProtocolError, DecodeError))


def _dht_dictionaries() -> Parser:
    table = DictionaryDHTValue()
    for n in range(3):
        table.store(str(n), b"value %d" % n, 1e9)

    def parse(data: bytes) -> None:
        unpack_records(data)

    return Parser("DHT dictionaries", [MSGPackSerializer.dumps(table)], mutate_bytes, parse, (ProtocolError,))


def _admission_requests() -> Parser:
    body = coordinator_pb2.AdmissionRequest(run=RUN, time=int(NOW), name="ada", code="code", protocol=PROTOCOL)
    sample = seal(PEERS[1], ADMIT, body.SerializeToString()).encoded
    return Parser("admission requests", [sample], resigned, open_request, (ProtocolError, CoordinatorError))


def _statements() -> Parser:
    samples = [
        statements.sign(OWNER, _receipt()).encoded,
        bind(PEERS[1], STRANGER, RUN, 1_700_000_000, "ada", "engines").encoded,
    ]
    openers: dict[str, Callable[[bytes], object]] = {
        "receipt": lambda d: statements.open_receipt(d, RUN, OWNER.key),
        "bind-account": lambda d: statements.open_binding(d, RUN),
    }

    def parse(data: bytes) -> None:
        for kind, opener in openers.items():
            if kind.encode() in data[:40]:
                opener(data)
                return
        statements.open_receipt(data, RUN, OWNER.key)

    return Parser("ledger statements", samples, resigned, parse, (ProtocolError,))


def _receipt() -> statements.Receipt:
    return statements.Receipt(
        RUN, PEERS[1].key, RECORD.body.round, RECORD.digest, digest("update"), True, "", 10, 160, 1, 5, 17
    )


# -- updates -----------------------------------------------------------------------------------------------------

LAYOUT = Layout.of({"a": (3, 50), "b": (77,), "c": (), "d": (4160,)})
CODECS = [make_codec(c, LAYOUT) for c in (CodecSpec(kind="sparse", k=64), CodecSpec(kind="sparse", k=1500))]
CODECS += [make_codec(CodecSpec(kind="sparse", k=4096), LAYOUT), make_codec(CodecSpec(kind="sign"), LAYOUT)]
CODECS += [make_codec(CodecSpec(kind="int8"), LAYOUT), make_codec(CodecSpec(kind="none"), LAYOUT)]
REDUCTIONS = [Reduction(codec) for codec in CODECS]


def mutate_blob(rng: random.Random, data: bytes) -> bytes:
    """Edit bytes in place: mostly the size stays, and the header."""
    if rng.random() < 0.05:
        return mutate_bytes(rng, data)
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 8))):
        at = rng.randrange(HEADER if rng.random() < 0.95 else 0, max(HEADER + 1, len(out)))
        put = rng.choice((b"\0", b"\xff", b"\x80", b"\x7f", b"\x80\x7f", b"\xc0\x7f", b"\x80\xff", rng.randbytes(4)))
        out[at : at + len(put)] = put[: max(0, len(out) - at)]
    return bytes(out)


def _blobs() -> Parser:
    blobs = [made.made_blob(c, f"fuzz {c.identifier} {c.kept}") for c in CODECS]
    by_header = {b[4:8]: c for b, c in zip(blobs, CODECS, strict=True)}

    def parse(data: bytes) -> None:
        codec = by_header.get(data[4:8], CODECS[0])
        codec.check(data)
        for index, tensor in enumerate(LAYOUT.tensors):
            decoded = codec.decode_tensor(data, index)
            assert decoded.values.isfinite().all() and decoded.values.abs().max() <= 2.0**30
            p = decoded.positions
            assert p is None or ((p[1:] > p[:-1]).all() and 0 <= p[0] and p[-1] < tensor.numel)
        assert all(0 <= e < float("inf") for e in codec.sum_squares(data))

    return Parser("updates", blobs, mutate_blob, parse, (CodecError,))


def _shards() -> Parser:
    sizes = [(r.shard_codec(2, 1), r) for r in REDUCTIONS]
    shards = [bytes(c.header) + bytes(c.size - HEADER) for c, _ in sizes if c.identifier != 5]
    shards += [c.with_author(made.made_blob(c, "shard"), PeerKey(bytes(32))) for c, _ in sizes if c.identifier == 2]

    def parse(data: bytes) -> None:
        for codec, reduction in sizes:
            if codec.header[:8] == data[:8]:
                return reduction.check_shard(data, 2, 1)
        raise CodecError("of no codec")

    return Parser("reduced shards", shards, mutate_blob, parse, (CodecError,))


# -- specs, invites, addresses --------------------------------------------------------------------------------------


def _specs() -> Parser:
    samples = [SPEC.canonical(), tiny_spec(codec={"kind": "sign"}, outer={"optimizer": "nesterov"}).canonical()]

    def parse(data: bytes) -> None:
        assert parse_spec(data).canonical() == data
        signed = seal(OWNER, spec.KIND, data).encoded
        open_spec(signed, RunId(blob_digest(data)))

    return Parser(
        "run specs", samples, mutate_json, parse, (SpecError, ProtocolError), mebibytes=MAX_SPEC_MEBIBYTES, seconds=5
    )


def _invites() -> Parser:
    address = f"/ip4/1.2.3.4/tcp/7412/p2p/{'12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo'}"
    invite = Invite(RUN, digest("c"), (HostPort("c.example", 7410), HostPort("::1", 1)), "code", (address,))
    other = Invite(RUN, digest("c"), (HostPort("192.0.2.1", 65535),), "", ("/dns/x.example/tcp/1",))

    def mutate(rng: random.Random, data: bytes) -> bytes:
        try:
            body = from_b64url(data.decode().removeprefix(PREFIX))[:-4]
        except (MalformedError, UnicodeDecodeError):
            return mutate_bytes(rng, data)
        if rng.random() < 0.2:
            return mutate_bytes(rng, data)
        body = mutate_bytes(rng, body)
        return (PREFIX + b64url(body + sha256(body)[:4])).encode()

    def parse(data: bytes) -> None:
        found = Invite.parse(data.decode("utf-8", "surrogateescape"))
        assert Invite.parse(str(found)) == found

    return Parser("invites", [str(invite).encode(), str(other).encode()], mutate, parse, (ProtocolError,))


def _addresses() -> Parser:
    peer = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
    samples = [
        f"/ip4/192.0.2.1/tcp/4001/p2p/{peer}",
        f"/ip6/::1/udp/4001/quic-v1/p2p/{peer}",
        f"/dns/a.b/tcp/1/p2p/{peer}",
    ]
    samples += ["c.example:7410", "[2001:db8::1]:7410"]

    def parse(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        if text.startswith("/"):
            dial_addresses(text)
        else:
            assert HostPort.parse(str(HostPort.parse(text))) == HostPort.parse(text)

    return Parser("addresses", [s.encode() for s in samples], mutate_bytes, parse, (ProtocolError,))


# -- blobs on streams, queries, answers --------------------------------------------------------------------------------


def _frames() -> Parser:
    request = frames.BlobRequest(frames.BlobOp.CHUNK, digest("blob"), 7).encode()

    prefix = frames.BlobReply(frames.ReplyStatus.OK, bytes(100)).prefix()

    def parse(data: bytes) -> None:
        assert frames.BlobReply(frames.ReplyStatus.BUSY, data).reason.isprintable()
        if len(data) == frames.REQUEST_BYTES:
            assert frames.parse_request(data).encode() == data
        elif len(data) == frames.REPLY_PREFIX_BYTES:
            assert frames.parse_reply_prefix(data, CHUNK)[1] <= CHUNK

    def mutate(rng: random.Random, data: bytes) -> bytes:
        """Fields have a fixed size: streams are read by it."""
        changed = mutate_bytes(rng, data)
        return changed[: len(data)].ljust(len(data), b"\0") if rng.random() < 0.9 else changed

    return Parser("stream frames", [request, prefix], mutate, parse, (ProtocolError,))


def _queries() -> Parser:
    parameters = [p for e in (*ENDPOINTS, *CREDIT_ENDPOINTS) for p in e.parameters]
    samples = [b"0", b"25", b"-1", b"up", PEERS[0].key.hex().encode(), "é".encode()]

    def parse(data: bytes) -> None:
        text, refusals = data.decode("utf-8", "replace"), 0
        for parameter in parameters:
            try:
                value = parameter.read(text)
                assert not isinstance(value, int) or parameter.low <= value <= parameter.top
            except ValueError as e:
                refusals += 1
                assert len(str(e)) < 1000
        if refusals == len(parameters):
            raise ValueError("no parameter takes it")

    return Parser("query parameters", samples, mutate_bytes, parse, (ValueError,))


def _answers() -> Parser:
    receipt = base64.b64encode(statements.sign(OWNER, _receipt()).encoded).decode()
    key = PEERS[1].key
    amounts = {"micro_credits_settled": 1, "micro_credits_pending": 2, "micro_credits_voided": 3}
    line = {"peer": key.hex(), "update": digest("update").hex(), "windows": 10, "tokens": 160, "micro_credits": 27}
    credited = {
        "number": 1, "round": 3, "record": RECORD.digest.hex(), "parent": digest("parent").hex(), "time": 1_700_000_000,
        "lines": [line | {"voided_by": None}, line | {"voided_by": 2}],
    }  # fmt: skip
    pages = {
        "receipts": [{"bytes": receipt, "status": "pending"}], "next": 5, "rounds": [credited], "size": 7, "settled": 5,
        "balances": [{"peer": key.hex(), **amounts}],
    }  # fmt: skip
    totals = {
        "kind": "peer", "name": "ada", "team": "", "account": key.hex(), "recent": 1, "tokens": 2, "rounds": 3,
        "peers": [key.hex()], "rounds_total": 4, **amounts,
    }  # fmt: skip

    def parse(data: bytes) -> None:
        async def fetch(url: str) -> bytes:
            return data

        client = LogClient("https://page.example", RUN, OWNER.key, fetch)
        accepted = 0
        calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: client.receipts(key), lambda: client.rounds(0, 10), client.balances, lambda: client.totals(key),
        ]  # fmt: skip
        for call in calls:
            try:
                call().send(None)
            except StopIteration:
                accepted += 1
            except CairnError as e:
                assert str(e).isprintable()
        if not accepted:
            raise MalformedError("no call accepts it")

    return Parser(
        "a coordinator's answers", [json.dumps(f).encode() for f in (pages, totals)], mutate_json, parse, (CairnError,),
        seconds=10,
    )  # fmt: skip


# -- an auditor's process ------------------------------------------------------------------------------------------


def _read_line(parse: Callable[[bytes], T], data: bytes) -> T:
    """Return what a line says. The error of another one must be short, and safe for a log."""
    try:
        return parse(data)
    except AuditError as e:
        assert len(str(e)) < 2000 and str(e).isprintable(), repr(str(e)[:200])
        raise


def _audit_jobs() -> Parser:
    blob = Path("/home/ada/.cairn/runs/tiny/store/blobs/ab/abcd")
    update = ClaimedUpdate(PEERS[0].key, 10, 14, 22, blob)
    gathered = RoundUpdates(3, digest("record"), (UpdateFile(PEERS[0].key, 4, blob), UpdateFile(PEERS[1].key, 8, blob)))
    reduced = RoundUpdates(4, digest("another"), (), (blob, blob))
    start = StateFiles(blob, digest("checkpoint"), (gathered, reduced), digest("state"), 12)
    replay = AuditJob(
        "replay", Path("/spec.json"), digest("certificate"), update, start, Rebase(gathered, digest("state"), 24)
    )
    shards = {digest("shard").hex(): str(blob), digest("other").hex(): ""}
    loss = AuditJob(
        "loss", Path("/spec.json"), digest("certificate"), update, start, own=update, device="cuda:1", threads=4,
        shards=shards, private_data=True,
    )  # fmt: skip

    screen = ScreenJob(Path("/spec.json"), (blob, blob, blob), ((blob, blob), (blob,)), threads=2)

    def parse(data: bytes) -> None:
        job = _read_line(parse_job, data)
        assert parse_job(job_line(job)) == job

    return Parser(
        "audit jobs",
        [job_line(replay), job_line(loss), job_line(screen)],
        mutate_json,
        parse,
        (AuditError,),
        mebibytes=128,
    )


def _audit_answers() -> Parser:
    scores = MeasuredScore("scale", 0.99, 0.8), MeasuredScore("signs", 0.994, 0.97)
    samples = [AuditAnswer(scores, "", 12.3), AuditAnswer((), "the disk is full", 0.5, is_uncheckable=True)]

    def parse(data: bytes) -> None:
        answer = _read_line(parse_answer, data)
        assert parse_answer(answer_line(answer)) == answer
        assert answer.reason.isprintable() and score_words(answer.as_scores).isprintable()
        if answer.scores:  # then the node signs them, and all peers must accept what it signs
            body = WorkReport(RUN, Round(3), digest("record"), digest("update"), "replay", answer.as_scores)
            assert _decoded(KeySigner(PEERS[0]).sign(body).encoded).body == body

    def mutate(rng: random.Random, data: bytes) -> bytes:
        return mutate_json(rng, data)[:MAX_ANSWER]  # the node reads no more

    return Parser("audit answers", [answer_line(a) for a in samples], mutate, parse, (AuditError,))


def _decoded(data: bytes) -> Signed:
    return PacketDecoder(MessageDecoder(RUN, OWNER.key)).decode_message(data, NOW)


# -- checkpoints ---------------------------------------------------------------------------------------------------


def _checkpoint_headers() -> Parser:
    headers = [Layout.of(s).checkpoint_header() for s in made.LAYOUTS.values()]

    def mutate(rng: random.Random, data: bytes) -> bytes:
        text = data[8:].rstrip(b" ") or b"{}"
        if rng.random() < 0.1:
            return mutate_bytes(rng, data)
        text = mutate_json(rng, text) if rng.random() < 0.5 else mutate_bytes(rng, text)
        size = -(-(8 + len(text)) // CHUNK) * CHUNK
        return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)

    def parse(data: bytes) -> None:
        size = checkpoint_header_size(data)
        assert size <= 2**27
        layout = Layout.from_checkpoint(data)
        assert layout.checkpoint_header() == data[:size]

    return Parser("checkpoint headers", headers, mutate, parse, (ProtocolError,))


NAMES = (
    "cairn.json",
    "spec.signed",
    "config.json",
    "tokenizer.json",
    "certificate.bin",
    "witnesses.json",
    "model.safetensors",
)


def _folders() -> Parser:
    """Folders of an archived state, as one JSON object of base64 files."""
    base = _folder()

    def mutate(rng: random.Random, data: bytes) -> bytes:
        try:
            files = {k: base64.b64decode(v) for k, v in json.loads(data).items()}
        except (ValueError, AttributeError):
            files = {k: base64.b64decode(v) for k, v in json.loads(base).items()}
        name = rng.choice([n for n in sorted(files) if n != "model.safetensors"])
        if name == "spec.signed" and rng.random() < 0.7:
            payload = wire.Envelope.FromString(base64.b64decode(json.loads(base)[name])).payload
            files[name] = seal(OWNER, spec.KIND, mutate_json(rng, payload)).encoded
        elif name.endswith(".json"):
            files[name] = mutate_json(rng, files[name])
        else:
            files[name] = mutate_bytes(rng, files[name])
        return _packed(files)

    def parse(data: bytes) -> None:
        try:
            files = {k: base64.b64decode(v) for k, v in json.loads(data).items()}
        except (ValueError, AttributeError, TypeError):
            raise MalformedError("not this test's form") from None

        def read_file(name: str) -> Iterator[bytes]:
            if name not in files:
                raise CoordinatorError(f"there is no {name}")
            file = io.BytesIO(files[name])
            while chunk := file.read(CHUNK):
                yield chunk

        lines: list[str] = []
        verification.verify_checkpoint(read_file, owner=OWNER.key, report=lines.append)
        assert all(line.isprintable() for line in lines)

    return Parser("checkpoint folders", [base], mutate, parse, (CairnError,), mebibytes=MAX_SPEC_MEBIBYTES, seconds=5)


def _packed(files: dict[str, bytes]) -> bytes:
    return json.dumps({k: base64.b64encode(v).decode() for k, v in files.items()}).encode()


def _folder() -> bytes:
    """Return a folder that verifies: the state that the record of round 1 of a tiny run names."""
    config, text = {"model_type": "llama", "hidden_size": 8}, b"{}"
    state = Layout.of({"w": (2,)}).with_reference_norms().checkpoint_header() + bytes(12)
    named = blob_digest(state)
    run_spec = tiny_spec(
        model={"config": config, "tensors": [["w", [2]]]}, tokenizer={"digest": blob_digest(text).hex(), "size": 2}
    )
    run, parent, peers = run_spec.run_id, digest("the record before"), PEERS[:3]
    headers = tuple(
        KeySigner(p).sign(
            UpdateHeader(
                run,
                Round(1),
                parent,
                named,
                0,
                0,
                9,
                1,
                digest(f"blob {p.key}"),
                1,
                3.5,
                admission(run_spec, p).encoded,
            )
        )
        for p in peers
    )
    record = KeySigner(peers[0]).sign(RoundRecord(run, Round(1), parent, named, 0, headers))
    votes = tuple(KeySigner(p).sign(Vote(run, Round(1), record.digest)) for p in peers)
    certificate = Certificate(record, votes)
    final = KeySigner(OWNER).sign(Finalization(run, Round(1), certificate.digest)).encoded
    manifest = {
        "run": run.hex(), "state": named.hex(), "record": parent.hex(), "round": 1, "tokens": 144, "name": "tiny",
        "final": base64.b64encode(final).decode(),
    }  # fmt: skip
    return _packed(
        {
            "cairn.json": json.dumps(manifest).encode(), "spec.signed": sign_spec(OWNER, run_spec).encoded,
            "config.json": config_json(config), "tokenizer.json": text, "model.safetensors": state,
            "certificate.bin": encode_certificate(certificate), "witnesses.json": b'["AAAA"]',
        }
    )  # fmt: skip


MAKERS: tuple[Callable[[], Parser], ...] = (
    _messages, _packets, _certificates, _compact_records, _coordinator_addresses, _dht_values,
    _dht_dictionaries, _admission_requests,
    _statements, _blobs, _shards, _specs, _invites, _addresses, _frames, _queries, _answers, _audit_jobs,
    _audit_answers, _checkpoint_headers, _folders,
)  # fmt: skip


def all_parsers() -> dict[str, Parser]:
    """Return every parser by its name."""
    return {p.name: p for p in (make() for make in MAKERS)}
