"""Where the own trainer stands on the chain, and how it is moved to where the chain's head is.

`applied` is the record whose state the trainer holds. One thing is asked of the trainer at a time: an update
(`making`), or a move (`target`).
"""

from __future__ import annotations

from protocol.ids import Digest
from protocol.messages import Certificate, Rollback
from protocol.rounds.actions import Apply, Resync
from protocol.rounds.asides import MAX_ASIDE, Asides
from protocol.rounds.blobs import PartOf, Source, contents
from protocol.rounds.context import MAX_WAY, Context

MAX_PAUSE = 60.0
TRIES = 3
"""Moves to the same head that may fail before another branch is tried."""

UNAVAILABLE = 10
"""Times the policy's patience: after that, people hear that nobody gives an update of a final record."""

UNAVAILABLE_MOST = 600.0
"""But no later than after so many seconds."""


WAYS = 3
"""To so many records the blobs are remembered that a move needs."""


class Position:
    """The trainer's place. `advance` moves it towards the head by one step at a time."""

    def __init__(self, context: Context):
        self._c = context
        self.applied: Digest | None = None
        self.state: Digest | None = None
        self.target: Digest | None = None
        self.making: Digest | None = None
        self.joined = False
        self.afresh = False
        """The trainer's next state is one that the run was rolled back to: what it has learnt since goes."""
        self._good: Digest | None = None
        self._failures = 0
        self._retry = 0.0
        self._asides = Asides(context)
        self._waiting: tuple[Digest, float] | None = None
        self._unavailable: Digest | None = None
        self._ways: dict[tuple, dict[Digest, Source]] = {}
        self._lacking: Digest | None = None

    @property
    def busy(self) -> bool:
        """Whether the trainer owes us an answer."""
        return self.target is not None or self.making is not None

    @property
    def behind(self) -> bool:
        """Whether the round after `applied` is decided already."""
        chain, applied = self._c.chain, self.applied
        return (
            applied is None
            or applied not in chain
            or (applied != chain.head and chain.is_ancestor(applied, chain.head))
        )

    @property
    def tip(self) -> Digest | None:
        """Of branches that are set aside, where those that are asked for again lead to."""
        tip = self._asides.tip
        return tip if tip in self._c.chain else None

    # -- what is needed --------------------------------------------------------------------------------------

    def needed(self) -> dict[Digest, Source]:
        """Blobs to hold before the trainer is moved to the head: of the records since where it stands, or since the
        newest checkpoint on another branch. Of a round that was reduced, the parts of its mean."""
        return self._blobs_to(self._c.chain.head)

    def asked_again(self) -> dict[Digest, Source]:
        """The same for where the branch leads that is set aside until its blobs are here."""
        return {} if self.tip is None else self._blobs_to(self.tip)

    def _blobs_to(self, head: Digest) -> dict[Digest, Source]:
        key = (self.applied, head, self._failures, self.joined)
        if key not in self._ways:
            if len(self._ways) >= WAYS:
                self._ways.clear()
            self._ways[key] = {blob: source for c in self._way(head) for blob, source in contents(c).items()}
        return self._ways[key]

    def _is_here(self, head: Digest) -> bool:
        """Whether all of them are held. Most often what lacked a moment ago lacks still."""
        needed, holds = self._blobs_to(head), self._c.blobs.holds
        if self._lacking is not None and self._lacking in needed and not holds(self._lacking):
            return False
        self._lacking = next((blob for blob in needed if not holds(blob)), None)
        return self._lacking is None

    def _way(self, head: Digest) -> tuple[Certificate, ...]:
        chain, applied, every = self._c.chain, self.applied, self._c.policy.checkpoint_every
        if self._c.observer or applied == head or head == chain.root:
            return ()
        boundary = max((chain.height(head) - 1) // every * every, chain.height(head) - MAX_WAY)
        if applied is None or applied not in chain:
            # Nothing to lose: the driver fetches as it goes. After a failure, look at what is missing first.
            boundary = boundary if (start := self._start(head)) is None else max(boundary, start.round)
            after = chain.ancestor_at(head, max(chain.height(chain.root), boundary))
            return chain.path(after or chain.root, head) if self._failures and self.joined else ()
        if (start := self._start(head)) is not None and chain.height(applied) < start.round:
            return chain.path(start.record, head)
        fork = chain.common_ancestor(applied, head)
        if fork != applied or chain.height(head) - chain.height(applied) > every:
            after = chain.ancestor_at(head, max(chain.height(fork), boundary))
            return chain.path(after or fork, head)
        return chain.path(applied, head)

    def _start(self, head: Digest) -> Rollback | None:
        """Where the run goes on after the owner's last rollback, when that is on the way to here: the state there can
        be had, and the rounds before it need not be."""
        chain, back = self._c.chain, self._c.chain.rollback
        if back is None or back.record == chain.genesis or not chain.is_ancestor(back.record, head):
            return None
        return back

    def rolled_back(self) -> None:
        """The owner has rolled the run back: where the trainer stands, or is moved to, may be left."""
        at = [record for record in (self.applied, self.target, self.making, self._good) if record is not None]
        if any(record not in self._c.chain for record in at):
            self.afresh = True
        if self.target is not None and self.target not in self._c.chain:
            # Not waited for: it may lack blobs that nobody keeps any more.
            self.target = self.applied = None
        self._failures, self._retry, self._waiting = 0, 0.0, None

    # -- moving ----------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """One step towards the head, if one is due and possible. True when something changed."""
        c, chain = self._c, self._c.chain
        self._asides.advance(self._is_here)
        head = chain.head
        if c.observer:
            changed = self.applied != head
            self.applied = head
            return changed
        if self.busy or not self.joined or c.now < self._retry or self.applied == head:
            if self.applied == head:
                self._waiting = None
            return False
        if self.applied is not None and self.applied not in chain:
            self.applied = None
        way = self._way(head)
        if not way and self.applied is not None:
            return self._resync(head)
        if self.applied is None:
            if self._is_here(head):
                return self._resync(head)
        elif way[0].record.body.parent == self.applied:
            first = way[0].record.body
            if first.base_state != self.state:
                return self.drift(first.base_state)
            if all(c.blobs.holds(blob) for blob in contents(way[0])):
                return self._apply(way[0])
        elif self._is_here(head):
            if chain.is_ancestor(self.applied, head):
                behind = chain.height(head) - chain.height(self.applied)
                c.report("info", "behind", f"{behind} rounds behind: loading a checkpoint and replaying the rest")
            else:
                text = f"leaving record {self.applied.short} for the heavier branch of {head.short}"
                c.report("warning", "fork", text)
            return self._resync(head)
        return self._wait_for_blobs(way, head) or self._go_on()

    def _apply(self, certificate: Certificate) -> bool:
        c, record = self._c, certificate.digest
        if self.applied is None:
            return False
        missed, regained = c.own.settle(c.chain, self.applied, record)
        self.target = record
        following = c.chain.next_window(c.me, record)
        c.emit(Apply(certificate, missed, following, c.chain.weight(record), regained))
        return True

    def _resync(self, head: Digest) -> bool:
        c, chain = self._c, self._c.chain
        every, keep = c.policy.checkpoint_every, c.policy.checkpoint_keep
        start = chain.height(chain.root)
        if self._failures == 0:
            start = max(start, ((chain.height(head) - 1) // every - keep + 1) * every)
        back = self._start(head) if self._failures % 2 == 0 else None
        if back is not None and back.round >= start:
            after = back.record
        else:
            after, back = chain.ancestor_at(head, min(start, chain.height(head))) or chain.root, None
        if self.afresh:
            c.own.forget_all()
        missed, regained = c.own.settle(chain, after, head)
        self.target = head
        following = chain.next_window(c.me, head)
        c.emit(Resync(chain.path(after, head), missed, following, chain.weight(head), regained, back, self.afresh))
        return True

    def _wait_for_blobs(self, way: tuple[Certificate, ...], head: Digest) -> bool:
        """Blobs of the way are being fetched; a branch whose blobs cannot be had for long is set aside for a while."""
        c = self._c
        if self._waiting is None or self._waiting[0] != head:
            self._waiting = (head, c.now if self._waiting is None else self._waiting[1])
        waited = c.now - self._waiting[1]
        if waited < 2 * c.policy.heartbeat_seconds:
            return False
        for certificate in way:
            for blob, source in contents(certificate).items():
                if not c.blobs.holds(blob):
                    # Of parts, who proposed the record answers for them. Who let us wait in vain before is given little
                    # time.
                    author = source.record.author if isinstance(source, PartOf) else source.author
                    number = certificate.record.body.round
                    if waited < c.policy.patience_seconds and c.members.is_waited_for(author, number):
                        return False
                    record = certificate.digest
                    floor = c.chain.floor
                    if floor is not None and c.chain.is_ancestor(record, floor):
                        # Lines that were cut a moment ago need theirs to carry again: nothing to alarm people with.
                        if waited >= min(UNAVAILABLE * c.policy.patience_seconds, UNAVAILABLE_MOST):
                            self._report_unavailable(record)
                        return False
                    c.members.strike(author, number)
                    what = f"the update of {author.short} that record {record.short} lists"
                    if isinstance(source, PartOf):
                        what = f"part {source.index} of the mean of record {record.short}"
                    text = f"nobody gives {what}: going on without that branch for a while"
                    c.report("warning", "withheld", text, author)
                    self._asides.add(record)
                    self._waiting = None
                    return True
        return False

    def _go_on(self) -> bool:
        """The head cannot be reached yet: meanwhile, a step along the branch that we are on, if it has one."""
        chain, applied = self._c.chain, self.applied
        if applied is None or self._waiting is None:
            return False
        if self._c.now - self._waiting[1] < 2 * self._c.policy.heartbeat_seconds:
            return False
        tip = chain.best_after(applied)
        if tip == applied:
            return False
        following = chain.path(applied, tip)[0]
        if following.record.body.base_state != self.state:
            return False
        return all(self._c.blobs.holds(blob) for blob in contents(following)) and self._apply(following)

    def _report_unavailable(self, record: Digest) -> None:
        """There is no other branch to go to: all that is left is to wait for somebody who has the blobs."""
        if self._unavailable != record:
            self._unavailable = record
            text = (
                f"record {record.short} is final, and nobody gives the updates that it lists: waiting for a member who "
            )
            self._c.report("error", "unavailable", text + "has them. Tell the run's owner")

    def drift(self, vouched: Digest) -> bool:
        """The chain vouches for another state than ours where we stand: ours is wrong."""
        mine = "none" if self.state is None else self.state.short
        text = f"our state {mine} is not the state {vouched.short} that the chain vouches for: loading it anew. "
        remedy = "If this repeats, the device computes wrongly or the software differs from the others'"
        self._c.report("error", "drift", text + remedy)
        self.applied = None
        return True

    # -- the trainer's answers -------------------------------------------------------------------------------

    def moved(self, record: Digest, state: Digest) -> bool:
        """The trainer holds the state after `record`. False when that was not asked of it."""
        if record != self.target:
            return False
        self.target = None
        self._failures = 0
        if record not in self._c.chain or self._c.chain.is_ancestor(record, self._c.chain.head):
            self._waiting = None  # else it was a step beside the way to the head, which is waited for all the same
        self.afresh = self.afresh and record not in self._c.chain
        self.applied = self._good = record
        self.state = state
        self._c.own.moved()
        return True

    def failed(self, record: Digest, reason: str, kept: bool) -> None:
        """A move was not made. Unless the trainer `kept` its state, it holds nothing that can be relied on."""
        c, chain = self._c, self._c.chain
        if kept and record != self.target:
            return  # another has been asked for meanwhile
        head = self.target or chain.head
        self.target = None
        if not kept or self.afresh:
            self.making = self.applied = None
        self._failures += 1
        pause = min(MAX_PAUSE, c.policy.heartbeat_seconds * 2 ** (self._failures - 1))
        self._retry = c.now + pause
        c.report(
            "warning",
            "apply-failed",
            f"the state after record {head.short} was not reached: {reason}; again in {pause:.0f} s",
        )
        if head not in chain or head == chain.root:
            return
        culprit, tries, good = head, TRIES, self._good
        if good is not None and good in chain and good != head:
            # There is a place to go back to: at once when that is another branch, which may be a liar's.
            fork = chain.common_ancestor(good, head)
            culprit = chain.ancestor_at(head, min(chain.height(head), chain.height(fork) + 1)) or head
            tries = TRIES if fork == good else 1
        if self._failures % tries == 0 and self._asides.add(culprit, failed=True):
            self._waiting = None
            if self.applied is not None:
                self._retry = c.now  # there is somewhere to go on from at once

    # -- branches that are not followed for a while ----------------------------------------------------------

    def hold_back(self, record: Digest, until: float) -> None:
        """A record is too light to be followed before this time."""
        self._asides.add_light(record, until)
        self._waiting = None

    def reconsider(self, record: Digest, weight: int) -> None:
        """A record came: a branch that was held back as too light is not, when what is built on it has this weight."""
        chain, at = self._c.chain, self.applied
        if at is not None and at in chain and chain.weight(record) - chain.weight(at) >= weight:
            self._asides.reconsider(record)

    def heard_at(self, head: Digest, since: float) -> None:
        """A member that we hear of since a time is at this head."""
        self._asides.heard_at(head, since)

    def times(self) -> list[float]:
        """When something will be due."""
        found = self._asides.times()
        if self._retry > self._c.now:
            found.append(self._retry)
        if self._waiting is not None:
            found.append(self._waiting[1] + self._c.policy.patience_seconds)
            found.append(self._waiting[1] + 2 * self._c.policy.heartbeat_seconds)
        return found

    def sizes(self) -> dict[str, tuple[int, int]]:
        """What is held, and its bound."""
        top = self._c.policy.max_members * self._c.policy.checkpoint_every
        needed = max((len(way) for way in self._ways.values()), default=0)
        return {"aside": (len(self._asides), MAX_ASIDE), "needed": (needed, top), "ways": (len(self._ways), WAYS)}
