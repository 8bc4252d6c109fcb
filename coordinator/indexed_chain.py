"""The chain as the coordinator has indexed it: posted rounds, open rounds, balances, history.

Only the chain indexer changes it; everything else reads it on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from coordinator.audit_index import AuditIndex, RecentRounds
from coordinator.history import RoundHistory, RoundPoint
from coordinator.ledger import CarriedReport, StatedDecision, StatedPardon
from protocol.audits import AuditRule
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import Balance, PeerBalances, RoundCredits, sum_credits

MAX_REMEMBERED = 64
"""Newest posted rounds whose credit lines are kept in memory."""


class IndexedChain:
    """The chain of one run: posted rounds are final and in the ledger, open ones are beyond them."""

    def __init__(self, audit: AuditRule, hold_rounds: int = MAX_REMEMBERED):
        """Begin empty; `hold_rounds` is the run's (spec: `credit.hold_rounds`), at most MAX_REMEMBERED."""
        self.posted: tuple[Round, Digest] | None = None
        """The newest final round and its record."""

        self.recent: deque[RoundCredits] = deque(maxlen=MAX_REMEMBERED)
        """The newest posted rounds, oldest first."""

        self.open: tuple[RoundCredits, ...] = ()
        """The chain beyond the newest posted round, oldest first."""

        self.history = RoundHistory()
        """All posted rounds."""

        self.first_seen: dict[Digest, float] = {}
        """Unix seconds at which open records were first seen, for those that were seen at first hand."""

        self.balances: Mapping[PeerKey, PeerBalances] = {}
        """The ledger's balances after the newest posted round: the one copy on the event loop."""

        self.settled: Mapping[PeerKey, Balance] = {}
        """Credits of each peer past the hold, from `balances`."""

        self.settled_micro_credits = 0
        """Those of all peers together."""

        self._held: dict[PeerKey, Balance] = {}
        """Pending credits in posted rounds, from `balances`."""

        self.pending: Mapping[PeerKey, Balance] = {}
        """Credits of each peer in open rounds, and in posted rounds within the hold."""

        self.audits = AuditIndex(audit, hold_rounds)
        """The reports and decisions of audits, of posted and open rounds."""

    @property
    def head(self) -> tuple[Round, Digest] | None:
        """The newest round of the chain and its record."""
        return (self.open[-1].round, self.open[-1].record) if self.open else self.posted

    @property
    def training_round(self) -> int:
        """The round that is being trained."""
        return self.head[0] + 1 if self.head else 0

    def has_credits(self, peer: PeerKey) -> bool:
        """Return whether a peer has credits that were not voided."""
        return peer in self.settled or peer in self.pending

    def has_recent_work(self, peer: PeerKey) -> bool:
        """Return whether a peer has work that is pending, or in one of the `recent` rounds."""
        return peer in self.pending or any(line.peer == peer for credits in self.recent for line in credits.lines)

    def is_final(self, round_: int) -> bool:
        """Return whether a round of this chain is posted."""
        return self.posted is not None and round_ <= self.posted[0]

    @property
    def remembered(self) -> list[RoundCredits]:
        """The rounds in memory, final or not, newest first."""
        return [*self.recent, *self.open][::-1]

    def newest(self, count: int) -> list[RoundCredits]:
        """Return at most `count` newest rounds, final or not, newest first."""
        return self.remembered[:count]

    @property
    def progress(self) -> int:
        """Tokens accepted up to the head that no record voids: a run ends when it has its total of them."""
        return self.history.progress + sum(c.progress for c in self.open)

    def points(self, last: int | None = None) -> list[RoundPoint]:
        """Return the last `last` posted rounds (None: all) and the open ones, for charts."""
        points, tokens = self.history.points(last), self.history.tokens
        for credits in self.open:
            tokens += credits.tokens
            points.append(RoundPoint(credits.round, tokens, credits.loss, self.first_seen.get(credits.record)))
        return points

    def restore(
        self, posted: tuple[Round, Digest] | None, recent: Iterable[RoundCredits], history: RoundHistory,
        first_seen: dict[Digest, float], balances: Mapping[PeerKey, PeerBalances],
        decisions: Sequence[StatedDecision] = (), pardons: Sequence[StatedPardon] = (),
        reports: Sequence[CarriedReport] = (),
    ) -> None:  # fmt: skip
        """Take over what the ledger holds; open rounds are forgotten."""
        self.posted, self.history, self.first_seen = posted, history, first_seen
        self.recent.clear()
        self.recent.extend(recent)
        self._set(balances, ())
        self.restore_audits(decisions, pardons, reports)

    def restore_audits(
        self, decisions: Sequence[StatedDecision], pardons: Sequence[StatedPardon], reports: Sequence[CarriedReport]
    ) -> None:
        """Take over the decisions, pardons and work reports that the ledger holds of posted rounds."""
        self.audits.restore(decisions, pardons, reports, self._recent_rounds())

    def post(
        self, added: Iterable[RoundCredits], posted: tuple[Round, Digest],
        balances: Mapping[PeerKey, PeerBalances], beyond: Sequence[RoundCredits],
    ) -> None:  # fmt: skip
        """Append rounds that the ledger has posted; `beyond` are the open rounds after them."""
        added = list(added)
        for credits in added:
            self.recent.append(credits)
            seen_at = self.first_seen.pop(credits.record, None)
            self.history.append(credits.round, credits.tokens, credits.voided_tokens, credits.loss, seen_at)
            if seen_at is not None:  # the others that were seen by then, of branches that lost
                later = {c.record for c in (*added, *beyond)}
                self.first_seen = {r: at for r, at in self.first_seen.items() if at > seen_at or r in later}
        self.posted = posted
        self._set(balances, beyond)
        self.audits.post(added, self._recent_rounds())

    def set_open(self, rounds: Sequence[RoundCredits]) -> None:
        self._set(self.balances, rounds)
        self.audits.follow(self._recent_rounds())

    def _recent_rounds(self) -> RecentRounds:
        return RecentRounds(self.open, {c.record: c for c in (*self.recent, *self.open)}, self.training_round - 1)

    def _set(self, balances: Mapping[PeerKey, PeerBalances], beyond: Sequence[RoundCredits]) -> None:
        """Change all balances at once: no reader may see a round both settled and pending."""
        if balances is not self.balances:
            self.settled = {p: b.settled for p, b in balances.items() if b.settled.rounds}
            self.settled_micro_credits = sum(b.micro_credits for b in self.settled.values())
            self._held = {p: b.pending for p, b in balances.items() if b.pending.rounds}
        self.balances, self.open = balances, tuple(beyond)
        held = dict(self._held)
        for peer, balance in sum_credits(self.open).items():
            held[peer] = held[peer].combined(balance) if peer in held else balance
        self.pending = held
