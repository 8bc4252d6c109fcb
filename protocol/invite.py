"""The invite: one line of text with which a newcomer enters a run. Published by the owner, pasted by volunteers.

`cairn1:` and base64url of:

    run id            32 bytes
    fingerprint       32 bytes: SHA-256 of the coordinator's TLS certificate (DER)
    coordinators      u8 count (1 to 4), each u8 length + "host:port" in ASCII
    code              u8 length (0 to 64) + ASCII
    swarm addresses   u8 count (0 to 8), each u8 length + text; length 0 is followed by the 38 bytes of the usual form
                      /ip4/ADDRESS/tcp/PORT/p2p/PEER (address 4, port 2 big endian, Ed25519 key 32)
    checksum          4 bytes: the first of the SHA-256 of all of the above after "cairn1:"

The checksum is against accidents of copying only: an invite is as trustworthy as the place where it was found.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey, RunId, b64url, from_b64url, sha256
from protocol.messages import MAX_ADDRESS
from protocol.version import UPGRADE

PREFIX = "cairn1:"
MAX_INVITE = 4096
MAX_COORDINATORS = 4
MAX_SWARM_ADDRESSES = 8
MAX_CODE = 64
TLS_NAME = "coordinator.cairn.invalid"
"""The name in every coordinator's certificate: clients trust its fingerprint, and expect this name in it."""

_REMEDY = "copy the whole line that begins with cairn1: from where the run's owner published it"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*")
_USUAL = re.compile(r"/ip4/([0-9.]{7,15})/tcp/([0-9]{1,5})/p2p/([1-9A-HJ-NP-Za-km-z]{40,60})")
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def is_multiaddress(text: str) -> bool:
    """Return whether an invite can name this address; the peer that dials it checks its parts."""
    return text.startswith("/") and text.isascii() and text.isprintable() and len(text) <= MAX_ADDRESS


def is_host_name(text: str) -> bool:
    """Return whether a text can be a host name, or an IPv4 address: labels of 1 to 63 characters (RFC 1123, 2.1).

    The resolver of Python raises UnicodeError for other labels.
    """
    return _HOST.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class HostPort:
    """The address of a coordinator's gRPC: a host name or IP address, and a TCP port."""

    host: str
    port: int

    def __post_init__(self):
        if not 1 <= self.port <= 65_535:
            raise MalformedError(f"{self.port} is not a port: want 1 to 65535")
        if ":" in self.host:
            try:
                ipaddress.IPv6Address(self.host)
            except ValueError:
                raise MalformedError(f"{self.host[:80]!r} is not an IPv6 address") from None
        elif not is_host_name(self.host):
            raise MalformedError(f"{self.host[:80]!r} is not a host name or IP address")

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Parse "host:port" or "[IPv6]:port". Raises MalformedError."""
        host, colon, port = text.rpartition(":")
        if not colon or not (port.isascii() and port.isdigit() and len(port) <= 5):
            raise MalformedError(f"{text[:80]!r} is not HOST:PORT")
        if host.startswith("[") and host.endswith("]") and ":" in host:
            host = host[1:-1]
        elif ":" in host:
            raise MalformedError(f"{text[:80]!r}: write an IPv6 address in brackets, [ADDRESS]:PORT")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Invite:
    """The data to enter a run: its coordinators, their certificate, and addresses of its swarm."""

    run: RunId
    fingerprint: Digest
    coordinators: tuple[HostPort, ...]
    code: str = ""
    addresses: tuple[str, ...] = ()

    def __post_init__(self):
        if not 1 <= len(self.coordinators) <= MAX_COORDINATORS:
            raise MalformedError(f"an invite names 1 to {MAX_COORDINATORS} coordinators, not {len(self.coordinators)}")
        check_code(self.code)
        if len(self.addresses) > MAX_SWARM_ADDRESSES:
            raise MalformedError(f"an invite names at most {MAX_SWARM_ADDRESSES} swarm addresses")
        for address in self.addresses:
            if not is_multiaddress(address):
                raise MalformedError(f"{address[:80]!r} is not a multiaddress")

    def __str__(self) -> str:
        body = bytearray(self.run + self.fingerprint)
        body.append(len(self.coordinators))
        for endpoint in self.coordinators:
            body += _short(str(endpoint))
        body += _short(self.code)
        body.append(len(self.addresses))
        for address in self.addresses:
            usual = _pack_usual(address)
            body += b"\x00" + usual if usual is not None else _short(address)
        return PREFIX + b64url(bytes(body) + sha256(bytes(body))[:4])

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Return the invite in a pasted text, without the white space that a terminal inserted.

        Raises MalformedError.
        """
        if len(text) > 4 * MAX_INVITE:
            raise MalformedError(f"this is too long for an invite: {_REMEDY}")
        text = "".join(text.split())
        if not text.startswith(PREFIX):
            if re.match(r"cairn[0-9]+:", text):
                raise MalformedError(f"this invite is of another version of Cairn: {UPGRADE}, or ask for a new invite")
            raise MalformedError(f"this is not an invite: {_REMEDY}")
        if len(text) > MAX_INVITE:
            raise MalformedError(f"this is too long for an invite: {_REMEDY}")
        try:
            data = from_b64url(text.removeprefix(PREFIX))
        except MalformedError:
            data = b""
        if len(data) < 4 or sha256(data[:-4])[:4] != data[-4:]:
            raise MalformedError(f"this invite is cut off or altered: {_REMEDY}")
        return _decode(_Reader(data[:-4]))


