"""The ports that a peer listens on: TCP, and QUIC (UDP) at the same number, so that one address says both."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from peer.swarm.addresses import bind_of, quic_beside
from peer.swarm.errors import SwarmStartError
from protocol.errors import MalformedError

log = logging.getLogger(__name__)

TRIES = 16
"""Of ports that are free for TCP, until one is for UDP too."""


def check_ports(listen: Sequence[str]) -> None:
    """libp2p shares TCP's ports (SO_REUSEPORT), so a second peer on the same one would take half of its connections.

    Raises SwarmStartError when one is taken, or an address makes no sense.
    """
    for address in listen:
        try:
            host, port, family = bind_of(address)
        except MalformedError as e:
            raise SwarmStartError(f"{e}; write e.g. /ip4/0.0.0.0/tcp/0") from None
        if port == 0:
            continue
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as e:
                raise SwarmStartError(
                    f"cannot listen on {address}: {(e.strerror or str(e)).lower()}; stop what listens there, or choose "
                    "another port (0: any)"
                ) from None


@contextmanager
def reserved(listen: Sequence[str]) -> Iterator[list[str]]:
    """What to have libp2p listen on for these addresses of TCP: port 0 is a number that is free for TCP and UDP, and
    beside each there is QUIC, unless something else has its port. The numbers are kept from others until the end."""
    with ExitStack() as held:
        both = []
        for address in listen:
            host, port, family = bind_of(address)
            chosen = port or _free_port(host, family, held)
            if chosen is None:
                both.append(address)  # this machine has no such address: libp2p says so
                continue
            address = f"{address.rpartition('/')[0]}/{chosen}"
            both.append(address)
            if (quic := quic_beside(address)) and _is_free_for_udp(host, chosen, family):
                both.append(quic)
            else:
                log.warning("something else has the UDP port of %s: others reach this peer by TCP only", address)
        yield both


def _free_port(host: str, family: socket.AddressFamily, held: ExitStack) -> int | None:
    """A port that is free for both. TCP's stays bound (and shared, so that libp2p can have it): nobody else who asks
    for any port is given it meanwhile. None when there is none, or no such host here."""
    for _ in range(TRIES):
        tcp = socket.socket(family, socket.SOCK_STREAM)
        held.callback(tcp.close)
        with suppress(OSError):
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            tcp.bind((host, 0))
            port = tcp.getsockname()[1]
            if _is_free_for_udp(host, port, family):
                return port
    return None


def _is_free_for_udp(host: str, port: int, family: socket.AddressFamily) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as udp:
        try:
            udp.bind((host, port))
        except OSError:
            return False
    return True
