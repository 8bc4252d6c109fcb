"""The effects of the round machine's actions: on the network, the disk and the trainer."""

from __future__ import annotations

import asyncio
import logging

from peer.errors import PeerError
from peer.node.certificate_store import CertificateStore
from peer.node.directive_handler import DirectiveHandler
from peer.node.events import EventQueue, NodeEvents, RunOver
from peer.node.inbox import Inbox
from peer.node.network import Network
from peer.node.outbox import NETWORK_ERRORS
from peer.node.shard_reducer import ShardReducer
from peer.node.tasks import Tasks
from peer.node.trainer_client import LEVELS, TrainerClient
from peer.node.trainer_epoch import store_epoch
from peer.node.update_fetcher import UpdateFetcher
from peer.store import Store
from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate, Directive, Finalization, Signed
from protocol.rounds import actions, events

log = logging.getLogger("peer.node")


class ActionHandler:
    """The `RoundEffects` of a node. `trainer` is None for an observer."""

    def __init__(
        self,
        store: Store,
        network: Network,
        inbox: Inbox,
        certificates: CertificateStore,
        updates: UpdateFetcher,
        reducer: ShardReducer,
        directives: DirectiveHandler,
        trainer: TrainerClient | None,
        queue: EventQueue,
        tasks: Tasks,
        observers: NodeEvents,
    ):
        self._store = store
        self._network = network
        self._inbox = inbox
        self._certificates = certificates
        self._updates = updates
        self._reducer = reducer
        self._directives = directives
        self._trainer = trainer
        self._queue = queue
        self._tasks = tasks
        self._observers = observers
        self._completed = False

    def broadcast(self, message: Signed) -> None:
        """Send a message to all peers."""
        self._network.broadcast(message)

    def send(self, action: actions.Send) -> None:
        """Send messages and certificates to one peer."""
        self._network.send(action.to, action.messages, action.certificates)

    def request_update(self, action: actions.RequestUpdate) -> None:
        """Have the trainer make an update."""
        self._required_trainer.request_update(action)

    def fetch_blob(self, action: actions.FetchBlob) -> None:
        """Fetch an update's blob, from its author first."""
        self._updates.fetch(action.blob, action.size, (action.author, *action.holders))

    def drop_blob(self, action: actions.DropBlob) -> None:
        """Stop to fetch a blob."""
        self._updates.drop(action.blob)

    def fetch_shard(self, action: actions.FetchShard) -> None:
        """Fetch a reduced shard."""
        self._reducer.fetch(action.blob, action.record, action.shard, action.holders)

    def reduce_shard(self, action: actions.ReduceShard) -> None:
        """Make a reduced shard."""
        self._reducer.reduce(action.record, action.shard, action.committee)

    def cancel_reduce(self, action: actions.CancelReduce) -> None:
        """Stop the work on a record's shards."""
        self._reducer.drop(action.record)

    def request_chain(self, action: actions.RequestChain) -> None:
        """Request certificates of a peer; the answer is queued as an event."""
        self._tasks.spawn(self._request_chain(action.to, action.have), "chain request")

    async def _request_chain(self, to: PeerKey, have: tuple[Digest, ...]) -> None:
        try:
            reply = await self._network.request_chain(to, have)
            self._queue.post(await self._inbox.chain(to, reply))
        except NETWORK_ERRORS as e:
            log.info("no chain from %s: %s", to.short, str(e) or type(e).__name__)
            self._queue.post(events.ChainUnanswered(to))

    async def store_certificate(self, certificate: Certificate) -> None:
        """Store a certificate. Raise StoreError."""
        await asyncio.to_thread(self._certificates.store, certificate)

    async def store_finalization(self, finalization: Signed[Finalization]) -> None:
        """Store the newest finalization. Raise StoreError."""
        await asyncio.to_thread(self._certificates.store_finalization, finalization)

    async def store_directive(self, directive: Signed[Directive]) -> None:
        """Store the newest directive. Raise StoreError."""
        await asyncio.to_thread(self._certificates.store_directive, directive)

    async def store_epoch(self, epoch: int) -> None:
        """Store the epoch of what the trainer saves from now on. Raise StoreError."""
        await asyncio.to_thread(store_epoch, self._store, epoch)

    def move(self, action: actions.ApplyRecord | actions.Resync) -> None:
        """Move the trainer to another state."""
        self._required_trainer.move(action)

    def directives_changed(self, action: actions.DirectivesChanged) -> None:
        """Follow the directives in force."""
        self._directives.handle(action)

    def notify(self, action: actions.Notice) -> None:
        """Write a notice of the machine to the log."""
        log.log(LEVELS[action.level], "%s", action.text)

    def run_completed(self, action: actions.RunCompleted) -> None:
        """Stop the trainer: the run is over. The node goes on serving those that do not have the last state yet."""
        if self._trainer is None:
            log.info("%s", action.reason)
        elif not self._completed:
            self._completed = True
            self._observers.post(RunOver(action.reason))
            log.warning("%s: staying until the others have its last state", action.reason)
            self._tasks.spawn(self._stop_trainer(self._trainer), "end of training")

    async def _stop_trainer(self, trainer: TrainerClient) -> None:
        await trainer.stop()

    @property
    def _required_trainer(self) -> TrainerClient:
        if self._trainer is None:
            raise PeerError("an observer was asked to train, or to hold a state")
        return self._trainer
