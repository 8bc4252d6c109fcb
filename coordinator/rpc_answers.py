"""The answers of the gRPC calls, from what the coordinator knows."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.admission import Admitter
from coordinator.control import RunControl
from coordinator.credits.log import CreditLog
from coordinator.history import charts
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger_thread import LedgerThread
from coordinator.overview import Overview, PeerOverview
from coordinator.swarm import SwarmView
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import Balance
from protocol.message_codec import MAX_ADDRESSES
from protocol.spec import RunSpec
from protocol.wire import coordinator_pb2 as wire

MAX_STATUS_PEERS = 1000
MAX_ABSENT = 8
MAX_LOSSES = 120
MAX_ENTRIES = 50


class RpcAnswers:
    """Answers the calls of `rpc.CoordinatorService`. Every method may raise CairnError."""

    def __init__(
        self, spec: RunSpec, spec_envelope: bytes, *, view: SwarmView, chain: IndexedChain, ledger: LedgerThread,
        admitter: Admitter, control: RunControl, credits: CreditLog, overview: Callable[[], Overview],
        page_url: Callable[[], str], now: Callable[[], float],
    ):  # fmt: skip
        self.run = spec.run_id
        self.credits = credits
        self._spec = spec
        self._spec_envelope = spec_envelope
        self._view = view
        self._chain = chain
        self._ledger = ledger
        self._admitter = admitter
        self._control = control
        self._overview = overview
        self._page_url = page_url
        self._now = now
        self._status: tuple[Overview, wire.StatusReply] | None = None
        self._thinned: tuple[tuple[Round, Digest] | None, list[float]] | None = None

    async def run_reply(self) -> wire.GetRunReply:
        """Return the spec, and where the swarm and the page are."""
        return wire.GetRunReply(spec=self._spec_envelope, addresses=self._addresses(), page=self._page_url())

    async def admit_reply(self, encoded: bytes) -> wire.AdmitReply:
        """Admit the peer that signed this request (an envelope)."""
        admission = await self._admitter.admit(encoded)
        return wire.AdmitReply(admission=admission.encoded, time=int(self._now()), addresses=self._addresses())

    def _addresses(self) -> list[str]:
        return list(self._view.addresses())[:MAX_ADDRESSES]

    async def status_reply(self) -> wire.StatusReply:
        """Return the swarm as it is now."""
        o = self._overview()
        if self._status is not None and self._status[0] is o:
            return self._status[1]  # hundreds of kilobytes: made once for each overview
        checkpoint = self._newest_checkpoint()
        reply = wire.StatusReply(
            name=o.name, health=o.health, message=o.message, round=o.round, head=o.head, state=o.state,
            state_round=o.state_round, tokens=o.tokens, total_tokens=o.total_tokens,
            tokens_per_second=o.tokens_per_second, loss=o.loss or 0.0, page=self._page_url(),
            peers=[_peer_status(p) for p in o.peers[:MAX_STATUS_PEERS]],
        )  # fmt: skip
        if o.final_round is not None:
            reply.final_round = o.final_round
        if checkpoint is not None:
            reply.checkpoint, reply.checkpoint_round = checkpoint
        for r in o.rounds:
            absent = r.absent or ()
            reply.rounds.add(
                round=r.round, tokens=r.tokens, loss=r.loss, contributors=len(r.contributors),
                absent=absent[:MAX_ABSENT], absent_total=len(absent), final=r.final,
            )  # fmt: skip
        reply.losses.extend(self._losses())
        for a in o.alerts:
            reply.alerts.add(name=a.name, since=int(a.since), message=a.message)
        self._status = (o, reply)
        return reply

    def _losses(self) -> list[float]:
        """Return the losses of the whole run, thinned; made once a round."""
        head = self._chain.head
        if self._thinned is None or self._thinned[0] != head:
            self._thinned = (head, charts(self._chain.points(), MAX_LOSSES).loss)
        return self._thinned[1]

    def _newest_checkpoint(self) -> tuple[Digest, int] | None:
        """Return the newest state that is a checkpoint and in the observer's store."""
        chain = self._chain
        for account in chain.newest(len(chain.open) + len(chain.recent)):
            if account.round % self._spec.checkpoint.every == 0 and self._view.has_blob(account.base_state):
                return account.base_state, account.round
        genesis = self._spec.genesis.name
        return (genesis, 0) if self._view.has_blob(genesis) else None

    async def directive_reply(self, encoded: bytes) -> wire.DirectiveReply:
        """Accept a directive (an envelope; b"": none), and return the newest with how far it has spread."""
        if encoded:
            await self._control.accept(encoded)
        newest, o = self._control.newest, self._overview()
        beats = [p.heartbeat for p in o.peers if p.heartbeat is not None and p.phase not in ("silent", "gone")]
        informed = sum(newest is not None and b.directive_sequence == newest.body.sequence for b in beats)
        return wire.DirectiveReply(
            directive=newest.encoded if newest is not None else b"", round=o.round, peers=len(beats), informed=informed
        )

    async def account_reply(self, peer: PeerKey) -> wire.AccountReply:
        """Return what a peer has earned; all zero for one that is unknown."""
        chain = self._chain
        newest = [
            wire.AccountEntry(
                round=a.round, record=a.record, tokens=e.tokens, micro_credits=e.micro_credits, settled=False
            )
            for a in reversed(chain.open)
            for e in a.lines
            if e.peer == peer
        ]
        settled, pending, posted = chain.settled.get(peer, Balance()), chain.pending.get(peer, Balance()), chain.posted
        entries = await self._ledger.read(lambda ledger: ledger.history_of(peer, limit=MAX_ENTRIES))
        newest += [
            wire.AccountEntry(
                round=e.round, record=e.record, tokens=e.tokens, micro_credits=e.micro_credits,
                settled=e.status == "settled",
            )
            for e in entries
            # A round that was posted since the balances above were read comes the next time. Voided ones earned
            # nothing.
            if posted is not None and e.round <= posted[0] and e.status != "voided"
        ]  # fmt: skip
        return wire.AccountReply(
            name=self._admitter.name_of(peer),
            micro_credits_settled=settled.micro_credits,
            micro_credits_pending=pending.micro_credits,
            tokens=settled.tokens + pending.tokens,
            rounds=settled.rounds + pending.rounds,
            newest=newest[:MAX_ENTRIES],
        )


def _peer_status(p: PeerOverview) -> wire.PeerStatus:
    status = wire.PeerStatus(
        peer=p.peer, name=p.name, phase=p.phase, micro_credits_settled=p.settled, micro_credits_pending=p.pending,
        seconds_since_heartbeat=p.seconds_since,
    )  # fmt: skip
    if (h := p.heartbeat) is not None:
        status.round, status.loss, status.tokens_per_second = h.round, h.loss, h.tokens_per_second
        status.bytes_up, status.bytes_down, status.head, status.device = h.bytes_up, h.bytes_down, h.head, h.device
    return status
