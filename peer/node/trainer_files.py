"""The trainer's files: the run's assets in the store, the spec that it starts with, and the state that it saves.

A trainer that was off during a rollback must not continue with what it saved before: that was learnt from states that
no longer count. So the epoch of the saved state, the number of rollbacks that it knows of, is stored.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from peer.channel import Start
from peer.doctor.disk import SAVED_TENSORS, files_room, to_save
from peer.durable import write_durably
from peer.errors import NotInSwarm, PeerError
from peer.fetched_data import fetched_shards
from peer.node.base_model import fetch_base_nearby, fetch_seconds
from peer.node.failure_log import FailureLog
from peer.node.network import Network
from peer.node.options import NodeOptions
from peer.store import Store
from peer.store.disk import disk, remove
from peer.swarm.errors import SwarmError
from protocol.chain import Chain
from protocol.ids import PeerKey
from protocol.spec import BlobRef, RunSpec

log = logging.getLogger(__name__)

TURN_SECONDS = 600.0
"""Seconds after which the members that are there by then are asked for the rest of a file."""

AGAIN_SECONDS = 5.0
"""Seconds until a file that nobody gave is asked for again: members come, go, and start again."""

EPOCH = "epoch"
"""Name of the value in the store."""

_SAVED_STATE = (
    SAVED_TENSORS, "trainer.json", "update*", "dropped-*", ".trainer-*", ".update*", ".dropped-*",
)  # fmt: skip


async def fetch_assets(spec: RunSpec, store: Store, network: Network, *, private_data: bool) -> None:
    """Fetch the tokenizer, and what `fetch_training_files` fetches. Raises CairnError."""
    await _fetch("tokenizer", spec.tokenizer, store, network)
    await fetch_training_files(spec, store, network, private_data=private_data)


async def fetch_training_files(spec: RunSpec, store: Store, network: Network, *, private_data: bool) -> None:
    """Fetch a frozen base model, and the training shards if the spec names no address that may be used.

    Raises CairnError.
    """
    if (adapter := spec.model.adapter) is not None:
        await fetch_base_nearby(adapter, store, network, private_data=private_data)
        await _fetch("base model", adapter.base, store, network)
    for shard in fetched_shards(spec, private_data=private_data):
        await _fetch("data shard", shard, store, network)


async def _fetch(what: str, blob: BlobRef, store: Store, network: Network) -> None:
    """Fetch a blob that is not here. The members that are there by then are asked again until its time is over."""
    if store.has(blob.name):
        return
    seconds, now, failures = fetch_seconds(blob.size), asyncio.get_running_loop().time, FailureLog()
    deadline = now() + seconds
    with network.downloads.noted(f"the run's {what}", blob.name, blob.size):
        while True:
            turn_ends = min(deadline, now() + TURN_SECONDS)
            try:
                await network.fetch_blob(blob.name, blob.size, network.providers(), deadline_seconds=turn_ends - now())
                return
            except (SwarmError, NotInSwarm) as e:
                if now() + AGAIN_SECONDS >= deadline:
                    raise PeerError(
                        f"the run's {what} did not arrive within {seconds / 3600:.1f} h: {e}. Check that this machine "
                        "is online and that members are there; the same command goes on from what has arrived"
                    ) from None
                if now() >= turn_ends:
                    continue
                if failures.failed(now()):
                    log.warning("the run's %s is asked for again: %s", what, e)
            await asyncio.sleep(AGAIN_SECONDS)


def room_for_files(spec: RunSpec, store: Store, options: NodeOptions) -> int:
    """Return the bytes of files that the trainer may write for its state between rounds. Raises StoreError."""
    with disk(f"reading the size of the disk of {store.folder}"):
        free = shutil.disk_usage(store.folder).free
    return files_room(
        spec, limit=store.limit_bytes, used=store.used_bytes, free=free,
        saves=to_save(spec, options.folder / "trainer"), private_data=options.private_data,
    )  # fmt: skip


def start_message(spec: RunSpec, store: Store, key: PeerKey, options: NodeOptions) -> Start:
    """Return the trainer's first message; the spec is written to a file for it. Raises StoreError."""
    return Start(
        spec_path=write_spec(spec, options.folder),
        identity_key=key,
        state_folder=options.folder / "trainer",
        device=options.device,
        threads=options.threads,
        parallel=options.parallel,
        recompute=options.recompute,
        compile=options.compile,
        moments=options.moments,
        overlap=options.overlap,
        private_data=options.private_data,
        shards=data_shards(spec, store),
        base=base_file(spec, store),
        disk=room_for_files(spec, store, options),
    )


def spec_file(folder: Path) -> Path:
    """Return the file in a node's folder that `write_spec` writes."""
    return folder / "spec.json"


def write_spec(spec: RunSpec, folder: Path) -> Path:
    """Write the spec to a file in a node's folder, for other processes, and return the file. Raises StoreError."""
    path = spec_file(folder)
    with disk(f"writing {path}"):
        write_durably(path, [spec.canonical()])  # the tools read it, also while a peer starts
    return path


def data_shards(spec: RunSpec, store: Store) -> dict[str, str]:
    """Return the training shards by digest, each with its file if the store has it, else ""."""
    return {s.digest: str(store.path(s.name)) if store.has(s.name) else "" for s in spec.data.train}


def base_file(spec: RunSpec, store: Store) -> Path | None:
    """Return the file of the run's frozen base model; None for a run without one. Raises StoreError."""
    return None if spec.model.adapter is None else store.path(spec.model.adapter.base.name)


def saved_epoch(store: Store) -> int:
    """Return the epoch of the saved state; 0 when none is stored. Raises StoreError."""
    text = (store.read_value(EPOCH) or b"").decode(errors="replace")
    return int(text) if text.isdigit() else 0


def store_epoch(store: Store, epoch: int) -> None:
    """Note the epoch of what the trainer saves from now on. Raises StoreError."""
    if epoch != saved_epoch(store):
        store.write_value(EPOCH, str(epoch).encode())


def remove_outdated_state(store: Store, chain: Chain, folder: Path) -> None:
    """Remove the saved state if the run was rolled back since. Raises StoreError, OSError."""
    epoch = 0 if chain.newest_directive is None else chain.newest_directive.body.epoch
    if saved_epoch(store) < epoch:
        remove_saved_state(folder)


def remove_drafts(store: Store) -> None:
    """Remove what a dead trainer was writing for the node. Raises StoreError."""
    with disk("removing the drafts of a dead trainer"):
        for draft in store.scratch.glob(".*.part"):
            remove(draft)


def remove_saved_state(folder: Path) -> None:
    """Remove what a trainer saved: error feedback, optimizer moments, counts. Raises OSError."""
    for pattern in _SAVED_STATE:
        for path in folder.glob(pattern):
            if path.is_file():
                path.unlink(missing_ok=True)
