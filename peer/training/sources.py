"""Sources of token shards: a verified file of this peer, or a folder at an address that the spec names.

A folder may also hold a frozen base model, which the node reads there.

A source returns ranges of bytes, with a deadline and a fixed size, and never more than was requested. The reader checks
the bytes.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Literal
from urllib.parse import urljoin, urlsplit

from peer.errors import PeerError
from peer.training.background import BackgroundTask
from protocol.data_address import check_address, is_public, public_url
from protocol.errors import MalformedError, SpecError, os_reason
from protocol.ids import Digest
from protocol.merkle import CHUNK, blob_leaves, check_leaves, chunk_count
from protocol.plain_text import one_line

CACHE_BYTES = 128 * 1024 * 1024
"""Verified chunks that a reader keeps in memory."""

MAX_STUCK = 8
"""Calls to an address that have not returned; while there are as many, it is not used."""

MAX_REDIRECTS = 4
REDIRECTS = (301, 302, 303, 307, 308)

MAX_ADDRESSES = 8
"""Addresses of one name that are tried."""


class SourceError(PeerError):
    """A source did not return the requested bytes. The message says why."""


class LocalFiles:
    """Shards on this disk, as blobs of the peer's store or as prepared files."""

    name = "this disk"

    def __init__(self, paths: Mapping[Digest, Path]):
        self._paths = dict(paths)

    def leaves(self, shard: Digest, size: int) -> bytes:
        """Return the leaf hashes of a shard of `size` bytes, concatenated. Raises SourceError.

        They come from a `.leaves` file beside the shard if they are the shard's. Otherwise the shard is hashed, and
        they are unverified.
        """
        path = self._path(shard)
        try:
            for beside in (path.with_suffix(".leaves"), path.with_name(path.name + ".leaves")):
                if beside != path and beside.is_file() and beside.stat().st_size == 32 * chunk_count(size):
                    with contextlib.suppress(OSError, MalformedError):
                        leaves = beside.read_bytes()
                        check_leaves(shard, size, [leaves[i : i + 32] for i in range(0, len(leaves), 32)])
                        return leaves
            if path.stat().st_size != size:
                raise SourceError(f"{path} has {path.stat().st_size} bytes, the spec says {size}")
            with path.open("rb") as file:
                return b"".join(blob_leaves(chunk)[0] for chunk in iter(lambda: file.read(CHUNK), b""))
        except OSError as e:
            raise SourceError(f"{path}: {os_reason(e)}") from None

    def chunk(self, shard: Digest, offset: int, size: int) -> bytes:
        """Return `size` bytes at an offset, unverified. Raises SourceError."""
        path = self._path(shard)
        try:
            with path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), size, offset)
        except OSError as e:
            raise SourceError(f"{path}: {os_reason(e)}") from None

    def _path(self, shard: Digest) -> Path:
        if shard not in self._paths:
            raise SourceError(f"shard {shard.short} is not on this disk")
        return self._paths[shard]


class RemoteFolder(ABC):
    """A folder at an address of the spec, with DIGEST.tokens or .safetensors, and .leaves, that acts as `LocalFiles`.

    Each request has a thread: neither the resolver of names nor most file systems have deadlines.
    """

    def __init__(self, address: str, timeout: float):
        self.name = address.rstrip("/")
        self.is_remote = check_address(address) != "file"
        """False for a folder of this machine."""
        self._timeout = timeout
        self._stuck: list[BackgroundTask[bytes]] = []
        self.received = 0
        """Bytes that came; those of a request past its deadline are not known."""

    def leaves(self, shard: Digest, size: int) -> bytes:
        return self._range(f"{shard}.leaves", 0, 32 * chunk_count(size))

    def chunk(self, shard: Digest, offset: int, size: int, kind: Literal["tokens", "safetensors"] = "tokens") -> bytes:
        return self._range(f"{shard}.{kind}", offset, size)

    def _range(self, file: str, start: int, size: int) -> bytes:
        """Return `size` bytes, whatever the other side sends, within the deadline. Raises SourceError."""
        self._stuck = [request for request in self._stuck if not request.is_done]
        if len(self._stuck) >= MAX_STUCK:
            raise SourceError(f"{self.name}: {MAX_STUCK} calls never came back")
        if not size:
            return b""
        reading = BackgroundTask(partial(self._read, file, start, size), "read")
        reading.wait(self._timeout)
        if not reading.is_done:
            self._abort()
            self._stuck.append(reading)
            raise SourceError(f"{self.name}/{file}: not complete after {self._timeout:.0f} s")
        data = reading.result()
        self.received += len(data)
        if len(data) < size:  # a connection that broke, or another file: the bytes that came may well be right
            raise SourceError(f"{self.name}/{file}: ended after {len(data):,} of {size:,} bytes")
        return data

    @abstractmethod
    def _read(self, file: str, start: int, size: int) -> bytes:
        """Return at most `size` bytes. Raises SourceError."""

    @abstractmethod
    def _abort(self) -> None:
        """End the request that is under way, if that is possible."""


ShardSource = LocalFiles | RemoteFolder


