"""Opens what arrives from the network: bytes in, events of verified messages out. Refusals are counted and named."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator

from peer.node.locator import Locator
from protocol.coordinator_address import is_coordinator_address
from protocol.envelope import kind_of
from protocol.errors import MalformedError, ProtocolError
from protocol.ids import Digest, PeerKey
from protocol.message_codec import MessageDecoder
from protocol.messages import Certificate, Heartbeat, RoundRecord, Signed
from protocol.messages import UpdateHeader as UpdateHeader
from protocol.rounds.events import CertificateReceived, ChainReceived, MessageReceived
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("peer.inbox")

MAX_MESSAGES = 2048
MAX_CERTIFICATES = 256
MAX_WORDS = 4
"""Of a packet, messages on where the coordinator is: only the newest counts, and an honest peer sends one."""

MAX_KINDS_OF_REFUSAL = 1000
MAX_BEATS = 8192
"""Heartbeats whose digests are remembered."""

_NUMBERS = re.compile(r"[0-9a-f]{8,}|[0-9]+")
SWARM_KINDS = ("heartbeat", "goodbye", "update", "record", "reduced", "vote", "leaves", "final", "directive")


class Inbox:
    """Verifies messages with an `MessageDecoder` and the admissions in them against the clock."""

    def __init__(self, decoder: MessageDecoder, locator: Locator | None = None):
        """The `locator` is given what is said of the coordinator's address; without one, that is refused."""
        self._decoder = decoder
        self._locator = locator
        self.refused: dict[tuple[PeerKey, str], int] = {}
        self._beats: dict[Digest, None] = {}

    def packet(
        self, sender: PeerKey, packet: wire.Packet, unix_seconds: float
    ) -> Iterator[MessageReceived | CertificateReceived | None]:
        """The events in a packet; what breaks the protocol is refused with its reason in the log. None for each message
        that gives none: to find that out takes its time too."""
        if len(packet.messages) > MAX_MESSAGES or len(packet.certificates) > MAX_CERTIFICATES:
            self._refuse(sender, "packet", MalformedError("a packet with too many messages"))
            return
        words = 0
        for sent in packet.messages:
            try:
                if self._locator is not None and is_coordinator_address(sent):
                    words += 1
                    if words <= MAX_WORDS:
                        self._locator.take(sent)
                    yield None
                else:
                    yield MessageReceived(self.message(sent, unix_seconds))
            except ProtocolError as e:
                self._refuse(sender, "message", e)
                yield None
        for sent in packet.certificates:
            try:
                yield CertificateReceived(self._decoder.decode_certificate(sent), sender)
            except ProtocolError as e:
                self._refuse(sender, "certificate", e)
                yield None

    def is_repeat(self, event: MessageReceived | CertificateReceived) -> bool:
        """Whether it is a heartbeat that came before, to the byte: no news for the round machine."""
        if not isinstance(event, MessageReceived) or not isinstance(event.message.body, Heartbeat):
            return False
        digest = event.message.digest
        known = digest in self._beats
        self._beats[digest] = self._beats.pop(digest, None)
        while len(self._beats) > MAX_BEATS:
            del self._beats[next(iter(self._beats))]
        return known

    def message(self, sent: bytes, unix_seconds: float) -> Signed:
        """One verified message. Raises ProtocolError."""
        kind = kind_of(sent)
        if kind not in SWARM_KINDS:
            raise MalformedError(f"a message of kind {kind[:32]!r} does not belong in the swarm")
        signed = self._decoder.decode_kind(sent, kind)
        match signed.body:
            case UpdateHeader():
                self._decoder.decode_admission_at(signed.body.admission, signed.author, unix_seconds)
            case Heartbeat() if signed.body.admission:
                self._decoder.decode_admission_at(signed.body.admission, signed.author, unix_seconds)
            case RoundRecord():
                for update in signed.body.updates:
                    self._decoder.decode_admission_at(update.body.admission, update.author, unix_seconds)
            case _:
                pass
        return signed

    async def chain(self, source: PeerKey, reply: wire.ChainReply) -> ChainReceived:
        """The answer to a chain request. Raises ProtocolError: then nothing of it is used."""
        if len(reply.certificates) > MAX_CERTIFICATES:
            raise MalformedError("a chain reply with too many certificates")
        certificates: list[Certificate] = []
        for sent in reply.certificates:
            certificates.append(self._decoder.decode_certificate(sent))
            await asyncio.sleep(0)  # verifying takes its time: others have a turn
        final = self._decoder.decode_kind(reply.final, "final") if reply.final else None
        word = self._decoder.decode_kind(reply.directive, "directive") if reply.directive else None
        return ChainReceived(tuple(certificates), final, source, reply.more, word)

    def _refuse(self, sender: PeerKey, what: str, error: ProtocolError) -> None:
        # Without numbers, which differ each time: the same fault is one sort, whoever repeats it.
        key = (sender, _NUMBERS.sub("#", str(error))[:120])
        if len(self.refused) >= MAX_KINDS_OF_REFUSAL and key not in self.refused:
            self.refused.pop(next(iter(self.refused)))
        count = self.refused[key] = self.refused.get(key, 0) + 1
        # The first of a sort is news; a flood of the same is one line each power of ten.
        if count in (1, 10, 100, 1000) or count % 10_000 == 0:
            log.warning("refused a %s from %s: %s%s", what, sender.short, error, f" ({count} times)" * (count > 1))
