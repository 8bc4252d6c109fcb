"""Large records travel as compact records (`protocol.compact_record`): names of headers, which the receiver holds.

The sender's side makes them, and gives the headers of records that it sent to whoever lacks some. The receiver's side
puts records together; what it lacks it asks of the sender, and of nobody else. Everything is bounded: what does not fit
is dropped, and the round machine repeats what matters.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from peer.node.outbox import NETWORK_ERRORS
from protocol.compact_record import (
    CompactRecord,
    check_header_ids,
    check_requested_headers,
    compact,
    header_id,
    is_compact_record,
    parse_compact_record,
)
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.messages import MAX_CONTRIBUTORS, RoundRecord, Signed, UpdateHeader
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("peer.briefs")

BRIEF_FROM = 16 * 1024
"""Smaller records go as they are: asking for one header costs more than it saves."""

PER_AUTHOR = 4
"""Headers of one author that are held: of this round and the next, and once more for who announces twice."""

AUTHORS = 2 * MAX_CONTRIBUTORS
RECORDS = 16
"""Records sent as briefs whose headers others may ask for."""

ASKED = 32
"""Briefs for which we ask at one time, one of each sender: answers are at most 2.6 MB each."""

IN_PACKET = 4
"""Briefs of one packet that are looked at: each may stand for 2.6 MB."""


class Held:
    """The headers of each author's latest rounds, by name: PER_AUTHOR of AUTHORS. Old ones that are replayed push out
    nothing."""

    def __init__(self) -> None:
        self._by_author: OrderedDict[PeerKey, list[tuple[int, bytes]]] = OrderedDict()
        self._sent: dict[bytes, bytes] = {}

    def add(self, header: Signed[UpdateHeader]) -> None:
        """Hold a verified header."""
        name = header_id(header.encoded)
        if name in self._sent:
            return
        mine = self._by_author.setdefault(header.author, [])
        self._by_author.move_to_end(header.author)
        mine.append((header.body.round, name))
        self._sent[name] = header.encoded
        if len(mine) > PER_AUTHOR:
            oldest = min(mine, key=lambda held: held[0])
            mine.remove(oldest)
            del self._sent[oldest[1]]
        if len(self._by_author) > AUTHORS:
            for _, old in self._by_author.popitem(last=False)[1]:
                del self._sent[old]

    def get(self, name: bytes) -> bytes | None:
        return self._sent.get(name)

    def __len__(self) -> int:
        return len(self._sent)


class Briefs:
    """Both sides of it, for one node."""

    def __init__(
        self,
        *,
        ask: Callable[[PeerKey, wire.Packet], Awaitable[wire.Packet]],
        take: Callable[[PeerKey, wire.Packet], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        is_member: Callable[[PeerKey], bool],
        charge: Callable[[PeerKey, int], None],
    ):
        """`ask(of, names)` gives headers, or raises NETWORK_ERRORS; `take` gets a packet with a record that could be
        put together late, as if it had come whole. Only members' briefs (`is_member`) are looked at, and what they
        stand for is counted (`charge`, in bytes) against what their senders may send: it is no cheaper than a record.
        """
        self._ask, self._take, self._spawn = ask, take, spawn
        self._is_member, self._charge = is_member, charge
        self._held = Held()
        self._made: OrderedDict[Digest, tuple[bytes | None, dict[bytes, bytes]]] = OrderedDict()
        self._asking: set[PeerKey] = set()

    # -- sending ---------------------------------------------------------------------------------------------

    def encode(self, message: Signed) -> bytes:
        """A message as it goes out: itself, or the brief of a large record."""
        if not isinstance(message.body, RoundRecord) or len(message.encoded) < BRIEF_FROM:
            return message.encoded
        made = self._made.get(message.digest)
        if made is None:
            brief = compact(message)
            headers = {} if brief is None else {header_id(u.encoded): u.encoded for u in message.body.updates}
            made = self._made[message.digest] = (brief, headers)
            if len(self._made) > RECORDS:
                self._made.popitem(last=False)
        self._made.move_to_end(message.digest)  # what is sent again is asked for again
        return message.encoded if made[0] is None else made[0]

    def answer(self, request: wire.Packet) -> wire.Packet:
        """The headers that somebody asks for, of the records that went out from here. Raises MalformedError."""
        names = check_header_ids([bytes(n) for n in request.messages])
        found: list[bytes] = []
        for name in dict.fromkeys(names):
            header = next((h for _, hs in self._made.values() if (h := hs.get(name)) is not None), None)
            if header is not None:
                found.append(header)
        return wire.Packet(messages=found)

    # -- receiving -------------------------------------------------------------------------------------------

    def heard(self, message: Signed) -> None:
        """A verified header or record, ours too: records will name these headers."""
        if isinstance(message.body, UpdateHeader):
            self._held.add(message)
        elif isinstance(message.body, RoundRecord):
            for header in message.body.updates:
                self._held.add(header)

    def unfold(self, sender: PeerKey, packet: wire.Packet) -> wire.Packet:
        """A packet with records in the place of their briefs; without those whose headers have to be asked for."""
        if not any(map(is_compact_record, packet.messages)):
            return packet
        messages: list[bytes] = []
        briefs = 0
        for sent in packet.messages:
            if not is_compact_record(sent):
                messages.append(sent)
                continue
            briefs += 1
            if briefs <= IN_PACKET and self._is_member(sender):
                record = self._record(sender, sent)
                if record is not None:
                    messages.append(record)
        return wire.Packet(messages=messages, certificates=packet.certificates)

    def _record(self, sender: PeerKey, sent: bytes) -> bytes | None:
        """What a brief stands for; None when it is refused, or its headers are asked for first."""
        try:
            brief = parse_compact_record(sent)
        except MalformedError as e:
            log.warning("refused a brief from %s: %s", sender.short, e)
            return None
        found = self._known(brief.header_ids)
        if len(found) == len(brief.header_ids):
            record = brief.reconstruct([found[n] for n in brief.header_ids])
            self._charge(sender, len(record))
            return record
        if sender not in self._asking and len(self._asking) < ASKED:
            self._asking.add(sender)
            self._spawn(self._fill(sender, brief))
        return None

    def _known(self, names: Iterable[bytes]) -> dict[bytes, bytes]:
        return {n: h for n in names if (h := self._held.get(n)) is not None}

    async def _fill(self, sender: PeerKey, brief: CompactRecord) -> None:
        """Ask the sender for what we lack, and take the record."""
        try:
            found = self._known(brief.header_ids)
            lacking = [n for n in brief.header_ids if n not in found]
            reply = await self._ask(sender, wire.Packet(messages=lacking))
            found |= check_requested_headers(lacking, [bytes(h) for h in reply.messages])
            if len(found) < len(brief.header_ids):
                log.info("%s names headers in a record that it does not give", sender.short)
                return
            record = brief.reconstruct([found[n] for n in brief.header_ids])
            self._charge(sender, len(record))
        except MalformedError as e:
            log.warning("refused the headers of a record from %s: %s", sender.short, e)
            return
        except NETWORK_ERRORS as e:
            log.info("no headers of a record from %s: %s", sender.short, str(e) or type(e).__name__)
            return
        finally:
            self._asking.discard(sender)
        await self._take(sender, wire.Packet(messages=[record]))