def one_per_peer_first(addresses: Iterable[str]) -> tuple[str, ...]:
    """Multiaddresses in their order, but first one of each peer: an invite has room for few, and peers come and go."""
    unique = list(dict.fromkeys(addresses))
    first = {a.rpartition("/p2p/")[2]: a for a in reversed(unique)}
    return tuple(sorted(unique, key=lambda a: first[a.rpartition("/p2p/")[2]] != a))


def check_code(code: str) -> None:
    """Raise MalformedError unless this can be an invite code (or is empty)."""
    if len(code) > MAX_CODE or not code.isascii() or not code.isprintable() or " " in code:
        raise MalformedError(f"an invite code is at most {MAX_CODE} printable ASCII characters without spaces")


def _decode(r: _Reader) -> Invite:
    run, fingerprint = RunId(r.take(32)), Digest(r.take(32))
    coordinators = tuple(HostPort.parse(r.text()) for _ in range(r.count("coordinators", MAX_COORDINATORS)))
    code = r.text()
    addresses = []
    for _ in range(r.count("swarm addresses", MAX_SWARM_ADDRESSES)):
        length = r.take(1)[0]
        addresses.append(r.ascii(length) if length else _unpack_usual(r.take(38)))
    r.end()
    return Invite(run, fingerprint, coordinators, code, tuple(addresses))


class _Reader:
    """Takes bytes off the front; never more than there are."""

    def __init__(self, data: bytes):
        self._data = data
        self._at = 0

    def take(self, n: int) -> bytes:
        part = self._data[self._at : self._at + n]
        if len(part) != n:
            raise MalformedError("this invite is damaged: ask the run's owner for a new one")
        self._at += n
        return part

    def count(self, what: str, top: int) -> int:
        n = self.take(1)[0]
        if n > top:
            raise MalformedError(f"this invite is damaged: it lists {n} {what}, more than {top}")
        return n

    def ascii(self, length: int) -> str:
        try:
            return self.take(length).decode("ascii")
        except UnicodeDecodeError:
            raise MalformedError("this invite is damaged: ask the run's owner for a new one") from None

    def text(self) -> str:
        return self.ascii(self.take(1)[0])

    def end(self) -> None:
        if self._at != len(self._data):
            raise MalformedError("this invite is damaged: ask the run's owner for a new one")


def _short(text: str) -> bytes:
    data = text.encode("ascii")
    if len(data) > 255:
        raise MalformedError(f"{text[:40]!r}... is too long for an invite")
    return bytes([len(data)]) + data


def _pack_usual(address: str) -> bytes | None:
    """38 bytes for a multiaddress of the usual form, None for any other."""
    match = _USUAL.fullmatch(address)
    if match is None:
        return None
    try:
        ip, port = ipaddress.IPv4Address(match[1]), int(match[2])
        key = PeerKey.from_libp2p_id(from_base58(match[3]))
        packed = ip.packed + port.to_bytes(2, "big") + key
    except (ValueError, OverflowError, MalformedError):
        return None
    return packed if _unpack_usual(packed) == address else None


def _unpack_usual(packed: bytes) -> str:
    ip, port, key = ipaddress.IPv4Address(packed[:4]), int.from_bytes(packed[4:6], "big"), PeerKey(packed[6:])
    return f"/ip4/{ip}/tcp/{port}/p2p/{to_base58(key.libp2p_id)}"


def to_base58(data: bytes) -> str:
    """Return bytes in Bitcoin's base 58, as libp2p writes keys."""
    number, digits = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\x00"))) + digits


def from_base58(text: str) -> bytes:
    """Return the bytes that `to_base58` has written. Raises ValueError."""
    number = 0
    for character in text:
        number = number * 58 + _BASE58.index(character)
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
