"""Events of a node: those that wait for the round machine, and those that other parts of the process subscribe to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from peer.errors import PeerError
from protocol.messages import Signed
from protocol.rounds import events

MAX_EVENTS = 20_000
"""Events that wait for the machine; beyond it network messages are dropped (their senders repeat what matters)."""


@dataclass(frozen=True, slots=True)
class MessageVerified:
    """A verified message of another peer that is not banned, before the machine has it.

    Messages that are too late to count are included.
    """

    message: Signed[Any]


@dataclass(frozen=True, slots=True)
class EventQueued:
    """An event is about to be queued for the machine; beyond MAX_EVENTS, a network message is dropped instead."""

    event: events.Event


@dataclass(frozen=True, slots=True)
class MachineStepped:
    """The machine processed an event, and its actions were carried out."""


@dataclass(frozen=True, slots=True)
class RunOver:
    """The node ends for this reason, or its run is over and it only serves others."""

    reason: str


NodeEvent = MessageVerified | EventQueued | MachineStepped | RunOver
AnyEvent = TypeVar("AnyEvent", MessageVerified, EventQueued, MachineStepped, RunOver)


class NodeEvents:
    """The event bus of one node: callbacks subscribe by the type of event."""

    def __init__(self) -> None:
        self._subscribers: dict[type[Any], list[Callable[[Any], None]]] = {}

    def subscribe(self, kind: type[AnyEvent], callback: Callable[[AnyEvent], None]) -> None:
        """Call `callback` with each event of this type."""
        self._subscribers.setdefault(kind, []).append(callback)

    def post(self, event: NodeEvent) -> None:
        """Call the subscribers of this type of event, in the order of their subscriptions."""
        for callback in tuple(self._subscribers.get(type(event), ())):
            callback(event)


Post = Callable[[events.Event], None]
"""Queues an event for the round machine."""


class EventQueue:
    """The events that wait for the round machine, at most MAX_EVENTS."""

    def __init__(self, bus: NodeEvents):
        self._queue: asyncio.Queue[events.Event] = asyncio.Queue(maxsize=MAX_EVENTS)
        self._bus = bus

    def post(self, event: events.Event) -> None:
        """Queue an event. Raises PeerError when the queue is full and the event is no network message."""
        self._bus.post(EventQueued(event))
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            if isinstance(event, events.MessageReceived | events.CertificateReceived):
                return
            raise PeerError(f"{MAX_EVENTS} events wait for the round machine: this process does not keep up") from None

    async def get(self) -> events.Event:
        return await self._queue.get()

    def __len__(self) -> int:
        return self._queue.qsize()
