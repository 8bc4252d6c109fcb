"""The chain as an auditor reads it: from members of the swarm, and from the coordinator only what they no longer keep.

What a member says is believed no more than what anybody says: each certificate is verified, with the votes of more than
two thirds of those whose updates it lists and the owner's admission of each, and must fit where it stands. Certificates
are read as the audit needs them, so that memory does not grow with the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable

from peer.log_client import LogClient
from peer.swarm.anonymous import ChainReader
from peer.swarm.errors import PeerRefused, PeerUnreachable
from protocol.chain import Chain
from protocol.errors import CairnError, ProtocolError
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import CreditRule, RoundAccount, account_for
from protocol.message_codec import MessageDecoder
from protocol.messages import Directive, Finalization, Signed
from protocol.rounds.policy import Policy
from protocol.spec import RunSpec
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("cairn.audit")

KEPT = 4096
"""Rounds whose certificates' sums are remembered: an audit looks back no further, unless many rounds are missing."""

PAGE = 64


class AuditedChain:
    """`ensure(record)` reads on until the record is known or nobody has more; then `find` knows it."""

    def __init__(self, spec: RunSpec, asker: ChainReader | None, coordinator: LogClient):
        self._run = spec.run_id
        self._rule = CreditRule.of(spec)
        self._decoder = MessageDecoder(spec.run_id, spec.owner_key, remember=8192)
        self._chain = Chain(spec.run_id, spec.genesis.name, Policy.of(spec).chain_limits)
        self._asker = asker
        self._coordinator = coordinator
        self._accounts: OrderedDict[Digest, RoundAccount] = OrderedDict()
        self._left: set[Digest] = set()
        self._read: set[Digest] = set()
        """Every record that was read in its place: about 100 bytes a round."""
        self._final: Signed[Finalization] | None = None
        self._silent: set[PeerKey] = set()
        self._ended = False
        self.from_members: dict[PeerKey, int] = {}
        """How many certificates each member gave that nobody had given before."""
        self.agreed: set[PeerKey] = set()
        """Members that gave a certificate of the chain that was read, whoever gave it first."""
        self.from_coordinator = 0
        self.epoch = 0
        """Rollbacks that members know of: what the coordinator alone tells does not count."""
        self.warnings: list[str] = []

    @property
    def rounds(self) -> int:
        """Rounds on the heaviest chain that was read."""
        return self._chain.height(self._chain.head)

    @property
    def newest_final(self) -> tuple[Round, Digest] | None:
        """The newest final that a member gave, the owner's signed word; none from before the newest rollback, of which
        a member that was away, or that wants to harm, may still tell."""
        if self._final is None or self._final.body.epoch < self.epoch:
            return None
        return self._final.body.round, self._final.body.record

    def find(self, record: Digest) -> RoundAccount | None:
        """What a record earns whom; None when its certificate was not read (or long ago)."""
        return self._accounts.get(record)

    def is_followed(self, record: Digest) -> bool:
        """Whether the heaviest chain that was read leads on from a record."""
        return record == self._chain.genesis or self._chain.is_ancestor(record, self._chain.head)

    async def begin(self) -> None:
        """Ask every member for its final, once: before the log is read, so that the log cannot be behind it.

        What they give on the way is taken, too. Raises CairnError for nothing: who is silent is passed over.
        """
        if self._asker is None:
            return
        asked = [self._ask(self._asker, member) for member in self._asker.members]  # at once: many may be gone
        for member, reply in zip(self._asker.members, await asyncio.gather(*asked), strict=True):
            if reply is not None:
                self._take(member, reply)

    async def ensure(self, record: Digest) -> bool:
        """Read on until a record is known. False when nobody gives it."""
        while record not in self._accounts and not self._ended:
            if not await self._read_on():
                self._ended = True
        if record not in self._accounts:
            await self._from_left(record)
        return record in self._accounts

    def is_left(self, record: Digest) -> bool:
        """Whether a record is known, but not of the chain that was read: such rounds count only until a rollback."""
        return record in self._left

    async def _from_left(self, record: Digest) -> None:
        """A record of a branch that was left: members keep none of it, the coordinator's observer may."""
        try:
            sent = await self._coordinator.certificate(record)
            if sent is None:
                return
            certificate = self._decoder.certificate(sent)
        except CairnError as e:
            self.warnings.append(f"the coordinator gives no certificate of record {record.short}: {e}")
            return
        if certificate.digest == record:
            if record not in self._read:  # else it was read, and forgotten since
                self._left.add(record)
            self._accounts[record] = account_for(certificate, self._rule)

    def look_again(self) -> None:
        """The chain may have grown since its end was reached."""
        self._ended = False

    async def _read_on(self) -> bool:
        """The next certificates, from whoever gives some. False at the end."""
        if self._asker is not None:
            for member in self._asker.members:
                if member not in self._silent and await self._from_member(member):
                    return True
        return await self._from_coordinator() > 0

    async def _from_member(self, member: PeerKey) -> int:
        """How many certificates it gave that were new."""
        if self._asker is None or (reply := await self._ask(self._asker, member)) is None:
            return 0
        return self._take(member, reply)

    async def _ask(self, asker: ChainReader, member: PeerKey) -> wire.ChainReply | None:
        # Not from the newest: that it gives the newest again shows that it is on the same chain.
        locator = self._chain.locator()
        try:
            return await asker.ask(member, locator[1:] or locator)
        except PeerRefused as e:
            log.info("%s", e)  # it keeps nothing that old: later perhaps
        except PeerUnreachable as e:
            log.info("%s", e)
            self._silent.add(member)
        return None

    def _take(self, member: PeerKey, reply: wire.ChainReply) -> int:
        """What a member said, verified; how many certificates were new."""
        try:
            if reply.directive:
                word = self._decoder.open(reply.directive, Directive)
                self._chain.take(word)
                self.epoch = max(self.epoch, word.body.epoch)
            if reply.final:
                final = self._decoder.open(reply.final, Finalization)
                known = None if self._final is None else (self._final.body.epoch, self._final.body.round)
                if known is None or (final.body.epoch, final.body.round) > known:
                    self._final = final
                self._chain.add_final(final)
            added = self._add(reply.certificates[:256], by_member=True)
        except ProtocolError as e:
            self.warnings.append(f"member {member.short} gave what is no part of the chain: {e}")
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
            certificate = self._decoder.certificate(data)
            if by_member and (word := certificate.record.body.directive) is not None:
                self.epoch = max(self.epoch, word.body.epoch)
            if self._chain.add(certificate):
                added += 1
                self._read.add(certificate.digest)
                self._accounts[certificate.digest] = account_for(certificate, self._rule)
        while len(self._accounts) > KEPT:
            self._accounts.popitem(last=False)
        return added
