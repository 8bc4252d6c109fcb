"""The owner's word: strict on the wire; in the chain a pure function of the way; rollbacks that nothing outweighs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.chain import Chain
from protocol.envelope import seal
from protocol.errors import AdmissionError, ChainError, FinalizedConflict, MalformedError, UnknownParent
from protocol.ids import Digest, Round, sha256
from protocol.message_codec import KeySigner
from protocol.messages import Certificate, Directive, Finalization, Rollback, RoundChanges, RoundRecord, UpdateHeader
from protocol.rounds.policy import RoundPolicy
from protocol.wire import swarm_pb2 as wire
from tests.simulation.signer import FakeSigner, certificate
from tests.support.empty_chain import KEYS, LIMITS, RUN, STATE, new
from tests.support.empty_chain import OWNER as CHAIN_OWNER
from tests.support.signed import DIRECTIVE, ONE_OF_EACH, PEERS, RECORD, decoder
from tests.support.specs import OWNER, digest

# -- on the wire ------------------------------------------------------------------------------------------------


def signed(**changes) -> bytes:
    return KeySigner(OWNER).sign(replace(DIRECTIVE, **changes)).encoded


def test_only_the_owners_word_is_one_and_others_cost_no_signature(monkeypatch):
    theirs = KeySigner(PEERS[0]).sign(DIRECTIVE).encoded
    monkeypatch.setattr("protocol.message_codec.open_envelope", lambda *a, **k: pytest.fail("it was looked at"))
    with pytest.raises(AdmissionError, match="not signed by the run's owner"):
        decoder().decode(theirs, Directive)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: setattr(m, "run_status", "stopped"),
        lambda m: m.banned.reverse(),
        lambda m: m.banned.append(m.banned[-1]),
        lambda m: m.banned.append(b"short"),
        lambda m: m.banned.extend(b"\xff" * 30 + i.to_bytes(2, "big") for i in range(1100)),
        lambda m: setattr(m, "reason", "x" * 201),
        lambda m: setattr(m, "reason", "two\nlines"),
        lambda m: setattr(m, "sequence", 2**60),
        lambda m: setattr(m.changes, "max_seconds", float("nan")),
        lambda m: setattr(m.changes, "max_seconds", 0.0),
        lambda m: setattr(m.changes, "max_members", 5000),
        lambda m: setattr(m.changes, "target_tokens", 0),
        lambda m: setattr(m.rollback, "epoch", 0),
        lambda m: setattr(m.rollback, "record", b""),
        lambda m: setattr(m.rollback, "state", b"x" * 33),
    ],
)
def test_what_breaks_a_bound_is_refused_though_the_owner_signed_it(spoil):
    m = wire.Directive.FromString(wire.Envelope.FromString(signed()).payload)
    spoil(m)
    sent = seal(OWNER, "directive", m.SerializeToString(deterministic=True)).encoded
    with pytest.raises(MalformedError):
        decoder().decode(sent, Directive)


def test_a_word_with_a_field_of_a_later_version_is_refused_whole():
    payload = wire.Envelope.FromString(signed()).payload + bytes([0xF8, 0x07, 1])  # field 127
    with pytest.raises(MalformedError, match="does not know"):
        decoder().decode(seal(OWNER, "directive", payload).encoded, Directive)


def test_without_directives_records_headers_finals_and_heartbeats_have_the_bytes_they_had():
    for message in ONE_OF_EACH:
        if not isinstance(message.body, Directive):
            payload = wire.Envelope.FromString(message.encoded).payload
            kind = {
                RoundRecord: wire.RoundRecord,
                UpdateHeader: wire.UpdateHeader,
                Finalization: wire.Finalization,
            }.get(type(message.body))
            if kind is not None:
                named = {f.name for f, _ in kind.FromString(payload).ListFields()}
                assert named.isdisjoint({"directive", "epoch"})


def test_a_record_carries_an_directive_and_one_that_is_not_the_owners_makes_it_none():
    word = KeySigner(OWNER).sign(DIRECTIVE)
    body = replace(RECORD.body, directive=word)
    sent = KeySigner(PEERS[1]).sign(body).encoded
    assert decoder().decode(sent, RoundRecord).body.directive == word
    with pytest.raises(AdmissionError):
        forged = replace(body, directive=KeySigner(PEERS[0]).sign(DIRECTIVE))
        decoder().decode(KeySigner(PEERS[1]).sign(forged).encoded, RoundRecord)


# -- in the chain -----------------------------------------------------------------------------------------------


def word(sequence: int, **fields):
    return CHAIN_OWNER.sign(Directive(RUN, sequence, **fields))


def after(chain: Chain, parent: Digest, claims: dict[int, int], *, carry=None, epoch=None, state=STATE) -> Certificate:
    """Return the next record after one, with windows by contributor."""
    number = chain.height(parent)
    epoch = chain.directives(parent).epoch if epoch is None else epoch
    if carry is not None:
        epoch = max(epoch, carry.body.epoch)
    updates = []
    for i, windows in sorted(claims.items()):
        first = chain.next_window(KEYS[i], parent)
        blob = Digest(sha256(b"blob", KEYS[i], parent, bytes([windows]), bytes([epoch])))
        header = UpdateHeader(RUN, number, parent, state, first, first, first + windows, 1, blob, 9, 1.0, b"", epoch)
        updates.append(FakeSigner(KEYS[i]).sign(header))
    weights = chain.weights(parent, updates)
    voided = chain.voided(parent, carry, ())
    body = RoundRecord(RUN, number, parent, state, 0, tuple(updates), carry, weights, voided=voided)
    return certificate(FakeSigner(KEYS[min(claims)]).sign(body), [KEYS[i] for i in claims])


def test_a_ban_holds_from_the_round_after_the_record_that_carries_it():
    chain = new()
    banning = word(1, banned=(KEYS[1],))
    a = after(chain, chain.genesis, {0: 1, 1: 1}, carry=banning)
    assert chain.add(a) and chain.newest_directive == banning
    with pytest.raises(ChainError, match="banned"):
        chain.add(after(chain, a.digest, {0: 1, 1: 1}))
    b = after(chain, a.digest, {0: 1}, carry=word(2))
    assert chain.add(b) and chain.add(after(chain, b.digest, {0: 1, 1: 1}))


def end(record: Certificate):
    return CHAIN_OWNER.sign(Finalization(RUN, record.record.body.round, record.digest))


def test_a_ban_cuts_what_had_no_quorum_without_the_banned_before_a_record_carries_it():
    chain = new()
    honest = after(chain, chain.genesis, {0: 1, 1: 1, 2: 1})
    assert chain.add(honest)
    alone = after(chain, honest.digest, {1: 1})
    assert chain.add(alone)
    on_it = after(chain, alone.digest, {1: 1})
    assert chain.add(on_it) and chain.head == on_it.digest
    assert chain.add_directive(word(1, banned=(KEYS[1],)))
    assert chain.head == honest.digest and alone.digest not in chain and on_it.digest not in chain
    with pytest.raises(FinalizedConflict, match="no quorum"):
        chain.add(alone)
    assert chain.record_refusal(alone.record.body) is not None
    assert chain.add(after(chain, honest.digest, {0: 1, 1: 1, 2: 1}))  # one of many: anybody who did not know it yet
    assert chain.add_directive(word(2)) and chain.add(alone)


def test_a_record_that_carries_the_ban_of_those_it_is_built_on_is_refused():
    chain = new()
    alone = after(chain, chain.genesis, {1: 1})
    chain.add(alone)
    with pytest.raises(FinalizedConflict, match="banned"):
        chain.add(after(chain, alone.digest, {0: 1}, carry=word(1, banned=(KEYS[1],))))
    assert chain.head == chain.genesis and len(chain) == 0


@pytest.mark.parametrize("banned, stays", [((0,), True), ((0, 1), False), ((0, 1, 2), False)])
def test_a_ban_leaves_rounds_that_most_others_must_have_voted_for(banned: tuple[int, ...], stays: bool):
    chain = new()
    record = after(chain, chain.genesis, {0: 1, 1: 1, 2: 1, 3: 1})
    chain.add(record)
    chain.add_directive(word(1, banned=tuple(KEYS[i] for i in banned)))
    assert (record.digest in chain) is stays


def test_a_ban_cuts_nothing_up_to_what_is_final_even_before_that_is_here():
    made = new()
    first = after(made, made.genesis, {1: 1})
    made.add(first)
    second = after(made, first.digest, {1: 1})
    made.add(second)
    made.add_finalization(end(first))
    made.add_directive(word(1, banned=(KEYS[1],)))
    assert made.head == first.digest
    newcomer = new()
    newcomer.add_directive(word(1, banned=(KEYS[1],)))
    newcomer.add_finalization(end(first))
    assert newcomer.add(first)
    with pytest.raises(FinalizedConflict, match="no quorum"):
        newcomer.add(second)
    assert newcomer.head == first.digest


def test_changes_hold_from_their_round_on_and_those_before_them_until_then():
    chain = new()
    a = after(chain, chain.genesis, {0: 90}, carry=word(1, changes=RoundChanges(max_update_tokens=50, max_members=1)))
    assert chain.add(a)
    with pytest.raises(ChainError, match="too many"):
        chain.add(after(chain, a.digest, {0: 51}))
    with pytest.raises(ChainError, match="max_members"):
        chain.add(after(chain, a.digest, {0: 1, 1: 1}))
    later = word(2, changes=RoundChanges(max_update_tokens=10), from_round=Round(3))
    b = after(chain, a.digest, {0: 50}, carry=later)
    assert chain.add(b)
    c = after(chain, b.digest, {0: 50})
    assert chain.add(c)
    with pytest.raises(ChainError, match="too many"):
        chain.add(after(chain, c.digest, {0: 11}))
    assert chain.add(after(chain, c.digest, {0: 10, 1: 10}))
    assert RoundPolicy(8, 100).under(chain.directives(c.digest).changes).max_update_windows == 10


def test_a_record_carries_no_word_that_is_not_newer():
    chain = new()
    a = after(chain, chain.genesis, {0: 1}, carry=word(5))
    assert chain.add(a) and chain.directive_to_include(a.digest) is None
    with pytest.raises(ChainError, match="not newer"):
        chain.add(after(chain, a.digest, {0: 1}, carry=word(4, run_status="paused")))
    assert (
        not chain.add_directive(word(4))
        and chain.add_directive(word(6))
        and chain.directive_to_include(a.digest) == word(6)
    )


def grown(chain: Chain, parent: Digest, count: int, *, who: int = 0, windows: int = 1) -> list[Certificate]:
    made = []
    for _ in range(count):
        made.append(after(chain, parent, {who: windows}))
        assert chain.add(made[-1])
        parent = made[-1].digest
    return made


def back_to(chain: Chain, record_: Digest, sequence: int, epoch: int = 1):
    return word(sequence, rollback=Rollback(epoch, record_, chain.height(record_), STATE))


def test_a_rollback_outweighs_whatever_was_built_and_what_was_final():
    chain = new()
    old = grown(chain, chain.genesis, 8, windows=50)
    old_final = CHAIN_OWNER.sign(Finalization(RUN, Round(5), old[5].digest))
    assert chain.add_finalization(old_final)
    rolled = back_to(chain, old[3].digest, 9)
    assert (
        chain.add_directive(rolled)
        and chain.head == old[3].digest == chain.required_ancestor
        and chain.finalization is None
    )
    with pytest.raises(FinalizedConflict):
        chain.add(old[4])
    assert not chain.add_finalization(old_final) and chain.finalization is None  # a replay changes nothing
    with pytest.raises(FinalizedConflict):  # nothing follows that does not carry the word
        chain.add(after(chain, old[3].digest, {0: 1}))
    first = after(chain, old[3].digest, {1: 1}, carry=chain.directive_to_include(old[3].digest))
    assert chain.add(first) and chain.head == first.digest
    new_final = CHAIN_OWNER.sign(Finalization(RUN, Round(4), first.digest, 1))
    assert chain.add_finalization(new_final) and chain.finalization == new_final
    with pytest.raises(ChainError, match="before a rollback"):
        chain.add(after(chain, first.digest, {0: 1}, epoch=0))


def test_the_rollback_is_learnt_from_the_record_that_carries_it():
    elsewhere = new()
    old = grown(elsewhere, elsewhere.genesis, 6)
    rolled = back_to(elsewhere, old[2].digest, 9)
    elsewhere.add_directive(rolled)
    first = after(elsewhere, old[2].digest, {1: 1}, carry=rolled)
    chain = new()
    for c in old:
        chain.add(c)
    assert (
        chain.add(first)
        and chain.head == first.digest
        and old[3].digest not in chain
        and chain.newest_directive == rolled
    )


def test_a_carried_rollback_must_be_to_the_parent_with_its_state():
    chain = new()
    old = grown(chain, chain.genesis, 3)
    elsewhere = word(9, rollback=Rollback(1, digest("nowhere"), Round(7), STATE))
    with pytest.raises(ChainError):
        chain.add(after(chain, old[2].digest, {0: 1}, carry=elsewhere))
    assert chain.is_missing_required_ancestor  # the word itself counts, whoever carried it wrongly
    chain = new()
    grown(chain, chain.genesis, 3)
    wrong = word(9, rollback=Rollback(1, old[2].digest, Round(3), digest("another state")))
    with pytest.raises(ChainError, match="another record than its parent"):
        chain.add(after(chain, old[2].digest, {0: 1}, carry=wrong))


def test_words_that_know_nothing_of_a_rollback_do_not_undo_it():
    chain = new()
    old = grown(chain, chain.genesis, 4)
    rolled = back_to(chain, old[1].digest, 9)
    assert (
        chain.add_directive(rolled)
        and not chain.add_directive(word(50, run_status="paused"))
        and chain.newest_directive == rolled
    )
    assert chain.add_directive(replace_word(rolled, sequence=51)) and chain.head == old[1].digest


def replace_word(signed_, **changes):
    return CHAIN_OWNER.sign(replace(signed_.body, **changes))


def test_a_tree_that_begins_after_the_rollbacks_record_says_so():
    chain = Chain(RUN, STATE, replace(LIMITS, max_records=70, min_main_records=64))
    old = grown(chain, chain.genesis, 90)
    chain.add_directive(word(9, rollback=Rollback(1, old[3].digest, Round(4), STATE)))
    assert chain.is_rolled_back_past_root
    with pytest.raises(FinalizedConflict):
        chain.add(after(chain, old[-1].digest, {0: 1}))
    anew = Chain(RUN, STATE, replace(LIMITS, max_records=70, min_main_records=64))
    anew.add_directive(chain.newest_directive)  # type: ignore[arg-type]
    for c in old[:4]:
        anew.add(c)
    assert anew.head == old[3].digest and not anew.is_rolled_back_past_root


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_whatever_comes_in_whatever_order_all_end_on_the_branch_of_the_last_rollback(seed: int, rollbacks: int):
    """A history with rollbacks: records, words and finals reach a chain in random order, again and again."""
    rng = random.Random(seed)
    source = new()
    tip, said, finals, made = source.genesis, [], [], []
    for epoch in range(rollbacks + 1):
        if epoch:
            way = [d for d in source.ancestors(source.head) if d != source.genesis]
            said.append(back_to(source, rng.choice(way), 10 * epoch, epoch))
            source.add_directive(said[-1])
            tip = source.head
        for _ in range(rng.randint(1, 6)):
            c = after(source, tip, {rng.randrange(3): rng.randint(1, 40)}, carry=source.directive_to_include(tip))
            assert source.add(c)
            made.append(c)
            tip = c.digest
        if rng.random() < 0.6:
            finals.append(CHAIN_OWNER.sign(Finalization(RUN, Round(source.height(tip) - 1), tip, epoch)))
            source.add_finalization(finals[-1])
    chain = new()
    things = [*made, *said, *finals]
    for _ in range(200):
        thing = rng.choice(things)
        try:
            if isinstance(thing, Certificate):
                chain.add(thing)
            elif isinstance(thing.body, Finalization):
                chain.add_finalization(thing)
            else:
                chain.add_directive(thing)
        except (UnknownParent, ChainError):
            pass
        assert chain.newest_directive is None or chain.newest_directive in said
    for c in made:  # and at last everything once, in order
        try:
            chain.add(c)
        except ChainError:
            continue
    for other in (*said, *made):
        try:
            chain.add(other) if isinstance(other, Certificate) else chain.add_directive(other)
        except ChainError:
            continue
    assert chain.head == source.head == tip
    assert list(chain.ancestors(chain.head)) == list(source.ancestors(source.head))
