"""Periodic log line on the trainer's time, memory and speed. The time is an argument."""

from __future__ import annotations

from peer.channel import Progress

FIRST_LINE_SECONDS, LINE_SECONDS = 60.0, 300.0
"""Seconds until the first line after the trainer began, and between the following ones."""

ONLY_WAITING = 0.995
"""Share of waiting from which the trainer does nothing else, as in a pause: one line says so."""

_LABELS = {
    "training": "training",
    "data": "waiting for data",
    "compressing": "compressing",
    "applying": "applying",
    "saving": "saving",
    "waiting": "waiting for the swarm",
}


class UsageLog:
    """The schedule and the text of the log lines. It is given each Progress."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._only_waits = False
        self._has_said_unknown = False

    def line(self, progress: Progress, now: float) -> str:
        """Return the line to log now: shares of the last minute above 0.5%, memory and MFU. Mostly empty."""
        if self._due is None:
            self._due = now + FIRST_LINE_SECONDS
        if now < self._due or progress.spent is None:
            return ""
        self._due = now + LINE_SECONDS
        only_waited, self._only_waits = self._only_waits, progress.spent.waiting >= ONLY_WAITING
        if only_waited and self._only_waits:
            return ""
        shares = [(getattr(progress.spent, name), label) for name, label in _LABELS.items()]
        listed = ", ".join(f"{share:.0%} {label}" for share, label in shares if share >= 0.005)
        parts = [f"of the last minute: {listed}"]
        if progress.memory is not None:
            parts.append(f"{progress.memory.used / 1e9:.1f} of {progress.memory.whole / 1e9:.1f} GB of memory")
        if progress.mfu is not None:
            parts.append(f"MFU {progress.mfu:.0%}")
        elif not self._has_said_unknown:
            self._has_said_unknown = True
            parts.append("MFU not known for this device or model")
        return "; ".join(parts)
