"""The table of admissions under floods: nobody is locked out, and work is never displaced by keys."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.admission_table import ABSENT_SECONDS, NEW_KEYS, UNSEEN_SECONDS, AdmissionTable
from coordinator.errors import TooManyError
from coordinator.ledger import AdmissionRow
from coordinator.limits import caller_of
from protocol.ids import PeerKey, sha256
from tests.support.long_cases import long_cases

DAY = 86_400


def key(number: int) -> PeerKey:
    return PeerKey(sha256(b"key", number.to_bytes(8, "big")))


def row(number: int, name: str = "", now: float = 0.0) -> AdmissionRow:
    return AdmissionRow(key(number), name, int(now), int(now), int(now) + DAY, b"")


def v4(number: int) -> str:
    return f"198.51.{number // 256}.{number % 256}"


def v6(number: int) -> str:
    """Return the /64 of an address in one /48."""
    return caller_of(f"ipv6:[2001:db8:1:{number % 0x10000:x}::1]:1")


def nobody(peer: PeerKey) -> bool:
    return False


STEPS = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 30)),
    st.tuples(st.just("see"), st.integers(0, 30)),
    st.tuples(st.just("work"), st.integers(0, 30)),
    st.tuples(st.just("stop"), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.sampled_from([1, UNSEEN_SECONDS / 2, UNSEEN_SECONDS, DAY, ABSENT_SECONDS])),
)


@given(st.lists(STEPS, max_size=100))
def test_a_full_table_displaces_the_oldest_idle_key_and_never_one_that_works(steps: list[tuple[str, float]]):
    limit, now = 6, 1e9
    worked: set[PeerKey] = set()
    working: set[PeerKey] = set()
    table = AdmissionTable(worked.__contains__, working.__contains__, limit=limit)
    active: dict[PeerKey, tuple[bool, float]] = {}
    """For each remembered peer, if it was seen, and when it was last (or was admitted)."""

    def idle() -> list[PeerKey]:
        return sorted(active.keys() - worked, key=active.__getitem__)

    for i, (what, value) in enumerate(steps):
        now += 1e-3
        peer = key(int(value))
        if what == "see":
            table.note_seen([peer], now)
            if peer in active:
                active[peer] = (True, now)
        elif what == "work":
            worked.add(peer)
            working.add(peer)
        elif what == "stop":
            working.discard(peer)
        elif what == "wait":
            now += value
            gone = [p for p in idle() if now - active[p][1] > (ABSENT_SECONDS if active[p][0] else UNSEEN_SECONDS)]
            assert sorted(table.forget_absent(now)) == sorted(gone)
            for p in gone:
                del active[p]
        elif peer in active:
            assert table.add(row(int(value), now=now), v4(i), now) == []
        elif len(active) == limit and active.keys() <= working:
            with pytest.raises(TooManyError, match="all work: try again"):
                table.add(row(int(value), now=now), v4(i), now)
        else:
            expected = idle()[:1] if len(active) == limit else []
            gone = [r.peer for r in table.add(row(int(value), now=now), v4(i), now)]
            if len(active) == limit and not expected:
                expected = gone
                assert len(gone) == 1 and gone[0] in active.keys() - working
            assert gone == expected
            for p in expected:
                del active[p]
            active[peer] = (False, now)
        assert len(table) == len(active) <= limit and all(p in table for p in active)


@pytest.mark.parametrize("addresses", [1, *long_cases(65_536)], ids=["one-ipv4", "one-ipv6-48"])
def test_a_flood_from_one_network_adds_a_share_and_newcomers_get_in(addresses: int):
    # For two days one network asks every twenty seconds, with a new key; each half hour an honest peer comes.
    rng = random.Random(7)
    table = AdmissionTable(nobody, nobody, limit=2000)
    share = NEW_KEYS if addresses == 1 else 4 * NEW_KEYS
    added, honest, largest = Counter[int](), 0, 0
    for second in range(0, 2 * DAY, 20):
        now = 1e9 + second
        caller = "203.0.113.7" if addresses == 1 else v6(rng.randrange(addresses))
        try:
            table.add(row(second + 10**6, now=now), caller, now)
            added[second // DAY] += 1
        except TooManyError as e:
            assert "try again in" in str(e) and "keys a day" in str(e)
        if second % 1800 == 0:
            table.add(row(honest, now=now), v4(honest), now)
            table.note_seen([key(honest)], now)
            honest += 1
        if second % 60 == 0:
            table.forget_absent(now)
        largest = max(largest, len(table))
    assert share <= added[0] <= 2 * share and added[1] <= share + 1
    assert all(key(n) in table for n in range(honest))
    assert largest <= honest + share + share * UNSEEN_SECONDS / DAY + 1


def test_many_networks_together_fill_the_table_and_newcomers_still_get_in():
    table = AdmissionTable(nobody, nobody, limit=500)
    for n in range(100):
        table.add(row(n), v4(n), 1e9)
        table.note_seen([key(n)], 1e9)
    for n in range(20 * NEW_KEYS):
        table.add(row(10**6 + n), v4(1000 + n // NEW_KEYS), 1e9 + 1)
    assert len(table) == 500 and all(key(n) in table for n in range(100))
    table.add(row(100), v4(100), 1e9 + 2)
    assert key(100) in table


def test_the_owners_own_machine_and_renewals_have_no_share():
    table = AdmissionTable(nobody, nobody)
    for n in range(2 * NEW_KEYS):
        table.add(row(n), "127.0.0.1", 1e9)
        table.add(row(10_000 + n), caller_of("ipv6:[::1]:5"), 1e9)
        table.add(row(20_000 + n), caller_of("unix:"), 1e9)
    for n in range(NEW_KEYS):
        table.add(row(1000 + n), "203.0.113.7", 1e9)
    with pytest.raises(TooManyError, match="in 22 min"):
        table.add(row(2000), "203.0.113.7", 1e9)
    table.add(row(1000, "renewed"), "203.0.113.7", 1e9)
    table.add(row(2000), "203.0.113.7", 1e9 + DAY / NEW_KEYS + 1)


def test_keys_that_worked_once_make_room_and_those_that_work_do_not():
    """Otherwise as many keys as there are places, with one accepted update each, would end admissions for good."""
    working = {key(0)}
    table = AdmissionTable(lambda peer: True, working.__contains__, limit=50)
    for n in range(50):
        table.add(row(n), v4(n), 1e9)
    assert [r.peer for r in table.add(row(50), v4(50), 1e9 + 1)] == [key(1)]
    assert key(0) in table and key(50) in table


def test_an_admission_that_is_taken_back_leaves_all_as_it_was():
    table = AdmissionTable(nobody, nobody, limit=2)
    first, second, renewed = row(1, "ada"), row(2), row(1, "grace")
    table.add(first, v4(1), 0.0)
    table.add(second, v4(2), 0.0)
    assert table.add(renewed, v4(1), 1.0) == []
    table.take_back(renewed, first, [], v4(1), 1.0)
    assert table.get(key(1)) is first and table.names.shown(key(1)) == "ada"
    third = row(3, "eve")
    displaced = table.add(third, v4(3), 1.0)
    table.take_back(third, None, displaced, v4(3), 1.0)
    assert key(3) not in table and table.names.shown(key(3)) == key(3).short
    assert table.get(key(1)) is first and table.get(key(2)) is second and len(table) == 2
    assert sorted(table.forget_absent(UNSEEN_SECONDS + 2)) == sorted([key(1), key(2)])


def test_an_admission_that_is_taken_back_uses_nothing_of_its_networks_share():
    table = AdmissionTable(nobody, nobody)
    for _ in range(3 * NEW_KEYS):
        again = row(1)
        table.take_back(again, None, table.add(again, v4(1), 0.0), v4(1), 0.0)
    assert table.add(row(2), v4(1), 0.0) == []


def test_asking_again_does_not_keep_an_unseen_key():
    table = AdmissionTable(nobody, nobody)
    table.load([row(1)], 0.0)
    for now in range(0, int(UNSEEN_SECONDS), 60):
        table.add(row(1, f"name {now}"), "203.0.113.7", now)
    assert table.forget_absent(UNSEEN_SECONDS + 1) == [key(1)]


def test_a_name_that_others_have_is_shown_with_the_key():
    table = AdmissionTable(nobody, nobody)
    table.add(row(1, "ada"), v4(1), 0.0)
    assert table.names.shown(key(1)) == "ada" and table.names.shown(key(9)) == key(9).short
    for n, name in ((2, "Ada"), (3, "\uff41da")):
        table.add(row(n, name), v4(n), 0.0)
        assert table.names.shown(key(n)) == f"{name} {key(n).short}"
        assert table.names.shown(key(1)) == f"ada {key(1).short}"
        table.add(row(n, "grace"), v4(n), 0.0)
        assert table.names.shown(key(1)) == "ada"
        table.add(row(n, ""), v4(n), 0.0)
    # A name that looks like a shown key is no name of its own.
    for name in (f"ada {key(1).short}", key(1).short, f"ada ({key(1).short.upper()})"):
        table.add(row(4, name), v4(4), 0.0)
        assert table.names.shown(key(4)) == f"{name} {key(4).short}"
