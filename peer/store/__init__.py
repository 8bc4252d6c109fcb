"""What a peer keeps on disk for one run: content-addressed blobs, the chain of certificates, small values.

Everything survives a crash at any instant: written to a temporary file, flushed, renamed, the folder flushed. All of it
is synchronous and thread-safe; whoever has an event loop calls what moves much data through `asyncio.to_thread`. No
sockets and no protocol decisions here: what to keep is for the node to say.
"""

from peer.store.errors import BlobCorrupt, BlobMissing, StoreBusy, StoreError, StoreFull
from peer.store.partial import Partial
from peer.store.store import Store

__all__ = [
    "BlobCorrupt",
    "BlobMissing",
    "Partial",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoreFull",
]
