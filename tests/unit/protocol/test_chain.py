"""The chain: what is refused, which head is chosen, what finals and bounds do. A cheap signer makes certificates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

from protocol.chain import Chain, UnknownParent, genesis_digest
from protocol.errors import ChainError
from protocol.ids import Digest, Round, RunId, sha256
from protocol.merkle import CHUNK
from protocol.messages import Certificate, Directive, Finalization, RoundRecord, Signed, UpdateHeader, Verdict
from protocol.reduce_plan import ReducePlan
from protocol.stake import STAKE_ROUNDS, StakeRule
from tests.simulation.signer import FakeSigner, certificate
from tests.support.empty_chain import KEYS, OWNER, RUN, STATE, new


def make(
    parent: Digest,
    number: int,
    claims: dict[int, tuple[int, int]],
    *,
    by=None,
    state=STATE,
    run=RUN,
    parts=0,
    label=b"",
    votes=None,
    chain: Chain | None = None,
    directive: Directive | None = None,
) -> Certificate:
    """Return a certificate whose contributors claim these windows, weighed as `chain` does if it is given."""
    updates = []
    for i, (first, end) in sorted(claims.items()):
        blob = Digest(sha256(b"blob", KEYS[i], parent, bytes([first % 251, end % 251])))
        updates.append(
            FakeSigner(KEYS[i]).sign(
                UpdateHeader(run, Round(number), parent, state, first, first, end, 1, blob, 9, 1.0, b"")
            )
        )
    author = KEYS[min(claims)] if by is None else by
    weights = () if chain is None else chain.weights(parent, updates)
    signed = None if directive is None else OWNER.sign(directive)
    voided = 0 if chain is None else chain.voided(parent, signed, ())
    body = RoundRecord(run, Round(number), parent, state, 0, tuple(updates), signed, weights, voided=voided)
    record = FakeSigner(author).sign(body)
    return certificate(
        record,
        [KEYS[i] for i in (claims if votes is None else votes)],
        tuple(Digest(sha256(b"part", bytes([i]), label)) for i in range(parts)),
    )


def final(record: Certificate):
    body = record.record.body
    return OWNER.sign(Finalization(RUN, body.round, record.digest))


def line(chain: Chain, parent: Digest, number: int, length: int, who: int, step: int = 1) -> list[Certificate]:
    """Certificates in a row by one contributor, added."""
    made = []
    for i in range(length):
        first = chain.next_window(KEYS[who], parent)
        made.append(make(parent, number + i, {who: (first, first + step)}, chain=chain))
        assert chain.add(made[-1])
        parent = made[-1].record.digest
    return made


REDUCE = ReducePlan("reduce", committee=3, update_size=3 * CHUNK, mean_size=CHUNK)
AUTO = ReducePlan("auto", committee=1, update_size=2 * CHUNK, mean_size=1)


@pytest.mark.parametrize(
    "contributors, parts, fits", [(1, 1, True), (2, 2, True), (5, 3, True), (1, 0, False), (5, 2, False), (2, 3, False)]
)
def test_a_reduced_round_has_the_parts_that_its_contributors_make(contributors, parts, fits):
    chain = new(reduce_plan=REDUCE)
    made = make(chain.genesis, 0, {i: (0, 1) for i in range(contributors)}, parts=parts)
    if fits:
        assert chain.add(made) and chain.certificate(chain.head).shards == made.shards
    else:
        with pytest.raises(ChainError, match="shards of the mean"):
            chain.add(made)


def test_one_record_with_two_sets_of_parts_is_two_branches_and_children_say_which_they_follow():
    chain = new(reduce_plan=REDUCE)
    a, b = (make(chain.genesis, 0, {0: (0, 1), 1: (0, 1)}, parts=2, label=label) for label in (b"a", b"b"))
    assert a.record == b.record and chain.add(a) and chain.add(b) and not chain.add(a)
    assert chain.head == min(a.digest, b.digest)
    lighter = next(c for c in (a, b) if c.digest != chain.head)
    child = make(lighter.digest, 1, {2: (0, 1)}, parts=1)
    assert chain.add(child) and chain.head == child.digest
    assert [c.shards for c in chain.path(chain.genesis, chain.head)] == [lighter.shards, child.shards]
    with pytest.raises(UnknownParent):  # the record alone says nothing of what was applied
        chain.add(make(a.record.digest, 1, {2: (0, 1)}, parts=1))
    other = next(c for c in (a, b) if c is not lighter)
    assert chain.add_finalization(final(other)) and chain.head == other.digest and child.digest not in chain


def test_a_gathered_round_has_no_parts():
    chain = new()
    with pytest.raises(ChainError, match="1 shards of the mean, and should be with 0"):
        chain.add(make(chain.genesis, 0, {0: (0, 1)}, parts=1))


def test_auto_follows_the_contributors_of_the_record_before_on_each_branch_and_after_an_anchor():
    # Reduced after four and more: (n - 1) * 2 chunks against 2 * (2 chunks and a byte).
    chain = new(reduce_plan=AUTO)
    few, many = ({i: (n, n + 1) for i in range(n)} for n in (3, 4))
    a, b = make(chain.genesis, 0, few), make(chain.genesis, 0, many)
    chain.add(a)
    chain.add(b)
    assert [chain.is_reduced_after(x) for x in (chain.genesis, a.record.digest, b.record.digest)] == [
        False,
        False,
        True,
    ]
    assert chain.add(make(a.record.digest, 1, {5: (0, 1)}))
    with pytest.raises(ChainError, match="shards of the mean"):
        chain.add(make(b.record.digest, 1, {5: (0, 1)}))
    after = make(b.record.digest, 1, {4: (0, 1), 5: (0, 1)}, parts=2)
    assert chain.add(after)


def test_an_empty_chain_is_its_genesis():
    chain = new()
    assert chain.head == genesis_digest(RUN) == chain.root
    assert chain.height(chain.head) == 0 and chain.weight(chain.head) == 0
    assert chain.locator() == (chain.genesis,) and chain.certificates_after([]) == ((), False)


def test_weights_and_next_windows_follow_the_records():
    chain = new()
    a = make(chain.genesis, 0, {0: (0, 10), 1: (5, 8)}, chain=chain)
    assert chain.add(a) and not chain.add(a)
    b = make(a.record.digest, 1, {1: (8, 20), 2: (0, 1)}, chain=chain)
    chain.add(b)
    assert a.record.body.weights == (3, 3) and b.record.body.weights == (6, 1)
    assert chain.head == b.record.digest and chain.weight(chain.head) == 13
    assert [chain.next_window(KEYS[i], chain.head) for i in range(4)] == [10, 20, 1, 0]
    assert chain.next_window(KEYS[1], a.record.digest) == 8
    assert chain.path(chain.genesis, chain.head) == (a, b)


@pytest.mark.parametrize(
    "claims, changes, words",
    [
        ({0: (9, 20)}, {}, "a second time"),
        ({0: (10, 111)}, {}, "too many"),
        ({i: (10, 11) for i in range(6)}, {}, "max_members"),
        ({0: (10, 11)}, {"by": KEYS[3]}, "no update in it"),
        ({0: (10, 11)}, {"number": 2}, "round 2"),
        ({0: (10, 11)}, {"run": RunId(sha256(b"other"))}, "another run"),
    ],
)
def test_a_certificate_that_breaks_a_rule_is_refused_with_the_reason(claims, changes, words):
    chain = new()
    a = make(chain.genesis, 0, {0: (0, 10)})
    chain.add(a)
    with pytest.raises(ChainError, match=words):
        chain.add(make(a.record.digest, changes.pop("number", 1), claims, **changes))
    assert chain.head == a.record.digest and len(chain) == 1


def test_round_0_starts_from_the_genesis_state_and_an_unknown_parent_says_so():
    chain = new()
    with pytest.raises(ChainError, match="another state"):
        chain.add(make(chain.genesis, 0, {0: (0, 1)}, state=Digest(sha256(b"else"))))
    with pytest.raises(UnknownParent):
        chain.add(make(Digest(sha256(b"nobody")), 1, {0: (0, 1)}))


def test_of_branches_with_equal_support_the_heavier_wins_and_ties_go_to_the_smaller_digest():
    rng = random.Random(4)
    made = [make(genesis_digest(RUN), 0, {i: (0, 5)}) for i in range(4)]
    least = min(c.record.digest for c in made)
    for _ in range(5):
        chain = new()
        for c in rng.sample(made, len(made)):
            chain.add(c)
        assert chain.head == least
        chain.add(make(max(c.record.digest for c in made), 1, {5: (0, 1)}))
        assert chain.weight(chain.head) == 6 and chain.common_ancestor(chain.head, least) == chain.genesis


def test_nothing_before_a_final_is_reverted_and_what_lost_to_it_is_dropped():
    chain = new()
    short, long = line(chain, chain.genesis, 0, 2, 0), line(chain, chain.genesis, 0, 9, 1)
    assert chain.head == long[-1].record.digest
    assert chain.add_finalization(final(short[1])) and not chain.add_finalization(final(short[0]))
    assert chain.head == short[1].record.digest and len(chain) == 2
    with pytest.raises(UnknownParent):
        chain.add(make(long[0].record.digest, 1, {2: (0, 99)}))
    with pytest.raises(ChainError, match="final"):
        chain.add(make(chain.genesis, 0, {3: (0, 100)}))
    assert chain.head == short[1].record.digest


def test_a_final_that_comes_before_its_record_takes_effect_with_it():
    other = new()
    wanted = line(other, other.genesis, 0, 2, 0)
    chain = new()
    heavy = line(chain, chain.genesis, 0, 3, 1, step=50)
    assert chain.add_finalization(final(wanted[1])) and chain.head == heavy[-1].record.digest
    for c in wanted:
        chain.add(c)
    assert chain.head == wanted[1].record.digest and chain.finalization == final(wanted[1])


def test_of_finals_that_contradict_each_other_the_first_stands():
    chain = new()
    a, b = line(chain, chain.genesis, 0, 1, 0), line(chain, chain.genesis, 0, 3, 1)
    chain.add_finalization(final(a[0]))
    assert chain.add_finalization(final(b[2]))  # its record is gone: only remembered
    with pytest.raises(ChainError):
        chain.add(b[0])
    assert chain.head == a[0].record.digest and chain.finalization == final(a[0])


def test_a_locator_finds_what_is_lacking_in_bounded_answers():
    chain, behind = new(), new()
    made = line(chain, chain.genesis, 0, 100, 0)
    for c in made[:30]:
        behind.add(c)
    assert len(chain.locator()) < 20 and chain.locator()[-1] == chain.genesis
    rounds = 0
    while behind.head != chain.head:
        found, more = chain.certificates_after(behind.locator(), count=16)
        assert 0 < len(found) <= 16 and more == (found[-1] is not made[-1])
        assert sum(behind.add(c) for c in found) == len(found)
        rounds += 1
    assert rounds == 5
    one, more = chain.certificates_after([chain.genesis], size=1)
    assert len(one) == 1 and more


def test_a_fork_finds_the_common_ancestor_by_its_locator():
    chain = new()
    made = line(chain, chain.genesis, 0, 20, 0)
    fork = line(chain, made[9].record.digest, 10, 3, 1)
    asker = new()
    for c in (*made[:10], *fork):
        asker.add(c)
    found, _ = chain.certificates_after(asker.locator())
    assert found == tuple(made[10:])


def test_the_main_chain_after_a_record_comes_in_pages_and_is_none_for_a_branch_that_lost():
    chain = new()
    made = line(chain, chain.genesis, 0, 6, 0)
    (lost,) = line(chain, made[1].record.digest, 2, 1, 1)
    assert chain.main_chain_after(chain.genesis, 4) == tuple(made[:4])
    assert chain.main_chain_after(made[3].record.digest, 4) == tuple(made[4:])
    assert chain.main_chain_after(chain.head, 4) == ()
    assert chain.main_chain_after(lost.record.digest, 4) is None is chain.main_chain_after(Digest(b"z" * 32), 4)


def test_the_newest_directive_says_who_is_banned_whether_or_not_a_record_carries_it():
    chain = new()
    assert not chain.is_banned(KEYS[1])
    assert chain.add_directive(OWNER.sign(Directive(RUN, 2, banned=(KEYS[1],))))
    assert not chain.add_directive(OWNER.sign(Directive(RUN, 1, banned=(KEYS[2],))))
    assert chain.is_banned(KEYS[1]) and not chain.is_banned(KEYS[2])
    assert chain.add_directive(OWNER.sign(Directive(RUN, 3))) and not chain.is_banned(KEYS[1])


def test_memory_is_bounded_and_what_is_left_still_answers():
    chain = new(max_records=50, min_main_records=20, max_side_records=10)
    made = line(chain, chain.genesis, 0, 300, 0)
    for i in range(40):
        chain.add(make(made[-5].record.digest, 296, {1: (i, i + 1)}))
    assert len(chain) <= 50 and chain.head == made[-1].record.digest
    assert chain.next_window(KEYS[0], chain.head) == 300
    assert chain.weight(chain.head) == 300 and chain.height(chain.head) == 300
    with pytest.raises(UnknownParent):
        chain.certificates_after([genesis_digest(RUN)])
    later, _ = chain.certificates_after(chain.locator()[3:])
    assert later[-1].record.digest == chain.head


def test_histories_of_all_authors_count_as_memory(monkeypatch):
    """Keys without end make them grow."""
    monkeypatch.setattr("protocol.record_node.HISTORY_BYTES", 10**6)
    chain = new(max_records=1000, min_main_records=20, max_bytes=3 * 10**6)
    made = line(chain, chain.genesis, 0, 300, 0)
    assert len(chain) <= 4 * 32 and chain.head == made[-1].digest
    tip = make(made[-5].digest, 296, {1: (0, 1)})
    chain.add(tip)
    assert tip.digest in chain and chain.next_window(KEYS[0], chain.head) == 300


def header_of(chain: Chain, who: int, parent: Digest, windows: int) -> Signed[UpdateHeader]:
    """Return a header that its author sends by itself."""
    first, blob = chain.next_window(KEYS[who], parent), Digest(sha256(b"alone", KEYS[who], parent))
    body = UpdateHeader(RUN, chain.height(parent), parent, STATE, first, first, first + windows, 1, blob, 9, 1.0, b"")
    return FakeSigner(KEYS[who]).sign(body)


def test_no_limit_drops_what_the_stake_at_a_fork_is_made_of():
    chain = new(max_records=1, max_side_records=4, stake=StakeRule(3))
    made = line(chain, chain.genesis, 0, 90, 0)
    assert len(chain) == 3 + STAKE_ROUNDS + 4
    oldest = made[-5].digest  # as many side records fork before it as the tree has room for
    assert chain.stakes(oldest) == {KEYS[0]: STAKE_ROUNDS}


def naive_stakes(chain: Chain, at: Digest) -> dict:
    """Return stakes by their definition, record by record."""
    rule, found = chain.limits.stake, {}
    for record in chain.ancestors(at):
        if record == chain.genesis:
            break
        age = chain.height(at) - chain.height(record)
        if rule.hold_rounds <= age < rule.hold_rounds + STAKE_ROUNDS:
            body = chain.certificate(record).record.body
            for author, windows in zip(body.contributors, body.weighed, strict=True):
                found[author] = found.get(author, 0) + windows
    if chain.height(at) < rule.hold_rounds + STAKE_ROUNDS:
        for key in rule.founders:
            found[key] = found.get(key, 0) + rule.founder_windows
    return found


def naive_head(chain: Chain, records: list[Digest], announced: Sequence[Signed[UpdateHeader]] = ()) -> Digest:
    """Return the head by its definition: at each fork, every key counts once, where its newest message is."""
    children: dict[Digest, list[Digest]] = {}
    for record in records:
        if record != chain.genesis:
            children.setdefault(chain.parent(record), []).append(record)

    @cache
    def below(record: Digest) -> list[Digest]:
        return [x for child in children.get(record, []) for x in (child, *below(child))]

    @cache
    def head(at: Digest) -> Digest:
        rivals = children.get(at, [])
        if not rivals:
            return at
        signed: dict[Digest, dict] = {r: {} for r in rivals}
        for rival in rivals:
            voters = {v.author for v in chain.certificate(rival).votes}
            headers = [u for u in chain.certificate(rival).record.body.updates if u.author in voters]
            for record in below(rival):
                headers += chain.certificate(record).record.body.updates
            headers += [h for h in announced if h.body.parent in (rival, *below(rival))]
            for header in headers:
                end = max(header.body.end_window, signed[rival].get(header.author, 0))
                signed[rival][header.author] = end
        stakes = naive_stakes(chain, at)

        def score(rival: Digest):
            keys = [k for k, end in signed[rival].items() if all(end >= signed[r].get(k, 0) for r in rivals)]
            weight = chain.weight(head(rival))
            return -sum(stakes.get(k, 0) for k in keys), -len(keys), -weight, rival

        return head(min(rivals, key=score))

    return head(chain.genesis)


@pytest.mark.parametrize("seed", range(12))
def test_the_head_is_what_the_definition_says_on_random_trees(seed):
    rng = random.Random(seed)
    rule = StakeRule(rng.randint(0, 4), tuple(KEYS[:2]) if seed % 2 else (), 3)
    chain = new(max_side_records=1000, stake=rule)
    records, announced = [chain.genesis], []
    for _ in range(80):
        parent = rng.choice(records[-8:])
        claims = {}
        for i in rng.sample(range(6), rng.randint(2, 5)):
            first = chain.next_window(KEYS[i], parent)
            claims[i] = (first, first + rng.randint(1, 9))
        made = make(
            parent, chain.height(parent), claims, votes=rng.sample(sorted(claims), len(claims) - 1), chain=chain
        )
        if chain.add(made):
            records.append(made.digest)
        if rng.random() < 0.2:
            record = chain.certificate(rng.choice(records[1:])).record
            assert not chain.add(certificate(record, rng.sample(record.body.contributors, 1)))  # only a vote is new
        if rng.random() < 0.3:
            at, i = rng.choice(records), rng.randrange(6)
            header = header_of(chain, i, at, rng.randint(1, 9))
            chain.announce(header)
            announced += [header] if KEYS[i] in chain.stakes(at) else []
        if rng.random() < 0.1:
            leaves = [r for r in records[1:] if all(chain.parent(c) != r for c in records[1:])]
            gone = rng.choice(leaves)
            chain.forget(gone)
            records.remove(gone)
            announced = [h for h in announced if h.body.parent != gone]
        assert chain.head == naive_head(chain, records, announced)


def test_a_record_that_weighs_otherwise_than_the_rule_is_refused():
    chain = new()
    first = make(chain.genesis, 0, {0: (0, 10), 1: (0, 10)})
    chain.add(first)
    fair = make(first.record.digest, 1, {0: (10, 20), 1: (10, 100)}, chain=chain)
    assert fair.record.body.weights == (10, 20)
    liar = FakeSigner(KEYS[1])
    for weights in ((), (10, 90), (10, 19), (20, 20), (1, 20)):
        record = liar.sign(replace(fair.record.body, weights=weights))
        with pytest.raises(ChainError, match="weighs an update otherwise"):
            chain.add(certificate(record, [KEYS[0], KEYS[1]]))
    assert chain.add(fair) and chain.weight(chain.head) == 50


def test_what_waits_to_be_weighed_outlives_snapshots_and_the_old_root():
    chain = new(max_records=2, min_main_records=2)
    parent, ends, weights = chain.genesis, [0, 0], []
    for number in range(80):
        claims = {0: (ends[0], ends[0] + 1)} if number % 2 else {i: (ends[i], ends[i] + 1) for i in (0, 1)}
        if number in (0, 2):
            claims[1] = (ends[1], ends[1] + 50)
        ends = [claims.get(i, (0, end))[1] for i, end in enumerate(ends)]
        made = make(parent, number, claims, chain=chain)
        assert chain.add(made)
        parent = made.record.digest
        weights.append(dict(zip(made.record.body.contributors, made.record.body.weighed, strict=True)).get(KEYS[1]))
    assert weights[::2][:6] == [1, 2, 4, 8, 16, 16]
    assert sum(w or 0 for w in weights) == ends[1]


@pytest.mark.parametrize("late", [False, True])
def test_a_verdict_takes_the_backlog_and_the_weight_of_what_it_voids_but_one_that_comes_too_late_does_not(late):
    hold = 3
    chain = new(stake=StakeRule(hold))
    parent, ends, records, weighed = chain.genesis, [0, 0], [], []
    for number in range(9):
        claims = {0: (ends[0], ends[0] + 8), 1: (ends[1], ends[1] + (64 if number < 2 else 1))}
        verdicts: tuple[Verdict, ...] = ()
        if number >= 2 + hold * late:  # repeated by every directive after it
            verdicts = (Verdict(records[1], KEYS[1], "a false claim"),)
        directive = Directive(RUN, number, verdicts=verdicts) if verdicts else None
        made = make(parent, number, claims, chain=chain, directive=directive)
        assert chain.add(made)
        parent, ends = made.digest, [end for _, end in claims.values()]
        records.append(parent)
        weighed.append(made.record.body.weighed[1])
    assert weighed == ([8, 16, 32, 64, 11, 1, 1, 1, 1] if late else [8, 16, 32, 1, 1, 1, 1, 1, 1])


def test_nothing_follows_a_record_with_the_runs_total():
    chain = new(total_windows=20)
    first = make(chain.genesis, 0, {0: (0, 9), 1: (0, 9)}, chain=chain)
    assert chain.add(first)
    last = make(first.digest, 1, {0: (9, 10), 1: (9, 10)}, chain=chain)
    assert chain.add(last) and chain.weight(last.digest) == 20
    with pytest.raises(ChainError, match="has all its tokens"):
        chain.add(make(last.digest, 2, {0: (10, 11), 1: (10, 11)}, chain=chain))
    other = make(first.digest, 1, {0: (9, 14), 1: (9, 10)}, chain=chain)
    assert chain.add(other), "another last record may come"


def test_an_honest_author_grows_again_from_a_newcomers_weight_after_a_verdict_that_directives_repeat():
    chain = new(stake=StakeRule(3))
    parent, ends, records, weighed = chain.genesis, [0, 0], [], []
    for number in range(9):
        claims = {0: (ends[0], ends[0] + 8), 1: (ends[1], ends[1] + 64)}
        directive = Directive(RUN, number, verdicts=(Verdict(records[2], KEYS[1], "a copy"),)) if number > 3 else None
        made = make(parent, number, claims, chain=chain, directive=directive)
        assert chain.add(made)
        parent, ends = made.digest, [end for _, end in claims.values()]
        records.append(parent)
        weighed.append(made.record.body.weighed[1])
    assert weighed == [8, 16, 32, 64, 100, 8, 16, 32, 64]


def test_next_windows_agree_with_a_plain_count_on_random_trees():
    rng = random.Random(7)
    chain = new(max_side_records=1000)
    ends: dict[Digest, dict[int, int]] = {chain.genesis: {}}
    for _ in range(400):
        parent = rng.choice(list(ends)[-40:])
        claims = {}
        for i in rng.sample(range(6), rng.randint(2, 5)):
            first = ends[parent].get(i, 0) + rng.randint(0, 2)
            claims[i] = (first, first + rng.randint(1, 9))
        c = make(parent, chain.height(parent), claims, chain=chain)
        if chain.add(c):
            ends[c.record.digest] = {**ends[parent], **{i: end for i, (_, end) in claims.items()}}
    for record, known in ends.items():
        assert [chain.next_window(KEYS[i], record) for i in range(6)] == [known.get(i, 0) for i in range(6)]
    assert chain.head == naive_head(chain, list(ends))
    for _ in range(2000):
        a, b = rng.choice(list(ends)), rng.choice([*ends, chain.head])
        assert chain.is_ancestor(a, b) == (a in chain.ancestors(b))


def test_what_the_head_would_be_with_a_branch_that_is_set_aside():
    chain = new()
    ours = line(chain, chain.genesis, 0, 2, 0)
    theirs = line(chain, chain.genesis, 0, 3, 1)
    light = line(chain, chain.genesis, 0, 1, 2)
    first, last = theirs[0].record.digest, theirs[2].record.digest
    for record in (first, last, light[0].record.digest):
        chain.quarantine(record)
    assert chain.head == ours[1].record.digest
    # Without the last, theirs is as long as ours: the smaller digest wins.
    equal = theirs[1].record.digest
    assert chain.head_if_released(first) == (equal if equal < chain.head else None)
    assert chain.head_if_released(last) is None and chain.head_if_released(light[0].record.digest) is None
    more = line(chain, equal, 2, 4, 3)
    assert chain.head_if_released(first) == more[-1].record.digest and chain.head == ours[1].record.digest
    chain.release(first)
    assert chain.head == more[-1].record.digest and chain.head_if_released(last) is None


def test_a_branch_set_aside_does_not_compete_until_it_is_taken_back():
    chain = new()
    light, heavy = line(chain, chain.genesis, 0, 1, 0), line(chain, chain.genesis, 0, 2, 1)
    chain.quarantine(heavy[0].record.digest)
    assert chain.head == light[0].record.digest
    more = line(chain, heavy[1].record.digest, 2, 1, 1)
    assert chain.head == light[0].record.digest
    chain.release(heavy[0].record.digest)
    assert chain.head == more[0].record.digest


def test_a_condemned_record_never_comes_back():
    chain = new()
    made = line(chain, chain.genesis, 0, 3, 0)
    chain.mark_invalid(made[1].record.digest)
    assert chain.head == made[0].record.digest and len(chain) == 1
    with pytest.raises(ChainError, match="broke the codec"):
        chain.add(made[1])


def test_stake_is_accepted_work_past_the_hold_within_the_window_and_founders_begin_with_some():
    chain = new(stake=StakeRule(2, (KEYS[5],), 7), min_main_records=1000, max_update_windows=100)
    assert chain.stakes(chain.genesis) == {KEYS[5]: 7}
    made = line(chain, chain.genesis, 0, 3 + STAKE_ROUNDS, 0, step=3)
    assert chain.stakes(made[0].digest) == {KEYS[5]: 7}  # within the hold, claims are nothing
    assert chain.stakes(made[2].digest) == {KEYS[5]: 7, KEYS[0]: 3}
    assert chain.stakes(made[STAKE_ROUNDS].digest) == {KEYS[5]: 7, KEYS[0]: 3 * (STAKE_ROUNDS - 1)}
    assert chain.stakes(made[-1].digest) == {KEYS[0]: 3 * STAKE_ROUNDS}


def test_a_key_alone_with_the_largest_claims_moves_nobody_however_many_rounds_it_certifies():
    chain = new(stake=StakeRule(1))
    parent = chain.genesis
    for number in range(6):
        made = make(parent, number, {i: (2 * number, 2 * number + 2) for i in range(4)})
        chain.add(made)
        parent = made.digest
    honest = chain.head
    fork = chain.ancestor_at(honest, 3)
    assert fork is not None and chain.stakes(fork)[KEYS[3]] == 4
    line(chain, fork, 3, 50, 3, step=100)
    line(chain, honest, 6, 1, 0)
    assert chain.ancestor_at(chain.head, 6) == honest
    assert chain.weight(chain.head) < 100  # against 5,000 windows that the liar claims


def test_a_key_counts_only_where_its_newest_message_is():
    """Nobody pulls the others back with a record that they voted for and left."""
    chain = new()
    left, chosen = (make(chain.genesis, 0, {i: (0, 9) for i in range(4)}, by=KEYS[i]) for i in (0, 1))
    chain.add(left)
    chain.add(chosen)
    then = make(chosen.digest, 1, {i: (9, 10) for i in range(4)})
    assert chain.add(then) and chain.head == then.digest
    line(chain, left.digest, 1, 9, 4, step=100)
    assert chain.head == then.digest


def common(chain: Chain, rounds: int, members: Sequence[int] = range(5)) -> Digest:
    """Rounds in which all take part, with two windows each. Return the last record."""
    parent = chain.genesis
    for number in range(rounds):
        made = make(parent, number, {i: (2 * number, 2 * number + 2) for i in members})
        assert chain.add(made)
        parent = made.digest
    return parent


@pytest.mark.parametrize("windows, counts", [((26, 30), True), ((6, 30), True), ((6, 8), False)])
def test_who_left_a_longer_branch_counts_where_it_went_however_short_that_is(windows, counts):
    """The heights of two branches are no clock: a split that heals must not leave a minority the last word.

    Only ends that are later than on the branch that was left are newer. In a replayable run trainers make no others:
    see `test_in_a_replayable_run_each_update_claims_all_that_was_trained_after_every_earlier_one`.
    """
    chain = new(stake=StakeRule(1))
    fork = common(chain, 3)
    parent = fork
    for number in range(3, 13):  # two of five, cut off, make ten rounds
        made = make(parent, number, {i: (2 * number, 2 * number + 2) for i in (0, 1)})
        chain.add(made)
        parent = made.digest
    longer = parent
    made = make(fork, 3, {i: (6, 8) for i in (2, 3, 4)})
    chain.add(made)
    assert chain.head == made.digest  # three of five have made one, and all come there
    then = make(made.digest, 4, {i: windows if i < 2 else (8, 10) for i in range(4)}, chain=chain)
    chain.add(then)
    assert chain.head == then.digest
    [back] = line(chain, longer, 13, 1, 4, step=50)  # one of the three goes back
    assert chain.head == (then.digest if counts else back.digest)


def test_votes_for_two_records_of_a_round_do_not_leave_a_minority_the_last_word():
    """Members vote for a second record when the first is late. A coalition may hold back its votes for that one."""
    chain = new(stake=StakeRule(1))
    fork = common(chain, 3)
    both = {i: (6, 8) for i in range(5)}
    kept_back = make(fork, 3, both, by=KEYS[4])
    second = make(fork, 3, {i: (6, 8) for i in range(3)})
    chain.add(second)
    parent = second.digest
    for number in range(4, 9):
        made = make(parent, number, {i: (2 * number, 2 * number + 2) for i in range(3)})
        chain.add(made)
        parent = made.digest
    chain.add(kept_back)  # the honest three voted for it, too
    line(chain, kept_back.digest, 4, 3, 3, step=50)
    line(chain, kept_back.digest, 4, 3, 4, step=50)
    assert chain.head == parent


def test_who_announced_on_a_record_counts_for_it_though_the_records_after_it_leave_it_out():
    chain = new(stake=StakeRule(1))
    fork = common(chain, 3)
    parent = fork
    for number in (3, 4):  # two of five propose, and list one other
        made = make(parent, number, {i: (2 * number, 2 * number + 2) for i in (2, 3, 4)})
        chain.add(made)
        parent = made.digest
        for i in (0, 1):
            chain.announce(header_of(chain, i, parent, 9))
    assert chain.head == parent
    private = make(fork, 3, {3: (50, 52), 4: (50, 52)})
    chain.add(private)
    assert chain.head == parent


def test_a_key_that_the_owner_has_banned_counts_at_no_fork_before_a_record_says_so():
    chain = new(stake=StakeRule(1))
    fork = common(chain, 3)
    theirs = make(fork, 3, {i: (6, 8) for i in (2, 3, 4)})
    ours = make(fork, 3, {i: (6, 8) for i in (0, 1)})
    chain.add(theirs)
    chain.add(ours)
    assert chain.head == theirs.digest
    chain.add_directive(OWNER.sign(Directive(RUN, 1, banned=tuple(sorted((KEYS[3], KEYS[4]))))))
    assert chain.head == ours.digest


def with_twins() -> tuple[Chain, list[Certificate]]:
    """Return a chain of two rounds, and two records of the second one that one key certified alone."""
    chain = new()
    honest = make(chain.genesis, 0, {i: (0, 9) for i in range(3)})
    chain.add(honest)
    chain.add(make(honest.digest, 1, {i: (9, 10) for i in range(3)}))
    return chain, [make(honest.digest, 1, {4: (i, i + 50)}) for i in range(2)]


def test_a_record_certified_alone_that_another_replaced_is_no_news_until_somebody_builds_on_it():
    chain, twins = with_twins()
    assert [chain.add(t) for t in twins] == [True, True]
    assert twins[0].digest not in chain and not chain.add(twins[0]) and twins[1].digest in chain
    child = make(twins[0].digest, 2, {3: (0, 9), 5: (0, 9)})
    with pytest.raises(UnknownParent):
        chain.add(child)
    assert chain.add(twins[0]) and chain.add(child)


def test_replays_of_records_that_one_key_certified_alone_and_of_what_it_built_on_them_are_no_news():
    chain, twins = with_twins()
    children = [make(t.digest, 2, {4: (60, 70)}) for t in twins]
    added = 0
    for made in (children[0], twins[0], children[1], twins[1]) * 100:
        with suppress(UnknownParent):
            added += chain.add(made)
    assert added <= 6


def test_new_votes_for_a_record_are_told_from_those_that_are_held():
    chain = new()
    claims = {i: (0, 9) for i in range(4)}
    first, second, both = (make(chain.genesis, 0, claims, votes=v) for v in ((0, 1, 2), (1, 2, 3), range(4)))
    chain.add(first)
    assert not chain.add_votes(first)
    assert chain.add_votes(second) and not chain.add_votes(both)
    assert len(chain.certificate(first.digest).votes) == 4


def test_the_head_is_chosen_again_when_limits_drop_what_others_voted_for():
    rng = random.Random(3)
    for _ in range(20):
        chain = new(max_side_records=5, stake=StakeRule(0))
        records = [chain.genesis]
        for _ in range(40):
            parent = rng.choice([r for r in records if r in chain][-6:])
            keys = rng.sample(range(6), rng.randint(2, 4))
            ends = {i: chain.next_window(KEYS[i], parent) for i in keys}
            made = make(
                parent, chain.height(parent), {i: (e, e + rng.randint(1, 9)) for i, e in ends.items()}, chain=chain
            )
            if chain.add(made):
                records.append(made.digest)
            assert chain.head == naive_head(chain, [r for r in records if r in chain])


def test_of_the_records_that_one_key_certified_alone_for_a_round_only_the_last_and_the_head_are_kept():
    chain = new()
    honest = make(chain.genesis, 0, {i: (0, 9) for i in range(3)})
    chain.add(honest)
    for i in range(100):
        assert chain.add(make(honest.digest, 1, {4: (i, i + 50)}))
    assert len(chain) <= 3


def test_a_full_tree_drops_what_nobody_with_stake_voted_for():
    chain = new(stake=StakeRule(0), max_side_records=4)
    parent = chain.genesis
    for number in range(3):
        made = make(parent, number, {i: (number, number + 1) for i in range(3)})
        chain.add(made)
        parent = made.digest
    rival = make(chain.genesis, 0, {2: (1, 2), 3: (0, 1)})
    chain.add(rival)
    for i in range(30):
        chain.add(make(chain.genesis, 0, {4: (i, i + 90), 5: (i, i + 90)}))
    assert rival.digest in chain and len(chain) == 7


def test_the_owner_finalizes_only_what_most_of_the_stake_is_for():
    chain = new(stake=StakeRule(1))
    parent = chain.genesis
    for number in range(4):
        made = make(parent, number, {i: (number, number + 1) for i in range(5)}, votes=range(4))
        chain.add(made)
        parent = made.digest
    path = list(reversed(list(chain.ancestors(parent))[:-1]))
    assert chain.count_backed(path) == 4
    two = make(parent, 4, {i: (9, 10) for i in range(2)})
    chain.add(two)
    assert chain.count_backed([*path, two.digest]) == 4
    three = make(two.digest, 5, {i: (10, 11) for i in range(1, 4)})
    chain.add(three)
    assert chain.count_backed([*path, two.digest, three.digest]) == 6  # those that built on it are for it


def test_the_owner_finalizes_without_most_of_the_stake_once_it_has_banned_those_who_left():
    chain = new(stake=StakeRule(1))
    two = make(common(chain, 4), 4, {i: (9, 10) for i in range(2)})
    chain.add(two)
    assert chain.count_backed([two.digest]) == 0
    chain.add_directive(OWNER.sign(Directive(RUN, 1, banned=tuple(sorted((KEYS[3], KEYS[4]))))))
    assert chain.count_backed([two.digest]) == 1


def test_a_coalition_alone_has_nothing_final_however_long_its_branch_is():
    """At its end nobody else has stake: a record counts with all before it only."""
    chain = new(stake=StakeRule(1))
    fork = common(chain, 3)
    private = [c.digest for c in line(chain, fork, 3, STAKE_ROUNDS + 10, 4, step=9)]
    assert chain.head == private[-1] and chain.stakes(private[-1]).keys() == {KEYS[4]}
    assert chain.count_backed(private) == 0


def test_nobody_has_a_say_in_finals_who_had_left_before_the_hold():
    """Of five, three leave: their stake remains for 64 rounds."""
    chain = new(stake=StakeRule(2))
    common(chain, 6)
    fork = chain.head
    some = make(fork, 6, {i: (12, 14) for i in range(3)})
    chain.add(some)
    assert chain.count_backed([some.digest]) == 1
    few = make(some.digest, 7, {0: (14, 16), 1: (14, 16)})
    chain.add(few)
    assert chain.count_backed([few.digest]) == 0
    parent, last = few.digest, few.digest
    for number in range(8, 12):
        made = make(parent, number, {0: (2 * number, 2 * number + 2), 1: (2 * number, 2 * number + 2)})
        chain.add(made)
        parent, last = made.digest, parent
    assert sum(chain.stakes(last)[KEYS[i]] for i in (2, 3, 4)) > sum(chain.stakes(last)[KEYS[i]] for i in (0, 1))
    assert chain.count_backed([parent]) == 1


def test_founders_count_as_if_they_had_just_contributed_when_a_run_begins():
    chain = new(stake=StakeRule(2, (KEYS[5],), 7))
    alone = [c.digest for c in line(chain, chain.genesis, 0, 5, 0)]
    assert chain.count_backed(alone) == 0


def test_a_branch_starts_after_the_newest_fork_that_is_open():
    chain = new()
    common = line(chain, chain.genesis, 0, 2, 0)[-1].digest
    ours = line(chain, common, 2, 3, 0)
    assert chain.branch_start(ours[-1].digest) == ours[-1].digest  # no fork: the record itself
    theirs = line(chain, common, 2, 1, 1)
    assert chain.branch_start(ours[-1].digest) == ours[0].digest
    assert chain.branch_start(theirs[-1].digest) == theirs[0].digest
    chain.quarantine(theirs[0].digest)
    assert chain.branch_start(ours[-1].digest) == ours[-1].digest
    chain.release(theirs[0].digest)
    chain.add_finalization(final(ours[0]))
    assert chain.branch_start(ours[-1].digest) == ours[-1].digest
