"""The chain on disk: it is loaded at the start, extended as the machine asks, and given to peers that request it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any, TypeVar

from peer.store import Store, StoreError
from protocol.bounded import BoundedDict
from protocol.chain import Chain, ChainLimits, UnknownParent
from protocol.errors import ChainError, FinalizedConflict, MalformedError, ProtocolError
from protocol.ids import Digest, PeerKey, Round
from protocol.message_codec import MessageDecoder, claimed_certificate, encode_certificate
from protocol.messages import MAX_CERTIFICATES, Certificate, Directive, Finalization, Signed, UpdateHeader
from protocol.spec import RunSpec
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

T = TypeVar("T")
Records = Sequence[tuple[Round, Digest]]

FINALIZATION, PENDING, DIRECTIVE, HEADER = "finalization", "pending-finalization", "directive", "update-header"
"""Names of the values in the store."""

MAX_HAVE = 256
REPLY_CERTIFICATES = MAX_CERTIFICATES // 4
REPLY_BYTES = 2 * 1024 * 1024

DECODED_AT_ONCE = 8
"""Certificates that the node itself has decoded in one turn."""

SIDE = 1024
"""Certificates of other branches that are flushed to disk if their branch wins."""

OWN_REMEMBERED = 1024
"""Messages of each kind that are remembered while the store is read: admissions come again in each record."""

MAX_WAITING = 8
"""Answers from the disk that wait at once. Each takes a second at most, and its asker waits for 15 s."""

SWEEP_EVERY = 256
"""Certificates stored between two searches for those that nobody needs."""


class ChainStore:
    """The certificates, the newest finalization and the newest directive of one run, and the chain that they form."""

    def __init__(self, store: Store, decoder: MessageDecoder, spec: RunSpec, limits: ChainLimits):
        """Load the chain from the store. Raises StoreError.

        Values that do not verify are ignored with a warning, and fetched from other peers again.
        """
        self._store = store
        self._decoder = decoder
        self._spec = spec
        self._stored = 0
        self._reading = asyncio.Lock()
        """One answer at a time is read from the disk: anybody may ask."""

        self._own_turn = asyncio.Lock()
        """One read of `certificates_after` at a time waits for `_reading`: a coordinator reads for strangers, too."""

        self._waiting = 0
        """Answers that are read from the disk, or wait for that."""

        self._side: BoundedDict[Digest, Round] = BoundedDict(SIDE)
        """Newest certificates beside the head's path, which a power cut may lose."""

        self._without_parent: set[Digest] = set()
        """Certificates on the disk that were left out of the tree: a damaged one before them may be fetched again."""

        self.chain = Chain(spec.run_id, spec.genesis.name, limits)
        self._load(self.chain)

    def _load(self, chain: Chain) -> None:
        self._restore(FINALIZATION, Finalization, chain.add_finalization)  # no ban cuts records up to it
        self._restore(DIRECTIVE, Directive, chain.add_directive)  # before the records: it excludes rolled back rounds
        loaded, left_out, why, rolled_back = 0, 0, "", 0
        decoder = self._decoder_of_own()
        for data in self._store.certificates():
            try:
                certificate = decoder.decode_certificate(data)
            except ProtocolError as e:
                left_out, why = left_out + 1, why or str(e)
                continue
            try:
                loaded += chain.add(certificate)
            except FinalizedConflict:
                rolled_back += 1
            except UnknownParent as e:
                if chain.rollback is None and not rolled_back:
                    left_out, why = left_out + 1, why or str(e)
                    self._without_parent.add(certificate.digest)
                else:
                    rolled_back += 1
            except ProtocolError as e:
                left_out, why = left_out + 1, why or str(e)
        if left_out:
            log.warning("%d stored certificates are left out, the first because %s; others have them", left_out, why)
        if rolled_back:
            log.info("%d stored certificates are of branches that cannot win any more", rolled_back)
        self._restore(PENDING, Finalization, chain.add_finalization)  # last, so that the one in force is in force again
        if loaded:
            log.info("resuming: %d records in the store, round %d", loaded, chain.height(chain.head))

    def _restore(self, name: str, kind: type[Any], add: Callable[[Signed[Any]], object]) -> None:
        """Give a stored message to the chain."""
        if (encoded := self._store.read_value(name)) is not None:
            try:
                add(self._decoder.decode(encoded, kind))
            except ProtocolError as e:
                log.warning("the stored %s is left out: %s", name, e)

    def store(self, certificate: Certificate) -> None:
        """Write a verified certificate; one on the head's path is on disk on return. Raises StoreError.

        Any admitted peer can certify any number of records all by itself. So those of other branches must cost little:
        a power cut may lose them. From time to time those that the tree has dropped are removed from the disk.
        """
        number, digest = certificate.record.body.round, certificate.digest
        chain = self.chain
        counts = digest in chain and chain.is_ancestor(digest, chain.head)
        self._store.append_certificate(encode_certificate(certificate), number, digest, durable=counts)
        if not counts:
            self._side[digest] = number
        elif self._side:  # some of another branch may lead to it
            for older in takewhile(self._side.__contains__, islice(chain.ancestors(digest), 1, None)):
                self._store.flush_certificate(self._side.pop(older), older)
        self._stored += 1
        if self._stored % SWEEP_EVERY == 0:
            # Rounds before the tree's first one were swept in their time; of those the tree knows nothing any more.
            first, newest = chain.height(chain.root), chain.height(chain.head) - 1

            def is_unwanted(at: Round, digest: Digest) -> bool:
                return digest not in chain and not (at >= newest and digest in self._without_parent)

            gone = self._store.drop_certificates(is_unwanted, first=first)
            if gone:
                log.info("%d certificates of branches that lost are removed from the store", gone)

    def store_finalization(self, finalization: Signed[Finalization], *, awaited: bool) -> None:
        """Write the newest finalization; it is on disk on return. Raises StoreError.

        One whose record is `awaited` leaves the one in force on the disk: alone, it would rule out no branch.
        """
        self._store.write_value(PENDING if awaited else FINALIZATION, finalization.encoded)

    def store_directive(self, directive: Signed[Directive]) -> None:
        """Write the newest directive; it is on disk on return. Raises StoreError."""
        self._store.write_value(DIRECTIVE, directive.encoded)

    def store_header(self, header: Signed[UpdateHeader]) -> None:
        """Write our newest header, in place of the one before; it is on disk on return. Raises StoreError."""
        self._store.write_value(HEADER, header.encoded)

    def own_header(self, me: PeerKey, unix_seconds: float) -> Signed[UpdateHeader] | None:
        """Return the header of the last `store_header`, unless its admission has ended. Raises StoreError."""
        if (encoded := self._store.read_value(HEADER)) is None:
            return None
        try:
            header = self._decoder.decode_header(encoded)
            self._decoder.decode_admission_at(header.body.admission, me, unix_seconds)
        except ProtocolError as e:
            log.info("the stored header is left out: %s", e)
            return None
        return header

    async def answer(self, request: wire.ChainRequest) -> wire.ChainReply:
        """Return the certificates that the requester is missing, from memory or, if they are older, from the disk.

        Raises ProtocolError for a malformed request, when the next certificate is missing here, and when too many ask.
        """
        if bytes(request.run) != self._spec.run_id or len(request.locator) > MAX_HAVE:
            raise MalformedError("a chain request of another run, or with too long a list")
        chain = self.chain
        have = [Digest(d) for d in islice(request.locator, MAX_HAVE)]
        if older := chain.older_records_after(have, count=REPLY_CERTIFICATES):
            found, more = await self._from_disk(older), True
            if not found:
                raise ChainError(f"the certificate of round {older[0][0]} is not here any more: others have it")
        else:
            certificates, more = chain.certificates_after(have, count=REPLY_CERTIFICATES, size=REPLY_BYTES)
            found = [encode_certificate(c) for c in certificates]
        return wire.ChainReply(
            certificates=found,
            finalization=chain.finalization.encoded if chain.finalization is not None else b"",
            more=more,
            directive=chain.newest_directive.encoded if chain.newest_directive is not None else b"",
        )

    async def _from_disk(self, older: Records) -> list[bytes]:
        if self._waiting >= MAX_WAITING:
            raise ChainError("too many ask for old certificates at once: others have them, or ask again")
        self._waiting += 1
        try:
            return await self._in_turn(self._read_answer, older)
        finally:
            self._waiting -= 1

    async def _in_turn(self, read: Callable[[Records], T], older: Records) -> T:
        """Read in a thread, one request after another. A thread does not end with its request, which then waits."""
        async with self._reading:
            reading = asyncio.ensure_future(asyncio.to_thread(read, older))
            try:
                return await asyncio.shield(reading)
            finally:
                while not reading.done():
                    with suppress(asyncio.CancelledError):  # the first is on its way, and a second one may come
                        await asyncio.wait([reading])
                if not reading.cancelled():
                    reading.exception()  # its asker may be gone

    async def certificates_after(self, record: Digest, limit: int) -> Sequence[Certificate] | None:
        """Return the certificates after a record on the head's path, oldest first, also from the disk: at most `limit`.

        There are fewer only at the head. Return None for any other record, and when one of them is missing here.
        """
        found: list[Certificate] = []
        while len(found) < limit and self.chain.is_below_root(record):
            # A few at a time, with 0.04 s of decoding each in large runs: others wait for the disk meanwhile.
            older = self.chain.older_records_after([record], count=min(DECODED_AT_ONCE, limit - len(found)))
            async with self._own_turn:
                read = await self._in_turn(self._read_decoded, older)
            if len(read) < len(older):
                return None
            found += read
            record = older[-1][1]
        if len(found) == limit:
            return found
        rest = self.chain.main_chain_after(record, limit - len(found))
        return None if rest is None else [*found, *rest]

    def _read(self, records: Records) -> Iterator[bytes]:
        """Yield these certificates from the disk, up to the first that is not what it should be."""
        for round_, digest in records:
            try:
                data = self._store.certificate(round_, digest)
                if data is None or claimed_certificate(data) != digest:
                    return
            except (StoreError, MalformedError) as e:
                log.info("the certificate of round %d is not given: %s", round_, e)
                return
            yield data

    def _read_answer(self, records: Records) -> list[bytes]:
        """Return as many of these certificates as fill an answer, at least one if the first is here."""
        found: list[bytes] = []
        size = 0
        for data in self._read(records):
            size += len(data)
            if found and size > REPLY_BYTES:
                break
            found.append(data)
        return found

    def _read_decoded(self, records: Records) -> list[Certificate]:
        decoder = self._decoder_of_own()
        return [decoder.decode_certificate(data) for data in self._read(records)]

    def _decoder_of_own(self) -> MessageDecoder:
        """Return a decoder for our own files: they have checksums, and `store` writes only what was verified."""
        return MessageDecoder(self._spec.run_id, self._spec.owner_key, remember=OWN_REMEMBERED, verifies=False)
