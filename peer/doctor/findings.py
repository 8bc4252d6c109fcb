"""A finding: what one check says of this machine, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from peer.errors import PeerError

Verdict = Literal["ok", "note", "warning", "no"]


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """`found` is what was found, in words; `remedy` is what to do unless all is well.

    A "note" tells without a judgement. With a "warning" the machine can take part, with a "no" it cannot.
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def require(self) -> None:
        """Raise PeerError if the verdict is "no"."""
        if self.verdict == "no":
            raise PeerError(f"{self.found}: {self.remedy}" if self.remedy else self.found)


def verdict_of(findings: Iterable[DoctorFinding]) -> Verdict:
    """Return the worst verdict of all: "ok", "warning" or "no"."""
    verdicts = {finding.verdict for finding in findings}
    return "no" if "no" in verdicts else "warning" if "warning" in verdicts else "ok"