def at_address(address: str, timeout: float, *, private: bool = False) -> RemoteFolder:
    """Return the source at an address of the spec. Raises SpecError.

    `private`: the address may lead to this disk and to private networks, and with this user's accounts into a cloud.
    """
    url = public_url(address)
    if private and check_address(address) not in ("http", "https"):
        return FsspecFolder(address, timeout)
    if url is None:
        raise SpecError(
            f"{address[:100]} is on this disk, or needs an account; if the run's owner may name such places to you, "
            "join with --allow-private-data"
        )
    return HttpFolder(address, url, timeout, private=private)


class HttpFolder(RemoteFolder):
    """A folder on an ordinary web server that answers range requests (RFC 9110 section 14), read at `url`.

    Unless it is `private`, nothing is sent to an address that is not of the public internet. Redirects are followed
    only from a cloud's own servers, for an address like hf://: they lead to another region or a content delivery
    network. The servers of other addresses are chosen by the run's owner. Proxies are not used: they would connect to
    addresses that are not checked here.
    """

    def __init__(self, address: str, url: str, timeout: float, *, private: bool = False):
        super().__init__(address, timeout)
        self._url = url.rstrip("/")
        self._redirects = 0 if url == address else MAX_REDIRECTS
        self._private = private
        self._connection: http.client.HTTPConnection | None = None

    def _read(self, file: str, start: int, size: int) -> bytes:
        url = f"{self._url}/{file}"
        try:
            for _ in range(1 + self._redirects):
                answer = self._request(url, start, size)
                if isinstance(answer, bytes):
                    return answer
                url = answer
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise SourceError(f"{self.name}/{file}: {_said(e)}") from None
        raise SourceError(f"{self.name}/{file}: the server redirects to {url[:100]!r}, which is not followed")

    def _request(self, url: str, start: int, size: int) -> bytes | str:
        """Return at most `size` bytes of a file, or the URL to which the server redirects. Raises SourceError."""
        parts = urlsplit(url)
        if parts.scheme != "https" and self._redirects:
            raise SourceError(f"the server redirects to {url[:100]!r}: only https:// is followed")
        if parts.username is not None or parts.hostname is None:
            raise SourceError(f"{url[:100]!r} is not an address without a user")
        if parts.scheme == "https":
            kind = http.client.HTTPSConnection if self._private else PublicTlsConnection
            connection = kind(parts.hostname, parts.port, timeout=self._timeout, context=tls_context())
        else:
            kind = http.client.HTTPConnection if self._private else PublicConnection
            connection = kind(parts.hostname, parts.port, timeout=self._timeout)
        with contextlib.closing(connection):
            self._connection = connection
            target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
            wanted = {"Range": f"bytes={start}-{start + size - 1}", "User-Agent": "cairn"}
            connection.request("GET", target, headers=wanted)
            response = connection.getresponse()
            if response.status in REDIRECTS:
                return urljoin(url, response.headers.get("Location", ""))
            if response.status not in (200, 206):
                raise SourceError(f"{url[:200]}: status {response.status}")
            if response.status == 200 and start:
                raise SourceError(f"{url[:200]}: the server does not answer range requests")
            data = bytearray()
            while len(data) < size and (piece := response.read1(size - len(data))):
                data += piece
            return bytes(data)

    def _abort(self) -> None:
        sock = None if self._connection is None else self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own shutdown, which is not thread-safe


class PublicConnection(http.client.HTTPConnection):
    """A connection over plain TCP to an address of the public internet."""

    def connect(self) -> None:
        self.sock = _connect_public(self.host, self.port, self.timeout)


class PublicTlsConnection(http.client.HTTPSConnection, PublicConnection):
    """A connection over TLS to an address of the public internet: `HTTPSConnection` puts TLS over its base's socket."""


def _connect_public(host: str, port: int, timeout: float | None) -> socket.socket:
    """Return a connection to one of a name's public addresses. Raises OSError.

    The checked address is the one that is connected to: a name that resolves otherwise the next time gains nothing.
    """
    error = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[:MAX_ADDRESSES]:
        ip = str(address[0])
        if not is_public(ip):
            error = OSError(
                f"{host} is at {ip}, which is not an address of the public internet; if the run's owner may name such "
                "places to you, join with --allow-private-data"
            )
            continue
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(timeout)
            sock.connect(address)
            if sock.getsockname()[0] == ip:
                raise OSError(f"{host} is this machine itself, at {ip}")
            return sock
        except OSError as e:
            sock.close()
            error = e
    raise error


@cache
def tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


class FsspecFolder(RemoteFolder):
    """A folder on any file system of fsspec, with the accounts and settings of the user who runs this process."""

    def _read(self, file: str, start: int, size: int) -> bytes:
        import fsspec.core

        try:
            fs, folder = fsspec.core.url_to_fs(self.name)
            return bytes(fs.cat_file(f"{folder}/{file}", start=start, end=start + size))
        except FileNotFoundError:
            raise SourceError(f"{self.name}/{file}: is not there") from None
        except Exception as e:  # noqa: BLE001 - any file system, any error
            raise SourceError(f"{self.name}/{file}: {_said(e)}") from None

    def _abort(self) -> None:
        """Leave the call to itself: no file system of fsspec can end one."""


def _said(error: Exception) -> str:
    """Return an error's text, bounded: it may quote what a server sent."""
    return one_line(str(error), 300) or type(error).__name__
