"""What the log says now and then of the trainer's time, memory and speed. The time is an argument."""

from __future__ import annotations

from peer.channel import Progress, TimeShares

FIRST_SECONDS, SECONDS = 60.0, 300.0
"""When the log says it for the first time after the trainer began, and how often from then on."""

_WORDS = {
    "training": "training",
    "data": "waiting for data",
    "compressing": "compressing",
    "applying": "applying",
    "saving": "saving",
    "waiting": "waiting for the swarm",
}


class UsageLog:
    """Fed with each Progress."""

    def __init__(self) -> None:
        self._due: float | None = None

    def line(self, progress: Progress, now: float) -> str:
        """What to log now: mostly nothing ("")."""
        if self._due is None:
            self._due = now + FIRST_SECONDS
        if now < self._due or progress.spent is None:
            return ""
        self._due = now + SECONDS
        return usage_line(progress, progress.spent)


def usage_line(progress: Progress, spent: TimeShares) -> str:
    """Shares of the last minute (those that are not next to nothing), memory, MFU."""
    shares = [(getattr(spent, name), words) for name, words in _WORDS.items()]
    said = ", ".join(f"{share:.0%} {words}" for share, words in shares if share >= 0.005)
    parts = [f"of the last minute: {said}"]
    if progress.memory is not None:
        parts.append(f"{progress.memory.used / 1e9:.1f} of {progress.memory.whole / 1e9:.1f} GB of memory")
    parts.append("MFU not known for this device or model" if progress.mfu is None else f"MFU {progress.mfu:.0%}")
    return "; ".join(parts)
