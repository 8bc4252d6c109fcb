"""Limits on what one sender may request: token buckets and concurrency, for a bounded number of senders."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from peer.swarm.errors import TooBusy
from protocol.ids import PeerKey
from protocol.token_bucket import TokenBucket

BURST_SECONDS = 2
"""A burst is what a rate allows in this time."""

STRANGERS_SHARE = 0.25
"""The part of the uplink that a user allows which answers to strangers take at most."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Bounds on what arrives by unary calls. Rates are per sender and second."""

    calls_per_second: float = 200
    bytes_per_second: float = 16 * 1024 * 1024
    concurrent_per_sender: int = 16
    concurrent: int = 256
    bytes_under_way: int = 64 * 1024 * 1024
    handler_seconds: float = 15
    concurrent_strangers: int = 64
    """For all senders together that are not known as members, like the next three: anybody can make keys."""
    strangers_calls_per_second: float = 1000
    strangers_bytes_per_second: float = 4 * 1024 * 1024
    strangers_answer_bytes_per_second: float = 4 * 1024 * 1024
    """Of the answers to all of them together."""
    senders: int = 4096


@dataclass(slots=True)
class _Sender:
    calls: TokenBucket
    volume: TokenBucket
    busy: int = 0


@dataclass(slots=True)
class Strangers:
    calls: TokenBucket
    volume: TokenBucket
    answers: TokenBucket
    busy: int = 0


@dataclass
class RateLimiter:
    """Admits calls within the limits. Not thread-safe: one event loop."""

    limits: CallLimits = field(default_factory=CallLimits)
    is_known: Callable[[PeerKey], bool] = lambda sender: True
    uplink: Callable[[], float] = lambda: math.inf
    """Bytes a second that the user allows for blobs. Beside these, answers to strangers take a quarter of that."""
    strangers: Strangers | None = None
    """The use that all strangers made together; None before the first call."""
    _senders: OrderedDict[PeerKey, _Sender] = field(default_factory=OrderedDict)
    _busy: int = 0
    _under_way: int = 0

    @contextmanager
    def admit(self, sender: PeerKey, size: int, *, now: float | None = None) -> Iterator[None]:
        """Hold a place for one call of `size` bytes while the block runs. Raises TooBusy."""
        limits = self.limits
        now = time.monotonic() if now is None else now
        own, strangers = self._sender(sender, now), self._shared(sender, now)
        if own.calls.tokens < 1:
            raise TooBusy(f"more than {limits.calls_per_second:.0f} calls a second: slow down")
        if own.volume.tokens < size:
            raise TooBusy(f"more than {limits.bytes_per_second:.0f} bytes a second: slow down")
        if strangers is not None and (strangers.calls.tokens < 1 or strangers.volume.tokens < size):
            raise TooBusy("strangers send too much: slow down")
        if strangers is not None and strangers.busy >= limits.concurrent_strangers:
            raise TooBusy("too many calls at once: try again")
        if own.busy >= limits.concurrent_per_sender or self._busy >= limits.concurrent:
            raise TooBusy("too many calls at once: try again")
        if self._busy and self._under_way + size > limits.bytes_under_way:
            raise TooBusy("too many calls at once: try again")
        counted = [own] if strangers is None else [own, strangers]
        for s in counted:
            s.calls.charge(1)
            s.volume.charge(size)
            s.busy += 1
        self._busy += 1
        self._under_way += size
        try:
            yield
        finally:
            for s in counted:
                s.busy -= 1
            self._busy -= 1
            self._under_way -= size

    def charge(self, sender: PeerKey, size: int, *, work: bool = False, now: float | None = None) -> None:
        """Count `size` bytes against a sender's limit, besides those that it sent.

        With `work` they stand for the cost of checking what arrived, and count against all strangers' volume, too.
        The debt of that is one burst at most, so that no sender keeps the others out for long.
        """
        now = time.monotonic() if now is None else now
        self._sender(sender, now).volume.charge(size)
        if work and (strangers := self._shared(sender, now)) is not None:
            shared = strangers.volume
            shared.charge(min(size, shared.tokens + shared.burst))

    def charge_answer(self, sender: PeerKey, size: int, *, now: float | None = None) -> None:
        """Count an answer of `size` bytes as the sender's own, and against what all strangers are sent."""
        now = time.monotonic() if now is None else now
        self._sender(sender, now).volume.charge(size)
        if (strangers := self._shared(sender, now)) is not None:
            strangers.answers.charge(size * max(1.0, strangers.answers.rate / (STRANGERS_SHARE * self.uplink())))

    def check_answers(self, sender: PeerKey, *, now: float | None = None) -> None:
        """Raise TooBusy if the sender is a stranger, and strangers were sent too much: before an answer."""
        strangers = self._shared(sender, time.monotonic() if now is None else now)
        if strangers is not None and strangers.answers.tokens <= 0:
            raise TooBusy("strangers ask for too much: slow down")

    def _shared(self, sender: PeerKey, now: float) -> Strangers | None:
        """Return what all strangers share, if the sender is one."""
        if self.is_known(sender):
            return None
        if self.strangers is None:
            limits = self.limits
            self.strangers = Strangers(
                _bucket(limits.strangers_calls_per_second, now),
                _bucket(limits.strangers_bytes_per_second, now),
                _bucket(limits.strangers_answer_bytes_per_second, now),
            )
        shared = self.strangers
        for bucket in (shared.calls, shared.volume, shared.answers):
            bucket.refill(now)
        return shared

    def _sender(self, sender: PeerKey, now: float) -> _Sender:
        limits = self.limits
        state = self._senders.get(sender)
        if state is None:
            calls, volume = _bucket(limits.calls_per_second, now), _bucket(limits.bytes_per_second, now)
            state = self._senders[sender] = _Sender(calls, volume)
            if len(self._senders) > limits.senders:  # evict the longest silent one with nothing under way
                idle = next((k for k, s in self._senders.items() if not s.busy and k != sender), None)
                if idle is not None:
                    del self._senders[idle]
        self._senders.move_to_end(sender)
        state.calls.refill(now)
        state.volume.refill(now)
        return state


def _bucket(rate: float, now: float) -> TokenBucket:
    return TokenBucket(rate, BURST_SECONDS * rate, now)
