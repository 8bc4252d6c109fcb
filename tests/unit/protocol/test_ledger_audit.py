"""An audit finds what was done to a ledger, says where, and finds nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from protocol.envelope import seal
from protocol.ids import Digest
from protocol.ledger.audit import TrustedTreeHead
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.entries import decode_entry, decode_line, encode_entry
from protocol.ledger.state import LedgerState
from protocol.merkle import leaf_hash
from tests.support.coordinator_fakes import back_to, peer
from tests.support.ledger_world import LedgerWorld, Written
from tests.support.specs import OWNER, digest, identity


@pytest.fixture
def world() -> LedgerWorld:
    made = LedgerWorld()
    made.sign()
    return made


def test_an_honest_ledger_is_clean(world: LedgerWorld):
    account = world.round({1: 4, 2: 3, 3: 2})
    world.void(account, 1)
    world.sign()
    world.round({1: 4, 2: 3})
    report = world.audit(final=9)
    assert report.findings == [] and report.unproved == [] and report.clean
    assert (report.entries, report.rounds) == (len(world.log), 10)
    assert report.issued == report.pending + report.settled + report.voided
    assert report.balances == world.books.balances and report.voided == account.lines[1].micro_credits


def test_an_honest_rollback_is_clean(world: LedgerWorld):
    world.rollback(5)
    for _ in range(4):
        world.round({1: 5, 3: 2})
    world.sign()
    assert world.found(final=9) == []


def test_an_empty_ledger_is_clean():
    world = LedgerWorld(0)
    world.sign()
    assert world.audit().clean
    assert world.found(final=0) == ["the log ends before round 0: finalized by the owner, and not credited"]


def test_the_end_of_a_run_settles_all():
    world = LedgerWorld(8, total_tokens=16 * 93 * 6)
    assert world.books.is_complete and world.books.totals["pending"] == 0
    assert world.audit().clean


# -- what is falsified is named, to the entry ----------------------------------------------------------------------


def only(found: list[str], *parts: str) -> None:
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0], found


def test_a_changed_amount_is_named(world: LedgerWorld):
    entry = world.entry_of(3)
    world.change_line(entry, 1, micro_credits=10**9)
    found = world.found()
    assert len(found) == 2
    assert f"line 1 of entry {entry} (round 3)" in found[0] and "micro-credits 1000000000, not" in found[0]
    assert "do not hash to what the entry commits to" in found[1]


def test_more_windows_than_the_certificate_has_are_named_though_all_is_hashed_again(world: LedgerWorld):
    entry, rule = world.entry_of(3), CreditRule.of(world.spec)
    world.heads.clear()
    world.change_line(entry, 0, windows=50, tokens=50 * rule.window, micro_credits=rule.micro_credits(50))
    world.hash_again(entry)
    found = world.found()
    assert any(f"line 0 of entry {entry} (round 3)" in f and "windows 50, not" in f for f in found)
    assert any(f"entry {entry} commits to other lines than the certificate" in f for f in found)
    assert any(f"entry {entry} says of record" in f and "micro-credits" in f for f in found)
    # The settlement is of what was earned: of the forger's, which is more, it would be another finding.
    assert len(found) == 3


def test_a_credit_moved_to_another_peer_is_named(world: LedgerWorld):
    entry = world.entry_of(4)
    lines = world.accounts[world.books.record_of(4)].lines  # type: ignore[arg-type]
    thief = next(i for i in map(identity, range(1000)) if lines[0].peer < i.key < lines[2].peer)
    world.change_line(entry, 1, peer=thief.key)
    world.hash_again(entry)
    found = world.found()
    assert any(f"line 1 of entry {entry}" in f and f"{thief.key.short}; by the certificate" in f for f in found)
    assert any("tree head over" in f and "root" in f for f in found)  # it was signed before


def test_a_changed_entry_is_named(world: LedgerWorld):
    entry = world.entry_of(3)
    world.heads.clear()
    world.change_entry(entry, micro_credits=1)
    found = world.found()
    assert any(f"entry {entry} says of record" in f and "micro-credits 1, not" in f for f in found)
    assert any(f"entry {entry + 1} names another entry before it than entry {entry}" in f for f in found)
    assert len(found) == 2


def test_a_changed_settlement_is_named(world: LedgerWorld):
    entry = world.entry_of(4) + 1
    assert decode_entry(world.log[entry].sent).kind == "settle"
    world.heads.clear()
    world.change_entry(entry, micro_credits=5)
    world.hash_again(entry)
    only(world.found(), f"entry {entry} says", "5 micro-credits; what follows")


def test_a_deleted_entry_is_named(world: LedgerWorld):
    entry = world.entry_of(3)
    world.heads.clear()
    del world.log[entry]
    found = world.found()
    assert f"place {entry} holds entry {entry + 1}: entry {entry} is missing there" in found[0]
    assert any("round 3 (record" in f and "is not credited" in f for f in found)
    assert len(found) <= 3


def test_a_deleted_settlement_is_named(world: LedgerWorld):
    entry = world.entry_of(4) + 1
    of = decode_entry(world.log[entry].sent).payload.entry  # type: ignore[union-attr]
    world.heads.clear()
    del world.log[entry]
    found = world.found()
    assert any(f"entry {entry} is missing there" in f for f in found)
    assert any(f"the settlement of entry {of} is missing" in f for f in found) and len(found) == 2


def test_a_deleted_entry_is_named_though_all_is_hashed_again(world: LedgerWorld):
    entry = world.entry_of(7)
    world.heads.clear()
    del world.log[entry:]
    only(world.found(final=7), "before round 7", "not credited")


def test_the_end_cut_off_is_noticed_by_the_head(world: LedgerWorld):
    del world.log[-2:]
    only(world.found(), f"a tree head over {len(world.log) + 2} entries was signed", "entries were removed")


def test_reordered_entries_are_named(world: LedgerWorld):
    entry = world.entry_of(1)
    world.heads.clear()
    world.log[entry], world.log[entry + 1] = world.log[entry + 1], world.log[entry]
    found = world.found()
    assert any(f"place {entry} holds entry {entry + 1}" in f for f in found)
    assert any(f"place {entry + 1} holds entry {entry}" in f for f in found)
    assert len(found) <= 4


def test_an_entry_given_twice_is_named(world: LedgerWorld):
    entry = world.entry_of(2)
    world.heads.clear()
    world.log.insert(entry + 1, world.log[entry])
    found = world.found()
    assert any(f"place {entry + 1} holds entry {entry}: it stands there twice" in f for f in found)
    assert len(found) == 1


def test_an_invented_round_is_named(world: LedgerWorld):
    account = credits_of(world.maker.fork(8).add({1: 60, 9: 60}), CreditRule.of(world.spec))
    n = len(world.log)
    world.keep(world.books.post_round(account, world.time))
    only(world.found(), f"entry {n} credits round 8", "not in the chain", "invented")


def test_an_invented_round_in_the_place_of_a_true_one_is_named():
    world = LedgerWorld(6)
    forged = credits_of(world.maker.fork(6).add({1: 60, 9: 60}), CreditRule.of(world.spec))
    world.keep(world.books.post_round(forged, world.time))
    true = world.maker.add({1: 4, 2: 3, 3: 2})
    world.accounts[true.digest] = credits_of(true, CreditRule.of(world.spec))
    only(world.found(), "entry", "invented")


def test_a_record_that_the_owner_has_not_made_final_is_named(world: LedgerWorld):
    auditor_found = world.found(final=20)
    only(auditor_found, "the log ends before rounds 8 to 20")


def test_a_forged_head_is_named(world: LedgerWorld):
    head = world.heads[0].head
    world.heads.append(TrustedTreeHead(replace(head, size=5, root=digest("forged"), time=head.time - 1)))
    only(world.found(), "the tree head over 5 entries", digest("forged").short)


def test_two_heads_of_one_size_are_named(world: LedgerWorld):
    head = world.heads[0].head
    world.heads.append(TrustedTreeHead(replace(head, root=digest("forged"))))
    found = world.found()
    assert any(f"two tree heads over {head.size} entries" in f for f in found)
    assert any("root" in f and digest("forged").short in f for f in found)


def test_a_smaller_head_signed_later_is_named(world: LedgerWorld):
    short = LedgerWorld(3).sign()
    world.heads.insert(0, TrustedTreeHead(replace(short, time=world.time + 1)))
    only(world.found(), "was signed after one over")


def test_a_log_rewritten_and_signed_again_differs_from_what_this_machine_saw(world: LedgerWorld):
    seen = world.heads.pop().head
    rewritten = LedgerWorld(0)
    for r in range(8):
        rewritten.round({1: 4 + r, 2: 3, 3: 3})
    rewritten.sign()
    assert rewritten.audit().clean  # by itself it is whole: another chain, another ledger
    rewritten.heads.append(TrustedTreeHead(seen, "seen by this machine"))
    found = rewritten.found()
    assert any("seen by this machine" in f for f in found)


def test_a_void_order_that_the_owner_did_not_sign_is_named():
    world = LedgerWorld(3)
    account = world.round({1: 4, 2: 3, 3: 2})
    world.void(account, 1)
    entry = len(world.log) - 1
    what = decode_entry(world.log[entry].sent).payload
    stranger = seal(identity("stranger"), "void-order", b"x").encoded
    world.change_entry(entry, void_order=stranger)
    assert what != decode_entry(world.log[entry].sent).payload
    only(world.found(), f"entry {entry} (void)", "void order that does not count")


def test_a_void_of_another_line_than_the_void_order_names_is_named():
    world = LedgerWorld(3)
    account = world.round({1: 4, 2: 3, 3: 2})
    world.void(account, 1)
    entry = len(world.log) - 1
    world.change_entry(entry, line=0, micro_credits=account.lines[0].micro_credits)
    only(world.found(), f"entry {entry} says line 0", "what follows from the chain is line 1")


def test_a_rollback_that_the_owner_did_not_sign_is_named(world: LedgerWorld):
    world.rollback(5)
    entry = len(world.log) - 1
    word = back_to(world.spec, world.books.tip, 5, by=identity("stranger"))
    world.change_entry(entry, directive=word)
    only(world.found(), f"entry {entry} (rollback)", "not signed by the run's owner")


def test_bytes_that_are_no_entry_are_named(world: LedgerWorld):
    world.heads.clear()
    world.log[-1].sent = b"rubbish"
    assert "cannot be read" in world.found()[0]


def test_what_nobody_has_the_certificate_of_is_said(world: LedgerWorld):
    gone = world.books.record_of(7)  # type: ignore[arg-type]
    world.rollback(5)
    for _ in range(3):
        world.round({1: 5, 3: 2})
    del world.accounts[Digest(gone)]
    report = world.audit()
    assert report.findings == [] and len(report.unproved) == 1 and not report.clean
    assert "rolled back" in report.unproved[0].message
    # Without the owner's rollback it is an invention.
    world = LedgerWorld()
    del world.accounts[world.books.record_of(7)]  # type: ignore[arg-type]
    assert any("not in the chain" in f for f in world.found())


@pytest.mark.parametrize("seed", range(40))
def test_no_single_change_goes_unnoticed(seed: int):
    """Any byte of any entry or line, any entry removed, doubled or moved: something is said, and no audit fails."""
    chance = random.Random(seed)
    world = LedgerWorld(6)
    account = world.round({1: 4, 2: 3, 3: 2})
    world.void(account, 2)
    world.round({1: 4, 2: 3, 3: 2})
    world.sign()
    assert world.audit().clean
    at = chance.randrange(len(world.log))
    kind = chance.choice(["entry", "line", "remove", "double", "move", "cut"])
    if kind == "line":
        at = chance.choice([i for i, w in enumerate(world.log) if w.lines])
        i = chance.randrange(len(world.log[at].lines))
        world.log[at].lines[i] = flipped(world.log[at].lines[i], chance)
    elif kind == "entry":
        world.log[at].sent = flipped(world.log[at].sent, chance)
    elif kind == "remove":
        del world.log[at]
    elif kind == "double":
        world.log.insert(chance.randrange(len(world.log)), Written(world.log[at].sent, list(world.log[at].lines)))
    elif kind == "move":
        other = (at + chance.randrange(1, len(world.log))) % len(world.log)
        world.log[at], world.log[other] = world.log[other], world.log[at]
    else:
        del world.log[at:]
    assert world.found(), (seed, kind, at)


def flipped(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def test_the_world_makes_what_the_books_take(world: LedgerWorld):
    books = LedgerState.of(world.spec)
    for written in world.log:
        books.replay(written.sent, written.lines)
    world.hash_again()
    assert [leaf_hash(w.sent) for w in world.log][-1] == books.leaf
    assert decode_line(world.log[0].lines[0]).peer in {peer(i).key for i in (1, 2, 3)}
    assert encode_entry(decode_entry(world.log[0].sent)) == world.log[0].sent
    assert OWNER.key == world.spec.owner_key
