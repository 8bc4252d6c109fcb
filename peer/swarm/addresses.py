"""Multiaddresses: where a peer can be dialled. Whatever strangers write as one is checked here.

A peer listens by TCP and by QUIC (UDP) at the same port number. So an address of TCP stands for both, and is all that
is told of the two: heartbeats and invites stay short.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

import base58
from hivemind.utils.multiaddr import Multiaddr

from protocol.errors import MalformedError
from protocol.ids import PeerKey
from protocol.messages import MAX_ADDRESS

_DIALABLE = re.compile(
    r"(/(?:ip4|ip6|dns|dns4|dns6)/[0-9A-Za-z.:-]{1,120}/(?:tcp/\d{1,5}|udp/\d{1,5}/quic-v1))/p2p/([1-9A-HJ-NP-Za-km-z]{40,64})"
)
_LISTEN = re.compile(r"/(ip4|ip6)/([0-9a-fA-F.:]+)/tcp/(\d{1,5})")
_TCP = re.compile(r"(/[^/]+/[^/]+)/tcp/(\d+)(/p2p/[^/]+)?")


def parse_address(text: str) -> tuple[PeerKey, bytes]:
    """The peer and the binary multiaddress (without the peer) of e.g. /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW...

    Raises MalformedError for anything else, circuits among it.
    """
    match = _DIALABLE.fullmatch(text) if len(text) <= MAX_ADDRESS else None
    if match is None:
        raise MalformedError(f"{text[:80]!r} is not an address such as /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW...")
    try:
        return PeerKey.from_libp2p_id(base58.b58decode(match[2])), Multiaddr(match[1]).to_bytes()
    except ValueError as e:
        raise MalformedError(f"{text[:80]!r} is not an address: {e}") from None


def quic_beside(address: str) -> str | None:
    """The address of QUIC at the same host and port number as this one of TCP; None for any other."""
    match = _TCP.fullmatch(address)
    return f"{match[1]}/udp/{match[2]}/quic-v1{match[3] or ''}" if match else None


def ways_to(address: str) -> tuple[PeerKey, list[bytes]]:
    """The peer, and what to dial for this address: QUIC beside TCP, too. libp2p dials all at once and takes the first
    that answers: QUIC is there a round trip after the first packet, TCP after four. Raises MalformedError."""
    peer, binary = parse_address(address)
    quic = quic_beside(address)
    return peer, [binary] if quic is None else [parse_address(quic)[1], binary]


def bind_of(listen: str) -> tuple[str, int, socket.AddressFamily]:
    """Host, port and family of a listen address. Raises MalformedError."""
    match = _LISTEN.fullmatch(listen)
    try:
        if match is None:
            raise ValueError
        host = ipaddress.ip_address(match[2])
        port = int(match[3])
        if host.version != int(match[1][2]) or port > 65535:
            raise ValueError
    except ValueError:
        raise MalformedError(f"{listen[:80]!r} is not an address to listen on") from None
    return str(host), port, socket.AF_INET if host.version == 4 else socket.AF_INET6


def dialable(visible: list[str]) -> list[str]:
    """Own addresses worth telling others, the widest first; loopback only where there is nothing else, and QUIC's only
    where it has not the port number of TCP."""
    ranked = sorted(_one_of_both(visible), key=_rank)
    wide = [a for a in ranked if _rank(a) < _LOOPBACK]
    return wide or ranked


def _one_of_both(addresses: Iterable[str]) -> list[str]:
    unique = dict.fromkeys(addresses)
    beside = {quic_beside(a) for a in unique}
    return [a for a in unique if a not in beside]


_LOOPBACK = 3


def _rank(address: str) -> int:
    parts = address.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return 0  # a name: somebody chose it to be found by
    try:
        host = ipaddress.ip_address(parts[2])
    except ValueError:
        return _LOOPBACK
    if host.is_loopback:
        return _LOOPBACK
    return 2 if host.is_link_local else 1 if host.is_private else 0
