"""Multiaddresses: where a peer can be dialled. Addresses written by strangers are checked here.

A peer listens by TCP and by QUIC (UDP) at the same port number. An address of TCP stands for both, and is the only one
of the two that is announced: heartbeats and invites stay short.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

import base58

from protocol.errors import MalformedError
from protocol.ids import PeerKey
from protocol.invite import is_host_name
from protocol.messages import MAX_ADDRESS

MAX_PORT = 65535

_DIALABLE = re.compile(
    r"(/(ip4|ip6|dns|dns4|dns6)/([0-9A-Za-z.:-]{1,120})/(?:tcp/(\d{1,5})|udp/(\d{1,5})/quic-v1))"
    r"/p2p/([1-9A-HJ-NP-Za-km-z]{40,64})"
)
_LISTEN = re.compile(r"/(ip4|ip6)/([0-9a-fA-F.:]+)/tcp/(\d{1,5})")
_TCP = re.compile(r"(/[^/]+/[^/]+)/tcp/(\d+)(/p2p/[^/]+)?")


def parse_address(text: str) -> tuple[PeerKey, str]:
    """Return the peer and the address without it, for e.g. /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW...

    Raises MalformedError for anything else, circuits included.
    """
    match = _DIALABLE.fullmatch(text) if len(text) <= MAX_ADDRESS else None
    if match is None:
        raise MalformedError(f"{text[:80]!r} is not an address such as /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW...")
    address, kind, host, tcp, udp, peer = match.groups()
    try:
        if int(tcp or udp) > MAX_PORT:
            raise ValueError(f"a port is at most {MAX_PORT}")
        if kind.startswith("ip"):
            _ip_of(kind, host)
        elif not is_host_name(host):
            raise ValueError(f"{host} is not a host name")
        return PeerKey.from_libp2p_id(base58.b58decode(peer)), address
    except ValueError as e:
        raise MalformedError(f"{text[:80]!r} is not an address: {e}") from None


def quic_beside(address: str) -> str | None:
    """Return the address of QUIC at the host and port number of this one of TCP; None for any other address."""
    match = _TCP.fullmatch(address)
    return f"{match[1]}/udp/{match[2]}/quic-v1{match[3] or ''}" if match else None


def dial_addresses(address: str) -> tuple[PeerKey, list[str]]:
    """Return the peer, and the addresses to dial for this one: QUIC beside TCP, too. Raises MalformedError.

    libp2p dials all at once and takes the first that answers. QUIC answers one round trip after the first packet, TCP
    after four.
    """
    peer, bare = parse_address(address)
    quic = quic_beside(bare)
    return peer, [bare] if quic is None else [quic, bare]


def bind_of(listen: str) -> tuple[str, int, socket.AddressFamily]:
    """Return host, port and family of a listen address. Raises MalformedError."""
    match = _LISTEN.fullmatch(listen)
    try:
        if match is None:
            raise ValueError
        host = _ip_of(match[1], match[2])
        port = int(match[3])
        if port > MAX_PORT:
            raise ValueError
    except ValueError:
        raise MalformedError(f"{listen[:80]!r} is not an address to listen on") from None
    return str(host), port, socket.AF_INET if host.version == 4 else socket.AF_INET6


def announceable(visible: list[str]) -> list[str]:
    """Return the own addresses worth announcing, those with the widest reach first.

    Loopback is among them only if there is nothing else; an address of QUIC only without one of TCP at the same port.
    """
    ranked = sorted(_one_of_both(visible), key=_rank)
    wide = [a for a in ranked if _rank(a) < _LOOPBACK]
    return wide or ranked


def _ip_of(kind: str, host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(host)
    if found.version != int(kind[2]):
        raise ValueError(f"{host} is not an IPv{kind[2]} address")
    return found


def _one_of_both(addresses: Iterable[str]) -> list[str]:
    unique = dict.fromkeys(addresses)
    beside = {quic_beside(a) for a in unique}
    return [a for a in unique if a not in beside]


_LOOPBACK = 3


def _rank(address: str) -> int:
    pieces = address.split("/")
    if len(pieces) < 3 or pieces[1] not in ("ip4", "ip6"):
        return 0  # a name: somebody chose it to be found by
    try:
        host = ipaddress.ip_address(pieces[2])
    except ValueError:
        return _LOOPBACK
    if host.is_loopback:
        return _LOOPBACK
    return 2 if host.is_link_local else 1 if host.is_private else 0
