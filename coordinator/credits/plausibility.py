"""Checks whether a peer can have trained what its update claims, in the time that it had as observed here."""

from __future__ import annotations

from protocol.ids import PeerKey
from protocol.ledger.credits import CreditLine, CreditRule, RoundCredits
from protocol.messages import Verdict
from protocol.spec import RoundSpec, RunSpec

CLOCK_SLACK = 60.0
"""Seconds granted to every peer: messages about records and admissions take time."""


class PlausibilityCheck:
    """Judges updates by the run's `credit.max_teraflops_per_second`."""

    def __init__(self, spec: RunSpec):
        self._limit = spec.credit.max_teraflops_per_second
        # Tokens that count; the others of a window are computed all the same.
        self._flops_per_token = CreditRule.of(spec).flops_per_token * spec.data.window // spec.data.window_tokens
        # Training continues during an exchange, so an update may hold work from before the record was seen.
        self._slack = 0.0
        self.update_rules(spec.round)

    def update_rules(self, rules: RoundSpec) -> None:
        """Apply the round policy in force. The slack only grows: a change never costs earlier credit."""
        self._slack = max(self._slack, rules.exchange_seconds + rules.patience_seconds + CLOCK_SLACK)

    def problem(self, line: CreditLine, seconds: float) -> str:
        """Return why a credit line cannot be true of a peer that had this time (seconds); "" if it can."""
        milliseconds = max(1, int((max(0.0, seconds) + self._slack) * 1000))
        flops = line.tokens * self._flops_per_token
        if flops * 1000 <= self._limit * 10**12 * milliseconds:
            return ""
        rate = flops / (milliseconds * 10**9)
        return f"{rate:.3g} teraflops a second over {milliseconds / 1000:.0f} s: at most {self._limit} are believed"

    def verdicts(self, credits: RoundCredits, seen_at: float, since: dict[PeerKey, float]) -> list[Verdict]:
        """Return verdicts on the lines of a round, seen first-hand at `seen_at`, that cannot be true.

        `since` is the time (unix seconds) from which each peer can have worked at its update; peers without one are not
        judged.
        """
        found = []
        for line in credits.lines:
            # A start after this record was seen means that the clock was set back: nothing is known.
            if (start := since.get(line.peer)) is None or start > seen_at:
                continue
            if reason := self.problem(line, seen_at - start):
                found.append(Verdict(credits.record, line.peer, reason))
        return found
