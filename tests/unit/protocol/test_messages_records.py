"""Records and certificates: each author once, of one round, voted for by those whom it lists."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.chain import genesis_digest
from protocol.envelope import MAX_ENVELOPE
from protocol.errors import MalformedError, SignatureError
from protocol.ids import MAX_COUNT, MAX_ROUND, Round
from protocol.merkle import MAX_BLOB
from protocol.message_codec import (
    KINDS,
    MAX_HEADER_ENVELOPE,
    MAX_VOTE_ENVELOPE,
    KeySigner,
    MessageDecoder,
    check_certificate,
    encode_certificate,
)
from protocol.messages import (
    MAX_ADDRESS,
    MAX_ADDRESSES,
    MAX_CERTIFICATE,
    MAX_CONTRIBUTORS,
    MAX_KNOWN_HEADERS,
    MAX_MISSING_AUTHORS,
    MAX_NAME,
    MAX_SHARDS,
    Admission,
    Certificate,
    Heartbeat,
    RoundRecord,
    ShardAttestation,
    quorum,
    shards_digest,
)
from protocol.record_node import RecordNode
from protocol.wire import swarm_pb2 as wire
from tests.support.signed import (
    CERTIFICATE,
    HEADERS,
    OTHER_RUN,
    PARTS,
    PEERS,
    RECORD,
    REDUCED_CERTIFICATE,
    RUN,
    SENT,
    STRANGER,
    VOTES,
    decoder,
    header,
    heartbeat,
    raw,
    record,
    vote,
    wire_record,
)
from tests.support.specs import OWNER, digest, identity

# -- records --------------------------------------------------------------------------------------------------


def test_a_record_knows_its_contributors_and_its_work():
    assert RECORD.body.contributors == tuple(p.key for p in PEERS)
    assert RECORD.body.windows == 10 * len(PEERS)


def test_one_contributor_does_not_set_the_loss_of_a_round():
    """It is shown, and fires the `loss` alert: a mean would be whatever one of them says, up to 3e38."""
    losses = (3.25, 3.75, 3.5)
    for lie in (3.0e38, -3.0e38, 0.0):
        for liar in range(3):
            told = [lie if i == liar else loss for i, loss in enumerate(losses)]
            body = record([header(p, loss=loss) for p, loss in zip(PEERS[:3], told, strict=True)]).body
            assert 3.25 <= body.loss <= 3.75
    headers = [header(p, loss=loss) for p, loss in zip(PEERS[:3], losses, strict=True)]
    assert [record(headers, weights=w).body.loss for w in ((1, 1, 1), (9, 1, 1), (1, 9, 1))] == [3.5, 3.25, 3.75]
    assert record(headers[:2]).body.loss == 3.25


@pytest.mark.parametrize(
    "headers",
    [[], SENT[::-1], [SENT[0], SENT[0]], [SENT[0], header(PEERS[0], loss=1.0).encoded],
     [SENT[1], SENT[0], SENT[2]], [b""],
     [SENT[0], b"rubbish"], [VOTES[0].encoded], [b"\x00" * 600], [SENT[0] + b"\x7a\x01x"]],
)  # fmt: skip
def test_a_record_lists_each_author_once_in_order(headers: list[bytes]):
    with pytest.raises((MalformedError, SignatureError)):
        decoder().decode(raw(PEERS[0], "round-record", wire_record(headers)), RoundRecord)


@pytest.mark.parametrize(
    "changes",
    [{"round": Round(4)}, {"parent": digest("other")}, {"base_state": digest("other")}, {"run": OTHER_RUN},
     {"epoch": 1}],
)  # fmt: skip
def test_a_record_lists_updates_of_its_own_round_alone(changes: dict[str, Any]):
    odd = header(PEERS[2], **changes)
    with pytest.raises(MalformedError):
        decoder().decode(raw(PEERS[0], "round-record", wire_record([SENT[0], odd.encoded])), RoundRecord)


@pytest.mark.parametrize(
    "changes", [{"attempt": 2**20 + 1}, {"round": 2**64 - 1}, {"parent": b""}, {"run": bytes(OTHER_RUN)}]
)
def test_an_impossible_record_is_malformed(changes: dict[str, Any]):
    decoder().decode(raw(PEERS[0], "round-record", wire_record(SENT)), RoundRecord)
    with pytest.raises(MalformedError):
        decoder().decode(raw(PEERS[0], "round-record", wire_record(SENT, **changes)), RoundRecord)


@pytest.mark.parametrize("proof", [b"", bytes(80), PEERS[1].prove(RECORD.body.draw_input), PEERS[0].prove(b"other")])
def test_a_record_without_its_authors_proof_is_refused(proof: bytes):
    decoder().decode(raw(PEERS[0], "round-record", wire_record(SENT)), RoundRecord)
    with pytest.raises(SignatureError, match="proof"):
        decoder().decode(raw(PEERS[0], "round-record", wire_record(SENT, proof=proof)), RoundRecord)


def test_nothing_that_its_author_chooses_changes_the_output_of_a_record():
    body = RECORD.body
    tried = replace(body, attempt=body.attempt + 1, updates=body.updates[:1], parent=digest("other"), weights=(1,))
    assert tried.draw_input == body.draw_input != replace(body, round=Round(4)).draw_input
    signed = KeySigner(PEERS[0]).sign(tried)
    assert signed.digest != RECORD.digest and signed.body.proof == KeySigner(PEERS[0]).sign(body).body.proof


# -- certificates ---------------------------------------------------------------------------------------------


def certified(votes: list[bytes], of: bytes = RECORD.encoded) -> bytes:
    return wire.Certificate(record=of, votes=votes).SerializeToString()


def test_a_certificate_survives_the_wire():
    assert decoder().decode_certificate(encode_certificate(CERTIFICATE)) == CERTIFICATE
    assert check_certificate(CERTIFICATE) is CERTIFICATE


def test_a_certificate_with_parts_survives_the_wire():
    sent = encode_certificate(REDUCED_CERTIFICATE)
    assert decoder().decode_certificate(sent) == REDUCED_CERTIFICATE
    assert check_certificate(REDUCED_CERTIFICATE) is REDUCED_CERTIFICATE
    assert encode_certificate(decoder().decode_certificate(sent)) == sent


def test_what_the_chain_calls_a_record_binds_its_parts_and_is_the_records_digest_without():
    assert CERTIFICATE.digest == RECORD.digest
    others = [Certificate(RECORD, (), parts) for parts in (PARTS[:6], PARTS[::-1], (digest("else"), *PARTS[1:]))]
    names = {c.digest for c in (CERTIFICATE, REDUCED_CERTIFICATE, *others)}
    assert len(names) == 5 and Certificate(RECORD, (), PARTS).digest == REDUCED_CERTIFICATE.digest


@pytest.mark.parametrize(
    "parts", [(), PARTS[:6], PARTS[::-1], (*PARTS, PARTS[0]), (digest("else"), *PARTS[1:]), (PARTS[0],) * MAX_SHARDS]
)
def test_votes_for_some_parts_certify_no_others(parts):
    with pytest.raises(MalformedError, match="other shards"):
        decoder().decode_certificate(encode_certificate(Certificate(RECORD, REDUCED_CERTIFICATE.votes, parts)))


def test_votes_for_no_parts_certify_none_and_mixed_votes_nothing():
    for votes in (VOTES[:5], [*REDUCED_CERTIFICATE.votes[:4], VOTES[4]]):
        with pytest.raises(MalformedError, match="other shards"):
            decoder().decode_certificate(encode_certificate(Certificate(RECORD, tuple(votes), PARTS)))


@pytest.mark.parametrize("parts", [[b""], [bytes(31)], [bytes(32)] * (MAX_SHARDS + 1)])
def test_impossible_parts_are_malformed(parts: list[bytes]):
    votes = [v.encoded for v in REDUCED_CERTIFICATE.votes]
    with pytest.raises(MalformedError):
        decoder().decode_certificate(
            wire.Certificate(record=RECORD.encoded, votes=votes, shards=parts).SerializeToString()
        )


_KEYS = [bytes(p.key) for p in PEERS]


@pytest.mark.parametrize(
    "changes",
    [
        {"shard": MAX_SHARDS},
        {"shard": 2**32 - 1},
        {"blob": b""},
        {"blob": b"short"},
        {"missing": _KEYS[:1]},
        {"blob": b"", "missing": [_KEYS[1], _KEYS[0]]},
        {"blob": b"", "missing": [_KEYS[0], _KEYS[0]]},
        {"blob": b"", "missing": [b"key"]},
        {"blob": b"", "missing": [i.to_bytes(32, "big") for i in range(MAX_MISSING_AUTHORS + 1)]},
        {"record": b""},
        {"round": 2**64 - 1},
    ],
)
def test_an_impossible_word_on_a_part_is_malformed(changes: dict[str, Any]):
    def sent(**changes: Any) -> bytes:
        fields = {"run": RUN, "round": 3, "record": RECORD.digest, "shard": 1, "blob": PARTS[1]}
        return raw(PEERS[0], "shard-attestation", wire.ShardAttestation(**{**fields, **changes}))

    decoder().decode(sent(), ShardAttestation)
    decoder().decode(sent(blob=b"", missing=_KEYS), ShardAttestation)
    with pytest.raises(MalformedError):
        decoder().decode(sent(**changes), ShardAttestation)


@given(st.integers(1, 10**6))
def test_a_certificate_needs_more_than_two_thirds_and_no_more(contributors: int):
    needed = quorum(contributors)
    assert 3 * needed > 2 * contributors >= 3 * (needed - 1)
    assert needed <= contributors


@given(st.sets(st.sampled_from(range(7))))
def test_any_five_of_seven_certify_and_no_four(voters: set[int]):
    sent = certified([VOTES[i].encoded for i in sorted(voters)])
    if len(voters) >= 5:
        assert decoder().decode_certificate(sent).record == RECORD
    else:
        with pytest.raises(MalformedError, match="not more than two thirds"):
            decoder().decode_certificate(sent)


_V = [v.encoded for v in VOTES]
_OTHER = record(HEADERS, attempt=1)


@pytest.mark.parametrize(
    "votes",
    [
        [],
        _V[:4],
        [_V[0]] * 5,
        _V[:4] + [_V[3]],
        _V[:5][::-1],
        _V[:4] + [vote(STRANGER, RECORD).encoded],
        sorted(_V[:4] + [vote(STRANGER, RECORD).encoded], key=lambda s: wire.Envelope.FromString(s).key),
        _V[:4] + [vote(PEERS[4], _OTHER).encoded],
        _V[:4] + [vote(PEERS[4], RECORD, round=Round(4)).encoded],
        _V[:4] + [vote(PEERS[4], RECORD, run=OTHER_RUN).encoded],
        _V[:4] + [raw(PEERS[4], "finalization", wire.Vote(run=RUN, round=3, record=RECORD.digest))],
        _V[:4] + [_V[4][:-1] + bytes([_V[4][-1] ^ 1])],
        _V[:4] + [b""],
        _V[:4] + [SENT[4]],
        _V * 1000,
    ],
)
def test_a_certificate_that_its_votes_do_not_make_is_refused(votes: list[bytes]):
    with pytest.raises((MalformedError, SignatureError)):
        decoder().decode_certificate(certified(votes))


def test_votes_for_one_record_do_not_certify_another():
    assert decoder().decode_certificate(certified(_V[:5])).record == RECORD
    with pytest.raises(MalformedError, match="vote for another record"):
        decoder().decode_certificate(certified(_V[:5], of=_OTHER.encoded))


def test_votes_of_strangers_do_not_count_when_made_here_either():
    with pytest.raises(MalformedError, match="no contributor"):
        check_certificate(Certificate(record(HEADERS[:1]), (vote(STRANGER, record(HEADERS[:1])),)))


def test_an_oversized_certificate_is_refused_before_it_is_parsed():
    with pytest.raises(MalformedError, match="at most"):
        decoder().decode_certificate(encode_certificate(CERTIFICATE) + bytes(MAX_CERTIFICATE))


def _len_field(size: int) -> int:
    return 1 + max(1, -(-size.bit_length() // 7)) + size


def test_the_largest_certificate_fits_one_message():
    updates = MAX_CONTRIBUTORS * _len_field(MAX_HEADER_ENVELOPE)
    record_envelope = updates + 400
    assert record_envelope <= KINDS[RoundRecord].limit == MAX_ENVELOPE
    votes, parts = MAX_CONTRIBUTORS * _len_field(MAX_VOTE_ENVELOPE), MAX_SHARDS * _len_field(32)
    assert _len_field(record_envelope) + votes + parts <= MAX_CERTIFICATE


def test_the_largest_honest_messages_are_within_their_limits():
    name = "é" * (MAX_NAME // 2)
    large = KeySigner(OWNER).sign(Admission(RUN, PEERS[1].key, MAX_COUNT, MAX_COUNT, name))
    big = header(
        PEERS[1], round=MAX_ROUND, end_window=MAX_COUNT, first_window=MAX_COUNT - 1, rebase_window=MAX_COUNT,
        inner_steps=2**32 - 1, blob_size=MAX_BLOB, admission=large.encoded,
    )  # fmt: skip
    assert decoder().decode_header(big.encoded) == big
    assert len(big.encoded) <= MAX_HEADER_ENVELOPE - 64  # a field or two more
    assert (
        len(vote(PEERS[1], RECORD, round=MAX_ROUND, shards_digest=shards_digest(PARTS)).encoded)
        <= MAX_VOTE_ENVELOPE - 32
    )
    missing = tuple(sorted(identity(f"lacking {i}").key for i in range(MAX_MISSING_AUTHORS)))
    word = KeySigner(PEERS[1]).sign(
        ShardAttestation(RUN, Round(MAX_ROUND), RECORD.digest, MAX_SHARDS - 1, None, missing)
    )
    assert decoder().decode(word.encoded, ShardAttestation) == word
    beat = heartbeat(
        PEERS[1],
        known_headers=(2**64 - 1,) * MAX_KNOWN_HEADERS,
        addresses=("a" * MAX_ADDRESS,) * MAX_ADDRESSES,
        admission=large.encoded,
    )
    assert decoder().decode(beat.encoded, Heartbeat) == beat


def test_a_record_in_the_chain_counts_as_the_memory_that_its_certificate_holds():
    encoded = encode_certificate(CERTIFICATE)
    reader = MessageDecoder(RUN, OWNER.key)
    tracemalloc.start()
    try:
        certificate = reader.decode_certificate(bytes(bytearray(encoded)))
        del reader
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    node = RecordNode(certificate.digest, RecordNode(genesis_digest(RUN)), certificate, 10**6, 12, 64)
    assert len(encoded) < held <= node.memory
