"""The owner's directives in force on a branch of the chain: a pure function of its records.

A record may carry one directive, newer than any that the records before it carry. From the round after it the banned
are out, and from `from_round` on, if that is later, the changes of the round policy hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import PeerKey
from protocol.messages import Directive, Rollback, RoundChanges, RoundRecord, Signed


@dataclass(frozen=True, slots=True)
class ActiveDirectives:
    """After a record, for the round that follows it."""

    newest: Signed[Directive] | None = None
    """The newest that the way to here carries."""

    changes: RoundChanges = RoundChanges()
    """Of the round policy, as they hold in the round that follows."""

    banned: frozenset[PeerKey] = frozenset()

    @property
    def precedence(self) -> tuple[int, int]:
        """Of the newest; (0, -1) where there is none."""
        return (0, -1) if self.newest is None else self.newest.body.precedence

    @property
    def rollback(self) -> Rollback | None:
        """The last rollback on the way to here."""
        return None if self.newest is None else self.newest.body.rollback

    @property
    def epoch(self) -> int:
        """Rollbacks on the way to here."""
        return 0 if self.newest is None else self.newest.body.epoch

    def after(self, record: RoundRecord) -> ActiveDirectives:
        """After one record more."""
        newest = record.directive or self.newest
        if newest is None or newest is self.newest and newest.body.changes == self.changes:
            return self
        body = newest.body
        changes = body.changes if body.from_round <= record.round + 1 else self.changes
        return ActiveDirectives(newest, changes, self.banned if newest is self.newest else frozenset(body.banned))

    def record_refusal(self, record: RoundRecord) -> str | None:
        """Why a record cannot follow here, as far as directives go; None when it can."""
        epoch = self.epoch
        if record.directive is not None:
            body = record.directive.body
            if body.precedence <= self.precedence:
                return "it carries a directive that is not newer than those before it"
            back = body.rollback
            if back is not None and back != self.rollback:
                if back.epoch <= epoch:
                    return "it carries another rollback of the same epoch"
                if (back.record, back.round, back.state) != (record.parent, record.round, record.base_state):
                    return "it carries a rollback to another record than its parent"
            epoch = body.epoch
        for u in record.updates:
            if u.body.epoch != epoch:
                return f"it lists an update of {u.author.short} from before a rollback, or from after one"
            if u.author in self.banned:
                return f"it lists an update of {u.author.short}, whom the run's owner has banned"
        return None


def starts_rollback_branch(record: RoundRecord, back: Rollback) -> bool:
    """Return whether a record is the first one of the branch that a rollback begins."""
    return record.parent == back.record and record.directive is not None and record.directive.body.epoch >= back.epoch
