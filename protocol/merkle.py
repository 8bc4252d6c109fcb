"""Merkle tree hashes (RFC 9162 section 2.1) and the blobs named by them.

A blob is bytes of any length, cut into chunks of CHUNK bytes. Its digest is the tree hash over its chunks, so
whoever has the list of leaf hashes (checked against the digest) can check every chunk by itself, from anyone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from protocol.errors import MalformedError
from protocol.ids import Digest, sha256

CHUNK = 256 * 1024
"""Bytes in every chunk of a blob but the last."""

MAX_BLOB = 1 << 40


def leaf_hash(data: bytes | memoryview) -> bytes:
    """RFC 9162: SHA-256 of 0x00 and the data."""
    return sha256(b"\x00", data)


def tree_hash(leaves: Sequence[bytes]) -> Digest:
    """Return the Merkle tree hash of leaf hashes (RFC 9162 section 2.1.1); of none, the SHA-256 of nothing."""
    if not leaves:
        return Digest(sha256())
    level = list(leaves)
    # Level by level with the odd one carried up is the same tree as RFC 9162's split at a power of two.
    while len(level) > 1:
        paired = [sha256(b"\x01", level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        if len(level) % 2:
            paired.append(level[-1])
        level = paired
    return Digest(level[0])


def chunk_count(size: int) -> int:
    """Return the number of chunks of a blob of `size` bytes."""
    return -(-size // CHUNK)


def chunk_size(size: int, index: int) -> int:
    """Return the size of chunk `index` of a blob of `size` bytes. Raises MalformedError when there is no such chunk."""
    if not 0 <= index < chunk_count(size):
        raise MalformedError(f"chunk {index} of a blob of {size} bytes")
    return min(CHUNK, size - index * CHUNK)


def read_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the chunks of a blob that an open file holds."""
    while chunk := file.read(CHUNK):
        yield chunk


def leaves_of(chunks: Iterable[bytes | memoryview]) -> list[bytes]:
    """Leaf hashes of a blob given as its chunks."""
    return [leaf_hash(chunk) for chunk in chunks]


def blob_leaves(data: bytes | memoryview) -> list[bytes]:
    """Leaf hashes of a blob in memory."""
    view = memoryview(data).cast("B")  # a view of floats would be cut by its number of floats
    return leaves_of(view[i : i + CHUNK] for i in range(0, len(view), CHUNK))


def blob_digest(data: bytes | memoryview) -> Digest:
    """Return the digest that names these bytes."""
    return tree_hash(blob_leaves(data))


def check_leaves(digest: Digest, size: int, leaves: Sequence[bytes]) -> None:
    """Raise MalformedError unless the leaves are those of the blob named by `digest`, of `size` bytes."""
    if len(leaves) != chunk_count(size) or any(len(leaf) != 32 for leaf in leaves) or tree_hash(leaves) != digest:
        raise MalformedError(f"these leaf hashes are not those of blob {digest.short}")
