"""Peers that break the rules, or are unlucky: what they do differs from `Node` in one way each."""

from __future__ import annotations

from dataclasses import replace

from protocol.ids import Digest, PeerKey
from protocol.messages import Heartbeat, Record, Vote
from protocol.rounds import events as ev
from tests.simulation.node import Node


class Equivocator(Node):
    """Proposes two records at once: one to every second peer, one to the others; and votes for both."""

    honest = False

    def broadcast(self, message) -> None:
        if not (isinstance(message.body, Record) and message.author == self.key and len(message.body.updates) > 1):
            super().broadcast(message)
            return
        drop = next(u for u in reversed(message.body.updates) if u.author != self.key)
        updates = tuple(u for u in message.body.updates if u is not drop)
        other = self.signer.sign(replace(message.body, updates=updates))
        for node in self.world.nodes:
            if node is not self and node.alive:
                told = message if node.index % 2 else other
                vote = self.signer.sign(Vote(self.world.run, told.body.round, told.digest))
                self.world.network.send(self.index, node.index, node.hear, told)
                self.world.network.send(self.index, node.index, node.hear, vote)


class Withholder(Node):
    """Announces, and never gives its updates to anybody."""

    honest = False

    def gives(self, blob: Digest, to: PeerKey) -> bool:
        return False


class Poisoner(Node):
    """Every update of its own breaks the codec's rules."""

    honest = False

    def step(self, event) -> None:
        if isinstance(event, ev.UpdateReady) and event.blob is not None:
            self.world.bad_blobs.add(event.blob)
        super().step(event)


class Boaster(Node):
    """Says in heartbeats that it has a far heavier chain, and has none."""

    honest = False

    def broadcast(self, message) -> None:
        if isinstance(message.body, Heartbeat) and message.author == self.key:
            body = replace(message.body, head=Digest(bytes(reversed(message.body.head))), weight=2**50)
            message = self.signer.sign(body)
        super().broadcast(message)


HOSTILE = (Equivocator, Withholder, Poisoner, Boaster)
