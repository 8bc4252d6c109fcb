"""Short looks at the network and the disk, which leave no trace: nothing is written, no key is used."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import async_timeout

from peer.store.disk import disk
from peer.swarm.addresses import parse_address
from protocol.errors import MalformedError

DIAL_SECONDS = 5.0
DIALLED = 8
"""Addresses of members that are dialled."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """`folder` is the nearest one that exists, `used`: bytes of a store there; `free`: 0 unless writable."""

    folder: Path
    is_writable: bool
    used: int
    free: int


def disk_space(store: Path) -> DiskSpace:
    """Return the space for a store, which need not exist. Raises StoreError."""
    with disk(f"reading the size of the disk of {store}"):
        folder = next(place for place in (store, *store.parents) if place.exists())
        files = (file for part in ("blobs", "partial") for file in (store / part).rglob("*"))
        used = sum(file.stat().st_size for file in files if file.is_file())
        writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
        return DiskSpace(folder, writable, used, shutil.disk_usage(folder).free if writable else 0)


async def dial(addresses: Sequence[str]) -> dict[str, bool]:
    """Return which of the first DIALLED multiaddresses take a connection by TCP, each host and port once."""
    places: dict[tuple[str, int], str] = {}
    for address in addresses:
        try:
            _, bare = parse_address(address)
        except MalformedError:
            continue
        _, _, host, transport, port = bare.split("/")[:5]
        if transport == "tcp":
            places.setdefault((host, int(port)), bare)
    some = dict(list(places.items())[:DIALLED])
    answers = await asyncio.gather(*(_takes(host, port) for host, port in some))
    return dict(zip(some.values(), answers, strict=True))


async def _takes(host: str, port: int) -> bool:
    try:
        async with async_timeout.timeout(DIAL_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, ValueError, asyncio.TimeoutError):  # ValueError: no name of a host
        return False
    writer.close()
    return True


def own_address(host: str, port: int) -> str:
    """Return this machine's address on the way to a host, of which it asks nothing; "" if there is no way."""
    try:
        family, kind, proto, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as way:
            way.connect(place)
            return str(way.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""
