"""The check of this machine's clock against the coordinator's."""

from __future__ import annotations

from peer.doctor.findings import DoctorFinding
from protocol.messages import CLOCK_TOLERANCE

CLOCK_SECONDS = 30.0
"""Maximum difference to the coordinator's clock without a warning."""

LISTED_SECONDS = 60
"""Difference beyond which members keep no record of the peer: it lives for 60 s, and they accept at most 120."""


def clock_finding(ahead: float | None) -> DoctorFinding:
    """Judge the seconds by which this clock is ahead of the coordinator's; None: the coordinator does not tell."""
    if ahead is None:
        return DoctorFinding("clock", "note", "not compared: this coordinator does not tell the time before admission")
    apart = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the coordinator's"
    if abs(ahead) > CLOCK_TOLERANCE:
        return DoctorFinding(
            "clock", "no", f"this machine's clock is {apart}, which admits nobody whose clock is off by more than "
            f"{CLOCK_TOLERANCE} s", "set it (for example with NTP)",
        )  # fmt: skip
    if abs(ahead) > CLOCK_SECONDS:
        return DoctorFinding(
            "clock", "warning", f"this machine's clock is {apart}: beyond {LISTED_SECONDS} s members do not list this "
            f"peer in their DHT, beyond {CLOCK_TOLERANCE} s nobody admits it", "set it (chrony, systemd-timesyncd)",
        )  # fmt: skip
    return DoctorFinding("clock", "ok", f"agrees with the coordinator's within {CLOCK_SECONDS:.0f} s")
