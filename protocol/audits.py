"""The draw of audits: the updates of a record to audit, and the auditors. A pure function of seeds and stakes.

Seeds are the only randomness (`RecordNode.seed`): no author of a record can choose one. That of the record's child is
known only after every update was committed to. So no peer knows, while it trains, whether its update will be audited,
by whom or on which windows (`audit_windows`). An update that is audited whatever is drawn need not wait for the child:
the record's own seed draws its auditors. Integers only, so that all peers get the same.

Stakes are those at the record's parent, of the keys that are present (`Chain.audit_stakes`). A key without any is
always audited. For the others the rate rises with the size of the update and falls with the author's stake, which is
work that no verdict has voided.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import AuditCheck, RoundRecord, Signed, UpdateHeader
from protocol.spec import RunSpec
from protocol.stake import STAKE_ROUNDS

MILLION = 1_000_000

UpdateCheck = AuditCheck | Literal["screen"]
"""A check of an update. A screen trains nothing, is made of each update, and only chooses what is replayed."""

SCREENED_UPDATES = 3
"""The least updates that a record must have to be screened: each is compared with at least two others."""

WINDOWS_COMPARED = 64
"""Windows of each kind that a loss check compares, if there are as many."""

LOSS_CHECK_PASSES = 4 * WINDOWS_COMPARED
"""Forward passes over one window by which rates are set: claimed and unclaimed windows, before the update and after it.

