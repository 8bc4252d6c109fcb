"""Other peers' packets and requests: what comes in from the network, and the answers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from peer.node.chain_store import ChainStore
from peer.node.enrollment import Enrollment
from peer.node.events import MAX_EVENTS, EventQueue, MessageVerified, NodeEvents
from peer.node.network import Network
from peer.node.packet_decoder import PacketDecoder
from peer.node.slice_relay import SliceRelay
from peer.swarm import Handlers
from protocol.ids import PeerKey
from protocol.messages import Heartbeat
from protocol.rounds.events import MessageReceived
from protocol.rounds.machine import RoundMachine
from protocol.wire import swarm_pb2 as wire

YIELD_EVERY = 32
"""Messages of one packet after which other tasks have a turn: a verification takes 0.2 ms."""


KNOWN_ROOM, UNKNOWN_ROOM = MAX_EVENTS // 2, MAX_EVENTS // 16
"""Queued events above which messages are dropped: those of members, and of other senders. So our own events always
have room, and members' messages too, however much others send."""


@dataclass(frozen=True)
class RequestServer:
    """The node's answers to packets and requests from the swarm."""

    membership: Enrollment
    packets: PacketDecoder
    network: Network
    machine: RoundMachine
    certificates: ChainStore
    slice_relay: SliceRelay
    queue: EventQueue
    bus: NodeEvents

    def handlers(self) -> Handlers:
        """Return the callbacks for the swarm."""
        return Handlers(
            on_packet=self._receive,
            on_chain_request=lambda _, request: self.certificates.answer(request),
            serve_refusal=self.machine.serve_refusal,
            on_blob_requested=self.slice_relay.note_request,
            on_coordinator_address_request=self._answer_coordinator,
        )

    async def _receive(self, sender: PeerKey, packet: wire.Packet) -> None:
        """Verify the messages of a packet, and queue those that are news for the machine."""
        network, me = self.network, self.membership.identity.key
        room = KNOWN_ROOM if sender == me or network.is_known(sender) else UNKNOWN_ROOM
        for i, event in enumerate(self.packets.decode_packet(sender, packet, time.time())):
            if i % YIELD_EVERY == YIELD_EVERY - 1 or i >= len(packet.messages):  # a certificate is many signatures
                await asyncio.sleep(0)
            if isinstance(event, MessageReceived):
                message = event.message
                if message.author == me:
                    if not isinstance(message.body, Heartbeat):
                        continue  # a heartbeat goes on: if we did not send it, another machine has our key
                elif not network.is_banned(message.author):
                    self.bus.post(MessageVerified(message))
                    network.note_message(message, sender)
            if event is not None and len(self.queue) < room and self.packets.note(event):
                self.queue.post(event)

    def _answer_coordinator(self, request: wire.CoordinatorAddressRequest) -> wire.CoordinatorAddressReply:
        addresses = [*self.network.addresses, *self.network.peers.addresses()]
        return self.membership.locator.answer(request, addresses)
