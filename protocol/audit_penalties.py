"""The cost of an audit's decision to its keys: the stake, and rounds in which they are barred. Pure.

The owner's pardons lift bars; they give back neither stake nor credit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from protocol.ids import PeerKey, Round
from protocol.messages import AuditDecision, Pardon

MAX_DOUBLINGS = 16
"""The bars of a key double no more often: 64 rounds are then four million."""


@dataclass(frozen=True, slots=True)
class AuditPenalty:
    """The cost of decisions to a key on a branch. Rounds are those of the records that carry what decided."""

    stakeless_until: Round = Round(0)
    """Its contributions to earlier rounds are no stake."""
    convictions: int = 0
    barred_until: Round = Round(0)
    """No record of an earlier round may list its updates. 0: no conviction, or none that is not pardoned."""
    convicted_in: Round = Round(0)
    """The round of the newest record that convicts it, if `barred_until` is not 0."""


_NO_PENALTY = AuditPenalty()


@dataclass(frozen=True, slots=True)
class AuditPenalties:
    """The penalties of all keys after some records of a branch: one step of the fold for each decision."""

    by_key: Mapping[PeerKey, AuditPenalty] = field(default_factory=dict)

    def of(self, key: PeerKey) -> AuditPenalty:
        """Return a key's penalty: `_NO_PENALTY` for most keys."""
        return self.by_key.get(key, _NO_PENALTY)

    def after(self, decision: AuditDecision, round_: Round, bar_rounds: int) -> AuditPenalties:
        """Return the penalties after a decision that a record of a round states (`add_decision`)."""
        found = dict(self.by_key)
        add_decision(found, decision, round_, bar_rounds)
        return AuditPenalties(found)

    def pardoned(self, pardons: Iterable[Pardon]) -> AuditPenalties:
        """Return the penalties after pardons that a record carries, before its decisions (`add_pardon`)."""
        found = dict(self.by_key)
        held = [add_pardon(found, pardon) for pardon in pardons]
        return AuditPenalties(found) if any(held) else self

    def is_barred(self, key: PeerKey, round_: Round) -> bool:
        """Return whether no record of a round may list an update of this key."""
        return round_ < self.of(key).barred_until

    def is_stake(self, key: PeerKey, round_: Round) -> bool:
        """Return whether what a key contributed to a round may count as its stake."""
        return round_ >= self.of(key).stakeless_until


def add_decision(found: dict[PeerKey, AuditPenalty], decision: AuditDecision, round_: Round, bar_rounds: int) -> None:
    """Change the penalties by key as a decision does that a record of a round states.

    A conviction bars from the next round on: the first for `bar_rounds`, each one after it for twice as long as the
    last. Several in one record count as one.
    """
    following = Round(round_ + 1)
    for key in decision.refuted:
        found[key] = replace(found.get(key, _NO_PENALTY), stakeless_until=following)
    if decision.convicted:
        old = found.get(decision.author, _NO_PENALTY)
        is_new = round_ >= old.barred_until
        count = old.convictions + is_new
        until = following + bar_rounds * 2 ** min(count - 1, MAX_DOUBLINGS) if is_new else old.barred_until
        found[decision.author] = AuditPenalty(following, count, Round(until), round_)


def add_pardon(found: dict[PeerKey, AuditPenalty], pardon: Pardon) -> bool:
    """Change the penalties by key as a pardon does, and return whether it holds.

    It holds if it names the newest conviction of its peer: the bar ends, and the next one is no longer for this
    conviction. Other pardons change nothing: it is safe to repeat one on the same branch.
    """
    old = found.get(pardon.peer, _NO_PENALTY)
    if not old.barred_until or old.convicted_in != pardon.round:
        return False
    found[pardon.peer] = AuditPenalty(old.stakeless_until, old.convictions - 1)
    return True
