"""The chain between disk and memory: loads what the store kept, answers those who lack some of it."""

from __future__ import annotations

import logging
from itertools import islice

from peer.store import Store
from protocol.chain import Chain, ChainLimits, UnknownParent
from protocol.errors import ChainError, FinalizedConflict, MalformedError, ProtocolError
from protocol.ids import Digest
from protocol.message_codec import MessageDecoder, encode_certificate
from protocol.messages import Certificate, Directive, Finalization, Signed
from protocol.spec import RunSpec
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("peer.chain")

FINAL, DIRECTIVE = "final", "directive"
MAX_HAVE = 256
REPLY_CERTIFICATES = 64
REPLY_BYTES = 2 * 1024 * 1024

SWEEP_EVERY = 256
"""Certificates kept between two looks for those that nobody needs."""


class ChainLog:
    """`load` first; then certificates and finals are kept as the machine orders it."""

    def __init__(self, store: Store, decoder: MessageDecoder, spec: RunSpec):
        self._store = store
        self._decoder = decoder
        self._spec = spec
        self._kept = 0
        self.chain: Chain | None = None

    def load(self, limits: ChainLimits) -> Chain:
        """The chain of the store; what does not verify is left out, with a warning, and comes from others again."""
        chain = self.chain = Chain(self._spec.run_id, self._spec.genesis.name, limits)
        if (sent := self._store.read_value(DIRECTIVE)) is not None:
            try:
                chain.add_directive(
                    self._decoder.decode(sent, Directive)
                )  # first: rounds that were rolled back are left out
            except ProtocolError as e:
                log.warning("the stored directive is left out: %s", e)
        loaded, left_out, why, back = 0, 0, "", 0
        for data in self._store.certificates():
            try:
                loaded += chain.add(self._decoder.decode_certificate(data))
            except FinalizedConflict:
                back += 1
            except UnknownParent as e:
                if chain.rollback is None:
                    left_out, why = left_out + 1, why or str(e)
                back += chain.rollback is not None
            except ProtocolError as e:
                left_out, why = left_out + 1, why or str(e)
        if left_out:
            log.warning("%d stored certificates are left out, the first because %s; others have them", left_out, why)
        if back:
            log.info("%d stored certificates are of branches that cannot win any more", back)
        if (sent := self._store.read_value(FINAL)) is not None:
            try:
                chain.add_finalization(self._decoder.decode(sent, Finalization))
            except ProtocolError as e:
                log.warning("the stored final is left out: %s", e)
        if loaded:
            log.info("resuming: %d records in the store, round %d", loaded, chain.height(chain.head))
        return chain

    def keep(self, certificate: Certificate) -> None:
        """On disk when it returns. Now and then what the tree has dropped is removed from the disk too: anybody who was
        admitted can certify records with itself alone, as many as it likes."""
        number = certificate.record.body.round
        self._store.append_certificate(encode_certificate(certificate), number, certificate.digest)
        self._kept += 1
        chain = self.chain
        if self._kept % SWEEP_EVERY == 0 and chain is not None:
            # Of rounds before the tree's first nothing is known any more, but that they were swept in their time.
            first = chain.height(chain.root)
            gone = self._store.drop_certificates(lambda round, digest: round >= first and digest not in chain)
            if gone:
                log.info("%d certificates of branches that lost are removed from the store", gone)

    def keep_final(self, final: Signed[Finalization]) -> None:
        """On disk when it returns."""
        self._store.write_value(FINAL, final.encoded)

    def keep_directive(self, word: Signed[Directive]) -> None:
        """On disk when it returns."""
        self._store.write_value(DIRECTIVE, word.encoded)

    def after(self, record: Digest, limit: int) -> tuple[Certificate, ...] | None:
        """What follows a record on the way to the head, oldest first, at most `limit`; None when it is not on it."""
        chain = self.chain
        if chain is None or record not in chain or chain.main_chain_at(chain.height(record)) != record:
            return None
        stop = chain.main_chain_at(min(chain.height(chain.head), chain.height(record) + limit))
        return chain.path(record, chain.head if stop is None else stop)

    def answer(self, request: wire.ChainRequest) -> wire.ChainReply:
        """What the asker lacks, as far as memory goes. Raises ProtocolError for a request that is none."""
        if bytes(request.run) != self._spec.run_id or len(request.have) > MAX_HAVE:
            raise MalformedError("a chain request of another run, or with too long a list")
        chain = self.chain
        if chain is None:
            raise ChainError("the chain is not loaded yet")
        have = [Digest(d) for d in islice(request.have, MAX_HAVE)]
        try:
            certificates, more = chain.certificates_after(have, count=REPLY_CERTIFICATES, size=REPLY_BYTES)
        except UnknownParent as e:
            raise ChainError(str(e)) from None
        return wire.ChainReply(
            certificates=[encode_certificate(c) for c in certificates],
            final=chain.finalization.encoded if chain.finalization is not None else b"",
            more=more,
            directive=chain.newest_directive.encoded if chain.newest_directive is not None else b"",
        )
