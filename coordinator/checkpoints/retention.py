"""Which archived states stay: a pure function of what there is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """`newest`: so many of the newest final states, and of those that are not final yet (of these at least `waiting`: a
    state must live to become final). `every`: the first state in each so many rounds, for ever (0: none). `best`: so
    many with the lowest validation loss. `bytes`: the most that all take together (0: no bound)."""

    newest: int = 5
    every: int = 0
    best: int = 0
    bytes: int = 0
    waiting: int = 1


@dataclass(frozen=True, slots=True)
class RetentionCandidate(Generic[K]):
    """A state as the policy sees it; `key` is the caller's. `loss`: validation loss, nats a token. `held`: in use."""

    key: K
    round: int
    size: int
    final: bool = False
    loss: float | None = None
    held: bool = False


def to_delete(states: Iterable[RetentionCandidate[K]], policy: RetentionPolicy) -> list[RetentionCandidate[K]]:
    """The states to remove, in that order: those that no rule keeps, then, while all take more than `policy.bytes`, as
    `evictable` and then those kept for ever. Never the first state, the newest, the newest final one, or a held one."""
    ordered = sorted(states, key=lambda s: s.round)
    safe = _never(ordered)
    kept = safe | _newest(ordered, policy) | _marks(ordered, policy) | _best(ordered, policy)
    gone = [s for i, s in enumerate(ordered) if i not in kept]
    if policy.bytes:
        left = sum(ordered[i].size for i in kept)
        for i in _shedding(ordered, policy, kept - safe):
            if left <= policy.bytes:
                break
            left -= ordered[i].size
            gone.append(ordered[i])
    return gone


def evictable(states: Iterable[RetentionCandidate[K]], policy: RetentionPolicy) -> list[RetentionCandidate[K]]:
    """What may go when the disk is full, in that order: the oldest that are only kept for being new. What is kept for
    ever, or for its loss, the owner asked for: it stays."""
    ordered = sorted(states, key=lambda s: s.round)
    asked = _never(ordered) | _marks(ordered, policy) | _best(ordered, policy)
    return [s for i, s in enumerate(ordered) if i not in asked]


def _never(ordered: Sequence[RetentionCandidate[K]]) -> set[int]:
    safe = {i for i, s in enumerate(ordered) if s.held or s.round == 0}
    finals = [i for i, s in enumerate(ordered) if s.final]
    return safe | set(finals[-1:]) | ({len(ordered) - 1} if ordered else set())


def _newest(ordered: Sequence[RetentionCandidate[K]], policy: RetentionPolicy) -> set[int]:
    later = [i for i, s in enumerate(ordered) if s.round]
    final, open_ = [i for i in later if ordered[i].final], [i for i in later if not ordered[i].final]
    waiting = max(policy.newest, policy.waiting)
    return {*final[max(0, len(final) - policy.newest) :], *open_[max(0, len(open_) - waiting) :]}


def _marks(ordered: Sequence[RetentionCandidate[K]], policy: RetentionPolicy) -> set[int]:
    """The first in each stretch of rounds: what is removed meanwhile is never the first, so the choice stays."""
    first: dict[int, int] = {}
    for i, s in enumerate(ordered):
        if policy.every and s.round >= policy.every:
            first.setdefault(s.round // policy.every, i)
    return set(first.values())


def _best(ordered: Sequence[RetentionCandidate[K]], policy: RetentionPolicy) -> set[int]:
    judged = [(s.loss, i) for i, s in enumerate(ordered) if s.loss is not None and math.isfinite(s.loss)]
    return {i for _, i in sorted(judged)[: policy.best]}


def _shedding(ordered: Sequence[RetentionCandidate[K]], policy: RetentionPolicy, of: set[int]) -> list[int]:
    """What the bound takes first: the merely new, oldest first; the worst of the best; then the oldest of the rest."""
    marks, best = _marks(ordered, policy), _best(ordered, policy)
    plain = sorted(of - marks - best)
    good = sorted(of & best - marks, key=lambda i: -(ordered[i].loss or 0.0))
    return [*plain, *good, *sorted(of & marks)]
