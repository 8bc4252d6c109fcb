"""Decoding of packets from the network into events of verified messages. Refusals are counted by sender and fault."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from peer.node.coordinator_discovery import CoordinatorLocator
from protocol.bounded import BoundedDict
from protocol.coordinator_address import is_coordinator_address
from protocol.envelope import claimed_kind
from protocol.errors import MalformedError, ProtocolError
from protocol.ids import Digest, PeerKey
from protocol.message_codec import MessageDecoder, claimed_certificate
from protocol.messages import (
    CLOCK_TOLERANCE,
    MAX_CERTIFICATES,
    Certificate,
    Heartbeat,
    RoundRecord,
    Signed,
    UpdateHeader,
)
from protocol.rounds.events import CertificateReceived, ChainReceived, MessageReceived
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

MAX_ADDRESS_RECORDS = 4
"""Coordinator address records of one packet that are read: only the newest counts, and an honest peer sends one."""

PUSHED_TOLERANCE = 3600.0
"""Seconds after the end of an admission in which a certificate with that contributor may still be pushed to us."""

MAX_REFUSALS = 1000
MAX_HEARTBEATS = 8192
"""Heartbeats whose digests are remembered."""

SWARM_KINDS = (
    "heartbeat",
    "goodbye",
    "update-header",
    "round-record",
    "shard-attestation",
    "vote",
    "work-report",
    "finalization",
    "directive",
)


class PacketDecoder:
    """Verifies messages with a `MessageDecoder`, and the admissions in them against the clock."""

    def __init__(
        self,
        decoder: MessageDecoder,
        locator: CoordinatorLocator | None = None,
        is_old: Callable[[Digest], bool] = lambda record: False,
    ):
        """Give coordinator address records to `locator`; without one, they are refused.

        `is_old` tells of a record whether its certificate, pushed once more, is left out before it is verified.
        """
        self._decoder = decoder
        self._locator = locator
        self._is_old = is_old
        self.refused: BoundedDict[tuple[PeerKey, str], int] = BoundedDict(MAX_REFUSALS)
        """Refused messages by sender and kind of fault."""
        self._heartbeats: BoundedDict[Digest, None] = BoundedDict(MAX_HEARTBEATS)

    def decode_packet(
        self, sender: PeerKey, packet: wire.Packet, unix_seconds: float
    ) -> Iterator[MessageReceived | CertificateReceived | None]:
        """Yield one item for each message of a packet: its event, or None when there is none.

        A message that breaks the protocol is refused, with the reason in the log.
        """
        address_records = 0
        for encoded in packet.messages:
            try:
                if self._locator is not None and is_coordinator_address(encoded):
                    address_records += 1
                    if address_records <= MAX_ADDRESS_RECORDS:
                        self._locator.accept(encoded)
                    yield None
                else:
                    yield MessageReceived(self.decode_message(encoded, unix_seconds))
            except ProtocolError as e:
                self._refuse(sender, "message", e)
                yield None
        for encoded in packet.certificates:
            try:
                if self._is_old(claimed_certificate(encoded)):  # 0.2 s of work with 300 contributors, for nothing
                    yield None
                    continue
                certificate = self._decoder.decode_certificate(encoded)
                self._check_admissions(certificate.record.body, unix_seconds, PUSHED_TOLERANCE)
                yield CertificateReceived(certificate, sender)
            except ProtocolError as e:
                self._refuse(sender, "certificate", e)
                yield None

    def note(self, event: MessageReceived | CertificateReceived) -> bool:
        """Note an event. Return False for a heartbeat whose exact bytes were noted before: it has no news."""
        if not isinstance(event, MessageReceived) or not isinstance(event.message.body, Heartbeat):
            return True
        digest = event.message.digest
        is_news = digest not in self._heartbeats
        self._heartbeats.renew(digest, None)
        return is_news

    def decode_message(self, encoded: bytes, unix_seconds: float) -> Signed:
        """Return one verified message. Raises ProtocolError."""
        kind = claimed_kind(encoded)
        if kind not in SWARM_KINDS:
            raise MalformedError(f"a message of kind {kind[:32]!r} does not belong in the swarm")
        signed = self._decoder.decode_kind(encoded, kind)
        body, check = signed.body, self._decoder.decode_admission_at
        if isinstance(body, UpdateHeader) or (isinstance(body, Heartbeat) and body.admission):
            check(body.admission, signed.author, unix_seconds)
        elif isinstance(body, RoundRecord):
            self._check_admissions(body, unix_seconds)
        return signed

    def _check_admissions(self, record: RoundRecord, unix_seconds: float, tolerance: float = CLOCK_TOLERANCE) -> None:
        """Raise AdmissionError if a contributor's admission is not valid now: what is pushed to us is news."""
        for u in record.updates:
            self._decoder.decode_admission_at(u.body.admission, u.author, unix_seconds, tolerance=tolerance)

    async def decode_chain_reply(self, source: PeerKey, reply: wire.ChainReply) -> ChainReceived:
        """Return the verified answer to a chain request. Raises ProtocolError when any part of it is invalid."""
        if len(reply.certificates) > MAX_CERTIFICATES:
            raise MalformedError("a chain reply with too many certificates")
        certificates: list[Certificate] = []
        for encoded in reply.certificates:
            certificates.append(self._decoder.decode_certificate(encoded))
            await asyncio.sleep(0)  # verification takes time: other tasks have a turn
        final = self._decoder.decode_kind(reply.finalization, "finalization") if reply.finalization else None
        directive = self._decoder.decode_kind(reply.directive, "directive") if reply.directive else None
        return ChainReceived(tuple(certificates), final, source, reply.more, directive)

    def _refuse(self, sender: PeerKey, what: str, error: ProtocolError) -> None:
        key = (sender, _fault(error))
        count = self.refused[key] = self.refused.get(key, 0) + 1
        # The first refusal for a fault is logged at once; a flood of the same, once for each power of ten.
        if count in (1, 10, 100, 1000) or count % 10_000 == 0:
            log.warning("refused a %s from %s: %s%s", what, sender.short, error, f" ({count} times)" * (count > 1))


def _fault(error: ProtocolError) -> str:
    """Return the kind of fault: the check that failed, by its place in the code.

    The text would not do, since the sender chooses some of it.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = "" if traceback is None else f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
    return f"{type(error).__name__} {where}"
