"""The assets that a trainer starts with: the run's tokenizer and shards in the store, and the spec in a file."""

from __future__ import annotations

import logging

from rich.filesize import decimal

from peer.channel import Start
from peer.node.network import Network
from peer.node.options import NodeOptions
from peer.store import Store
from peer.store.disk import disk
from protocol.ids import PeerKey
from protocol.spec import RunSpec

log = logging.getLogger("peer.assets")

FETCH_SECONDS = 3600.0


async def fetch_assets(spec: RunSpec, store: Store, network: Network) -> None:
    """Fetch the tokenizer, and the training shards for which the spec names no address. Raise CairnError."""
    wanted = [("tokenizer", spec.tokenizer)]
    if not spec.data.addresses:
        wanted += [("data shard", s) for s in spec.data.train]
    for what, blob in wanted:
        if not store.has(blob.name):
            log.info("fetching the run's %s %s (%s)", what, blob.name.short, decimal(blob.size))
            await network.fetch_blob(blob.name, blob.size, network.everyone(), deadline_seconds=FETCH_SECONDS)


def start_message(spec: RunSpec, store: Store, key: PeerKey, options: NodeOptions) -> Start:
    """Return the trainer's first message; the spec is written to a file for it. Raise StoreError."""
    spec_file = options.folder / "spec.json"
    with disk(f"writing {spec_file}"):
        spec_file.write_bytes(spec.canonical())
    return Start(
        spec_path=spec_file,
        store=options.folder / "store",
        identity_key=key,
        state_folder=options.folder / "trainer",
        device=options.device,
        threads=options.threads,
        parallel=options.parallel,
        recompute=options.recompute,
        compile=options.compile,
        overlap=options.overlap,
        shards={s.digest: str(store.path(s.name)) if store.has(s.name) else "" for s in spec.data.train},
    )
