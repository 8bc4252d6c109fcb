"""Exchange of large records in compact form (`protocol.compact_record`): headers are named, and the receiver has them.

The sender makes compact records, and gives the headers of the records that it sent to receivers that miss some. The
receiver reconstructs the record; it requests missing headers from the sender and from nobody else. Everything is
bounded: what does not fit is dropped, and the round machine repeats what matters.
"""

from __future__ import annotations

import logging
from collections import ChainMap, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Protocol

from peer.node.outbox import NETWORK_ERRORS
from peer.node.tasks import Tasks
from peer.swarm import checking_cost
from protocol.bounded import BoundedDict
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

log = logging.getLogger(__name__)

COMPACT_FROM = 16 * 1024
"""Bytes of the smallest record that is sent in compact form: for a smaller one, requesting a header costs more than it
saves."""

PER_AUTHOR = 4
"""Headers kept for one author: two rounds, and two of each for an author that announces twice."""

AUTHORS = 2 * MAX_CONTRIBUTORS
RECORDS = 16
"""Number of records sent in compact form whose headers others may request."""

REQUESTS = 32
"""Maximum number of header requests under way, one for each sender: an answer has at most 2.6 MB."""

IN_PACKET = 4
"""Compact records of one packet that are processed: each may stand for 2.6 MB."""


class HeaderCache:
    """The headers of each author's latest rounds, by name: PER_AUTHOR of each of AUTHORS.

    Old headers that are replayed evict nothing newer.
    """

    def __init__(self) -> None:
        self._by_author: OrderedDict[PeerKey, list[tuple[int, bytes]]] = OrderedDict()
        self._encoded: dict[bytes, bytes] = {}

    def add(self, header: Signed[UpdateHeader]) -> None:
        name = header_id(header.encoded)
        if name in self._encoded:
            return
        kept = self._by_author.setdefault(header.author, [])
        self._by_author.move_to_end(header.author)
        kept.append((header.body.round, name))
        self._encoded[name] = header.encoded
        if len(kept) > PER_AUTHOR:
            oldest = min(kept, key=lambda entry: entry[0])
            kept.remove(oldest)
            del self._encoded[oldest[1]]
        if len(self._by_author) > AUTHORS:
            for _, old in self._by_author.popitem(last=False)[1]:
                del self._encoded[old]

    def get(self, name: bytes) -> bytes | None:
        """Return the envelope of a header by its name."""
        return self._encoded.get(name)

    @property
    def authors(self) -> int:
        return len(self._by_author)

    def __len__(self) -> int:
        return len(self._encoded)


class HeaderTransport(Protocol):
    """The network as `CompactRecords` uses it. `receive` processes a packet as if it had arrived."""

    async def request_headers(self, sender: PeerKey, names: wire.Packet) -> wire.Packet: ...
    async def receive(self, sender: PeerKey, packet: wire.Packet) -> None: ...
    def is_admitted(self, key: PeerKey) -> bool: ...
    def charge(self, sender: PeerKey, size: int) -> None: ...


class CompactRecords:
    """The compact records that one node sends, and the reconstruction of those that it receives."""

    def __init__(self, transport: HeaderTransport, tasks: Tasks):
        self._transport = transport
        self._tasks = tasks
        self._headers = HeaderCache()
        self._sent: BoundedDict[Digest, tuple[bytes | None, dict[bytes, bytes]]] = BoundedDict(RECORDS)
        self._requesting: set[PeerKey] = set()

    # -- sending ---------------------------------------------------------------------------------------------

    def encode(self, message: Signed) -> bytes:
        """Return a message as it is sent: itself, or the compact form of a large record."""
        if not isinstance(message.body, RoundRecord) or len(message.encoded) < COMPACT_FROM:
            return message.encoded
        sent = self._sent.get(message.digest)
        if sent is None:
            compact_form = compact(message)
            headers = {} if compact_form is None else {header_id(u.encoded): u.encoded for u in message.body.updates}
            sent = (compact_form, headers)
        self._sent.renew(message.digest, sent)  # a record that is sent again may be asked about again
        return message.encoded if sent[0] is None else sent[0]

    def answer(self, request: wire.Packet) -> wire.Packet:
        """Return the requested headers of the records that this node sent. Raises MalformedError."""
        names = check_header_ids(request.messages)
        headers = ChainMap(*(headers for _, headers in self._sent.values()))
        return wire.Packet(messages=[headers[name] for name in dict.fromkeys(names) if name in headers])

    # -- receiving -------------------------------------------------------------------------------------------

    def note(self, message: Signed) -> None:
        """Keep the headers in a verified message, our own included: records will name them."""
        if isinstance(message.body, UpdateHeader):
            self._headers.add(message)
        elif isinstance(message.body, RoundRecord):
            for header in message.body.updates:
                self._headers.add(header)

    def reconstruct(self, sender: PeerKey, packet: wire.Packet) -> wire.Packet:
        """Return a packet with whole records in place of compact ones.

        Records whose headers have to be requested first are left out; they arrive by `HeaderTransport.receive`.
        """
        if not any(map(is_compact_record, packet.messages)):
            return packet
        messages: list[bytes] = []
        left = IN_PACKET if self._transport.is_admitted(sender) else 0
        for encoded in packet.messages:
            if not is_compact_record(encoded):
                messages.append(encoded)
            elif left > 0:
                left -= 1
                if (record := self._record(sender, encoded)) is not None:
                    messages.append(record)
        return wire.Packet(messages=messages, certificates=packet.certificates)

    def _record(self, sender: PeerKey, encoded: bytes) -> bytes | None:
        """Return the whole record; None when it is refused, or its headers are requested first."""
        try:
            compact_form = parse_compact_record(encoded)
        except MalformedError as e:
            log.warning("refused a compact record from %s: %s", sender.short, e)
            return None
        found = self._known(compact_form.header_ids)
        if len(found) == len(compact_form.header_ids):
            return self._reconstruct(sender, compact_form, found)
        if sender not in self._requesting and len(self._requesting) < REQUESTS:
            self._requesting.add(sender)
            self._tasks.spawn(self._complete(sender, compact_form), "headers of a record")
        return None

    def _reconstruct(self, sender: PeerKey, compact_form: CompactRecord, headers: Mapping[bytes, bytes]) -> bytes:
        record = compact_form.reconstruct([headers[n] for n in compact_form.header_ids])
        # It is no cheaper than a whole one.
        self._transport.charge(sender, len(record) + checking_cost(record, has_record=True))
        return record

    def _known(self, names: Iterable[bytes]) -> dict[bytes, bytes]:
        return {n: h for n in names if (h := self._headers.get(n)) is not None}

    async def _complete(self, sender: PeerKey, compact_form: CompactRecord) -> None:
        """Request the missing headers from the sender, and process the record."""
        try:
            found = self._known(compact_form.header_ids)
            missing = [n for n in compact_form.header_ids if n not in found]
            reply = await self._transport.request_headers(sender, wire.Packet(messages=missing))
            found |= check_requested_headers(missing, [bytes(h) for h in reply.messages])
            if len(found) < len(compact_form.header_ids):
                log.info("%s names headers in a record that it does not give", sender.short)
                return
            record = self._reconstruct(sender, compact_form, found)
        except MalformedError as e:
            log.warning("refused the headers of a record from %s: %s", sender.short, e)
            return
        except NETWORK_ERRORS as e:
            log.info("no headers of a record from %s: %s", sender.short, str(e) or type(e).__name__)
            return
        finally:
            self._requesting.discard(sender)
        await self._transport.receive(sender, wire.Packet(messages=[record]))
