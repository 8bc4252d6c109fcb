"""Peers that break the rules, or are unlucky: what they do differs from `Node` in one way each."""

from __future__ import annotations

from dataclasses import replace

from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import Heartbeat, RoundRecord, ShardAttestation, Signed, UpdateHeader, Vote, shards_digest
from protocol.rounds import events as ev
from tests.simulation.committee import part_of
from tests.simulation.node import Node


class Equivocator(Node):
    """Proposes two records at once: one to every second peer, one to the others; and votes for both."""

    honest = False

    def broadcast(self, message) -> None:
        if not (isinstance(message.body, RoundRecord) and message.author == self.key and len(message.body.updates) > 1):
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

    def gives_slice(self, blob: Digest, parts: int, part: int, to: PeerKey) -> bool:
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


class Copier(Node):
    """Announces the update of one honest peer as its own as soon as it has the header, and gives nothing to anybody."""

    honest = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.copied: set[Digest] = set()

    def hear(self, message) -> None:
        body, honest = message.body, [n.key for n in self.world.nodes if n.honest]
        is_due = isinstance(body, UpdateHeader) and message.author == honest[self.index % len(honest)]
        if self.alive and is_due and body.parent not in self.copied:
            self.copied.add(body.parent)
            copy = self.signer.sign(replace(body, first_window=0, rebase_window=0, end_window=1))
            for node in self.world.nodes:
                if node.alive and node is not self:
                    self.world.network.send(self.index, node.index, node.hear, copy)
        super().hear(message)

    def broadcast(self, message) -> None:
        if isinstance(message.body, Heartbeat):
            super().broadcast(message)

    def gives(self, blob: Digest, to: PeerKey) -> bool:
        return False

    def gives_slice(self, blob: Digest, parts: int, part: int, to: PeerKey) -> bool:
        return False


HOSTILE = (Equivocator, Withholder, Poisoner, Boaster, Copier)


def lie(attestation: ShardAttestation) -> Digest:
    """Return the wrong digest that all liars agree on."""
    return Digest(sha256(b"lie", attestation.record, bytes([attestation.shard])))


class Liar(Node):
    """Signs a wrong digest for every part that it makes, the same as other liars, and gives its blob to who asks."""

    honest = False

    def broadcast(self, message) -> None:
        if _own_word(self, message) and message.body.blob is not None:
            body = replace(message.body, blob=lie(message.body))
            self.blobs.add(lie(message.body))
            message = self.signer.sign(body)
        super().broadcast(message)


class Spoiler(Liar):
    """A liar whose parts break the codec's rules."""

    def broadcast(self, message) -> None:
        if _own_word(self, message) and message.body.blob is not None:
            self.world.bad_blobs.add(lie(message.body))
        super().broadcast(message)


class TwoTongued(Node):
    """Signs the right digest of a part for every second peer, a wrong one for the others."""

    honest = False

    def broadcast(self, message) -> None:
        if not (_own_word(self, message) and message.body.blob is not None):
            super().broadcast(message)
            return
        other = self.signer.sign(replace(message.body, blob=lie(message.body)))
        for node in self.world.nodes:
            if node is not self and node.alive:
                told = message if node.index % 2 else other
                self.world.network.send(self.index, node.index, node.hear, told)


class Recorder(Node):
    """Remembers the records that it has seen proposed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen: dict[Digest, RoundRecord] = {}

    def note(self, message: Signed) -> None:
        if isinstance(message.body, RoundRecord):
            self.seen[message.digest] = message.body

    def hear(self, message) -> None:
        self.note(message)
        super().hear(message)


class TwoMinded(Recorder):
    """Gets one record certified with two sets of shards, wherever the committees and votes of its kind suffice.

    Every second peer gets the right digests and votes. The others get wrong ones, of shards for which its kind has a
    majority.
    """

    honest = False

    def broadcast(self, message) -> None:
        self.note(message)
        other = self._other(message) if message.author == self.key else message
        for node in self.world.nodes:
            if node is not self and node.alive:
                told = message if node.index % 2 else other
                self.world.network.send(self.index, node.index, node.hear, told)

    def _other(self, message: Signed) -> Signed:
        """Return what the second half gets instead."""
        body = message.body
        record = self.seen.get(body.record) if isinstance(body, Vote | ShardAttestation) else None
        if record is None or isinstance(body, Vote) and body.shards_digest is None:
            return message
        committees, lies = self.world.policy.exchange.committees(self.world.seed_after(record.parent), record), {}
        for part, seated in enumerate(committees):
            if 2 * sum(isinstance(self.world.by_key[key], TwoMinded) for key in seated) > len(seated):
                lies[part] = lie(ShardAttestation(self.world.run, body.round, body.record, part, None))
        if isinstance(body, ShardAttestation):
            if body.blob is None or body.shard not in lies:
                return message
            self.blobs.add(lies[body.shard])
            return self.signer.sign(replace(body, blob=lies[body.shard]))
        count = len(committees)
        parts = [lies.get(i, part_of(record, count, i)) for i in range(count)]
        return self.signer.sign(replace(body, shards_digest=shards_digest(parts)))


class Silent(Node):
    """Says nothing on any part."""

    honest = False

    def broadcast(self, message) -> None:
        if not _own_word(self, message):
            super().broadcast(message)


class Accuser(Recorder):
    """Attests of every shard that nobody else's update is available."""

    honest = False

    def broadcast(self, message) -> None:
        self.note(message)
        if _own_word(self, message) and (record := self.seen.get(message.body.record)) is not None:
            others = tuple(key for key in record.contributors if key != self.key)
            if others:
                message = self.signer.sign(replace(message.body, blob=None, missing=others))
        super().broadcast(message)


class Miser(Node):
    """Gives its update to everybody but the committee of one part."""

    honest = False

    def gives_slice(self, blob: Digest, parts: int, part: int, to: PeerKey) -> bool:
        return part != self.key[0] % parts and super().gives_slice(blob, parts, part, to)


def _own_word(node: Node, message: Signed) -> bool:
    return isinstance(message.body, ShardAttestation) and message.author == node.key


HOSTILE_REDUCERS = (Liar, Spoiler, TwoTongued, TwoMinded, Silent, Accuser, Miser)
"""Beside the others, in worlds whose rounds are reduced."""
