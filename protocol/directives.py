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
    """The directives in force on a branch, after a record and for the round that follows it."""

    newest: Signed[Directive] | None = None
    """The newest directive that the branch carries."""

    changes: RoundChanges = RoundChanges()
    """Changes of the round policy, as they hold in the round that follows."""

    banned: frozenset[PeerKey] = frozenset()

    @property
    def precedence(self) -> tuple[int, int]:
        """Precedence of the newest directive; (0, -1) without one."""
        return (0, -1) if self.newest is None else self.newest.body.precedence

    @property
    def rollback(self) -> Rollback | None:
        """The last rollback on the branch."""
        return None if self.newest is None else self.newest.body.rollback

    @property
    def epoch(self) -> int:
        """Number of rollbacks on the branch."""
        return 0 if self.newest is None else self.newest.body.epoch

    def after(self, record: RoundRecord) -> ActiveDirectives:
        """Return the directives in force after one more record."""
        newest = record.directive or self.newest
        # Without a new directive something changes only when the changes of the newest begin to hold (`from_round`).
        if newest is None or (newest is self.newest and newest.body.changes == self.changes):
            return self
        body = newest.body
        changes = body.changes if body.from_round <= record.round + 1 else self.changes
        return ActiveDirectives(newest, changes, self.banned if newest is self.newest else frozenset(body.banned))

    def record_refusal(self, record: RoundRecord) -> str | None:
        """Return why directives do not let a record follow here; None when they do."""
        epoch = self.epoch
        if record.directive is not None:
            body = record.directive.body
            if body.precedence <= self.precedence:
                return "it carries a directive that is not newer than those before it"
            rollback = body.rollback
            if rollback is not None and rollback != self.rollback:
                if rollback.epoch <= epoch:
                    return "it carries another rollback of the same epoch"
                if (rollback.record, rollback.round, rollback.state) != (
                    record.parent,
                    record.round,
                    record.base_state,
                ):
                    return "it carries a rollback to another record than its parent"
            epoch = body.epoch
        for u in record.updates:
            if u.body.epoch != epoch:
                return f"it lists an update of {u.author.short} from before a rollback, or from after one"
            if u.author in self.banned:
                return f"it lists an update of {u.author.short}, whom the run's owner has banned"
        return None


def starts_rollback_branch(record: RoundRecord, rollback: Rollback) -> bool:
    """Return whether a record is the first one of the branch that a rollback begins."""
    return (
        record.parent == rollback.record
        and record.directive is not None
        and record.directive.body.epoch >= rollback.epoch
    )
