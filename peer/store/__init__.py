"""The data that a peer keeps on disk for one run: content-addressed blobs, certificates of the chain, small values.

Whole blobs, certificates and values survive a crash at any instant: each is written to a temporary file, flushed and
renamed, and the folder is flushed. All of it is synchronous and thread-safe; code with an event loop calls what moves
much data through `asyncio.to_thread`. There are no sockets and no protocol decisions here: the node says what to keep.
"""

from peer.store.errors import BlobCorrupt, BlobMissing, StoreBusy, StoreError, StoreFull
from peer.store.in_progress import InProgressBlob
from peer.store.store import Store
