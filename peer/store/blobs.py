"""Content-addressed blobs in a folder: which are there, how they get there, and that they are what they should be."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from peer.store.disk import disk, flush_folder, remove, write_durably, write_loosely
from peer.store.errors import BlobCorrupt, BlobMissing, StoreError, StoreFull
from peer.store.partial import Partial
from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.merkle import CHUNK, MAX_BLOB, blob_leaves, check_leaves, chunk_count, chunk_size, leaf_hash, tree_hash

log = logging.getLogger(__name__)

LEAF_LISTS = 32
"""Leaf lists kept in memory, each 32 bytes a chunk."""

_HEX = re.compile(r"[0-9a-f]{64}")


class Blobs:
    """The blobs of a `Store`, which holds the folder's lock. Thread-safe. An index of names and sizes is in memory."""

    def __init__(self, folder: Path, limit_bytes: int):
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.notices: list[str] = []
        """What was found damaged and mended: for the node to report. The newest 100."""
        self._mutex = threading.RLock()
        self._sizes: dict[Digest, int] = {}
        self._partials: dict[Digest, Partial] = {}
        self._waiting: dict[Digest, int] = {}  # partial blobs on disk that nobody has asked for since the start
        self._leaf_lists: OrderedDict[Digest, bytes] = OrderedDict()
        self._scan()

    @property
    def scratch(self) -> Path:
        """Where files may be made that are then `adopt`ed: same file system, emptied at every start."""
        return self.folder / "scratch"

    @property
    def used_bytes(self) -> int:
        """Bytes of all blobs, and of all room made for blobs that are arriving."""
        with self._mutex:
            arriving = sum(p.room for p in self._partials.values())
            return sum(self._sizes.values()) + arriving + sum(self._waiting.values())

    def has(self, digest: Digest) -> bool:
        return digest in self._sizes

    def blobs(self) -> dict[Digest, int]:
        """All blobs held, with their sizes."""
        with self._mutex:
            return dict(self._sizes)

    def path(self, digest: Digest) -> Path:
        """The file of a blob that is held. Raises BlobMissing. Read it, never write to it."""
        if digest not in self._sizes:
            raise BlobMissing(f"blob {digest.short} is not in the store")
        return self._file(digest)

    def size(self, digest: Digest) -> int:
        """Raises BlobMissing."""
        with self._mutex:
            if digest not in self._sizes:
                raise BlobMissing(f"blob {digest.short} is not in the store")
            return self._sizes[digest]

    def put(self, data: bytes | memoryview) -> Digest:
        """Keep these bytes; durable when it returns. Raises StoreError."""
        leaves = blob_leaves(data)
        digest = tree_hash(leaves)
        if self.has(digest):
            return digest
        self._check_room(len(data), digest)
        with disk(f"writing blob {digest.short} ({len(data):,} bytes)"):
            path = self._file(digest)
            path.parent.mkdir(exist_ok=True)
            write_loosely(_leaf_file(path), b"".join(leaves), scratch=self.scratch)
            write_durably(path, data, scratch=self.scratch)
        self._register(digest, len(data), leaves)
        return digest

    def adopt(self, source: Path | str, digest: Digest | None = None) -> Digest:
        """Move a finished file in; durable when it returns. The source is gone then.

        With `digest`, the file must be that blob. Raises StoreError (MalformedError when it is another): the source
        stays where it is.
        """
        source = Path(source)
        with disk(f"taking {source.name} into the store"):
            with open(source, "rb") as file:
                leaves = [leaf_hash(chunk) for chunk in iter(lambda: file.read(CHUNK), b"")]
                size = file.tell()
                found = tree_hash(leaves)
                if digest is not None and digest != found:
                    raise MalformedError(f"{source.name} is not blob {digest.short}: its digest is {found.short}")
                if self.has(found):
                    remove(source)
                    return found
                self._check_room(size, found)
                os.fsync(file.fileno())
            path = self._file(found)
            path.parent.mkdir(exist_ok=True)
            write_loosely(_leaf_file(path), b"".join(leaves), scratch=self.scratch)
            self._move(source, path)
        self._register(found, size, leaves)
        return found

    def leaves(self, digest: Digest) -> list[bytes]:
        """The leaf hashes of a blob. Raises BlobMissing, BlobCorrupt."""
        raw = self._leaves_raw(digest)
        return [raw[i : i + 32] for i in range(0, len(raw), 32)]

    def read_chunk(self, digest: Digest, index: int) -> bytes:
        """A chunk, checked against its leaf. Raises BlobMissing, BlobCorrupt, MalformedError (no such chunk)."""
        expected = chunk_size(self.size(digest), index)
        raw = self._leaves_raw(digest)
        try:
            with open(self._file(digest), "rb") as file:
                data = os.pread(file.fileno(), expected, index * CHUNK)
        except FileNotFoundError:
            raise self._corrupt(digest, "its file is gone") from None
        except OSError as e:
            if e.errno == errno.EIO:
                raise self._corrupt(digest, "the disk cannot read it") from None
            raise StoreError(f"reading blob {digest.short}: {e.strerror}; check the disk") from None
        if len(data) != expected or leaf_hash(data) != raw[index * 32 : index * 32 + 32]:
            raise self._corrupt(digest, f"chunk {index} is not what it was")
        return data

    def read(self, digest: Digest, *, limit: int = 64 * 1024 * 1024) -> bytes:
        """A whole blob in memory, checked. Raises BlobMissing, BlobCorrupt, StoreError when it is over the limit."""
        size = self.size(digest)
        if size > limit:
            raise StoreError(f"blob {digest.short} has {size:,} bytes: more than the {limit:,} that are read at once")
        return b"".join(self.read_chunk(digest, i) for i in range(chunk_count(size)))

    def verify(self, digest: Digest, first: int = 0, most: int | None = None) -> bool:
        """Read a blob and check it: from chunk `first`, at most so many. Whether that was all of it.

        Raises BlobMissing, BlobCorrupt (it is removed then), StoreError.
        """
        self._leaves_raw(digest)  # a file without any chunk has none to be wrong
        chunks = chunk_count(self.size(digest))
        end = chunks if most is None else min(chunks, first + most)
        for i in range(first, end):
            self.read_chunk(digest, i)
        return end == chunks

    def remove(self, digest: Digest) -> None:
        """Forget a blob, arriving or complete. No error when it is not there."""
        with self._mutex, disk(f"removing blob {digest.short}"):
            if (partial := self._partials.pop(digest, None)) is not None:
                partial.shut()
            self._waiting.pop(digest, None)
            self._remove_partial_files(digest)
            if self._sizes.pop(digest, None) is not None:
                self._leaf_lists.pop(digest, None)
                remove(self._file(digest))
                remove(_leaf_file(self._file(digest)))

    def dispensable(self, keep: set[Digest]) -> list[Digest]:
        """Every blob, and every partial blob that is not arriving now, but those in `keep`."""
        with self._mutex:
            arriving = {d for d, p in self._partials.items() if not p.done and not p.idle}  # somebody fetches it now
            return sorted((self._sizes.keys() | self._waiting.keys() | self._partials.keys()) - keep - arriving)

    def prune(self, keep: set[Digest]) -> list[Digest]:
        """Remove what is `dispensable`; says which."""
        with self._mutex:
            doomed = self.dispensable(keep)
            for digest in doomed:
                self.remove(digest)
            return doomed

    # -- blobs that are arriving ---------------------------------------------------------------------------------

    def partial(
        self, digest: Digest, size: int, leaves: Sequence[bytes], chunks: Collection[int] | None = None
    ) -> Partial:
        """Room for a blob whose chunks will come; goes on from what an earlier attempt left, checked again.

        With `chunks` there is room for these (and those asked for before), which are all that is wanted of the blob.
        Raises MalformedError for leaves that are not those of this digest and size, and for such chunks; StoreFull.
        """
        if not 0 <= size <= MAX_BLOB:
            raise MalformedError(f"a blob of {size} bytes: at most {MAX_BLOB} are accepted")
        check_leaves(digest, size, leaves)
        with self._mutex:
            known = self._partials.get(digest)
            if known is not None and (chunks is not None or not known.idle):
                self._check_room(known.more_room(chunks), digest)
                if known.share(chunks):
                    return known
            # The room that an attempt before this one left is this one's.
            left = self._waiting.pop(digest, 0) or (known.room if known is not None else 0)
            self._partials.pop(digest, None)
            try:
                self._check_room(size if chunks is None else sum(chunk_size(size, i) for i in set(chunks)), digest)
                path = self.folder / "partial" / digest.hex()
                with disk(f"making room for blob {digest.short}"):
                    write_loosely(_leaf_file(path), b"".join(leaves), scratch=self.scratch)
                made = Partial(
                    path, digest, size, leaves, mutex=self._mutex, finished=self._finished, chunks=chunks
                )  # fmt: skip
            except BaseException:
                if left:
                    self._waiting[digest] = left
                raise
            self._partials[digest] = made
            return made

    def arriving(self, digest: Digest) -> Partial | None:
        """The partial blob of this digest, when there is one since the start: its chunks can be had."""
        partial = self._partials.get(digest)
        return partial if partial is not None and not partial.done else None

    def known_leaves(self, digest: Digest, size: int) -> list[bytes] | None:
        """The leaves that an earlier, interrupted attempt left, if they are right."""
        try:
            raw = _leaf_file(self.folder / "partial" / digest.hex()).read_bytes()
        except OSError:
            return None
        leaves = [raw[i : i + 32] for i in range(0, len(raw), 32)]
        try:
            check_leaves(digest, size, leaves)
        except MalformedError:
            return None
        return leaves

    def _finished(self, partial: Partial) -> None:
        path = self._file(partial.digest)
        path.parent.mkdir(exist_ok=True)
        write_loosely(_leaf_file(path), b"".join(partial.leaves), scratch=self.scratch)
        os.rename(partial.path, path)
        flush_folder(path.parent)
        with self._mutex:
            self._register(partial.digest, partial.size, partial.leaves)
            self._partials.pop(partial.digest, None)
        remove(_leaf_file(partial.path))

    def _remove_partial_files(self, digest: Digest) -> None:
        path = self.folder / "partial" / digest.hex()
        remove(path)
        remove(_leaf_file(path))

    # -- inside ------------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """What is on disk: names and sizes. Contents are checked chunk by chunk when they are read."""
        for draft in self.scratch.iterdir():
            shutil.rmtree(draft) if draft.is_dir() and not draft.is_symlink() else remove(draft)
        for entry in (e for sub in (self.folder / "blobs").iterdir() if sub.is_dir() for e in os.scandir(sub)):
            if _HEX.fullmatch(entry.name):
                self._sizes[Digest.parse(entry.name)] = entry.stat().st_size
        for entry in os.scandir(self.folder / "partial"):
            if _HEX.fullmatch(entry.name):
                digest = Digest.parse(entry.name)
                if digest in self._sizes:
                    self._remove_partial_files(digest)
                else:
                    found = entry.stat()
                    self._waiting[digest] = min(found.st_size, 512 * found.st_blocks)  # of a slice most is a hole
            elif entry.name.endswith(".leaves") and not (self.folder / "partial" / entry.name[:64]).exists():
                os.unlink(entry.path)  # its blob was finished; the crash came just before this

    def _file(self, digest: Digest) -> Path:
        name = digest.hex()
        return self.folder / "blobs" / name[:2] / name

    def _check_room(self, size: int, digest: Digest) -> None:
        used = self.used_bytes
        if used + size > self.limit_bytes:
            raise StoreFull(
                f"blob {digest.short} needs {size:,} bytes, and {used:,} of the {self.limit_bytes:,} that the store "
                "may use are taken: allow it more disk"
            )

    def _register(self, digest: Digest, size: int, leaves: Sequence[bytes]) -> None:
        with self._mutex:
            self._sizes[digest] = size
            self._remember_leaves(digest, b"".join(leaves))

    def _remember_leaves(self, digest: Digest, raw: bytes) -> None:
        self._leaf_lists[digest] = raw
        self._leaf_lists.move_to_end(digest)
        while len(self._leaf_lists) > LEAF_LISTS:
            self._leaf_lists.popitem(last=False)

    def _leaves_raw(self, digest: Digest) -> bytes:
        with self._mutex:
            size = self.size(digest)
            if (raw := self._leaf_lists.get(digest)) is not None:
                self._leaf_lists.move_to_end(digest)
                return raw
        path = self._file(digest)
        with suppress(OSError, MalformedError):
            raw = _leaf_file(path).read_bytes()
            check_leaves(digest, size, [raw[i : i + 32] for i in range(0, len(raw), 32)])
            with self._mutex:
                self._remember_leaves(digest, raw)
            return raw
        try:
            with open(path, "rb") as file:
                leaves = [leaf_hash(chunk) for chunk in iter(lambda: file.read(CHUNK), b"")]
            check_leaves(digest, size, leaves)
        except FileNotFoundError:
            raise self._corrupt(digest, "its file is gone") from None
        except MalformedError:
            raise self._corrupt(digest, "its bytes are not what they were") from None
        except OSError as e:
            raise StoreError(f"reading blob {digest.short}: {e.strerror}; check the disk") from None
        with disk(f"writing the leaves of blob {digest.short}"):
            write_loosely(_leaf_file(path), b"".join(leaves), scratch=self.scratch)
        self._register(digest, size, leaves)
        return b"".join(leaves)

    def _corrupt(self, digest: Digest, why: str) -> BlobCorrupt:
        with self._mutex:
            gone = digest not in self._sizes
            if not gone:  # else another has removed it, and it may be arriving again
                self.remove(digest)
        text = f"blob {digest.short} on disk was damaged ({why}) and is removed; it has to be fetched again"
        if not gone:
            self._notice(text)
        return BlobCorrupt(text)

    def _notice(self, text: str) -> None:
        log.warning(text)
        self.notices.append(text)
        del self.notices[:-100]

    def _move(self, source: Path, path: Path) -> None:
        try:
            os.rename(source, path)
            flush_folder(path.parent)
        except OSError as e:
            if e.errno != errno.EXDEV:
                raise
            draft = self.scratch / f"{path.name}.copy"
            shutil.copyfile(source, draft)
            with open(draft, "rb") as file:
                os.fsync(file.fileno())
            os.rename(draft, path)
            flush_folder(path.parent)
            remove(source)


def _leaf_file(path: Path) -> Path:
    return path.with_name(path.name + ".leaves")
