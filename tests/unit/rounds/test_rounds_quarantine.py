"""Branches that are left out of the fork choice for a while: how they come back, and what a liar can do with them."""

from __future__ import annotations

from dataclasses import replace

from protocol.ids import Digest, Round, sha256
from protocol.messages import Certificate, Finalization, RoundRecord
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.blobs import applied_blobs
from protocol.rounds.branch_quarantine import MAX_QUARANTINED
from protocol.rounds.consensus import Consensus
from tests.simulation.signer import FakeSigner, certificate
from tests.support.rounds_bench import OTHERS, POLICY, RUN, STATE
from tests.support.second_round import NEXT, SLOW, Second

RIVALS = tuple(sorted(OTHERS[3:7]))
"""As many as outvote the three of the first record while nobody has stake."""
LIAR = OTHERS[7]
PATIENCE = POLICY.patience_seconds


def state(number: int) -> Digest:
    return Digest(sha256(b"state", bytes([number])))


class Split(Second):
    """Stands on a first record; others come on rival branches from the genesis, of more contributors."""

    def __init__(self):
        self.requested: set[Digest] = set()
        """Blobs that are requested, and not here yet."""
        super().__init__()

    def step(self, event, now=None):
        if isinstance(event, ev.BlobHeld | ev.BlobInvalid):
            self.requested.discard(event.blob)
        for action in super().step(event, now):
            if isinstance(action, do.FetchBlob):
                self.requested.add(action.blob)
            elif isinstance(action, do.CancelFetch):
                self.requested.discard(action.blob)
        return self.actions

    def hears(self, label: bytes, by=RIVALS, parent: Certificate | None = None, windows: int = 50) -> Certificate:
        """Deliver a record by these authors and return its certificate.

        It is the first of a branch, or it follows another of their records. Nobody serves its updates.
        """
        number = 0 if parent is None else parent.record.body.round + 1
        base = STATE if parent is None else state(number)
        at = self.chain.genesis if parent is None else parent.digest
        headers = []
        for key in by:
            first = self.chain.next_window(key, at)
            headers.append(
                self.header(key, label=label, round=Round(number), parent=at, base_state=base, first_window=first,
                            end_window=first + windows)
            )  # fmt: skip
        updates = tuple(sorted(headers, key=lambda h: h.author))
        weights = self.chain.weights(at, updates)
        record = RoundRecord(RUN, Round(number), at, base, 0, updates, weights=weights)
        made = certificate(FakeSigner(by[0]).sign(record), by)
        self.step(ev.CertificateReceived(made, by[0]))
        return made

    def passes(self, seconds: float) -> list[do.Action]:
        """Step the machine every half second and return all its actions, with those of the last step before."""
        found = list(self.actions)
        for _ in range(int(2 * seconds)):
            found += self.step(ev.Tick(), self.now + 0.5)
        return found


def blobs(made: Certificate) -> set[Digest]:
    return {u.body.blob for u in made.record.body.updates}


def test_what_nobody_gave_is_asked_for_again_and_followed_when_it_is_here():
    b = Split()
    made = b.hears(b"a")
    b.passes(PATIENCE + 1)
    assert b.chain.head == b.first and not b.requested
    asked = [a.blob for a in b.passes(PATIENCE) if isinstance(a, do.FetchBlob)]
    assert set(asked) == blobs(made) == b.requested and b.chain.head == b.first
    for blob, role in applied_blobs(made).items():
        b.step(ev.BlobHeld(blob, role.responsible))
    assert b.chain.head == made.digest and b.of(do.SyncState)


def test_a_record_certified_with_the_update_of_another_is_not_followed():
    b = Split()
    made = b.hears(b"a")
    b.passes(PATIENCE + 1)
    for blob in blobs(made):
        b.step(ev.BlobHeld(blob, OTHERS[-1]))
    asked = b.passes(6 * PATIENCE)
    assert b.chain.head == b.first and not [a for a in asked if isinstance(a, do.SyncState | do.ApplyRecord)]


def test_where_a_branch_led_that_the_tree_has_dropped_nobody_looks_any_more():
    """A tree has room for few records beside its main branch: the lightest tips of equal support are removed."""
    b = Split()
    b.chain.limits = replace(b.chain.limits, max_side_records=8)
    small = b.hears(b"b", parent=b.hears(b"a", windows=30), windows=2)
    b.passes(2 * PATIENCE + 2)
    assert blobs(small) < b.requested
    for i in range(6):
        b.hears(bytes([i]), parent=b.hears(b"d%d" % i, windows=40 + i), windows=2)
        b.passes(4)  # their author has failed us before: they are quarantined soon
    assert small.digest not in b.chain and not blobs(small) & b.requested
    b.passes(PATIENCE)
    assert not blobs(small) & b.requested


def test_one_who_makes_branch_after_branch_hides_nobody_elses():
    b = Split()
    for i in range(16):
        b.hears(b"%d" % i, by=(LIAR,), parent=b.hears(b"-%d" % i, by=(LIAR,)), windows=40 + i % 10)
        b.passes(4)
    theirs = b.hears(b"a", windows=4)
    b.passes(PATIENCE + 10)
    assert b.chain.head == b.first
    asked = [a.blob for a in b.passes(2 * PATIENCE) if isinstance(a, do.FetchBlob)]
    assert blobs(theirs) <= set(asked)
    for blob, role in applied_blobs(theirs).items():
        b.step(ev.BlobHeld(blob, role.responsible))
    b.passes(2 * PATIENCE)
    assert b.chain.head == theirs.digest


