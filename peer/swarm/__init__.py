"""The network side of a peer: packets to other members, blobs over streams, presence in a DHT.

`Swarm` is all of it for the node. Everything that arrives is hostile until it is bounded here and checked by its
receiver: sizes and rates are bounded here, signatures and admissions by the node (through `MessageDecoder`), blob bytes
against their digest here. There is no round logic here, and no decision on membership: those are the node's.

Read in this order: `transport`, `swarm`, `transfer`, `libp2p`.
"""

from peer.swarm.errors import (
    BlobFetchError,
    PacketTooLarge,
    PeerRefused,
    PeerUnreachable,
    SwarmError,
    SwarmStartError,
)
from peer.swarm.swarm import MAX_PACKET, Handlers, Swarm, SwarmLimits

__all__ = [
    "MAX_PACKET",
    "BlobFetchError",
    "Handlers",
    "PacketTooLarge",
    "PeerRefused",
    "PeerUnreachable",
    "Swarm",
    "SwarmError",
    "SwarmLimits",
    "SwarmStartError",
]
