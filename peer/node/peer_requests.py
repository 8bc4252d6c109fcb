"""Other peers' packets and requests: what comes in from the network, and the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from peer.node.certificate_store import CertificateStore
from peer.node.coordinator_discovery import CoordinatorLocator
from peer.node.events import MAX_EVENTS, EventQueue, MessageVerified, NodeEvents
from peer.node.inbox import Inbox
from peer.node.network import Network
from peer.node.slice_relay import SliceRelay
from peer.swarm import Handlers
from protocol.ids import PeerKey
from protocol.rounds.events import MessageReceived
from protocol.rounds.machine import RoundMachine
from protocol.wire import swarm_pb2 as wire

YIELD_EVERY = 32
"""Messages of one packet after which other tasks have a turn: a verification takes 0.2 ms."""


class PeerRequests:
    """The handlers of the swarm. `is_banned` says whether the run's owner has banned a peer."""

    def __init__(
        self,
        me: PeerKey,
        inbox: Inbox,
        network: Network,
        machine: RoundMachine,
        certificates: CertificateStore,
        locator: CoordinatorLocator,
        relay: SliceRelay,
        queue: EventQueue,
        observers: NodeEvents,
        is_banned: Callable[[PeerKey], bool],
    ):
        self._me = me
        self._inbox = inbox
        self._network = network
        self._machine = machine
        self._certificates = certificates
        self._locator = locator
        self._relay = relay
        self._queue = queue
        self._observers = observers
        self._is_banned = is_banned

    def handlers(self) -> Handlers:
        """Return the handlers for `Network.start`."""
        return Handlers(
            on_packet=self.receive,
            on_chain_request=self._answer_chain,
            may_serve=self._machine.may_serve,
            on_blob_requested=self._relay.note_request,
            on_coordinator_address=self._answer_coordinator,
        )

    async def receive(self, sender: PeerKey, packet: wire.Packet) -> None:
        """Verify the messages of a packet, and queue those that are news for the machine."""
        # Our own events always have room, and so have members' messages, whatever strangers send.
        room = MAX_EVENTS // (2 if sender == self._me or self._network.is_known(sender) else 16)
        for i, event in enumerate(self._inbox.packet(sender, packet, time.time())):
            if i % YIELD_EVERY == YIELD_EVERY - 1:
                await asyncio.sleep(0)
            if isinstance(event, MessageReceived):
                message = event.message
                if message.author == self._me:
                    continue
                if not self._is_banned(message.author):
                    self._observers.post(MessageVerified(message))
                    self._network.observe(message, sender)
            if event is not None and len(self._queue) < room and not self._inbox.is_repeat(event):
                self._queue.post(event)

    async def _answer_chain(self, sender: PeerKey, request: wire.ChainRequest) -> wire.ChainReply:
        return self._certificates.answer(request)

    def _answer_coordinator(self, request: wire.CoordinatorAddressRequest) -> wire.CoordinatorAddressReply:
        return self._locator.answer(request, [*self._network.addresses, *self._network.peers.addresses()])
