"""The effects of the round machine's actions: on the network, the disk and the trainer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from peer.errors import PeerError
from peer.node.chain_store import ChainStore
from peer.node.device_work import DeviceWork
from peer.node.directive_handler import DirectiveHandler
from peer.node.end_of_run import EndOfRun
from peer.node.events import EventQueue, NodeEvents, RunOver
from peer.node.network import Network
from peer.node.outbox import NETWORK_ERRORS
from peer.node.packet_decoder import PacketDecoder
from peer.node.round_blob_fetcher import RoundBlobFetcher
from peer.node.shard_reducer import ShardReducer
from peer.node.status_reporter import store_goodbye
from peer.node.tasks import Tasks
from peer.node.trainer_client import LEVELS
from peer.node.trainer_files import store_epoch
from peer.store import Store
from protocol.ids import Digest, PeerKey
from protocol.messages import Goodbye
from protocol.rounds import actions, events

log = logging.getLogger(__name__)


@dataclass
class ActionHandler:
    """The `RoundEffects` of a node.

    The machine of a node without a trainer asks for no update and no state, and one without a reporter for no audit.
    """

    store: Store
    network: Network
    packets: PacketDecoder
    certificates: ChainStore
    updates: RoundBlobFetcher
    reducer: ShardReducer
    directives: DirectiveHandler
    work: DeviceWork
    end_of_run: EndOfRun
    queue: EventQueue
    tasks: Tasks
    bus: NodeEvents
    _completed: bool = field(default=False, init=False)

    async def carry_out(self, action: actions.Action) -> None:  # noqa: C901 (a flat choice)
        trainer, auditor = self.work.trainer, self.work.auditor
        match action:
            case actions.StoreCertificate(certificate):
                await asyncio.to_thread(self.certificates.store, certificate)
            case actions.StoreFinalization(message, awaited):
                await asyncio.to_thread(self.certificates.store_finalization, message, awaited=awaited)
            case actions.StoreDirective(message):
                await asyncio.to_thread(self.certificates.store_directive, message)
            case actions.StoreHeader(message):
                await asyncio.to_thread(self.certificates.store_header, message)
            case actions.StoreEpoch(epoch):
                await asyncio.to_thread(store_epoch, self.store, epoch)
            case actions.Broadcast(message):
                if isinstance(message.body, Goodbye):
                    await asyncio.to_thread(store_goodbye, self.store, message.body.sequence)
                self.network.broadcast(message)
            case actions.Send():
                self.network.send(action.to, action.messages, action.certificates)
            case actions.RequestChain():
                self.tasks.spawn(self._request_chain(action.to, action.have), "chain request")
            case actions.FetchBlob():
                self.updates.fetch(action.blob, (action.author, *action.holders))
            case actions.CancelFetch():
                self.updates.drop(action.blob)
            case actions.FetchShard():
                self.reducer.fetch(action.blob, action.record, action.shard, action.holders)
            case actions.ReduceShard():
                self.reducer.reduce(action.record, action.shard, action.committee)
            case actions.CancelReduce():
                self.reducer.drop(action.record)
            case actions.DirectivesChanged():
                self.directives.handle(action)
            case actions.RequestUpdate() if trainer is not None:
                trainer.request_update(action)
            case actions.ApplyRecord() | actions.SyncState() if trainer is not None:
                trainer.move(action)
            case actions.KeepState() if trainer is not None:
                trainer.keep_state(action)
            case actions.ReleaseTrainer() if trainer is not None:
                self.work.release()
            case actions.AcquireTrainer() if trainer is not None:
                self.work.acquire()
            case actions.AuditUpdate() if auditor is not None:
                auditor.audit(action)
            case actions.Notice():
                log.log(LEVELS[action.level], "%s", action.text, extra={"kind": action.kind})
            case actions.RunCompleted():
                self._complete_run(action.reason)
            case _:
                raise PeerError(f"this node cannot carry out the action {type(action).__name__}")

    async def _request_chain(self, to: PeerKey, have: tuple[Digest, ...]) -> None:
        try:
            reply = await self.network.request_chain(to, have)
            self.queue.post(await self.packets.decode_chain_reply(to, reply))
        except NETWORK_ERRORS as e:
            log.info("no chain from %s: %s", to.short, str(e) or type(e).__name__)
            self.queue.post(events.ChainUnanswered(to))

    def _complete_run(self, reason: str) -> None:
        """Stop the trainer. The node goes on serving those that do not have the last state yet."""
        trainer = self.work.trainer
        if trainer is None:
            log.info("%s", reason)
        elif not self._completed:
            self._completed = True
            self.end_of_run.complete()
            self.bus.post(RunOver(reason))
            log.warning("%s: staying until the others and the coordinator have its last state", reason)
            self.tasks.spawn(trainer.stop(), "end of training")
