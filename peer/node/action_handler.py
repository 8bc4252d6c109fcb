"""The effects of the round machine's actions: on the network, the disk and the trainer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from peer.node.chain_store import ChainStore
from peer.node.directive_handler import DirectiveHandler
from peer.node.end_of_run import EndOfRun
from peer.node.events import EventQueue, NodeEvents, RunOver
from peer.node.network import Network
from peer.node.outbox import NETWORK_ERRORS
from peer.node.packet_decoder import PacketDecoder
from peer.node.round_blob_fetcher import RoundBlobFetcher
from peer.node.shard_reducer import ShardReducer
from peer.node.tasks import Tasks
from peer.node.trainer_client import LEVELS, TrainerClient
from peer.node.trainer_files import store_epoch
from peer.node.update_auditor import UpdateAuditor
from peer.store import Store
from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate, Directive, Finalization, Signed
from protocol.rounds import actions, events

log = logging.getLogger(__name__)


@dataclass
class ActionHandler:
    """The `RoundEffects` of a node, which describes the methods.

    `trainer` is None for a node without one, whose machine asks for no update and no state. `auditor` is None where the
    machine has no reporter.
    """

    store: Store
    network: Network
    packets: PacketDecoder
    certificates: ChainStore
    updates: RoundBlobFetcher
    reducer: ShardReducer
    directives: DirectiveHandler
    trainer: TrainerClient | None
    auditor: UpdateAuditor | None
    end_of_run: EndOfRun
    queue: EventQueue
    tasks: Tasks
    bus: NodeEvents
    _completed: bool = field(default=False, init=False)

    def broadcast(self, message: Signed) -> None:
        self.network.broadcast(message)

    def send(self, action: actions.Send) -> None:
        self.network.send(action.to, action.messages, action.certificates)

    def request_update(self, action: actions.RequestUpdate) -> None:
        assert self.trainer is not None
        self.trainer.request_update(action)

    def fetch_blob(self, action: actions.FetchBlob) -> None:
        self.updates.fetch(action.blob, action.size, (action.author, *action.holders))

    def cancel_fetch(self, action: actions.CancelFetch) -> None:
        self.updates.drop(action.blob)

    def fetch_shard(self, action: actions.FetchShard) -> None:
        self.reducer.fetch(action.blob, action.record, action.shard, action.holders)

    def reduce_shard(self, action: actions.ReduceShard) -> None:
        self.reducer.reduce(action.record, action.shard, action.committee)

    def cancel_reduce(self, action: actions.CancelReduce) -> None:
        self.reducer.drop(action.record)

    def request_chain(self, action: actions.RequestChain) -> None:
        self.tasks.spawn(self._request_chain(action.to, action.have), "chain request")

    async def _request_chain(self, to: PeerKey, have: tuple[Digest, ...]) -> None:
        try:
            reply = await self.network.request_chain(to, have)
            self.queue.post(await self.packets.decode_chain_reply(to, reply))
        except NETWORK_ERRORS as e:
            log.info("no chain from %s: %s", to.short, str(e) or type(e).__name__)
            self.queue.post(events.ChainUnanswered(to))

    async def store_certificate(self, certificate: Certificate) -> None:
        await asyncio.to_thread(self.certificates.store, certificate)

    async def store_finalization(self, finalization: Signed[Finalization]) -> None:
        await asyncio.to_thread(self.certificates.store_finalization, finalization)

    async def store_directive(self, directive: Signed[Directive]) -> None:
        await asyncio.to_thread(self.certificates.store_directive, directive)

    async def store_epoch(self, epoch: int) -> None:
        await asyncio.to_thread(store_epoch, self.store, epoch)

    def move(self, action: actions.ApplyRecord | actions.SyncState) -> None:
        assert self.trainer is not None
        self.trainer.move(action)

    def keep_state(self, action: actions.KeepState) -> None:
        assert self.trainer is not None
        self.trainer.keep_state(action)

    def release_trainer(self) -> None:
        assert self.trainer is not None
        self.trainer.release(*([] if self.auditor is None else [self.auditor.release()]))

    def acquire_trainer(self) -> None:
        assert self.trainer is not None
        if self.auditor is not None:
            self.auditor.resume()
        self.trainer.acquire()

    def audit_update(self, action: actions.AuditUpdate) -> None:
        assert self.auditor is not None
        self.auditor.audit(action)

    def on_directives_changed(self, action: actions.DirectivesChanged) -> None:
        self.directives.handle(action)

    def notify(self, action: actions.Notice) -> None:
        log.log(LEVELS[action.level], "%s", action.text, extra={"kind": action.kind})

    def on_run_completed(self, action: actions.RunCompleted) -> None:
        """Stop the trainer: the run is over. The node goes on serving those that do not have the last state yet."""
        if self.trainer is None:
            log.info("%s", action.reason)
        elif not self._completed:
            self._completed = True
            self.end_of_run.complete()
            self.bus.post(RunOver(action.reason))
            log.warning("%s: staying until the others and the coordinator have its last state", action.reason)
            self.tasks.spawn(self.trainer.stop(), "end of training")
