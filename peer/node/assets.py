"""What a trainer needs before it can start: the run's tokenizer and shards in the store, the spec in a file."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.filesize import decimal

from peer.channel import Choice, Start
from peer.node.network import Network
from peer.store import Store
from peer.store.disk import disk
from protocol.ids import PeerKey
from protocol.spec import RunSpec

log = logging.getLogger("peer.assets")

FETCH_SECONDS = 3600.0


async def fetch_assets(spec: RunSpec, store: Store, network: Network) -> None:
    """The tokenizer, and the training shards where the spec names no address for them. Raises CairnError."""
    wanted = [("tokenizer", spec.tokenizer)]
    if not spec.data.addresses:
        wanted += [("data shard", s) for s in spec.data.train]
    for what, blob in wanted:
        if not store.has(blob.name):
            log.info("fetching the run's %s %s (%s)", what, blob.name.short, decimal(blob.size))
            await network.fetch_blob(blob.name, blob.size, network.everyone(), deadline_seconds=FETCH_SECONDS)


def start_message(
    spec: RunSpec,
    store: Store,
    folder: Path,
    key: PeerKey,
    device: str,
    threads: int,
    parallel: str = "auto",
    recompute: Choice = "auto",
    compiled: Choice = "auto",
    overlap: bool = True,
) -> Start:
    """What the trainer is started with; the spec is written to a file for it. Raises StoreError."""
    spec_file = folder / "spec.json"
    with disk(f"writing {spec_file}"):
        spec_file.write_bytes(spec.canonical())
    return Start(
        spec_path=spec_file,
        store=folder / "store",
        identity_key=key,
        state_folder=folder / "trainer",
        device=device,
        threads=threads,
        parallel=parallel,
        recompute=recompute,
        compile=compiled,
        overlap=overlap,
        shards={s.digest: str(store.path(s.name)) if store.has(s.name) else "" for s in spec.data.train},
    )
