"""The epoch of the trainer's saved state: the number of rollbacks that it knows of.

A trainer that was away during a rollback must not continue with what it saved before: that was learnt from states that
no longer count.
"""

from __future__ import annotations

from pathlib import Path

from peer.store import Store
from protocol.chain import Chain

EPOCH = "epoch"
"""Name of the value in the store."""

_SAVED_STATE = (
    "trainer-*.safetensors", "trainer.json", "update*", "dropped-*", ".trainer-*", ".update*", ".dropped-*",
)  # fmt: skip


def saved_epoch(store: Store) -> int:
    """Return the epoch of the saved state; 0 when none is stored. Raise StoreError."""
    text = (store.read_value(EPOCH) or b"").decode(errors="replace")
    return int(text) if text.isdigit() else 0


def store_epoch(store: Store, epoch: int) -> None:
    """Note the epoch of what the trainer saves from now on. Raise StoreError."""
    if epoch != saved_epoch(store):
        store.write_value(EPOCH, str(epoch).encode())


def remove_outdated_state(store: Store, chain: Chain, folder: Path) -> None:
    """Remove the saved state if the run was rolled back since. Raise StoreError, OSError."""
    epoch = 0 if chain.newest_directive is None else chain.newest_directive.body.epoch
    if saved_epoch(store) < epoch:
        remove_saved_state(folder)


def remove_saved_state(folder: Path) -> None:
    """Remove what a trainer saved: error feedback, optimizer moments, counts. Raise OSError."""
    for pattern in _SAVED_STATE:
        for path in folder.glob(pattern):
            if path.is_file():
                path.unlink(missing_ok=True)
