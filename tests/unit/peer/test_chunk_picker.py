"""A scarce seeder gives each chunk once, the rarest first, and nobody is waited for long."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest

from peer.swarm.transfer.chunk_picker import LATE_SECONDS, MIN_REQUESTS, SILENT_SECONDS, WAIT_SECONDS, ChunkPicker
from protocol.identity import Identity
from protocol.ids import PeerKey

COUNT = 60


def key(n: int) -> PeerKey:
    return Identity(bytes([n]) * 32).key


SOURCE, OTHER, ME, B, C = (key(n) for n in range(1, 6))


def bits(chunks) -> bytes:
    out = bytearray(-(-COUNT // 8))
    for i in chunks:
        out[i >> 3] |= 1 << (i & 7)
    return bytes(out)


ALL = bits(range(COUNT))


class Fetcher:
    """One who fetches, and what is here."""

    def __init__(
        self,
        me: PeerKey,
        peers: list[PeerKey],
        *,
        latency: dict[PeerKey, float] | None = None,
        loaded_latency: dict[PeerKey, float] | None = None,
        **options,
    ):
        self.here: set[int] = set()
        self.looked_for = 0
        slow, once = latency or {}, latency or {} if loaded_latency is None else loaded_latency
        self.picker = ChunkPicker(
            me, peers, range(COUNT), COUNT, has=self.has, here=lambda: len(self.here),
            latency=lambda p: slow.get(p, 0.0), loaded_latency=lambda p: once.get(p, 0.0),
            **({"relayed": True, "chance": random.Random(0)} | options),
        )  # fmt: skip

    def has(self, index: int) -> bool:
        self.looked_for += 1
        return index in self.here

    def ask(self, peer: PeerKey, now: float = 0.0, most: int = 1000) -> list[int]:
        """Return all that may be requested from it at once."""
        out = []
        while len(out) < most and (index := self.picker.next(peer, now)) is not None:
            out.append(index)
        return out

    def get_all(self, peer: PeerKey, now: float = 0.0) -> None:
        """Receive all that it gives."""
        while asked := self.ask(peer, now):
            for index in asked:
                self.get(peer, index, now)

    def get(self, peer: PeerKey, index: int, now: float = 0.0) -> None:
        self.here.add(index)
        self.picker.received(index, now, peer)
        self.picker.release(peer, index)


def together(keys: list[PeerKey], peers: list[PeerKey]) -> dict[PeerKey, Fetcher]:
    """Return fetchers of one seeder that know of each other to have nothing."""
    fetchers = {k: Fetcher(k, [p for p in [SOURCE, *keys, *peers] if p != k]) for k in keys}
    for k, f in fetchers.items():
        f.picker.update(SOURCE, ALL, 0.0)
        for other in keys:
            if other != k:
                f.picker.update(other, b"", 0.0)
    return fetchers


def test_those_who_fetch_at_once_ask_a_source_for_each_chunk_once():
    fetchers = together([ME, B, C], [])
    asked: Counter[int] = Counter()
    for f in fetchers.values():
        while mine := f.ask(SOURCE):
            asked.update(mine)
            for index in mine:
                f.get(SOURCE, index)
    assert asked == Counter(range(COUNT))
    assert all(f.picker.left == COUNT * 2 // 3 for f in fetchers.values())
    for k, f in fetchers.items():
        for other, of in fetchers.items():
            if other != k:
                f.picker.update(other, bits(of.here), 0.0)
                f.get_all(other)
        assert f.picker.left == 0


def test_before_anybody_has_said_what_it_has_the_share_is_asked_for_already():
    f = Fetcher(ME, [SOURCE, B, C])
    f.picker.update(SOURCE, ALL, 0.0)
    assert sorted(f.ask(SOURCE)) == sorted(together([ME, B, C], [])[ME].ask(SOURCE))


def test_the_shares_of_another_blob_are_dealt_out_in_another_way():
    shares = []
    for turn in (0, 1):
        f = Fetcher(ME, [SOURCE, B, C], offset=turn)
        f.picker.update(SOURCE, ALL, 0.0)
        shares.append(set(f.ask(SOURCE)))
    assert not shares[0] & shares[1]


def test_of_a_fellow_is_asked_what_few_have_first():
    f = together([ME, B, C], [])[ME]
    f.picker.update(B, bits([3, 4, 5]), 0.0)
    f.picker.update(C, bits([4, 5, 6, 7]), 0.0)
    assert set(f.ask(C, most=2)) == {6, 7}


def test_what_a_fellow_has_is_not_asked_of_the_source():
    f = together([ME, B], [])[ME]
    share = set(f.ask(SOURCE))
    for index in share:
        f.picker.release(SOURCE, index)
    f.picker.update(B, bits(sorted(share)[:5]), 0.0)
    assert set(f.ask(SOURCE)) == set(sorted(share)[5:])
    assert set(f.ask(B)) == set(sorted(share)[:5])


def with_the_share_here(theirs: int, by: PeerKey = SOURCE) -> Fetcher:
    """Return a fetcher with its assigned chunks after 10 s, while the leecher has `theirs` of its own.

    The source was asked for its chunks, and `by` gave them.
    """
    f = together([ME, B], [])[ME]
    share = set(f.ask(SOURCE, 0.0))
    for index in share:
        f.here.add(index)
        f.picker.received(index, 10.0, by)
        f.picker.release(SOURCE, index)
    f.picker.update(B, bits(sorted(set(range(COUNT)) - share)[:theirs]), 10.0)
    f.get_all(B, 10.0)
    assert f.ask(SOURCE, 10.0) == []
    return f


def test_the_share_of_who_does_not_get_it_is_taken_over_little_by_little():
    f = with_the_share_here(20)
    assert len(f.ask(SOURCE, 10.0 + 1.01 * WAIT_SECONDS)) == 1
    assert len(f.ask(SOURCE, 10.0 + 3.01 * WAIT_SECONDS)) == 2


def test_who_gets_on_is_waited_for():
    f = with_the_share_here(20)
    for n in range(21, 30):
        f.picker.update(B, bits(range(2 * n)), n - 10.5)
        f.get_all(B, n - 10.5)
        assert f.ask(SOURCE, n - 10.5 + 0.9 * WAIT_SECONDS) == []


def test_a_fast_source_is_not_left_idle_for_a_slow_fellow():
    f = with_the_share_here(5)
    assert len(f.ask(SOURCE, 10.0 + 1.01 * WAIT_SECONDS)) >= 10


def test_who_says_now_that_it_has_all_and_now_nothing_is_not_waited_for():
    f = together([ME, B], [])[ME]
    for tick in range(50):
        now = 0.2 * tick
        f.picker.update(B, b"" if tick % 2 else bits(range(1, COUNT)), now)
        for index in f.ask(B, now):
            f.picker.release(B, index)  # it has not
        for index in f.ask(SOURCE, now + 0.1):
            f.get(SOURCE, index, now + 0.1)
        if not f.picker.left:
            break
    else:
        pytest.fail(f"{f.picker.left} of {COUNT} chunks have not come in 10 s")


def test_what_a_fellow_took_back_is_not_asked_of_it_and_what_it_says_again_is_noted_once():
    f = together([ME, B], [])[ME]

    def say_again(times: int) -> int:
        """Return the bytes that are in memory after it."""
        for _ in range(times):
            f.picker.update(B, ALL[:-1], 0.0)
            f.picker.update(B, bits([3, 4]), 0.0)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = say_again(20)
        assert say_again(500) < before + 1000
    finally:
        tracemalloc.stop()
    assert sorted(f.ask(B)) == [3, 4]


def test_a_chunk_that_a_fellow_gave_says_nothing_of_the_source_that_was_asked_for_it_too():
    """A source that was fast is asked for much at once (see above), and one that gave nothing for a chunk."""
    f = with_the_share_here(5, by=B)
    assert len(f.ask(SOURCE, 10.0 + 1.01 * WAIT_SECONDS)) == 1
    f = with_the_share_here(5)
    assert len(f.ask(SOURCE, 10.0 + 1.01 * WAIT_SECONDS)) >= 10


@pytest.mark.parametrize(
    ("loaded_latency", "all_at_once"),
    [({}, True), ({SOURCE: 0.23}, True), ({SOURCE: 0.26}, False), ({SOURCE: 0.9}, False)],
)
def test_a_source_that_was_slow_when_all_asked_it_is_spared_though_it_is_quick_now(loaded_latency, all_at_once: bool):
    now = {SOURCE: 0.2, B: 0.2, C: 0.2}
    f = Fetcher(ME, [SOURCE, B, C], latency=now, loaded_latency=now | loaded_latency)
    f.picker.update(SOURCE, ALL, 0.0)
    assert (len(f.ask(SOURCE)) == COUNT) is all_at_once


def test_the_share_of_who_gives_nothing_is_everybodys_at_once():
    f = together([ME, B], [])[ME]
    before = set(f.ask(SOURCE))
    f.picker.set_idle(B)
    assert before | set(f.ask(SOURCE)) == set(range(COUNT))


def test_with_as_many_sources_as_fetchers_nobody_waits_for_a_fellow():
    f = Fetcher(ME, [SOURCE, OTHER, B])
    f.picker.update(SOURCE, ALL, 0.0)
    f.picker.update(B, b"", 0.0)
    f.picker.update(OTHER, ALL, 0.0)
    assert len(f.ask(SOURCE)) + len(f.ask(OTHER)) >= 2 * (COUNT // 3)
    for source in (SOURCE, OTHER):
        for index in f.ask(source):
            f.get(source, index)


def all_have_it(sources: list[PeerKey]) -> Fetcher:
    f = Fetcher(ME, sources)
    for source in sources:
        f.picker.update(source, ALL, 0.0)
    return f


def test_one_holder_is_asked_for_an_even_part_of_what_is_left():
    f = all_have_it([SOURCE, OTHER])
    asked = f.ask(SOURCE)
    assert len(asked) == COUNT // 2
    f.get_all(OTHER)
    assert f.picker.left == COUNT // 2
    for index in asked[:10]:
        f.picker.release(SOURCE, index)
    assert len(f.ask(OTHER)) == 10  # of 15
    f = all_have_it([SOURCE, OTHER, B, C])
    for index in range(COUNT - 3):
        f.here.add(index)
    f.picker.refresh(0.0)
    assert len(f.ask(OTHER)) == MIN_REQUESTS


@pytest.mark.parametrize("mine", [0.0, 0.3])
def test_what_is_late_is_asked_of_who_has_it_and_gives_it_sooner(mine: float):
    f = Fetcher(ME, [SOURCE, OTHER, B], latency={SOURCE: 2.0, OTHER: mine}, relayed=False)
    f.picker.update(B, b"", 0.0)
    asked = f.ask(SOURCE, 0.0, most=5)
    f.get_all(OTHER)
    assert f.ask(OTHER, 0.9 * LATE_SECONDS) == []
    assert f.ask(B, 10.0) == []
    assert set(f.ask(OTHER, 1.1 * LATE_SECONDS)) == set(asked)
    assert f.ask(OTHER, 20.0) == []


def test_a_slow_line_is_not_asked_for_what_a_slow_line_is_late_with():
    f = Fetcher(ME, [SOURCE, OTHER], latency={SOURCE: 2.0, OTHER: 2.0}, relayed=False)
    asked = f.ask(SOURCE, 0.0, most=5)
    f.get_all(OTHER)
    assert f.ask(OTHER, 2.5) == []
    assert set(f.ask(OTHER, 3.5)) == set(asked)


def test_three_who_are_gone_are_not_all_that_are_asked():
    f = Fetcher(ME, [SOURCE, OTHER, B, C], relayed=False)
    first = f.ask(SOURCE, 0.0, most=1)
    for n, peer in enumerate([OTHER, B], 1):
        f.ask(peer, n * 1.1 * LATE_SECONDS)
    assert set(first).isdisjoint(f.ask(C, 3.3 * LATE_SECONDS)), "one more is not asked while these may only be slow"
    assert set(first) <= set(f.ask(C, 1.1 * SILENT_SECONDS))


def test_three_who_are_slow_but_give_are_all_that_are_asked():
    f = Fetcher(ME, [SOURCE, OTHER, B, C], latency={SOURCE: 8.0, OTHER: 8.0, B: 8.0}, relayed=False)
    f.ask(SOURCE, 0.0, most=COUNT)
    f.ask(OTHER, 20.0)
    f.ask(B, 35.0)
    f.picker.received(0, 36.0, SOURCE)
    f.picker.received(1, 37.0, OTHER)
    f.picker.received(2, 38.0, B)
    assert f.ask(C, 50.0) == []


def test_what_was_not_given_is_asked_for_again_of_anybody_who_has_it():
    f = together([ME, B], [])[ME]
    first = f.ask(SOURCE)[0]
    f.picker.update(B, bits([first]), 0.0)
    f.picker.release(SOURCE, first)
    assert f.ask(B) == [first]
    f.get(B, first)
    assert f.picker.left == COUNT - 1


def test_a_bitmap_that_lies_is_believed_in_nothing_that_could_be_no_chunk():
    f = together([ME, B], [])[ME]
    assert not f.picker.update(B, b"\0" * 500 + b"\xff" * 500, 0.0)
    f.picker.update(B, b"\xff" * 9999, 0.0)
    assert set(f.ask(B)) <= set(range(COUNT))
    f.picker.update(B, b"", 0.0)  # takes it all back
    assert f.picker.left == COUNT


def test_chunks_of_other_fetches_are_searched_for_only_when_one_has_come():
    f = together([ME, B], [])[ME]
    share = f.ask(SOURCE, 0.0)
    f.picker.refresh(0.0)
    f.looked_for = 0
    for turn in range(50):  # a slow source gives one of its chunks every 10 idle turns
        if turn % 10 == 0:
            f.get(SOURCE, share[turn // 10], turn / 50)
        f.picker.refresh(turn / 50)
    assert f.looked_for == 0
    by_others = set(range(COUNT)) - {*share}
    f.here |= by_others
    f.picker.refresh(1.0)
    assert f.picker.left == len(share) - 5 and f.looked_for == COUNT - 5
    f.picker.refresh(1.0)
    assert f.looked_for == COUNT - 5


def test_a_chunk_that_comes_during_the_search_for_others_is_noted_by_the_next():
    class Late(Fetcher):
        def has(self, index: int) -> bool:
            was_here = super().has(index)
            if index == 1:
                self.here.add(1)
            return was_here

    f = Late(ME, [SOURCE])
    f.here.add(0)
    for left in (COUNT - 1, COUNT - 2):
        f.picker.refresh(0.0)
        assert f.picker.left == left
