"""The transport of the product: libp2p, by the daemon p2pd that hivemind brings. No other package imports hivemind.

`Libp2pTransport` implements `peer.swarm.transport.Transport`. `daemon.py` replaces parts of hivemind's P2P, and
`dht.py` of its DHT, each with the reason.
"""

from peer.swarm.libp2p.daemon import DAEMON_ERRORS
from peer.swarm.libp2p.transport import START_SECONDS, Libp2pTransport
