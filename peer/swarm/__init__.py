"""The network side of a peer: packets to other members, blobs over streams, presence in a DHT.

`Swarm` is all of it for the node. Everything that arrives is hostile until it is bounded and checked. Sizes and rates
are bounded here, and blob bytes are checked against their digest. The node checks signatures and admissions (through
`MessageDecoder`). Round logic and membership are the node's, too.

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
from peer.swarm.swarm import MAX_PACKET, Handlers, Swarm, SwarmLimits, checking_cost
