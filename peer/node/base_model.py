"""The frozen base model of a run that trains an adapter: fetched once, from the nearest place that has it.

That is another run's store on this machine, an address of the spec that may be used, or the members. Each chunk is
checked, and chunks that are here already are not fetched again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable
from functools import partial

import async_timeout

from peer.errors import PeerError
from peer.node.network import Network
from peer.store import Store, StoreError, StoreFull
from peer.swarm.pace import Pace
from protocol.data_address import check_address, public_url
from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.merkle import CHUNK, chunk_size
from protocol.spec import AdapterSpec

log = logging.getLogger(__name__)

READ_CHUNKS = 16
"""Chunks of one request to an address."""
READ_SECONDS = 20.0
FETCH_SECONDS = 3600.0
RETRIES = 5
"""Requests in a row that fail before an address is given up: the pauses between them are a minute."""
LEAST_RATE = 500_000
"""Bytes a second that a large blob must arrive at; what came before it is kept for the next start."""


def fetch_seconds(size: int) -> float:
    """Return the seconds within which a blob of this size must arrive."""
    return max(FETCH_SECONDS, size / LEAST_RATE)


async def fetch_base_nearby(adapter: AdapterSpec, store: Store, network: Network, *, private_data: bool) -> None:
    """Take the base from another run's store or from an address, if one has it. Raises StoreError."""
    name, size = adapter.base.name, adapter.base.size
    if store.has(name) or await asyncio.to_thread(link_from_other_runs, store, name):
        return
    for address in adapter.addresses:
        if not (private_data or public_url(address)):
            continue
        stopped = threading.Event()
        pace = Pace() if check_address(address) == "file" else network.paces.down
        take = partial(_take_in_thread, pace, asyncio.get_running_loop())
        try:
            with network.downloads.noted("the run's base model", name, size):
                async with async_timeout.timeout(fetch_seconds(size)):
                    await asyncio.to_thread(
                        read_from_address, adapter, store, address, stopped, take, private=private_data
                    )
            return
        except asyncio.TimeoutError:
            log.warning("the base model was not read from %s: it took %.0f s", address, fetch_seconds(size))
        except (PeerError, MalformedError) as e:
            log.warning("the base model was not read from %s: %s", address, e)
        finally:
            stopped.set()


def _take_in_thread(pace: Pace, loop: asyncio.AbstractEventLoop, size: int) -> None:
    asyncio.run_coroutine_threadsafe(pace.take(size), loop).result()


def link_from_other_runs(store: Store, blob: Digest) -> bool:
    """Take a blob from the store of another run in the same home, without a copy; return whether it is here now."""
    for file in store.folder.parent.parent.glob(f"*/store/blobs/{blob.hex()[:2]}/{blob.hex()}"):
        draft = store.scratch / f"linked-{blob.hex()}-{secrets.token_hex(4)}"
        try:
            os.link(file, draft, follow_symlinks=False)
            found = draft.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                continue  # somebody else could change it after the check
            store.adopt(draft, blob)
        except StoreFull:
            raise
        except (OSError, MalformedError, StoreError) as e:
            log.info("the base model of another run here cannot be used (%s): %s", file, e)
            continue
        finally:
            draft.unlink(missing_ok=True)
        log.info("the base model is that of another run here: %s", file)
        return True
    return False


def read_from_address(
    adapter: AdapterSpec,
    store: Store,
    address: str,
    stopped: threading.Event,
    take: Callable[[int], object],
    *,
    private: bool,
) -> None:
    """Read the base at an address of the spec, for as long as nobody has `stopped` it.

    `take` waits until these bytes may come. Raises PeerError, and MalformedError for wrong bytes.
    """
    from peer.training.sources import at_address

    source, blob, size = at_address(address, READ_SECONDS, private=private), adapter.base.name, adapter.base.size
    raw = source.leaves(blob, size)
    arriving = store.receive(blob, size, [raw[i : i + 32] for i in range(0, len(raw), 32)])
    if arriving is None:
        return
    failures = 0
    try:
        while (missing := arriving.missing()) and not stopped.is_set():
            first = missing[0]
            run = [i for n, i in enumerate(missing[:READ_CHUNKS]) if i == first + n]
            sizes = [chunk_size(size, i) for i in run]
            if not failures:
                for each in sizes:  # one by one, so that others have their turn
                    take(each)
            try:
                data = source.chunk(blob, first * CHUNK, sum(sizes), "safetensors")
            except PeerError as e:  # of thousands of requests one may fail
                failures += 1
                if failures > RETRIES:
                    raise
                log.info("%s; it is asked again", e)
                stopped.wait(2.0**failures)
                continue
            failures = 0
            for i in run:
                arriving.write(i, data[(i - first) * CHUNK : (i - first + 1) * CHUNK])
        if not arriving.left:
            arriving.finish()
    finally:
        arriving.close()
