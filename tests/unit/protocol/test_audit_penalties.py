"""Bars fold over decisions and pardons: longer each time, and a pardoned conviction leaves only its loss of stake."""

from __future__ import annotations

from protocol.audit_penalties import AuditPenalties
from protocol.chain import genesis_digest
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import AuditDecision, Pardon, RoundRecord, UpdateHeader
from protocol.record_node import RecordNode
from tests.simulation.signer import FakeSigner, certificate
from tests.support.empty_chain import RUN, STATE

LIAR, OTHER = (PeerKey(sha256(name)) for name in (b"liar", b"other"))
RECORD = Digest(sha256(b"record"))
BAR = 8


def convicted(before: AuditPenalties, round_: int, key: PeerKey = LIAR) -> AuditPenalties:
    return before.after(AuditDecision(RECORD, key, True), Round(round_), BAR)


def bar(penalties: AuditPenalties) -> int:
    """Return the first round in which the liar may be listed again."""
    return next(r for r in range(1000) if not penalties.is_barred(LIAR, Round(r)))


def test_a_pardon_of_the_newest_conviction_ends_the_bar_and_gives_back_no_stake():
    guilty = convicted(convicted(AuditPenalties(), 3), 3, OTHER)
    pardoned = guilty.pardoned([Pardon(LIAR, Round(3))])
    assert guilty.is_barred(LIAR, Round(5)) and bar(pardoned) == 0
    assert not pardoned.is_stake(LIAR, Round(3)) and pardoned.is_stake(LIAR, Round(4))
    assert pardoned.of(OTHER) == guilty.of(OTHER)


def test_the_conviction_after_a_pardon_bars_no_longer_than_a_first_one():
    served = convicted(AuditPenalties(), 3)
    again = convicted(served, 3 + 1 + BAR)
    assert bar(again) == 3 + 1 + BAR + 1 + 2 * BAR
    assert bar(convicted(again.pardoned([Pardon(LIAR, Round(3 + 1 + BAR))]), 20)) == 20 + 1 + 2 * BAR
    assert bar(convicted(served.pardoned([Pardon(LIAR, Round(3))]), 5)) == 5 + 1 + BAR


def test_a_pardon_covers_neither_another_conviction_nor_one_that_comes_later():
    guilty = convicted(AuditPenalties(), 3)
    repeated = Pardon(LIAR, Round(3))
    for other in (Pardon(LIAR, Round(2)), Pardon(LIAR, Round(4)), Pardon(OTHER, Round(3))):
        assert guilty.pardoned([other]) == guilty
    later = convicted(guilty.pardoned([repeated]), 5)
    assert later.pardoned([repeated]) == later and later.is_barred(LIAR, Round(6))


def test_a_pardon_covers_all_that_one_record_decides():
    guilty = convicted(convicted(AuditPenalties(), 3), 3)
    assert bar(guilty) == bar(convicted(AuditPenalties(), 3))
    assert bar(convicted(guilty.pardoned([Pardon(LIAR, Round(3))]), 5)) == 5 + 1 + BAR


def test_penalties_count_as_memory_of_each_record_that_changes_them(monkeypatch):
    """Each such record holds a map of all penalized keys, and anybody can make keys."""
    monkeypatch.setattr("protocol.record_node.PENALTY_BYTES", 10**6)
    node, found = RecordNode(genesis_digest(RUN)), []
    for number, convicts in enumerate(((), (LIAR,), (), (OTHER,), (LIAR, OTHER))):
        update = UpdateHeader(RUN, Round(number), node.digest, STATE, 0, 0, 1, 1, RECORD, 9, 1.0, b"")
        decisions = tuple(AuditDecision(STATE, key, True) for key in convicts)
        body = RoundRecord(
            RUN, Round(number), node.digest, STATE, 0, (FakeSigner(LIAR).sign(update),), None, decisions=decisions
        )
        made = certificate(FakeSigner(LIAR).sign(body), [LIAR])
        node = RecordNode(made.digest, node, made, 99, 3, BAR)
        found.append(node.memory // 10**6)
    assert found == [0, 1, 0, 2, 2]
