"""How much one sender may ask of us: token buckets and concurrency, with a bound on how many senders are remembered."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from peer.swarm.errors import SwarmError
from protocol.ids import PeerKey


class TooBusy(SwarmError):
    """A sender asked for more than its share: nothing of the request was looked at."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what comes in by unary calls. Rates are per sender and second, with twice as much at once."""

    calls_per_second: float = 200
    bytes_per_second: float = 16 * 1024 * 1024
    concurrent_per_sender: int = 16
    concurrent: int = 256
    bytes_under_way: int = 64 * 1024 * 1024
    handler_seconds: float = 15
    concurrent_strangers: int = 64
    strangers_bytes_per_second: float = 4 * 1024 * 1024
    """All those together who are not known as members: anybody can make keys."""
    senders: int = 4096


@dataclass(slots=True)
class _Sender:
    calls: float
    volume: float
    refilled: float
    busy: int = 0


@dataclass
class Guard:
    """Admits calls within the limits. Not thread-safe: one event loop."""

    limits: Limits = field(default_factory=Limits)
    is_known: Callable[[PeerKey], bool] = lambda sender: True
    _strangers: _Sender | None = None
    _senders: OrderedDict[PeerKey, _Sender] = field(default_factory=OrderedDict)
    _busy: int = 0
    _under_way: int = 0

    @contextmanager
    def admit(self, sender: PeerKey, size: int, *, now: float | None = None) -> Iterator[None]:
        """Holds a place for one call of `size` bytes. Raises TooBusy."""
        limits = self.limits
        state = self._state(sender, time.monotonic() if now is None else now)
        if state.calls < 1:
            raise TooBusy(f"more than {limits.calls_per_second:.0f} calls a second: slow down")
        if state.volume < size:
            raise TooBusy(f"more than {limits.bytes_per_second:.0f} bytes a second: slow down")
        strangers = self._shared(sender, state.refilled)
        if strangers is not None and strangers.volume < size:
            raise TooBusy("strangers send too much: slow down")
        if strangers is not None and strangers.busy >= limits.concurrent_strangers:
            raise TooBusy("too many calls at once: try again")
        if state.busy >= limits.concurrent_per_sender or self._busy >= limits.concurrent:
            raise TooBusy("too many calls at once: try again")
        if self._busy and self._under_way + size > limits.bytes_under_way:
            raise TooBusy("too many calls at once: try again")
        state.calls -= 1
        mine = [state] if strangers is None else [state, strangers]
        for s in mine:
            s.volume -= size
            s.busy += 1
        self._busy += 1
        self._under_way += size
        try:
            yield
        finally:
            for s in mine:
                s.busy -= 1
            self._busy -= 1
            self._under_way -= size

    def charge(self, sender: PeerKey, size: int, *, work: bool = False, now: float | None = None) -> None:
        """Count bytes that go out to a sender against its share: small questions with big answers are not free.

        `work`: what it costs to check what came in, which counts against what all strangers have together, too.
        """
        state = self._state(sender, time.monotonic() if now is None else now)
        state.volume -= size
        if work and (strangers := self._shared(sender, state.refilled)) is not None:
            strangers.volume -= size

    def _shared(self, sender: PeerKey, now: float) -> _Sender | None:
        """What all strangers have together, when this is one."""
        if self.is_known(sender):
            return None
        rate, s = self.limits.strangers_bytes_per_second, self._strangers
        if s is None:
            s = self._strangers = _Sender(0, 2 * rate, now)
        s.volume = min(2 * rate, s.volume + max(0.0, now - s.refilled) * rate)
        s.refilled = now
        return s

    def _state(self, sender: PeerKey, now: float) -> _Sender:
        limits = self.limits
        state = self._senders.get(sender)
        if state is None:
            state = self._senders[sender] = _Sender(2 * limits.calls_per_second, 2 * limits.bytes_per_second, now)
            if len(self._senders) > limits.senders:  # the longest silent one with nothing under way
                idle = next((k for k, s in self._senders.items() if not s.busy and k != sender), None)
                if idle is not None:
                    del self._senders[idle]
        self._senders.move_to_end(sender)
        passed = max(0.0, now - state.refilled)
        state.calls = min(2 * limits.calls_per_second, state.calls + passed * limits.calls_per_second)
        state.volume = min(2 * limits.bytes_per_second, state.volume + passed * limits.bytes_per_second)
        state.refilled = now
        return state
