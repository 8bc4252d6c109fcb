"""Checks whether a peer can have trained what its update claims, in the time that it had as observed here."""

from __future__ import annotations

from protocol.ids import PeerKey
from protocol.ledger.credits import CreditRule
from protocol.messages import Certificate, Verdict
from protocol.spec import RoundSpec, RunSpec

CLOCK_SLACK = 60.0
"""Seconds granted to every peer: messages about records and admissions take time."""


class PlausibilityCheck:
    """Judges updates by the run's `credit.max_teraflops_per_second`."""

    def __init__(self, spec: RunSpec):
        self._limit = spec.credit.max_teraflops_per_second
        # Of all tokens: those of a window that do not count are computed all the same.
        self._flops_per_window = CreditRule.of(spec).flops_per_token * spec.data.window
        # Training continues during an exchange, so an update may hold work from before the record was seen.
        self._slack = 0.0
        self.update_rules(spec.round)

    def update_rules(self, rules: RoundSpec) -> None:
        """Apply the round policy in force. The slack only grows: a change never costs earlier credit."""
        self._slack = max(self._slack, rules.exchange_seconds + rules.patience_seconds + CLOCK_SLACK)

    def problem(self, windows: int, seconds: float) -> str:
        """Return why a peer cannot have trained a number of windows in this time (seconds); "" if it can."""
        milliseconds = max(1, int((max(0.0, seconds) + self._slack) * 1000))
        flops = windows * self._flops_per_window
        if flops * 1000 <= self._limit * 10**12 * milliseconds:
            return ""
        rate = flops / (milliseconds * 10**9)
        return f"{rate:.3g} teraflops a second over {milliseconds / 1000:.0f} s: at most {self._limit} are believed"

    def verdicts(self, certificate: Certificate, seen_at: float, since: dict[PeerKey, float]) -> list[Verdict]:
        """Return verdicts on the updates of a record, seen first-hand at `seen_at`, that cannot be true.

        `since` is the time (unix seconds) from which each peer can have worked at its update; peers without one are not
        judged. Judged are claimed windows: weighed ones may be of earlier rounds, and a claim that is weighed later
        must be true, too.
        """
        found = []
        for update in certificate.record.body.updates:
            # A start after this record was seen means that the clock was set back: nothing is known.
            if (start := since.get(update.author)) is None or start > seen_at:
                continue
            if reason := self.problem(update.body.windows, seen_at - start):
                found.append(Verdict(certificate.digest, update.author, reason))
        return found