def test_a_branch_that_has_become_final_is_aside_no_more():
    b = Split()
    made = b.hears(b"a")
    b.passes(PATIENCE + 1)
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Finalization(RUN, Round(0), made.digest))))
    assert b.chain.head == made.digest
    b.chain.limits = replace(b.chain.limits, min_main_records=1, max_records=1)
    b.hears(b"b", parent=made)
    assert b.chain.root == made.digest and b.machine.sizes()["quarantined"][0] == 0
    b.passes(4 * PATIENCE)


def test_who_is_on_the_way_from_a_branch_that_is_gone_does_not_say_that_it_trains():
    b = Split()
    made = b.hears(b"a")
    for blob, role in applied_blobs(made).items():
        b.step(ev.BlobHeld(blob, role.responsible))
    moves = [a.path[-1] for a in b.passes(1) if isinstance(a, do.SyncState)]
    assert moves == [made] and b.machine.phase == "training"
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Finalization(RUN, Round(0), made.digest))))
    b.chain.limits = replace(b.chain.limits, min_main_records=1, max_records=1)
    b.hears(b"b", parent=made)
    assert b.first not in b.chain and b.machine.phase == "syncing"


def test_a_move_that_fails_though_all_is_held_is_tried_less_and_less():
    b = Split()
    made = b.hears(b"a")
    for blob, role in applied_blobs(made).items():
        b.step(ev.BlobHeld(blob, role.responsible))
    tried, said = [], []
    while b.now < 60 * PATIENCE:
        if b.of(do.SyncState):
            tried.append(b.now)
            b.step(ev.SyncFailed(made.digest, "nobody has a checkpoint", kept=True))
            said += [r.text for r in b.of(do.Notice) if r.kind == "apply-failed"]
            assert b.chain.head == b.first
        b.step(ev.Tick(), b.now + 0.5)
    pauses = [later - earlier for earlier, later in zip(tried, tried[1:], strict=False)]
    assert [round(p / PATIENCE) for p in pauses] == [1, 2, 4, 8, 16]
    assert len(tried) == 6 and len(said) == 3, "the first, the second and the fourth"
    assert "(4 times): nobody has a checkpoint" in said[-1]


def test_a_bad_update_that_is_given_when_it_is_asked_for_again_drops_its_record():
    b = Split()
    made = b.hears(b"a")
    b.passes(2 * PATIENCE + 1)
    assert b.requested == blobs(made)
    b.step(ev.BlobInvalid(next(iter(blobs(made))), "chunk 3: a scale that is not finite"))
    assert made.digest not in b.chain and not b.requested
    assert [r for r in b.of(do.Notice) if r.kind == "bad-record"]


COALITION = tuple(sorted(OTHERS[7:11]))


class Flooded(Second):
    """All three have announced, and four keys without stake have certified one record more than are held back."""

    def __init__(self):
        super().__init__()
        self.announced()
        self.hold(self.header(SLOW, label=b"2", **self.work(10)))
        self.flood = [self.sibling(i) for i in range(MAX_QUARANTINED + 1)]
        for made in self.flood:
            self.step(ev.CertificateReceived(made, COALITION[0]))
        assert self.flood[0].digest not in self.chain and self.chain.head == self.first

    def sibling(self, number: int, votes: int = 3) -> Certificate:
        """Return a record on the head, with the votes of three, or all four, of its contributors."""
        updates = tuple(self.header(key, label=b"%d" % number, **self.work(0)) for key in COALITION)
        weights = self.chain.weights(self.first, updates)
        record = RoundRecord(RUN, Round(1), self.first, NEXT, number, updates, weights=weights)
        return certificate(FakeSigner(COALITION[0]).sign(record), COALITION[:votes])


def test_replays_of_certificates_without_support_are_no_work(monkeypatch):
    b, asked = Flooded(), []
    is_supported = Consensus.is_supported
    monkeypatch.setattr(
        Consensus, "is_supported", lambda *args, **kwargs: asked.append(args) or is_supported(*args, **kwargs)
    )
    for i in range(1000):
        b.step(ev.CertificateReceived(b.flood[i % len(b.flood)], COALITION[0]))
        assert not b.of(do.StoreCertificate)
    assert not asked


def test_a_branch_that_gave_way_to_others_is_taken_again_for_a_new_vote():
    b = Flooded()
    b.step(ev.CertificateReceived(b.sibling(0, votes=4), COALITION[0]))
    assert b.chain.head == b.flood[0].digest, "it has support now"


def test_a_branch_that_gave_way_to_others_is_taken_again_for_a_record_of_others_on_it():
    b, builder = Flooded(), OTHERS[12]
    header = b.header(builder, round=Round(2), parent=b.flood[0].digest, base_state=state(2))
    record = RoundRecord(RUN, Round(2), b.flood[0].digest, state(2), 0, (header,))
    child, stored = certificate(FakeSigner(builder).sign(record), [builder]), []
    for made in (child, b.flood[0], child, *b.flood, child, *b.flood):
        b.step(ev.CertificateReceived(made, builder))
        stored += [a.certificate for a in b.of(do.StoreCertificate)]
    assert stored == [b.flood[0], child]


def test_a_branch_that_gave_way_to_others_is_taken_again_after_patience():
    b = Flooded()
    b.step(ev.Tick(), b.now + PATIENCE)
    b.step(ev.CertificateReceived(b.flood[0], COALITION[0]))
    assert b.flood[0].digest in b.chain
