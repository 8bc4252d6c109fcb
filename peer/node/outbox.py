"""Queues of outgoing messages: one bounded queue and one task for each peer, so that a slow peer delays no other."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from peer.errors import NotInSwarm
from peer.node.tasks import cancel_and_wait
from protocol.bounded import BoundedDict
from protocol.errors import CairnError
from protocol.ids import PeerKey
from protocol.message_codec import encode_certificate
from protocol.messages import Certificate, Heartbeat, Signed
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

MAX_WAITING = 512
"""Messages that wait for one peer. Beyond it the oldest are dropped; the machine repeats what matters."""

MAX_PACKET = 1024 * 1024
SEND_SECONDS = 10.0

MAX_STRANGERS = 64
"""Queues for peers that are not known as members: anybody can make keys that never answer."""

MAX_FAILURES = 1024
"""Unreachable peers that are remembered, so that each is logged once."""

NETWORK_ERRORS = (CairnError, asyncio.TimeoutError, OSError, EOFError)
"""Errors of a call over the network: the peer failed, or libp2p's daemon, which is started again."""

Item = Signed | Certificate


class Outbox:
    """The queues of one node. `transport(to, packet, seconds)` raises NETWORK_ERRORS when a peer is unreachable."""

    def __init__(
        self,
        transport: Callable[[PeerKey, wire.Packet, float], Awaitable[None]],
        encode: Callable[[Signed], bytes] = lambda message: message.encoded,
        is_known: Callable[[PeerKey], bool] = lambda key: True,
    ):
        """Use `encode` to get the bytes of a message. `is_known` says who is a member."""
        self._transport = transport
        self._encode = encode
        self._is_known = is_known
        self._waiting: dict[PeerKey, deque[Item]] = {}
        self._tasks: dict[PeerKey, asyncio.Task[None]] = {}
        self.failures: BoundedDict[PeerKey, str] = BoundedDict(MAX_FAILURES)

    def send(self, to: PeerKey, messages: Iterable[Signed] = (), certificates: Iterable[Certificate] = ()) -> None:
        """Queue messages for one peer without blocking. A newer heartbeat replaces one that still waits."""
        items: list[Item] = [*messages, *certificates]
        if not items or not (to in self._waiting or self._is_known(to) or self._has_room_for_a_stranger()):
            return
        queue = self._waiting.setdefault(to, deque(maxlen=MAX_WAITING))
        for item in items:
            if isinstance(item, Signed) and isinstance(item.body, Heartbeat):
                for old in [i for i in queue if _is_heartbeat_of(i, item)]:
                    queue.remove(old)
            queue.append(item)
        if to not in self._tasks:
            self._tasks[to] = asyncio.create_task(self._drain(to))

    def _has_room_for_a_stranger(self) -> bool:
        return sum(not self._is_known(key) for key in self._waiting) < MAX_STRANGERS

    def broadcast(self, to: Iterable[PeerKey], message: Signed) -> None:
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
                except NotInSwarm:
                    queue.clear()  # these messages are outdated once the daemon runs
                except NETWORK_ERRORS as e:
                    why = str(e) or type(e).__name__
                    if to not in self.failures:
                        log.info(
                            "cannot reach %s: %s",
                            to.short,
                            why.removeprefix(f"peer {to.short}: "),
                            extra={"file_only": True},
                        )
                    self.failures[to] = why
                    queue.clear()
        finally:
            # Not in a callback of the task: a message that is queued before that runs would wait for the next one.
            del self._waiting[to], self._tasks[to]

    async def flush(self, seconds: float) -> None:
        """Wait until all messages are sent, at most these seconds."""
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def close(self) -> None:
        """Stop sending; messages that wait are dropped."""
        await cancel_and_wait(list(self._tasks.values()))


def _packet_of(queue: deque[Item], encode: Callable[[Signed], bytes]) -> wire.Packet:
    """Take the oldest messages off the queue, as many as fit into one packet."""
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


def _is_heartbeat_of(waiting: Item, heartbeat: Signed) -> bool:
    """Return whether a waiting message is a heartbeat of the same author."""
    return isinstance(waiting, Signed) and isinstance(waiting.body, Heartbeat) and waiting.author == heartbeat.author
