"""The books: strict bytes, double entry, and a replay that takes what they made and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.envelope import seal
from protocol.errors import LedgerRuleError, MalformedError, SignatureError
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.entries import (
    MAX_ENTRY,
    CreditLine,
    LedgerEntry,
    RollbackEntry,
    RoundEntry,
    SettleEntry,
    VoidEntry,
    decode_entry,
    decode_line,
    encode_entry,
    encode_line,
    genesis_leaf,
    lines_root,
)
from protocol.ledger.state import LedgerState, PostedEntry
from protocol.ledger.void_orders import MAX_REASON, VoidOrder, open_void_order, seal_void_order
from protocol.merkle import leaf_hash, tree_hash
from protocol.message_codec import KeySigner
from protocol.messages import MAX_CONTRIBUTORS, Directive
from tests.support.coordinator_fakes import ChainMaker, back_to, make_spec, peer
from tests.support.specs import OWNER

SPEC = make_spec(credit={"hold_rounds": 2})
RULE = CreditRule.of(SPEC)

digests = st.binary(min_size=32, max_size=32).map(Digest)
keys = st.binary(min_size=32, max_size=32).map(PeerKey)
counts = st.integers(0, 2**53)
lines = st.builds(CreditLine, keys, digests, st.integers(1, 2**53), st.integers(1, 2**53), counts)
whats = st.one_of(
    st.builds(RoundEntry, st.integers(0, 2**40).map(Round), digests, digests, digests, st.integers(1, 1024), counts),
    st.builds(SettleEntry, counts, st.integers(0, 1024), counts),
    st.builds(VoidEntry, counts, st.integers(0, 1023), counts, st.binary(min_size=1, max_size=1024)),
    st.builds(RollbackEntry, digests, st.integers(0, 2**40).map(Round), st.binary(min_size=1, max_size=2000)),
)
entries = st.builds(LedgerEntry, st.just(SPEC.run_id), counts, digests, counts, whats)


@given(entries, lines)
def test_what_is_written_is_read_back(entry: LedgerEntry, line: CreditLine):
    assert decode_entry(encode_entry(entry)) == entry
    assert decode_line(encode_line(line)) == line


@given(entries, st.data())
def test_every_change_of_a_byte_is_another_entry_or_refused(entry: LedgerEntry, data):
    sent = bytearray(encode_entry(entry))
    at = data.draw(st.integers(0, len(sent) - 1))
    sent[at] ^= data.draw(st.integers(1, 255))
    try:
        other = decode_entry(bytes(sent))
    except MalformedError:
        return
    assert other != entry and encode_entry(other) == bytes(sent)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_written_the_same_again(sent: bytes):
    for decode, encode in ((decode_entry, encode_entry), (decode_line, encode_line)):
        try:
            assert encode(decode(sent)) == sent  # pyright: ignore[reportArgumentType] - of the same pair
        except MalformedError:
            pass


def test_what_is_out_of_bounds_is_refused():
    entry = LedgerEntry(SPEC.run_id, 0, genesis_leaf(SPEC.run_id), 1, SettleEntry(0, 1, 1))
    for wrong in (
        replace(entry, sequence=2**53 + 1),
        replace(entry, time=2**60),
        replace(entry, payload=SettleEntry(0, MAX_CONTRIBUTORS + 1, 1)),
        replace(entry, payload=RollbackEntry(Digest(bytes(32)), Round(0), b"")),
        replace(entry, payload=VoidEntry(0, 0, 1, bytes(2000))),
        replace(entry, payload=RoundEntry(Round(0), *[Digest(bytes(32))] * 3, 0, 1)),
    ):
        with pytest.raises(MalformedError):
            decode_entry(encode_entry(wrong))
    with pytest.raises(MalformedError, match="at most"):
        decode_entry(bytes(MAX_ENTRY + 1))
    with pytest.raises(MalformedError, match="says nothing"):
        decode_entry(b"")
    with pytest.raises(MalformedError):
        decode_entry(encode_entry(entry) + b"\x92\x06\x01x")  # a field that is not known
    with pytest.raises(MalformedError, match="at least one window"):
        decode_line(encode_line(CreditLine(peer(0).key, Digest(bytes(32)), 0, 0, 0)))


def test_a_void_order_is_the_owners_on_this_run_and_for_people():
    void_order = VoidOrder(SPEC.run_id, Round(3), Digest(bytes(32)), peer(1).key, Digest(bytes(32)), "too fast")
    sent = seal_void_order(OWNER, void_order).encoded
    assert open_void_order(sent, SPEC.run_id, OWNER.key) == void_order
    with pytest.raises(SignatureError, match="does not own"):
        open_void_order(seal_void_order(peer(1), void_order).encoded, SPEC.run_id, OWNER.key)
    with pytest.raises(SignatureError, match="a void order on run"):
        open_void_order(sent, make_spec(seed=3).run_id, OWNER.key)
    with pytest.raises(SignatureError):
        open_void_order(seal(OWNER, "finalization", b"").encoded, SPEC.run_id, OWNER.key)
    for reason in ("", "x" * (MAX_REASON + 1), "a\x1b[2J"):
        with pytest.raises(MalformedError, match="the reason"):
            seal_void_order(OWNER, replace(void_order, reason=reason))


# -- the state machine ---------------------------------------------------------------------------------------


def story() -> list[PostedEntry]:
    """Six rounds, a void order, a rollback, two rounds more."""
    chain, books = ChainMaker(SPEC), LedgerState.of(SPEC)
    accounts = [credits_of(chain.add({n: 5000 + n + r for n in range(3)}), RULE) for r in range(6)]
    made = []
    for r, account in enumerate(accounts):
        made += books.post_round(account, 1000 + r)
    line = accounts[5].lines[1]
    void_order = VoidOrder(SPEC.run_id, Round(5), accounts[5].record, line.peer, line.update, "no")
    made.append(books.void(seal_void_order(OWNER, void_order).encoded, 2000))
    made.append(books.rollback(accounts[3].record, Round(3), back_to(SPEC, accounts[3].record, 3), 3000))
    other = chain.fork(4)
    for r in range(2):
        made += books.post_round(credits_of(other.add({5: 7000 + r}), RULE), 4000)
    return made


STORY = story()


def taken(upto: int) -> LedgerState:
    books = LedgerState.of(SPEC)
    for posted in STORY[:upto]:
        books.replay(posted.encoded, [encode_line(line) for line in posted.lines])
    return books


def test_every_entry_is_replayed_to_the_same_transfers():
    books = LedgerState.of(SPEC)
    for posted in STORY:
        assert books.replay(posted.encoded, [encode_line(line) for line in posted.lines]) == posted
        assert books.imbalance() == 0
    assert books.due is None and books.size == len(STORY) and books.posted == 8 and books.rounds == 6


def test_transfers_are_double_entry_and_every_line_leaves_pending_once():
    seen: set[tuple[int, int, str]] = set()
    for posted in STORY:
        for t in posted.transfers:
            key = (t.entry, t.line, t.source.kind)
            assert key not in seen and t.source != t.target and t.micro_credits > 0
            assert str(t.source) == "issuance" or str(t.source) == f"pending/{t.target.peer}"
            seen.add(key)


def test_leaves_are_chained_and_the_lines_are_under_their_root():
    before = genesis_leaf(SPEC.run_id)
    for posted in STORY:
        assert posted.entry.previous == before
        before = Digest(leaf_hash(posted.encoded))
        if isinstance(posted.entry.payload, RoundEntry):
            assert posted.entry.payload.lines_root == tree_hash([leaf_hash(encode_line(line)) for line in posted.lines])


@pytest.mark.parametrize("at", range(len(STORY)))
def test_any_other_entry_in_its_place_is_refused_and_changes_nothing(at: int):
    posted = STORY[at]
    sent_lines = [encode_line(line) for line in posted.lines]
    e, what = posted.entry, posted.entry.payload
    wrong: list[tuple[LedgerEntry, list[bytes]]] = [
        (replace(e, sequence=e.sequence + 1), sent_lines),
        (replace(e, previous=Digest(bytes(32))), sent_lines),
        (replace(e, run=make_spec(seed=5).run_id), sent_lines),
        (replace(e, payload=SettleEntry(99, 1, 1)), []),
    ]
    if isinstance(what, RoundEntry):
        more = replace(posted.lines[0], micro_credits=posted.lines[0].micro_credits + 1)
        cheat = [encode_line(more), *sent_lines[1:]]
        altered = (more, *posted.lines[1:])
        amount = what.micro_credits + 1
        wrong += [
            (e, []),
            (e, cheat),
            (replace(e, payload=replace(what, lines_root=lines_root(altered), micro_credits=amount)), cheat),
            (e, sent_lines[::-1] if len(sent_lines) > 1 else [*sent_lines, *sent_lines]),
            (replace(e, payload=replace(what, micro_credits=amount)), sent_lines),
            (replace(e, payload=replace(what, round=Round(what.round + 1))), sent_lines),
            (replace(e, payload=replace(what, parent=Digest(bytes(32)))), sent_lines),
        ]
    else:
        wrong.append((e, [encode_line(STORY[0].lines[0])]))
    if isinstance(what, SettleEntry | VoidEntry):
        wrong.append((replace(e, payload=replace(what, micro_credits=what.micro_credits + 1)), []))
        wrong.append((replace(e, payload=replace(what, entry=what.entry + 1)), []))
    if e.time > 1000:
        wrong.append((replace(e, time=999), sent_lines))
    books = taken(at)
    for entry, with_lines in wrong:
        with pytest.raises((LedgerRuleError, MalformedError)):
            books.replay(encode_entry(entry), with_lines)
    for later in STORY[at + 1 :]:
        if later.encoded != posted.encoded:
            with pytest.raises(LedgerRuleError):
                books.replay(later.encoded, [encode_line(line) for line in later.lines])
    assert books.replay(posted.encoded, sent_lines) == posted


def test_books_that_go_on_from_a_state_make_the_same_entries():
    for at in range(len(STORY)):
        if (books := taken(at)).due is not None:
            continue
        for posted in STORY[at:]:
            assert books.replay(posted.encoded, [encode_line(line) for line in posted.lines]) == posted


def test_lines_that_are_not_ascending_or_twice_the_same_peer_are_refused():
    account = credits_of(ChainMaker(SPEC).add({0: 5000, 1: 5000}), RULE)
    a, b = account.lines
    for entries_ in ((b, a), (a, a), ()):
        with pytest.raises(LedgerRuleError):
            LedgerState.of(SPEC).post_round(replace(account, lines=entries_), 1)


def test_a_rollback_says_what_the_owners_word_says_and_is_done_once():
    chain, books = ChainMaker(SPEC), LedgerState.of(SPEC)
    accounts = [credits_of(chain.add({n: 5000 + r for n in range(3)}), RULE) for r in range(4)]
    for account in accounts:
        books.post_round(account, 1000)
    pause = KeySigner(OWNER).sign(Directive(SPEC.run_id, 1, "paused", 5)).encoded
    with pytest.raises(LedgerRuleError, match="rolls nothing back"):
        books.rollback(accounts[1].record, Round(1), pause, 2000)
    with pytest.raises(LedgerRuleError, match="goes back to round 2"):
        books.rollback(accounts[1].record, Round(1), back_to(SPEC, accounts[2].record, 2), 2000)
    with pytest.raises(LedgerRuleError, match="of another run"):
        other = make_spec(seed=3)
        books.rollback(accounts[1].record, Round(1), back_to(other, accounts[1].record, 1), 2000)
    word = back_to(SPEC, accounts[2].record, 2)
    assert not books.has_rollback(word)
    books.rollback(accounts[2].record, Round(2), word, 2000)
    assert books.has_rollback(word) and books.has_rollback(back_to(SPEC, accounts[2].record, 2, sequence=9))
    with pytest.raises(LedgerRuleError, match="done once"):
        books.rollback(accounts[2].record, Round(2), back_to(SPEC, accounts[2].record, 2, sequence=9), 2000)
