"""The search in the DHT ends, asks nobody twice, and finds the nearest nodes whatever others invent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from peer.swarm.libp2p.search import MAX_CALLS, NEAREST, Search

ME = -1
BITS = 160
Ask = Callable[[int], tuple[int, dict[int, int]] | None]


def run(search: Search[int], ask: Ask, chance: random.Random, *, at_once: int = 8) -> list[int]:
    """Drive a search, with answers in any order; return the nodes asked."""
    asked: list[int] = []
    waiting: list[int] = []
    while True:
        new = search.next(at_once - len(waiting))
        asked, waiting = asked + new, waiting + new
        if not waiting:
            return asked
        node = waiting.pop(chance.randrange(len(waiting)))
        if (answer := ask(node)) is None:
            search.note_silence(node)
        else:
            search.note_answer(node, *answer)


class Net:
    """Nodes with ids, each of which knows its 20 nearest and others; attackers invent what they name."""

    def __init__(self, seed: int, honest: int, hostile: int = 0):
        self.chance = random.Random(seed)
        self.key = self.chance.getrandbits(BITS)
        self.ids = {node: self.chance.getrandbits(BITS) for node in range(honest)}
        self.tables = {
            node: {*self.chance.sample(range(honest), min(honest, 60)), *self.nearest(self.ids, 20, node_id)}
            for node, node_id in self.ids.items()
        }
        self.hostile = {honest + n: self.key ^ n for n in range(1, hostile + 1)}
        self.invented = 10**6

    def nearest(self, nodes: Iterable[int] | None = None, count: int = NEAREST, to: int | None = None) -> list[int]:
        to = self.key if to is None else to
        return sorted(self.ids if nodes is None else nodes, key=lambda n: self.ids[n] ^ to)[:count]

    def ask(self, node: int) -> tuple[int, dict[int, int]] | None:
        if node in self.hostile:  # ever nearer nodes that are not there, and honest ones under ids far away
            self.invented += 20
            lies = {self.invented + n: self.key ^ self.chance.getrandbits(8) for n in range(15)}
            return self.hostile[node], lies | {n: ~self.key & (2**BITS - 1) for n in self.nearest(count=5)}
        if node not in self.ids:
            return None
        mine = self.tables[node]
        return self.ids[node], {n: self.ids[n] for n in self.nearest(mine, 20)} | self.hostile

    def search(self, drawn: int = 4) -> Search[int]:
        mine = self.chance.sample(sorted(self.ids), min(len(self.ids), 20))
        chosen = self.chance.sample(mine, min(drawn, len(mine)))
        return Search(self.key, known={n: self.ids[n] for n in self.nearest(mine, 20)}, drawn=chosen, me=ME)


@pytest.mark.parametrize("seed", range(20))
def test_the_nearest_nodes_are_found_first(seed):
    net = Net(seed, honest=500)
    search = net.search()
    asked = run(search, net.ask, net.chance)
    assert search.found()[:NEAREST] == net.nearest()
    assert len(asked) == len(set(asked)) <= MAX_CALLS


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("hostile", [1, 3])
def test_a_few_nodes_near_the_key_neither_keep_it_from_ending_nor_hide_others(seed, hostile):
    net = Net(seed, honest=200, hostile=hostile)
    search = net.search()
    asked = run(search, net.ask, net.chance)
    found = search.found()
    assert len(asked) == len(set(asked)) <= MAX_CALLS
    assert not any(node >= 10**6 for node in found), "those that nobody is count for nothing"
    assert found[:hostile] == sorted(net.hostile, key=lambda n: net.hostile[n] ^ net.key)
    assert found[hostile:NEAREST] == net.nearest(count=NEAREST - hostile)


@pytest.mark.parametrize("seed", range(20))
def test_nodes_drawn_by_chance_are_asked_when_an_attacker_has_all_near_places(seed):
    net = Net(seed, honest=200, hostile=30)
    search = net.search()
    asked = run(search, net.ask, net.chance)
    assert len(asked) <= MAX_CALLS
    assert all(node in net.hostile for node in search.found()[:NEAREST])
    assert sum(node in net.ids for node in search.found()) == 4


def test_a_small_network_is_asked_as_a_whole_and_without_us():
    net = Net(1, honest=5)
    search = Search(net.key, known={0: net.ids[0], ME: 1}, drawn=[0, ME], me=ME)
    assert sorted(run(search, net.ask, net.chance)) == [0, 1, 2, 3, 4]
    assert search.found() == net.nearest()


def test_a_search_without_known_nodes_finds_none():
    search = Search(7, known={}, drawn=[], me=ME)
    assert search.next(8) == [] and search.found() == []


def test_a_name_far_away_hides_no_node():
    search = Search(0, known={1: 1, 2: 2}, drawn=[], me=ME)
    assert search.next(1) == [1]
    search.note_answer(1, 1, {3: 2**159, **{n: 100 + n for n in range(10, 17)}})
    assert search.next(1) == [2]
    search.note_answer(2, 2, {3: 3})
    assert search.next(1) == [3]


def test_nodes_with_one_id_keep_the_order_of_their_answers():
    """Answers that are not among the nearest at once are dropped: they must not come back later."""
    search = Search(0, known={}, drawn=[], me=ME)
    kept: set[int] = set()
    for node in random.Random(1).sample(range(10**6), 60):
        search.note_answer(node, 5, {})
        found = set(search.found())
        assert found <= kept | {node}
        kept = found