A loss check that is clear at a first look makes half of them; one that fails, as many again on its auditor's update.
"""

TRAINED_WINDOW_PASSES = 3
"""The training of a window in forward passes: a backward pass takes two."""

RAISED = 4
"""Times the usual rates, at most, while keys with much of the stake were convicted."""

RAISED_BY = 16
"""If stake is divided among this many equal keys, one conviction raises the rates to their maximum."""

BY_STRENGTH: tuple[AuditCheck, ...] = ("replay", "loss")
"""Checks that may be due, the one that decides more first."""

_DRAWS = 2**64


@dataclass(frozen=True, slots=True)
class AuditRule:
    """The run's rates, in millionths, and how many keys are drawn.

    A rate holds for an update of mean weight whose author's stake is STAKE_ROUNDS such updates. No author's is below a
    third of it. A loss check costs the same for every update, so large ones are checked more often.
    """

    loss_rate: int = 150_000
    loss_cost: int = 20_000
    """Loss checks of LOSS_CHECK_PASSES take at least this share of the training of the updates, by making more."""
    replay_rate: int = 30_000
    auditors: int = 3
    """Keys that may report on an update: two of them convict, if a jury confirms it."""
    jury: int = 64
    """Seats of the jury that decides what two auditors say: see `draw_jury`."""
    bar_rounds: int = 64
    """Rounds for which the first conviction bars a key."""
    owner: PeerKey | None = None
    """The run's owner: it may report on any update."""

    @classmethod
    def of(cls, spec: RunSpec) -> AuditRule:
        """Return the rule of a run."""
        rule = cls(owner=spec.owner_key)
        return rule if spec.audit.replayable else replace(rule, replay_rate=0)

    def raised(self, convicted: int, total: int) -> AuditRule:
        """Return the rule for a branch that recently convicted keys with `convicted` stake; all others have `total`.

        Liars seldom act alone, and a jury costs more than extra audits. One peer's report never raises a rate.
        """
        if not convicted:
            return self
        most = total + convicted
        times = most + (RAISED - 1) * min(most, RAISED_BY * convicted)
        loss, cost, replay = (rate * times // most for rate in (self.loss_rate, self.loss_cost, self.replay_rate))
        return replace(self, loss_rate=min(MILLION, loss), loss_cost=cost, replay_rate=min(MILLION, replay))

    def rate(self, check: AuditCheck, size: int) -> int:
        """Return the rate of a check of an update of `size` windows."""
        if check == "replay":
            return self.replay_rate
        by_cost = size * self.loss_cost * TRAINED_WINDOW_PASSES // LOSS_CHECK_PASSES
        return min(MILLION, max(self.loss_rate, by_cost)) if self.loss_rate else 0


@dataclass(frozen=True, slots=True)
class UpdateAudit:
    """The check that is due for one update (header digest) of a record, and the keys drawn for it."""

    update: Digest
    author: PeerKey
    check: AuditCheck
    auditors: tuple[PeerKey, ...]


class AuditSeeds(NamedTuple):
    """The seeds that draw the audits of a record: its own, and that of the record after it.

    Audits that a seed of None would draw are left out.
    """

    own: bytes | None
    following: bytes | None


@dataclass(frozen=True, slots=True)
class _Rates:
    """The rule of a record: of `updates` updates that weigh `windows` together."""

    rule: AuditRule
    stakes: Mapping[PeerKey, int]
    updates: int
    windows: int

    @classmethod
    def of(cls, record: RoundRecord, stakes: Mapping[PeerKey, int], rule: AuditRule) -> _Rates:
        return cls(rule, stakes, len(record.updates), record.windows)

    def due(self, draw: int, author: PeerKey, size: int) -> AuditCheck | None:
        """Return the strongest check of an update that a draw makes due."""
        stake, over = self.stakes.get(author, 0), size * STAKE_ROUNDS * size * self.updates
        for check in BY_STRENGTH:
            rate = self.rule.rate(check, size)
            if not stake or not rate:
                is_due = rate > 0
            else:
                # rate * (size * STAKE_ROUNDS / stake) * (size / mean weight), and no less than rate / 3
                is_due = draw * 3 * MILLION < rate * _DRAWS or draw * MILLION * stake * self.windows < (
                    rate * over * _DRAWS
                )
            if is_due:
                return check
        return None

    def is_always_due(self, author: PeerKey, size: int) -> bool:
        """Return whether the strongest check of an update is due whatever is drawn."""
        always = self.due(_DRAWS - 1, author, size)
        return always is not None and always == self.due(0, author, size)


def _size(update: Signed[UpdateHeader], weighed: int) -> int:
    """Return the windows that an update is audited by: claims beyond its weight are paid in later rounds."""
    return max(update.body.windows, weighed)


def audit_seed(
    update: Signed[UpdateHeader], record: RoundRecord, seeds: AuditSeeds, stakes: Mapping[PeerKey, int], rule: AuditRule
) -> bytes | None:
    """Return the seed that draws the audit of an update of a record; None before the record that draws it comes.

    `rule`: the run's, not a raised one.
    """
    size = _size(update, record.weighed[record.contributors.index(update.author)])
    return seeds.own if _Rates.of(record, stakes, rule).is_always_due(update.author, size) else seeds.following


def due_audits(
    record: RoundRecord, seeds: AuditSeeds, stakes: Mapping[PeerKey, int], rule: AuditRule, convicted: int = 0
) -> tuple[UpdateAudit, ...]:
    """Return the audits of a record that are due and drawn already, in the order of its updates.

    A loss check only chooses what is replayed, so none is due beside a replay. `convicted`: as in `AuditRule.raised`.
    """
    usual = _Rates.of(record, stakes, rule)
    rates = replace(usual, rule=rule.raised(convicted, sum(stakes.values())))
    line, due = _StakeLine(stakes), []
    for update, weighed in zip(record.updates, record.weighed, strict=True):
        author, size = update.author, _size(update, weighed)
        seed = seeds.own if usual.is_always_due(author, size) else seeds.following
        if seed is None:
            continue
        draw = int.from_bytes(sha256(b"cairn/v1/audit", seed, author)[:8], "little")
        if (check := rates.due(draw, author, size)) is not None:
            auditors = line.draw(_auditor_seed(seed, author), rule.auditors, {author})
            due.append(UpdateAudit(update.digest, author, check, auditors))
    return tuple(due)


def draw_auditors(seed: bytes, author: PeerKey, stakes: Mapping[PeerKey, int], rule: AuditRule) -> tuple[PeerKey, ...]:
    """Return the keys that may report on an update, in the order of the draw. The owner may always, and is not drawn.

    Each update of a record has auditors, also one that is not due: what a loss check finds strange is replayed.
    """
    return draw_by_stake(_auditor_seed(seed, author), stakes, rule.auditors, {author})


def _auditor_seed(seed: bytes, author: PeerKey) -> bytes:
    return b"cairn/v1/auditors" + seed + author


def first_auditors(
    record: RoundRecord, seeds: AuditSeeds, stakes: Mapping[PeerKey, int], rule: AuditRule
) -> dict[Digest, PeerKey | None]:
    """Return the first auditor of each update (header digest), as `draw_auditors` draws it, in O(log n) for each.

    None where nobody but the author has stake. Updates whose auditors these seeds do not draw are left out.
    """
    usual, line = _Rates.of(record, stakes, rule), _StakeLine(stakes)
    found: dict[Digest, PeerKey | None] = {}
    for update, weighed in zip(record.updates, record.weighed, strict=True):
        author = update.author
        seed = seeds.own if usual.is_always_due(author, _size(update, weighed)) else seeds.following
        if seed is not None:
            found[update.digest] = next(iter(line.draw(_auditor_seed(seed, author), 1, {author})), None)
    return found


class Jury(NamedTuple):
    """The keys that confirm or refute what the auditors of an update say, with the votes of each."""

    votes: Mapping[PeerKey, int]
    needed: int
    """Votes that decide."""


def draw_jury(seed: bytes, author: PeerKey, stakes: Mapping[PeerKey, int], rule: AuditRule) -> Jury:
    """Return the jury of an update.

    The `rule.jury` keys with the most stake are the jury if they have 7/8 of it, or are all that have any. Their votes
    are their stake, and more than half of *all* stake decides. Otherwise the jury has that many seats, each drawn by
    stake from all, and a key has as many votes as seats. So a coalition has its share of the votes, however many keys
    it has, and many keys with little stake make no jury a sample.

    A sample decides with more than two thirds of its seats. A third of the stake has that in 1 of 10^8 draws, and more
    than half of the seats in 1 of 500. Each update has a draw, and those who decide may take the stake of all others.

    Auditors and the author are drawn like all others. The author has no say, but its votes count. Otherwise liars with
    less than half of all stake could have more than half of the rest, and convict the honest.
    """
    keys = sorted(key for key in stakes if stakes[key] > 0)
    largest = sorted(keys, key=lambda key: -stakes[key])[: rule.jury]
    total = sum(stakes[key] for key in keys)
    if 8 * sum(stakes[key] for key in largest) >= 7 * total:
        return Jury({key: stakes[key] for key in sorted(largest)}, total // 2 + 1)
    sums, name = list(accumulate(stakes[key] for key in keys)), b"cairn/v1/jury" + seed + author
    seats = Counter(keys[bisect_right(sums, _drawn(name, seat) % total)] for seat in range(rule.jury))
    return Jury(seats, 2 * rule.jury // 3 + 1)


def draw_by_stake(
    seed: bytes, stakes: Mapping[PeerKey, int], count: int, without: Collection[PeerKey] = ()
) -> tuple[PeerKey, ...]:
    """Return up to `count` keys, each drawn by stake from those that are left. Dividing stake over keys gains nothing.

    Draw i takes H(seed | i) modulo the stake that is left, and finds the key on whose part of it, by ascending key, it
    falls.
    """
    return _StakeLine(stakes).draw(seed, count, without)


class _StakeLine:
    """The keys that have stake, ascending, each with a part of one line that is as long as its stake."""

    def __init__(self, stakes: Mapping[PeerKey, int]):
        self._keys = sorted(key for key in stakes if stakes[key] > 0)
        self._ends = list(accumulate(stakes[key] for key in self._keys))

    def draw(self, seed: bytes, count: int, without: Collection[PeerKey]) -> tuple[PeerKey, ...]:
        """Draw as `draw_by_stake` does, in O(log n) for each key."""
        places = [bisect_left(self._keys, key) for key in without]
        out = sorted({at for key, at in zip(without, places, strict=True) if self._keys[at : at + 1] == [key]})
        left = (self._ends[-1] if self._ends else 0) - sum(self._stake(place) for place in out)
        drawn: list[PeerKey] = []
        while left and len(drawn) < count:
            at = _drawn(seed, len(drawn)) % left
            for place in out:  # their parts are passed over
                if at >= self._ends[place] - self._stake(place):
                    at += self._stake(place)
            found = bisect_right(self._ends, at)
            drawn.append(self._keys[found])
            insort(out, found)
            left -= self._stake(found)
        return tuple(drawn)

    def _stake(self, place: int) -> int:
        return self._ends[place] - (self._ends[place - 1] if place else 0)


def _drawn(seed: bytes, draw: int) -> int:
    return int.from_bytes(sha256(seed, draw.to_bytes(4, "little")), "little")
