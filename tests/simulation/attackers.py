"""Attackers with a strategy, each a small change of `Node`: alone, or as a coalition whose keys act as one.

An attacker follows the rules until `begins`, so that its keys earn what honest keys earn. Then it calls `act` twice a
second. It reads the state of honest peers, as if their heartbeats reached it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from protocol.chain import Chain
from protocol.errors import ChainError
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import Certificate, Heartbeat, RoundRecord, Signed, UpdateHeader, Vote
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from tests.simulation.committee import part_of
from tests.simulation.node import ADMISSION, Node
from tests.simulation.signer import FakeSigner, certificate
from tests.simulation.trainer import state_after

ACT_EVERY = 0.5


class Attacker(Node):
    """Honest until `begins` (seconds); attackers of one class in one world are one coalition."""

    honest = False

    def __init__(self, *args, begins: float = 30.0, late: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.begins = begins
        self.late = late
        """It joins no sooner than that: a newcomer without stake."""

        self.heads: set[Digest] = set()
        """Heads on which it has acted."""

    @property
    def betrays(self) -> bool:
        """True from the time at which it breaks the rules."""
        return self.world.clock.now >= self.begins

    @property
    def allies(self) -> list[Node]:
        """The coalition, by index. The first one acts for all."""
        return [n for n in self.world.nodes if type(n) is type(self)]

    def boot(self) -> None:
        super().boot()
        if self.allies[0] is self:
            self.world.clock.at(self.begins, self._begin, self.incarnation)

    def _begin(self, incarnation: int) -> None:
        self.new_front()  # strategies act at the start of a round: the one under way has begun
        self._act(incarnation)

    def _act(self, incarnation: int) -> None:
        if self.alive and incarnation == self.incarnation:
            try:
                self.act()
            except ChainError:
                if self.world.owner.newest is None:
                    raise  # else an order (a ban, a rollback) forbids the records that the strategy makes
            self.world.clock.after(ACT_EVERY, self._act, incarnation)

    def act(self) -> None:
        """Do what the strategy does beside its messages. Called twice a second by the first of the coalition."""

    def audit_update(self, action: do.AuditUpdate) -> None:
        if not self.betrays:
            super().audit_update(action)

    def gives(self, blob: Digest, to: PeerKey) -> bool:
        """Give what it has to anybody: the coalition does not hide its updates from itself."""
        return self.alive and blob in self.blobs

    # -- means -----------------------------------------------------------------------------------------------

    def front(self) -> Digest:
        """Return the newest record that an honest trainer has applied."""
        places = [n.trainer_record for n in self.world.honest if n.trainer_record is not None]
        return max(places, key=self.height, default=self.world.genesis)

    def height(self, record: Digest) -> int:
        found = self.world.records.get(record)
        return 0 if found is None else found.record.body.round + 1

    def new_front(self) -> Digest | None:
        """Return the front if it has advanced since the last call."""
        head = self.front()
        if head in self.heads:
            return None
        self.heads.add(head)
        return head

    def before(self, record: Digest, back: int) -> Digest:
        """Return the record that is `back` rounds before one, or the genesis."""
        for _ in range(back):
            if record in self.world.records:
                record = self.world.records[record].record.body.parent
        return record

    def branch(
        self, fork: Digest, length: int, keys: Sequence[PeerKey], *, salt: str = "", held: bool = True,
        windows_each: int | None = None,
    ):  # fmt: skip
        """Return a private branch after a record: each round lists these keys alone, with the largest claims there.

        `windows_each`: they claim this number of windows instead. The coalition gives blobs and states to those that
        request them, if `held`; otherwise nobody has them.
        """
        world, found = self.world, list[Certificate]()
        policy, state, parent, number = world.policy, world.owner.state_of(fork), fork, self.height(fork)
        before = 0 if fork not in world.records else len(world.records[fork].record.body.updates)
        windows = {key: self.next_window(key, fork) for key in sorted(keys)}
        chain = Chain(world.run, world.genesis_state, policy.chain_limits)
        for record in reversed(world.way_to(fork)):
            chain.add(world.records[record])
        most = policy.under(chain.directives(fork).changes).max_update_windows
        for _ in range(length):
            headers = []
            for key, first in windows.items():
                blob = Digest(sha256(b"forged", key, parent, salt.encode()))
                world.contents[blob], world.made_by[blob] = frozenset(), key
                windows[key] = end = first + (windows_each or most)
                body = UpdateHeader(
                    world.run, Round(number), parent, state, first, first, end, 1, blob, 1000, 0.01, ADMISSION,
                    chain.epoch(fork),
                )  # fmt: skip
                headers.append(FakeSigner(key).sign(body))
                for ally in self.allies if held else ():
                    ally.blobs.add(blob)
            weights = chain.weights(parent, headers)
            body = RoundRecord(world.run, Round(number), parent, state, 0, tuple(headers), weights=weights)
            record, shards = FakeSigner(headers[0].author).sign(body), ()
            if policy.exchange.is_reduced(before):
                count = policy.exchange.shard_count(len(headers))
                shards = tuple(part_of(body, count, part) for part in range(count))
                for ally in self.allies if held else ():
                    ally.blobs.update(shards)
            found.append(certificate(record, windows, shards))
            chain.add(found[-1])
            state, parent, number, before = state_after(state, found[-1]), found[-1].digest, number + 1, len(headers)
            for ally in self.allies if held else ():
                ally.checkpoints.add(state)
        return found

    def next_window(self, key: PeerKey, record: Digest) -> int:
        """Return the end of a key's windows up to a record, by the world's records."""
        while record in self.world.records:
            body = self.world.records[record].record.body
            for u in body.updates:
                if u.author == key:
                    return u.body.end_window
            record = body.parent
        return 0

    def tell(self, certificates: Iterable[Certificate]) -> None:
        """Send certificates to everybody, in order, as one packet."""
        packet = list(certificates)
        for node in self.world.nodes:
            if node.alive and not isinstance(node, Attacker):
                self.world.network.send(self.index, node.index, self._deliver, node, packet)

    def _deliver(self, node: Node, packet: list[Certificate]) -> None:
        for c in packet:
            node.step(ev.CertificateReceived(c, self.key))

    def spare_keys(self, count: int) -> list[PeerKey]:
        """Return keys of its own that are new to everybody: each costs an admission."""
        keys = [PeerKey(sha256(b"spare", self.key, bytes([i % 256, i // 256]))) for i in range(count)]
        self.world.by_key.update((key, self) for key in keys)
        return keys


class SiblingMaker(Attacker):
    """Certifies `count` records alone on each new head. They name blobs that nobody has.

    `fresh`: on each new head; else once. `spare`: each by another key, which is new to everybody.
    """

    def __init__(self, *args, count: int = 8, fresh: bool = True, spare: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.count, self.fresh, self.spare = count, fresh, spare

    def act(self) -> None:
        if len(self.heads) > 1 and not self.fresh or (head := self.new_front()) is None:
            return
        keys = self.spare_keys(self.count) if self.spare else [self.key] * self.count
        self.tell(self.branch(head, 1, [key], salt=str(i), held=False)[0] for i, key in enumerate(keys))


class SoloCertifier(Attacker):
    """Publishes a private branch of `length` rounds, from `back` rounds before the head, certified by its keys alone.

    It gives the blobs to everybody, and repeats the branch every five seconds.
    """

    def __init__(self, *args, length: int = 15, back: int = 5, **kwargs):
        super().__init__(*args, **kwargs)
        self.length, self.back = length, back
        self.private: list[Certificate] = []
        self.told_at = 0.0

    def act(self) -> None:
        if not self.private:
            self.private = self.branch(self.before(self.front(), self.back), self.length, [n.key for n in self.allies])
        if self.world.clock.now >= self.told_at + 5.0:
            self.told_at = self.world.clock.now
            self.tell(self.private)


class FrontRunner(Attacker):
    """Certifies each round with its keys alone at the moment that it begins."""

    def act(self) -> None:
        if (head := self.new_front()) is not None:
            self.tell(self.branch(head, 1, [n.key for n in self.allies]))


class EarlyCertifier(FrontRunner):
    """Announces one window as each round begins, and certifies itself alone while the others train. It does no more."""

    def act(self) -> None:
        if (head := self.new_front()) is not None:
            made = self.branch(head, 1, [self.key], windows_each=1)
            for header in made[0].record.body.updates:
                super().broadcast(header)
            self.tell(made)

    def broadcast(self, message) -> None:
        if not (self.betrays and isinstance(message.body, UpdateHeader | RoundRecord | Vote)):
            super().broadcast(message)


class Deserter(SoloCertifier):
    """Leaves the run `away` seconds before it begins, and comes back with a branch from before its departure."""

    def __init__(self, *args, away: float = 15.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.away = away
        self.fork: Digest | None = None

    def boot(self) -> None:
        super().boot()
        self.world.clock.at(self.begins - self.away, self._depart)

    def _depart(self) -> None:
        self.fork = self.before(self.front(), self.back)

    @property
    def is_away(self) -> bool:
        return self.fork is not None

    def hear(self, message) -> None:
        if not self.is_away:
            super().hear(message)

    def broadcast(self, message) -> None:
        if not self.is_away:
            super().broadcast(message)

    def act(self) -> None:
        assert self.fork is not None
        if not self.private:
            self.private = self.branch(self.fork, self.length, [n.key for n in self.allies])
        super().act()


class Hurrier(Attacker):
    """Claims the most windows in its heartbeats. Nobody audits these."""

    def broadcast(self, message) -> None:
        if self.betrays and isinstance(message.body, Heartbeat) and message.author == self.key:
            message = self.signer.sign(replace(message.body, windows=self.world.policy.max_update_windows))
        super().broadcast(message)


class OverClaimer(Hurrier):
    """Claims the most windows in each update, too."""

    def step(self, event) -> None:
        if self.betrays and isinstance(event, ev.UpdateReady) and event.blob is not None:
            self.world.fakes.add(event.blob)
            event = replace(event, end_window=event.first_window + self.world.policy.max_update_windows)
        super().step(event)


class LiesOnce(OverClaimer):
    """Claims the most windows in one update, the first one that it makes from `begins` on."""

    has_lied = False

    @property
    def betrays(self) -> bool:
        return super().betrays and not self.has_lied

    def step(self, event) -> None:
        lies = self.betrays and isinstance(event, ev.UpdateReady) and event.blob is not None
        super().step(event)
        self.has_lied = self.has_lied or lies


class LyingAuditor(OverClaimer):
    """Claims the most, accuses all honest updates that it audits, and finds nothing wrong with its allies'.

    `accuses`: else it only finds nothing wrong with its allies' updates.
    """

    def __init__(self, *args, accuses: bool = True, **kwargs):
        super().__init__(*args, **kwargs)
        self.accuses = accuses

    def audit_update(self, action: do.AuditUpdate) -> None:
        author = self.audited_header(action).author
        passed = not self.accuses or any(author == ally.key for ally in self.allies)
        self.answer_audit(action, passed=passed if self.betrays else self.is_honest_work(action))


class NeverVotes(Attacker):
    """Announces and gives its updates. It neither votes nor proposes, so it wastes its turns."""

    def broadcast(self, message) -> None:
        own = message.author == self.key and isinstance(message.body, Vote | RoundRecord)
        if not (self.betrays and own):
            super().broadcast(message)


class Staller(Attacker):
    """Seems to train in one round of each `period`, and never announces there; in the others it is honest.

    The coalition takes turns.
    """

    def __init__(self, *args, period: int = 2, **kwargs):
        super().__init__(*args, **kwargs)
        self.period = period

    def broadcast(self, message) -> None:
        if self.stalls_with(message):
            if not isinstance(message.body, Heartbeat):
                return
            message = self.signer.sign(replace(message.body, phase="training", windows=5, known_headers=()))
        super().broadcast(message)

    def send(self, action: do.Send) -> None:
        super().send(replace(action, messages=tuple(m for m in action.messages if not self.stalls_with(m))))

    def stalls_with(self, message: Signed) -> bool:
        """Return whether a message is its own, of a round in which it stalls."""
        body, turn = message.body, self.allies.index(self)
        mine = message.author == self.key and isinstance(body, Heartbeat | UpdateHeader | RoundRecord | Vote)
        return self.betrays and mine and (body.round + turn) % self.period == 0


class Withholding(Attacker):
    """Announces, and gives its updates to its allies alone."""

    def gives(self, blob: Digest, to: PeerKey) -> bool:
        return super().gives(blob, to) and not self.betrays

    def gives_slice(self, blob: Digest, parts: int, part: int, to: PeerKey) -> bool:
        return super().gives_slice(blob, parts, part, to) and not self.betrays


class Censor(Attacker):
    """Lists no update of `victim` (a node's index), and votes for no record that does."""

    def __init__(self, *args, victim: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.victim = victim

    def hear(self, message: Signed) -> None:
        victim, body = self.world.nodes[self.victim].key, message.body
        concerns = isinstance(body, UpdateHeader) and message.author == victim
        concerns = concerns or isinstance(body, RoundRecord) and victim in body.contributors
        if not (self.betrays and concerns):
            super().hear(message)


class Omitter(Attacker):
    """Proposes at once without the first `victims` nodes, but votes for others' records."""

    def __init__(self, *args, victims: int = 1, **kwargs):
        super().__init__(*args, **kwargs)
        self.victims = victims

    def hear(self, message: Signed) -> None:
        victims = {node.key for node in self.world.nodes[: self.victims]}
        if not (self.betrays and message.author in victims and isinstance(message.body, UpdateHeader | Heartbeat)):
            super().hear(message)


class SybilLister(Attacker):
    """Proposes in each round a record that lists `count` spare keys, whose updates nobody has and which never vote."""

    def __init__(self, *args, count: int = 24, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = count

    def act(self) -> None:
        if (head := self.new_front()) is not None:
            [made] = self.branch(head, 1, [self.key, *self.spare_keys(self.count)], held=False)
            self.broadcast(self.signer.sign(made.record.body))


class Drifter(FrontRunner):
    """Announces in each round, by spare keys, updates of a state that nobody has, and certifies the round alone."""

    def __init__(self, *args, spare: int = 2, **kwargs):
        super().__init__(*args, **kwargs)
        self.spare = spare

    def act(self) -> None:
        if (head := self.new_front()) is None:
            return
        [made] = self.branch(head, 1, [n.key for n in self.allies])
        for key in self.spare_keys(self.spare):
            first = self.next_window(key, head)
            body = replace(
                made.record.body.updates[0].body, base_state=Digest(sha256(b"no such state")), first_window=first,
                rebase_window=first, end_window=first + 1, blob=Digest(sha256(b"none", head, key)),
            )  # fmt: skip
            header = FakeSigner(key).sign(body)
            for node in self.world.nodes:
                if node is not self and node.alive:
                    self.world.network.send(self.index, node.index, node.hear, header)
        self.world.clock.after(1.0, self.tell, [made])


Make = Callable[..., Attacker]
"""An attacker's class, or a `functools.partial` of one."""

ATTACKERS: tuple[type[Attacker], ...] = (
    SiblingMaker, SoloCertifier, FrontRunner, Hurrier, OverClaimer, NeverVotes, Withholding, Censor, SybilLister,
)  # fmt: skip
"""The strategies that random scenarios draw from."""
