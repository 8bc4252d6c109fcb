"""The retention policy of archived states: a pure function of the states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The rules by which states stay.

    `newest` is the number of newest final states, and of those that are not final yet (of these at least `waiting`,
    since a state must live to become final). `every` keeps the first state in each interval of this many rounds for
    ever (0: none). `best` is the number of states with the lowest validation loss. `bytes` is the maximum of all
    together (0: none).
    """

    newest: int = 5
    every: int = 0
    best: int = 0
    bytes: int = 0
    waiting: int = 1


@dataclass(frozen=True, slots=True)
class RetentionCandidate(Generic[K]):
    """A state to decide on. `key` is the caller's, `loss` in nats per token; a `held` state is in use."""

    key: K
    round: int
    size: int
    final: bool = False
    loss: float | None = None
    held: bool = False


def to_delete(states: Iterable[RetentionCandidate[K]], policy: RetentionPolicy) -> list[RetentionCandidate[K]]:
    """Return the states to delete, in order: those that no rule keeps, then those beyond `policy.bytes`.

    The latter are the `evictable` ones and then those kept for ever. The first state, the newest, the newest final one,
    held ones and those that wait to become final are never deleted: else a small bound would end finality.
    """
    ordered = sorted(states, key=lambda s: s.round)
    safe = _never(ordered)
    kept = safe | _newest(ordered, policy) | _marks(ordered, policy) | _best(ordered, policy)
    gone = [s for i, s in enumerate(ordered) if i not in kept]
    if policy.bytes:
        left = sum(ordered[i].size for i in kept)
        for i in _shedding(ordered, policy, kept - safe - _waiting(ordered, policy.waiting)):
            if left <= policy.bytes:
                break
            left -= ordered[i].size
            gone.append(ordered[i])
    return gone


def evictable(states: Iterable[RetentionCandidate[K]], policy: RetentionPolicy) -> list[RetentionCandidate[K]]:
    """Return the states that a full disk may cost, in order: the oldest that are only kept for being new.

    States that are kept for ever, or for their loss, stay: the owner asked for them. So do those that wait to become
    final, as in `to_delete`.
    """
    ordered = sorted(states, key=lambda s: s.round)
    asked = _never(ordered) | _marks(ordered, policy) | _best(ordered, policy) | _waiting(ordered, policy.waiting)
    return [s for i, s in enumerate(ordered) if i not in asked]


def _never(ordered: Sequence[RetentionCandidate[K]]) -> set[int]:
    safe = {i for i, s in enumerate(ordered) if s.held or s.round == 0}
    finals = [i for i, s in enumerate(ordered) if s.final]
    return safe | set(finals[-1:]) | ({len(ordered) - 1} if ordered else set())


def _newest(ordered: Sequence[RetentionCandidate[K]], policy: RetentionPolicy) -> set[int]:
    final = [i for i, s in enumerate(ordered) if s.round and s.final]
    waiting = _waiting(ordered, max(policy.newest, policy.waiting))
    return {*final[max(0, len(final) - policy.newest) :], *waiting}


def _waiting(ordered: Sequence[RetentionCandidate[K]], most: int) -> set[int]:
    """Return the newest that are not final yet, at most this many."""
    open_ = [i for i, s in enumerate(ordered) if s.round and not s.final]
    return set(open_[max(0, len(open_) - most) :])


def _marks(ordered: Sequence[RetentionCandidate[K]], policy: RetentionPolicy) -> set[int]:
    """Return the first that is left in each interval of rounds."""
    first: dict[int, int] = {}
    for i, s in enumerate(ordered):
        if policy.every and s.round >= policy.every:
            first.setdefault(s.round // policy.every, i)
    return set(first.values())


def _best(ordered: Sequence[RetentionCandidate[K]], policy: RetentionPolicy) -> set[int]:
    judged = [(s.loss, i) for i, s in enumerate(ordered) if s.loss is not None and math.isfinite(s.loss)]
    return {i for _, i in sorted(judged)[: policy.best]}


def _shedding(ordered: Sequence[RetentionCandidate[K]], policy: RetentionPolicy, of: set[int]) -> list[int]:
    """Return the states that the limit on bytes costs, in order.

    These are the merely new, oldest first; the worst of the best; the oldest others.
    """
    marks, best = _marks(ordered, policy), _best(ordered, policy)
    plain = sorted(of - marks - best)
    good = sorted(of & best - marks, key=lambda i: -(ordered[i].loss or 0.0))
    return [*plain, *good, *sorted(of & marks)]
