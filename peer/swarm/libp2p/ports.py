"""The ports that a peer listens on: TCP, and QUIC (UDP) at the same number, so that one address stands for both."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from peer.swarm.addresses import bind_of, quic_beside
from peer.swarm.errors import SwarmStartError
from protocol.errors import MalformedError, os_reason

log = logging.getLogger(__name__)

TRIES = 16
"""Ports free for TCP that are tried until one is free for UDP too."""


def check_ports(listen: Sequence[str]) -> None:
    """Raise SwarmStartError when a port is taken, or a listen address makes no sense.

    libp2p shares TCP's ports (SO_REUSEPORT), so a second peer on the same port would get half of the connections.
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
                    f"cannot listen on {address}: {os_reason(e)}; stop what listens there, or choose "
                    "another port with --listen (for a coordinator: --swarm; 0: any)"
                ) from None


@contextmanager
def reserved(listen: Sequence[str]) -> Iterator[list[str]]:
    """Yield the addresses to listen on for these of TCP: port 0 becomes a number that is free for TCP and UDP.

    Beside each there is one of QUIC, unless something else has its port. No other process gets the numbers meanwhile.
    """
    with ExitStack() as held:
        both = []
        for address in listen:
            host, port, family = bind_of(address)
            chosen = port or _free_port(host, family, held)
            if chosen is None:
                both.append(address)  # this machine has no such address: libp2p reports it
                continue
            address = f"{address.rpartition('/')[0]}/{chosen}"
            both.append(address)
            if (quic := quic_beside(address)) and _is_free_for_udp(host, chosen, family):
                both.append(quic)
            else:
                log.warning("something else has the UDP port of %s: others reach this peer by TCP only", address)
        yield both


def _free_port(host: str, family: socket.AddressFamily, held: ExitStack) -> int | None:
    """Return a port that is free for TCP and UDP; None if there is none, or the host is not of this machine.

    TCP's stays bound (and shared, so that libp2p can have it): the system gives it to no other process meanwhile.
    """
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
