"""Client of a coordinator's credits: the log, its proofs, receipts, balances.

Signatures are verified here. All other checks of an answer are in `protocol.ledger`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peer.coordinator_client import CoordinatorClient
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.ledger.statements import Receipt, TreeHead, Word, open_receipt, open_tree_head
from protocol.proofs import MAX_PROOF
from protocol.wire import coordinator_pb2 as wire

MAX_TEXT = 80
STATUSES = ("pending", "settled", "voided", "not accepted")


@dataclass(frozen=True, slots=True)
class Receipted:
    """A verified receipt, and its status as the coordinator gives it."""

    word: Word[Receipt]
    status: str


@dataclass(frozen=True, slots=True)
class CreditTotals:
    """Totals of a peer or an account, as the coordinator gives them: `cairn audit ledger` recomputes them.

    Amounts are micro-credits; `recent` is the decaying average of a day.
    """

    key: PeerKey
    kind: str
    name: str
    team: str
    account: PeerKey | None
    settled: int
    pending: int
    voided: int
    recent: int
    tokens: int
    rounds: int
    peers: tuple[PeerKey, ...]
    rounds_in_all: int


@dataclass(frozen=True, slots=True)
class LinesOf:
    """The lines of a round entry, as they were written."""

    entry: int
    lines: tuple[bytes, ...]


class LogClient:
    """One coordinator's log of credits. Every method raises CairnError."""

    def __init__(self, client: CoordinatorClient, owner: PeerKey):
        self._client = client
        self._run = client.run
        self._owner = owner

    async def heads(self, before: int = 0, limit: int = 1) -> list[Word[TreeHead]]:
        """Return tree heads signed by the owner, newest first; those smaller than `before`, unless that is 0."""
        return [open_tree_head(sent, self._run, self._owner) for sent in await self.heads_sent(before, limit)]

    async def heads_sent(self, before: int = 0, limit: int = 1) -> list[bytes]:
        """Return tree heads unverified: an auditor names the invalid ones."""
        request = wire.TreeHeadRequest(run=self._run, before=before, limit=limit)
        reply: wire.TreeHeadReply = await self._client.call(lambda stub, t: stub.TreeHead(request, timeout=t))
        return list(reply.heads[:limit])

    async def entries(self, first: int, limit: int) -> tuple[list[bytes], int]:
        """Return the entries of the log from `first` on, and the size of the log."""
        request = wire.EntriesRequest(run=self._run, first=first, limit=limit)
        reply: wire.EntriesReply = await self._client.call(lambda stub, t: stub.Entries(request, timeout=t))
        return list(reply.entries[:limit]), reply.size

    async def lines(self, first: int, limit: int) -> tuple[list[LinesOf], int]:
        """Return the lines of round entries from `first` on, in order, and the entry to go on from."""
        request = wire.LinesRequest(run=self._run, first=first, limit=limit)
        reply: wire.LinesReply = await self._client.call(lambda stub, t: stub.Lines(request, timeout=t))
        return [LinesOf(g.entry, tuple(g.lines)) for g in reply.entries], min(reply.next, first + limit)

    async def inclusion(self, entry: int, size: int) -> tuple[bytes, ...]:
        """Return a proof for `proofs.check_inclusion`."""
        request = wire.InclusionRequest(run=self._run, entry=entry, size=size)
        return _hashes(await self._client.call(lambda stub, t: stub.Inclusion(request, timeout=t)))

    async def consistency(self, first: int, second: int) -> tuple[bytes, ...]:
        """Return a proof for `proofs.check_consistency`."""
        request = wire.ConsistencyRequest(run=self._run, first=first, second=second)
        return _hashes(await self._client.call(lambda stub, t: stub.Consistency(request, timeout=t)))

    async def receipts(self, peer: PeerKey, before: int = 0, limit: int = 50) -> tuple[list[Receipted], int | None]:
        """Return a peer's receipts, newest first, and `before` of the next page."""
        request = wire.ReceiptsRequest(run=self._run, peer=peer, before=before, limit=limit)
        reply: wire.ReceiptsReply = await self._client.call(lambda stub, t: stub.Receipts(request, timeout=t))
        found = []
        for item in reply.receipts[:limit]:
            word = open_receipt(item.receipt, self._run, self._owner)
            if word.body.peer != peer:
                raise MalformedError(f"the coordinator gave a receipt of {word.body.peer.short}, not of {peer.short}")
            found.append(Receipted(word, item.status if item.status in STATUSES else "unknown"))
        return found, reply.next or None

    async def standing(self, key: PeerKey) -> CreditTotals:
        """Return the totals of a peer or an account; all zero for an unknown key."""
        request = wire.StandingRequest(run=self._run, key=key)
        m: wire.StandingReply = await self._client.call(lambda stub, t: stub.Standing(request, timeout=t))
        return CreditTotals(
            key, _text(m.kind), _text(m.name), _text(m.team), PeerKey(m.account) if m.account else None,
            m.micro_credits_settled, m.micro_credits_pending, m.micro_credits_voided, m.recent, m.tokens, m.rounds,
            tuple(PeerKey(p) for p in m.peers), m.rounds_in_all,
        )  # fmt: skip

    async def bind(self, binding: bytes) -> int:
        """Hand in a signed binding; return the number of the account's peers after it."""
        request = wire.BindRequest(run=self._run, binding=binding)
        reply: wire.BindReply = await self._client.call(lambda stub, t: stub.Bind(request, timeout=t))
        return reply.peers

    async def certificates(self, after: Digest, limit: int) -> tuple[Sequence[bytes], bool]:
        """Return certificates that follow a record, unverified, and whether there are more."""
        request = wire.CertificatesRequest(run=self._run, after=after, limit=limit)
        reply: wire.CertificatesReply = await self._client.call(lambda stub, t: stub.Certificates(request, timeout=t))
        return list(reply.certificates), reply.more

    async def certificate(self, record: Digest) -> bytes | None:
        """Return the certificate of one record of any branch, unverified; None when it is not kept."""
        request = wire.CertificatesRequest(run=self._run, record=record)
        reply: wire.CertificatesReply = await self._client.call(lambda stub, t: stub.Certificates(request, timeout=t))
        return reply.certificates[0] if reply.certificates else None


def _hashes(reply: wire.ProofReply) -> tuple[bytes, ...]:
    if len(reply.hashes) > MAX_PROOF:
        raise MalformedError(f"a proof of {len(reply.hashes)} hashes: at most {MAX_PROOF} are accepted")
    return tuple(reply.hashes)


def _text(text: str) -> str:
    """Return text that a terminal may show."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT])
