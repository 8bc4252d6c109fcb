"""The model of a run that is over, for a volunteer: its address, and a verified copy of the last state."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from cairn.peer_screen import PeerScreen, page_address
from coordinator.checkpoints.archive import read_manifest
from coordinator.checkpoints.copies import file_reader
from coordinator.checkpoints.verification import ReadFile, VerificationError, verify_checkpoint
from coordinator.durable import sync
from peer.coordinator_client import RunInfo
from peer.store import Store
from protocol.errors import CairnError, os_reason
from protocol.ids import Digest, RunId
from protocol.state import state_layout
from protocol.units import byte_size

RESERVE = 10**9
"""Bytes of the disk that a copy leaves free."""

FETCH_SECONDS = 3600.0
"""Maximum seconds to fetch a last state."""

STOP_SECONDS = 5.0
"""Maximum seconds to wait for a fetch that was stopped."""


class FetchStopped(CairnError):
    """The user wants no copy, or it takes too long."""


async def offer_model(
    info: RunInfo, folder: Path, store: Store, most: int, stopping: asyncio.Future[Any], screen: PeerScreen
) -> None:
    """Print where the model of a run is that is over, and fetch its last state unless the peer's folder has it.

    `most`: maximum bytes of a copy. `stopping` is done when the user wants no more.
    """
    page, last = page_address(info.page), info.last
    if page:
        screen.say(f"model    {page}#model")
    if last is None or last.state is None:
        return
    copy = folder / "checkpoints" / f"round-{last.round:06d}"
    address = f"{page}checkpoints/{copy.name}"
    kept = read_manifest(copy)
    if not store.has(last.state) and (kept is None or kept.state != last.state):
        try:
            if not page:
                raise CairnError("the coordinator gives no address of its page")
            size = state_layout(info.spec.model.layout, info.spec.outer).checkpoint_size
            _check_room(folder, size, most - store.used_bytes)
            screen.say(f"fetching the last state ({byte_size(size)}) to {copy}; Ctrl-C stops that")
            with screen.downloading("the last state", size) as note:
                await _until_stopped(address, info.spec.run_id, last.state, copy, stopping, note)
        except CairnError as e:
            click.echo(f"the last state was not fetched: {e}. The files are on the page", err=True)
            return
    screen.say(f"yours    cairn export {folder} my-model")


def _check_room(folder: Path, size: int, most: int) -> None:
    """Raise CairnError unless a copy of this many bytes may be made here."""
    free = shutil.disk_usage(folder).free
    if size > most or size + RESERVE > free:
        raise CairnError(
            f"it has {byte_size(size)}, and --disk leaves {byte_size(max(0, most))}, this disk {byte_size(free)}"
        )


async def _until_stopped(
    address: str, run: RunId, state: Digest, copy: Path, stopping: asyncio.Future[Any], note: Callable[[int], None]
) -> None:
    """Fetch a copy until `stopping` is done. Raises CairnError.

    The thread ends at its next chunk, and a server that sends a byte a minute delays that. So nobody waits for it long,
    and it is a daemon, which keeps no process alive.
    """
    stopped, loop = threading.Event(), asyncio.get_running_loop()
    fetching: asyncio.Future[None] = loop.create_future()

    def end(error: Exception | None) -> None:
        if not fetching.done():
            fetching.set_exception(error) if error else fetching.set_result(None)

    def fetch() -> None:
        error = None
        try:
            fetch_archived(address, run, state, copy, stopped, note)
        except Exception as e:  # noqa: BLE001 - raised where it is awaited
            error = e
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(end, error)

    threading.Thread(target=fetch, daemon=True).start()
    await asyncio.wait([fetching, stopping], timeout=FETCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    stopped.set()
    await asyncio.wait([fetching], timeout=STOP_SECONDS)
    end(FetchStopped("it was stopped, or took too long"))
    await fetching


def fetch_archived(
    address: str, run: RunId, state: Digest, copy: Path, stopped: threading.Event, note: Callable[[int], None]
) -> None:
    """Copy an archived state from an address into a folder, which appears whole and verified or not at all.

    Until `stopped` is set. `note` is given the number of bytes of each chunk. Raises CairnError.
    """
    draft = copy.with_name(f".{copy.name}.partial")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        read = _keeping(file_reader(address, redirects=False), draft, stopped, note)
        found = verify_checkpoint(read, run=run, names=None)
        if found.archived.state != state:
            raise VerificationError(f"{address}: state {found.archived.state.short}, not the run's last, {state.short}")
        for path in (*draft.iterdir(), draft):
            sync(path)
        shutil.rmtree(copy, ignore_errors=True)
        draft.rename(copy)
        sync(copy.parent)
    except OSError as e:
        raise CairnError(f"{copy} cannot be written: {os_reason(e)}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _keeping(read: ReadFile, folder: Path, stopped: threading.Event, note: Callable[[int], None]) -> ReadFile:
    """Return a function that reads like `read`, and keeps each file in a folder."""

    def kept(name: str) -> Iterator[bytes]:
        with open(folder / name, "wb") as file:
            for chunk in read(name):
                if stopped.is_set():
                    raise FetchStopped("it was stopped, or took too long")
                file.write(chunk)
                note(len(chunk))
                yield chunk

    return kept
