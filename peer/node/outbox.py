"""Sends to every peer without letting a slow one hold up the others: one bounded queue and one task a peer."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from protocol.errors import CairnError
from protocol.ids import PeerKey
from protocol.message_codec import encode_certificate
from protocol.messages import Certificate, Heartbeat, Signed
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("peer.outbox")

MAX_WAITING = 512
"""Messages that wait for one peer; beyond it the oldest are dropped (the machine repeats what matters)."""

MAX_PACKET = 1024 * 1024
SEND_SECONDS = 10.0

MAX_FAILURES = 1024
"""Peers out of reach that are remembered, so that each is named in the log once."""

NETWORK_ERRORS = (CairnError, asyncio.TimeoutError, OSError, EOFError)
"""How a call of the network fails: a peer's doing, or that of libp2p's daemon, which is started again."""

Item = Signed | Certificate


class Outbox:
    """`transport(to, packet, seconds)` may raise NETWORK_ERRORS: the peer is unreachable then."""

    def __init__(
        self,
        transport: Callable[[PeerKey, wire.Packet, float], Awaitable[None]],
        encode: Callable[[Signed], bytes] = lambda message: message.encoded,
    ):
        """`encode`: how a message travels."""
        self._transport = transport
        self._encode = encode
        self._waiting: dict[PeerKey, deque[Item]] = {}
        self._tasks: dict[PeerKey, asyncio.Task[None]] = {}
        self.failures: dict[PeerKey, str] = {}

    def send(self, to: PeerKey, messages: Iterable[Signed] = (), certificates: Iterable[Certificate] = ()) -> None:
        """Queue for one peer. Never blocks; a newer heartbeat replaces one that still waits."""
        items: list[Item] = [*messages, *certificates]
        if not items:
            return
        queue = self._waiting.setdefault(to, deque(maxlen=MAX_WAITING))
        for item in items:
            if isinstance(item, Signed) and isinstance(item.body, Heartbeat):
                for old in [i for i in queue if _same_heart(i, item)]:
                    queue.remove(old)
            queue.append(item)
        if to not in self._tasks:
            self._tasks[to] = asyncio.create_task(self._drain(to))

    def broadcast(self, to: Iterable[PeerKey], message: Signed) -> None:
        """Queue for many."""
        for key in to:
            self.send(key, (message,))

    async def _drain(self, to: PeerKey) -> None:
        queue = self._waiting[to]
        try:
            while queue:
                packet = _packet_of(queue, self._encode)
                try:
                    await self._transport(to, packet, SEND_SECONDS)
                    self.failures.pop(to, None)
                except NETWORK_ERRORS as e:
                    self._note_failure(to, str(e) or type(e).__name__)
                    queue.clear()
        finally:
            # At once, not when the task is over: what is sent between the two would wait for the next message.
            del self._waiting[to], self._tasks[to]

    def _note_failure(self, to: PeerKey, why: str) -> None:
        if to not in self.failures:
            log.info("cannot reach %s: %s", to.short, why)
        self.failures[to] = why
        while len(self.failures) > MAX_FAILURES:
            del self.failures[next(iter(self.failures))]

    async def flush(self, seconds: float) -> None:
        """Wait until all is sent, at most this long."""
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def close(self) -> None:
        """Stop sending; what waits is dropped."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _packet_of(queue: deque[Item], encode: Callable[[Signed], bytes]) -> wire.Packet:
    """The oldest of what waits, as much as fits into one packet; taken off the queue."""
    packet, size = wire.Packet(), 0
    while queue:
        item = queue[0]
        data = encode_certificate(item) if isinstance(item, Certificate) else encode(item)
        if size and size + len(data) > MAX_PACKET:
            break
        queue.popleft()
        (packet.certificates if isinstance(item, Certificate) else packet.messages).append(data)
        size += len(data)
    return packet


def _same_heart(waiting: Item, heartbeat: Signed) -> bool:
    """Whether an older heartbeat of the same author still waits."""
    return isinstance(waiting, Signed) and isinstance(waiting.body, Heartbeat) and waiting.author == heartbeat.author
