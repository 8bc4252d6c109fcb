"""How a peer meets the others: libp2p and the DHT (by hivemind's p2pd), packets, blobs over raw streams, presence.

`Swarm` is the whole of it for the node. All that comes in is hostile until it is bounded here and checked by whoever
gets it: sizes and rates are bounded here, signatures and admissions by the node (through `MessageDecoder`),
blob bytes against their digest here. No round logic and no decision on who is a member: those are the node's.
"""

from peer.swarm.errors import (
    BlobUnavailable,
    PacketTooLarge,
    PeerRefused,
    PeerUnreachable,
    SwarmError,
    SwarmStartError,
)
from peer.swarm.swarm import MAX_PACKET, Handlers, Swarm, SwarmLimits

__all__ = [
    "MAX_PACKET",
    "BlobUnavailable",
    "Handlers",
    "PacketTooLarge",
    "PeerRefused",
    "PeerUnreachable",
    "Swarm",
    "SwarmError",
    "SwarmLimits",
    "SwarmStartError",
]
