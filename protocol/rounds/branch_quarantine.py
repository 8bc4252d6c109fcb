"""Branches that the fork choice ignores for a while: they have no support, or their blobs are unavailable.

A branch whose blobs were unavailable returns only with them: when its time is over they are requested again. Until they
are here, the branch draws nobody away from what is available.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocol.bounded import BoundedDict
from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate
from protocol.rounds.context import Context

MAX_QUARANTINED = 64
MAX_FORGOTTEN = 4 * MAX_QUARANTINED
MAX_EARLY_FAILURES = 2
"""After this number of failed moves, a branch stays quarantined for the full time even if a contributor reappears: each
attempt can take minutes."""


@dataclass(slots=True)
class _Entry:
    since: float
    until: float
    """The end of its time; of a record without support, infinite: `Consensus` knows when patience is over."""

    unsupported: bool
    failures: int
    """Moves there that failed though all blobs were held."""

    absent: frozenset[PeerKey]
    """Contributors of its record that were no members then: the blobs may be available once one of them is back."""

    contributors: int
    active: bool = True
    """False once it is released: the entry then only remembers its failures."""

    retried_since: float | None = None
    """The time from which its blobs are to be requested again."""

    turns: int = 0
    """The turns that it has had: see `BranchQuarantine._take_turn`."""


class BranchQuarantine:
    """The branches that one machine's fork choice ignores for now, each by its first record."""

    def __init__(self, context: Context):
        self._context = context
        self._entries: dict[Digest, _Entry] = {}
        self._forgotten: BoundedDict[Digest, tuple[float, frozenset[PeerKey]]] = BoundedDict(MAX_FORGOTTEN)
        """The branches that gave way to others: the time until which they are not taken again, and who is for them."""

        self.tip: Digest | None = None
        """The tip of the branch whose blobs are requested again; None when there is none."""

        self._turn: Digest | None = None
        """The branch whose turn it is, since `_turn_since`."""

        self._turn_since = 0.0
        self._next_check = 0.0
        self._tips: dict[Digest, Digest] = {}
        self._tips_for: tuple | None = None

    def hold_back(self, record: Digest) -> None:
        """Quarantine a record without support, until it has some or patience is over."""
        self._add(record, float("inf"), unsupported=True, failures=0)

    def add(self, record: Digest, *, failed: bool = False) -> bool:
        """Quarantine a branch for `patience_seconds`, or until an absent peer is back; then until its blobs are here.

        `failed`: a move failed although they were here. The time doubles with each such failure. Return False when
        there is no other branch.
        """
        old = self._entries.get(record)
        failures = failed + (0 if old is None else old.failures)
        return self._add(record, self._end_of(failures), unsupported=False, failures=failures)

    def _end_of(self, failures: int) -> float:
        return self._context.now + self._context.policy.patience_seconds * 2 ** min(max(0, failures - 1), 6)

    def _add(self, record: Digest, until: float, *, unsupported: bool, failures: int) -> bool:
        context, required = self._context, self._context.chain.required_ancestor
        if required is not None and context.chain.is_ancestor(record, required):
            return False
        self._entries.pop(record, None)
        absent = frozenset() if unsupported else self._absent(record)
        number = len(context.chain.certificate(record).record.body.updates)
        self._entries[record] = _Entry(context.now, until, unsupported, failures, absent, number)
        context.chain.quarantine(record)
        while len(self._entries) > MAX_QUARANTINED:
            entries = self._entries
            least = min(entries, key=lambda r: (entries[r].active, entries[r].contributors, entries[r].since))
            active = entries.pop(least).active
            if active and least in context.chain and not context.chain.is_ancestor(least, context.chain.head):
                self._forget(least)
        return record in self._entries

    def _forget(self, record: Digest) -> None:
        context, (_, known) = self._context, self._forgotten.get(record, (0.0, frozenset()))
        until = context.now + context.policy.patience_seconds
        self._forgotten.renew(record, (until, known | context.chain.keys_for(record)))
        context.chain.forget(record)

    def is_forgotten(self, certificate: Certificate) -> bool:
        """Return whether a branch gave way to others less than `patience_seconds` ago, and no other key votes for it.

        If it was taken again at once, replays of a few certificates would displace each other's branches without end.
        """
        forgotten = self._forgotten.get(certificate.digest)
        if forgotten is None or self._context.now >= forgotten[0] or self._context.chain.is_missing_required_ancestor:
            return False
        return forgotten[1].issuperset(v.author for v in certificate.votes)

    def built_on(self, certificate: Certificate) -> None:
        """Note a record whose parent is unknown: a forgotten parent is taken again if other keys vote for this one."""
        parent = certificate.record.body.parent
        if parent in self._forgotten:
            _, known = self._forgotten[parent]
            more = known.union(v.author for v in certificate.votes)
            if len(known) < len(more) <= 2 * self._context.policy.max_members:
                self._forgotten[parent] = self._context.now, more

    def _absent(self, record: Digest) -> frozenset[PeerKey]:
        members = self._context.members
        authors = set(self._context.chain.certificate(record).record.body.contributors) - {self._context.me}
        return frozenset(key for key in authors if key not in members and not members.has_left(key))

    # -- release ---------------------------------------------------------------------------------------------

    def reconsider(self, is_supported: Callable[[Digest], bool], changed: Digest | None = None) -> None:
        """Release the branches held back that have support now: by votes, by what is built on them, or by absence.

        `changed`: nothing but this record is new, or has new votes, so only the branches up to there are examined.
        """
        chain = self._context.chain
        for branch, entry in self._entries.items():
            held_back = entry.active and entry.unsupported and branch in chain
            if held_back and (changed is None or chain.is_ancestor(branch, changed)) and is_supported(branch):
                self._release(branch)

    def member_at(self, head: Digest, since: float) -> None:
        """Note the head of a member that we have heard from since a time.

        If it came after a branch up to there was quarantined, the branch's blobs may be available again.
        """
        chain = self._context.chain
        for branch, entry in self._entries.items():
            waits = entry.active and not entry.unsupported and entry.retried_since is None
            news = waits and entry.since < since and entry.failures <= MAX_EARLY_FAILURES
            if news and branch in chain and chain.is_ancestor(branch, head):
                entry.until = self._context.now

    def advance(self, is_here: Callable[[Digest], bool], is_patience_over: Callable[[Digest, float], bool]) -> None:
        """Release the branches whose time is over. `is_here(tip)`: all blobs that a move to a record needs are held.

        `is_patience_over(parent, arrived)`: whether a record without support may be followed now.
        """
        context = self._context
        check = context.now >= self._next_check
        if check:
            # Look for returned contributors every half heartbeat, not at each message.
            self._next_check = context.now + context.policy.heartbeat_seconds / 2
        for record, entry in list(self._entries.items()):
            if entry.active and not context.chain.is_quarantined(record) or record not in context.chain:
                del self._entries[record]  # finalized, or gone
            elif not entry.active or entry.retried_since is not None:
                continue
            elif entry.unsupported:
                if is_patience_over(context.chain.parent(record), entry.since):
                    self._release(record)
            elif context.deadlines.due("quarantine", entry.until) or check and self._is_somebody_back(entry):
                # If somebody is back, the network was probably split, and nothing was withheld.
                entry.retried_since = context.now
        while self._take_turn():
            record = self._turn
            if record is None or self.tip is None:
                return
            if is_here(self.tip):
                self._release(record)
            elif context.deadlines.due("quarantine turn", self._turn_since + context.policy.patience_seconds):
                self._prolong(record)
            else:
                return

    def _is_somebody_back(self, entry: _Entry) -> bool:
        return entry.failures <= MAX_EARLY_FAILURES and any(self._is_back(k) for k in entry.absent)

    def _take_turn(self) -> bool:
        """Choose the branch whose blobs are requested: one at a time, or one could hide another behind itself.

        A branch with few contributors comes last: one peer alone can make any number of branches.
        """
        context = self._context
        due = [record for record, entry in self._entries.items() if entry.active and entry.retried_since is not None]
        key = (frozenset(due), context.chain.head, len(context.chain))
        if key != self._tips_for or any(tip not in context.chain for tip in self._tips.values()):
            self._tips_for = key
            self._tips = {record: tip for record in due if (tip := context.chain.head_if_released(record)) is not None}
        if self._turn not in self._tips:
            # Branches that the fork choice would not prefer are no candidates: nobody would move there.
            entries = [(record, self._entries[record]) for record in self._tips]
            order = {record: (-entry.contributors, entry.turns, entry.retried_since) for record, entry in entries}
            self._turn = min(order, key=lambda record: order[record], default=None)
            self._turn_since = context.now
            if self._turn is not None:
                self._entries[self._turn].turns += 1
        self.tip = None if self._turn is None else self._tips[self._turn]
        return self._turn is not None

    def _prolong(self, record: Digest) -> None:
        """End a turn in which the blobs did not come.

        Members that came during it still count as new: it may have been too short for them.
        """
        entry = self._entries[record]
        entry.since, entry.until, entry.retried_since = self._turn_since, self._end_of(entry.failures), None
        self._context.deadlines.register("quarantine", entry.until)
        entry.absent = self._absent(record)

    def _release(self, record: Digest) -> None:
        entry = self._entries[record]
        entry.active, entry.retried_since = False, None
        self._context.chain.release(record)

    def _is_back(self, key: PeerKey) -> bool:
        """Return whether a member was heard from more than once: one heartbeat can come from behind a split."""
        member = self._context.members.get(key)
        return member is not None and member.heard - member.since >= self._context.policy.heartbeat_seconds

    def sizes(self) -> dict[str, tuple[int, int]]:
        return {
            "quarantined": (len(self._entries), MAX_QUARANTINED),
            "forgotten": (len(self._forgotten), MAX_FORGOTTEN),
        }
