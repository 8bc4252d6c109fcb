"""The chain as an auditor reads it: from members of the swarm, and what none of them has from the coordinator.

No source is trusted. Each certificate is verified: it has the votes of more than two thirds of the contributors, the
owner's admission of each, and a parent that was read before. Certificates are read as the audit needs them, so that
memory does not grow with the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

from peer.coordinator_client import CoordinatorClient
from peer.swarm.anonymous import ChainReader
from peer.swarm.errors import PeerRefused, PeerUnreachable
from protocol.bounded import BoundedDict
from protocol.chain import Chain
from protocol.errors import CairnError, ProtocolError
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import CreditRule, RoundCredits, credits_of
from protocol.message_codec import MessageDecoder
from protocol.messages import Directive, Finalization, Signed
from protocol.rounds.policy import RoundPolicy
from protocol.spec import RunSpec
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("cairn.audit")

KEPT = 4096
"""Rounds whose credits are remembered: an audit needs no older ones, unless many rounds are missing."""

SPARE = 4096
"""Certificates of a member that are read beyond as many as the log has had rounds."""

PAGE = 64
"""Certificates in one request to the coordinator."""


class AuditedChain:
    """The certificates read so far, and their credits. `ensure` reads more, `find` looks a record up."""

    def __init__(self, spec: RunSpec, asker: ChainReader | None, coordinator: CoordinatorClient):
        self._rule = CreditRule.of(spec)
        self._decoder = MessageDecoder(spec.run_id, spec.owner_key, remember=8192)
        self._chain = Chain(spec.run_id, spec.genesis.name, RoundPolicy.of(spec).chain_limits)
        self._asker = asker
        self._members = deque(() if asker is None else asker.members)
        """In the order in which they are asked: each that was asked is last then."""
        self._coordinator = coordinator
        self._credits: BoundedDict[Digest, RoundCredits] = BoundedDict(KEPT)
        self._abandoned: set[Digest] = set()
        self._read: set[Digest] = set()
        """Every record that was read as part of the chain: about 100 bytes a round."""
        self._final: Signed[Finalization] | None = None
        self._silent: set[PeerKey] = set()
        self._ended = False
        self._most = 0
        """Certificates of one member that are read: an admitted key can certify alone without end."""
        self.from_members: dict[PeerKey, int] = {}
        """Number of new certificates that each member sent."""
        self.agreed: set[PeerKey] = set()
        """Members that sent a certificate of the chain, new or not."""
        self.from_coordinator = 0
        self.epoch = 0
        """Number of rollbacks that members know of; those that only the coordinator claims do not count."""
        self.warnings: list[str] = []

    @property
    def rounds(self) -> int:
        """Rounds on the best branch that was read."""
        return self._chain.height(self._chain.head)

    @property
    def newest_final(self) -> tuple[Round, Digest] | None:
        """Round and record of the newest finalization that a member sent; None without one since the newest rollback.

        A member that was away, or a hostile one, may send a finalization from before a rollback.
        """
        if self._final is None or self._final.body.epoch < self.epoch:
            return None
        return self._final.body.round, self._final.body.record

    def find(self, record: Digest) -> RoundCredits | None:
        """Return the credits of a record; None if its certificate was not read, or is no longer remembered."""
        return self._credits.get(record)

    def is_followed(self, record: Digest) -> bool:
        """Return whether a record is on the best branch that was read."""
        return record == self._chain.genesis or self._chain.is_ancestor(record, self._chain.head)

    async def begin(self) -> None:
        """Request every member's finalization before the log is read, so that the log cannot be older.

        Certificates in the replies are accepted too. Silent members are skipped, and no error is raised.
        """
        replies = await asyncio.gather(*map(self._ask, self._members))  # in parallel: many may be gone
        for member, reply in zip(self._members, replies, strict=True):
            if reply is not None:
                self._accept(member, reply)

    async def ensure(self, record: Digest, place: int) -> bool:
        """Read on until a record is known. Return False if no source has it. `place`: in the log, from 0."""
        self._most = place + SPARE
        while record not in self._credits and not self._ended:
            if not await self._read_on():
                self._ended = True
        if record not in self._credits:
            await self._read_abandoned(record)
        return record in self._credits

    def is_abandoned(self, record: Digest) -> bool:
        """Return whether a record is known but not on the chain: such rounds count only until a rollback."""
        return record in self._abandoned

    async def _read_abandoned(self, record: Digest) -> None:
        """Read a record of an abandoned branch from the coordinator: members keep none, its observer may."""
        try:
            sent = await self._coordinator.certificate(record)
            if sent is None:
                return
            certificate = self._decoder.decode_certificate(sent)
        except CairnError as e:
            self.warnings.append(f"the coordinator gives no certificate of record {record.short}: {e}")
            return
        if certificate.digest == record:
            if record not in self._read:  # else it was read as part of the chain, and forgotten
                self._abandoned.add(record)
            self._credits[record] = credits_of(certificate, self._rule)

    def refresh(self) -> None:
        """Read on at the next `ensure`, since the chain may have grown after its end was reached."""
        self._ended = False

    async def _read_on(self) -> bool:
        """Read the next certificates from any source. Return False at the end."""
        for _ in range(len(self._members)):
            member = self._members[0]
            self._members.rotate(-1)
            if member in self._silent or self.from_members.get(member, 0) > self._most:
                continue
            reply = await self._ask(member)
            if reply is not None and self._accept(member, reply):
                return True
        return await self._from_coordinator() > 0

    async def _ask(self, member: PeerKey) -> wire.ChainReply | None:
        if self._asker is None:
            return None
        # Start before the newest record: a member that sends it again shows that it is on the same chain.
        locator = self._chain.locator()
        try:
            return await self._asker.ask(member, locator[1:] or locator)
        except PeerRefused as e:
            log.info("%s", e)  # the member has lost these certificates, but may have newer ones
        except PeerUnreachable as e:
            log.info("%s", e)
            self._silent.add(member)
        return None

    def _accept(self, member: PeerKey, reply: wire.ChainReply) -> int:
        """Verify and accept a member's reply; return the number of new certificates."""
        try:
            if reply.directive:
                word = self._decoder.decode(reply.directive, Directive)
                self._chain.add_directive(word)
                self.epoch = max(self.epoch, word.body.epoch)
            if reply.finalization:
                final = self._decoder.decode(reply.finalization, Finalization)
                if self._final is None or final.body.precedence > self._final.body.precedence:
                    self._final = final
                self._chain.add_finalization(final)
            added = self._add(reply.certificates[:256], by_member=True)
        except ProtocolError as e:
            self.warnings.append(f"member {member.short} sent something that is not of the chain: {e}")
            self._silent.add(member)
            return 0
        if reply.certificates:
            self.agreed.add(member)
        if added:
            self.from_members[member] = self.from_members.get(member, 0) + added
        return added

    async def _from_coordinator(self) -> int:
        try:
            sent, _ = await self._coordinator.certificates(self._chain.head, PAGE)
            added = self._add(sent)
        except CairnError as e:
            self.warnings.append(f"the coordinator gives no more certificates after round {self.rounds - 1}: {e}")
            return 0
        self.from_coordinator += added
        return added

    def _add(self, sent: Iterable[bytes], *, by_member: bool = False) -> int:
        added = 0
        for data in sent:
            certificate = self._decoder.decode_certificate(data)
            if by_member and (word := certificate.record.body.directive) is not None:
                self.epoch = max(self.epoch, word.body.epoch)
            if self._chain.add(certificate):
                added += 1
                self._read.add(certificate.digest)
                self._credits[certificate.digest] = credits_of(certificate, self._rule)
        return added
