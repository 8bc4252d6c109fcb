"""The search for the nodes of the DHT near a key (Kademlia, Maymounkov and Mazieres 2002), as a pure state machine.

hivemind's own (version 1.1.12) keeps the nodes that somebody only named, and goes on while anybody names nearer ones.
Then a node near the key that invents its neighbours keeps a search from ending, and honest nodes out of its result.
Here only nodes that answer count, under the id that they give themselves. Each is asked once, and MAX_CALLS in all.

An id can be chosen, so eight keys of one attacker can be the nearest. Hence some known nodes, drawn by chance, are
asked as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Mapping
from typing import Generic, TypeVar

NEAREST = 8
"""Nodes near a key that keep its records and are asked for them."""

MAX_CALLS = 64
"""Nodes that one search asks at most."""

P = TypeVar("P", bound=Hashable)


class Search(Generic[P]):
    """One search for the NEAREST nodes to `key`, from `known` nodes and some `drawn` by chance. Ids are integers."""

    def __init__(self, key: int, *, known: Mapping[P, int], drawn: Collection[P], me: P):
        self._key = key
        self._drawn = [node for node in drawn if node != me]
        self._distance: dict[P, int] = {}
        self._asked = {me}
        self._answered: dict[P, None] = {}
        """Nodes in the order of their answers, by which `found` ranks those that give themselves the same id."""
        self._name(known)

    @property
    def asked(self) -> int:
        """The number of nodes asked so far."""
        return len(self._asked) - 1  # we are in it

    def next(self, room: int) -> list[P]:
        """Return the nodes to ask now, at most `room`. The search is over when there are none and no answer is due."""
        wanted = [*self._drawn, *self._nearest(self._distance)]
        new = [node for node in dict.fromkeys(wanted) if node not in self._asked]
        new = new[: max(0, min(room, MAX_CALLS - self.asked))]
        self._asked.update(new)
        return new

    def note_answer(self, node: P, node_id: int, named: Mapping[P, int]) -> None:
        """Note that a node that was asked gave its id and the ids of others; the nearest of these are asked in turn."""
        self._answered[node] = None
        self._distance[node] = self._key ^ node_id
        self._name(
            {other: named[other] for other in heapq.nsmallest(NEAREST, named, key=lambda n: self._key ^ named[n])}
        )

    def note_silence(self, node: P) -> None:
        """Note that a node that was asked gave no usable answer."""
        self._distance.pop(node, None)

    def found(self) -> list[P]:
        """Return the nearest of the nodes that have answered, nearest first, then others that were drawn."""
        nearest = self._nearest(self._answered)
        return [*nearest, *(node for node in self._drawn if node in self._answered and node not in nearest)]

    def _name(self, named: Mapping[P, int]) -> None:
        for node, node_id in named.items():
            if node not in self._asked:  # afterwards only its own word counts
                self._distance[node] = min(self._key ^ node_id, self._distance.get(node, self._key ^ node_id))

    def _nearest(self, nodes: Collection[P]) -> list[P]:
        return heapq.nsmallest(NEAREST, nodes, key=self._distance.__getitem__)
