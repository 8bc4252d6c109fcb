"""Content-addressed blobs in a folder: which are there, how they arrive, and that their bytes match their digests."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from peer.durable import flush_folder, write_durably
from peer.store.disk import disk, disk_error, remove, write_no_sync
from peer.store.errors import BlobCorrupt, BlobMissing, StoreError, StoreFull
from peer.store.in_progress import InProgressBlob
from protocol.bounded import BoundedDict
from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.merkle import CHUNK, MAX_BLOB, blob_leaves, check_leaves, chunk_count, chunk_size, leaf_hash, tree_hash

log = logging.getLogger(__name__)

LEAF_LISTS = 32
"""Leaf lists kept in memory, each 32 bytes a chunk."""

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class WholeBlob:
    """All of it is here. `room` is its size in bytes."""

    room: int


@dataclass(frozen=True, slots=True)
class InterruptedBlob:
    """Chunks of it lie on disk since before the start, in `room` bytes, and nobody has fetched it since."""

    room: int


BlobState = WholeBlob | InterruptedBlob | InProgressBlob
"""The state of a blob in the store. A blob that is absent has none."""


class BlobStore:
    """The blobs of a `Store`, which holds the folder's lock. Thread-safe.

    `_lock` guards the state of every blob. Event loops take it, so it is not held during slow disk work. `_files_lock`
    is held while files come, move and go, and is taken before `_lock`.
    """

    def __init__(self, folder: Path, limit_bytes: int):
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._lent = 0
        self._lock = threading.RLock()
        self._files_lock = threading.RLock()
        self._states: dict[Digest, BlobState] = {}
        self._leaf_lists: BoundedDict[Digest, bytes] = BoundedDict(LEAF_LISTS)
        self._scan()

    @property
    def scratch(self) -> Path:
        """The folder for drafts of files to `adopt`: on the same file system, emptied at every start."""
        return self.folder / "scratch"

    @property
    def used_bytes(self) -> int:
        """Bytes of all whole blobs, the bytes reserved for all others, and those that are lent."""
        with self._lock:
            return self._lent + sum(state.room for state in self._states.values())

    def lend(self, size: int) -> None:
        """Count so many bytes of files beside the store as used, instead of those that were lent before."""
        self._lent = size

    @property
    def free_bytes(self) -> int:
        """Bytes for more blobs, by the limit and by the disk. Raises StoreError."""
        with disk(f"reading the size of the disk of {self.folder}"):
            free = shutil.disk_usage(self.folder).free
        return max(0, min(self.limit_bytes - self.used_bytes, free))

    def has(self, digest: Digest) -> bool:
        """Return whether the whole blob is here."""
        return isinstance(self._states.get(digest), WholeBlob)

    def blobs(self) -> dict[Digest, int]:
        """Return all whole blobs with their sizes in bytes."""
        with self._lock:
            return {digest: state.room for digest, state in self._states.items() if isinstance(state, WholeBlob)}

    def path(self, digest: Digest) -> Path:
        """Return the file of a whole blob. Read it, never write to it. Raises BlobMissing."""
        self.size(digest)
        return self._file(digest)

    def size(self, digest: Digest) -> int:
        """Return the size of a whole blob in bytes. Raises BlobMissing."""
        state = self._states.get(digest)
        if not isinstance(state, WholeBlob):
            raise BlobMissing(f"blob {digest.short} is not in the store")
        return state.room

    def put(self, data: bytes | memoryview) -> Digest:
        """Keep these bytes as a blob; return its digest. Durable when it returns. Raises StoreError."""
        leaves = blob_leaves(data)
        digest = tree_hash(leaves)
        if self.has(digest):
            return digest
        self._check_room(len(data), digest)
        with self._files_lock, disk(f"writing blob {digest.short} ({len(data):,} bytes)"):
            path = self._file_to_write(digest)
            write_no_sync(_leaf_file(path), b"".join(leaves), scratch=self.scratch)
            write_durably(path, [data], scratch=self.scratch)
            self._register(digest, len(data), leaves)
        return digest

    def adopt(self, source: Path | str, digest: Digest | None = None) -> Digest:
        """Move a finished file in; return its digest. Durable when it returns; the source is gone then.

        With `digest`, the file must be that blob. Raises StoreError, and MalformedError when it is another blob: then
        the source stays where it is.
        """
        source = Path(source)
        with disk(f"moving {source.name} into the store"):
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
            with self._files_lock:
                path = self._file_to_write(found)
                write_no_sync(_leaf_file(path), b"".join(leaves), scratch=self.scratch)
                self._move(source, path)
                self._register(found, size, leaves)
        return found

    def leaves(self, digest: Digest) -> list[bytes]:
        """Return the leaf hashes of a whole blob, 32 bytes each. Raises BlobMissing, BlobCorrupt."""
        raw = self._leaves_raw(digest)
        return [raw[i : i + 32] for i in range(0, len(raw), 32)]

    def leaves_page(self, digest: Digest, first: int, count: int) -> bytes:
        """Return up to `count` leaf hashes of a whole blob, joined. Raises BlobMissing, BlobCorrupt.

        Of a list of 400,000 leaves that takes no longer than of a short one.
        """
        return self._leaves_raw(digest)[32 * first : 32 * (first + count)]

    def read_chunk(self, digest: Digest, index: int) -> bytes:
        """Return a chunk of a whole blob, checked. Raises BlobMissing, BlobCorrupt, MalformedError (no such chunk)."""
        expected = chunk_size(self.size(digest), index)
        raw = self._leaves_raw(digest)
        try:
            with open(self._file(digest), "rb") as file:
                data = os.pread(file.fileno(), expected, index * CHUNK)
        except FileNotFoundError:
            raise self._corrupt(digest, "its file is gone") from None
        except OSError as e:
            raise self._unreadable(digest, e) from None
        if len(data) != expected or leaf_hash(data) != raw[index * 32 : index * 32 + 32]:
            raise self._corrupt(digest, f"chunk {index} is not what it was")
        return data

    def read(self, digest: Digest, *, limit: int = 64 * 1024 * 1024) -> bytes:
        """Return a whole blob, checked. Raises BlobMissing, BlobCorrupt; StoreError when it exceeds `limit` bytes."""
        size = self.size(digest)
        if size > limit:
            raise StoreError(f"blob {digest.short} has {size:,} bytes: more than the {limit:,} that are read at once")
        return b"".join(self.read_chunk(digest, i) for i in range(chunk_count(size)))

    def verify(self, digest: Digest, first: int = 0, most: int | None = None) -> bool:
        """Read a whole blob and check it, from chunk `first` on, `most` chunks at most; return whether it was the rest.

        Raises BlobMissing, BlobCorrupt (the blob is removed then), StoreError.
        """
        self._leaves_raw(digest)  # a file without any chunk has none to be wrong
        chunks = chunk_count(self.size(digest))
        end = chunks if most is None else min(chunks, first + most)
        for i in range(first, end):
            self.read_chunk(digest, i)
        return end == chunks

    def remove(self, digest: Digest) -> None:
        """Remove a blob, whole or in progress. It is no error if there is none."""
        with self._files_lock, disk(f"removing blob {digest.short}"):
            with self._lock:
                state = self._states.pop(digest, None)
                self._leaf_lists.pop(digest, None)
                if isinstance(state, InProgressBlob):
                    state.retire(whole=False)
            self._remove_partial_files(digest)
            if isinstance(state, WholeBlob):
                remove(self._file(digest))
                remove(_leaf_file(self._file(digest)))

    def unreferenced(self, keep: set[Digest]) -> list[Digest]:
        """Return all blobs, sorted, except those in `keep` and those being fetched now."""
        with self._lock:
            idle = {d for d, s in self._states.items() if not isinstance(s, InProgressBlob) or s.idle}
            return sorted(idle - keep)

    # -- blobs that are arriving ---------------------------------------------------------------------------------

    def receive(
        self, digest: Digest, size: int, leaves: Sequence[bytes], chunks: Collection[int] | None = None
    ) -> InProgressBlob | None:
        """Reserve disk space for a blob whose chunks will come. Return None when the whole blob is here.

        Chunks that an earlier attempt left count; those from before the start are checked again first, without the
        lock. With `chunks`, space is reserved for these, and for those of earlier calls. Raises StoreError, and
        MalformedError when the leaves are not those of this digest and size, or the blob has no such chunk.
        """
        if not 0 <= size <= MAX_BLOB:
            raise MalformedError(f"a blob of {size} bytes: at most {MAX_BLOB} are accepted")
        check_leaves(digest, size, leaves)
        with self._files_lock:
            earlier = self._states.get(digest)
            if isinstance(earlier, WholeBlob):
                return None
            if isinstance(earlier, InProgressBlob) and (earlier.size == size or not earlier.idle):
                with self._lock:
                    self._check_room(earlier.more_room(chunks), digest)
                    claimed = earlier.claim(chunks)
                earlier.make_room(claimed)
                return earlier
            path = self._partial_file(digest)
            made = InProgressBlob(path, digest, size, leaves, lock=self._lock, promote=self._promote)
            try:
                with self._lock:
                    # The new attempt takes over the space of the earlier one.
                    self._states.pop(digest, None)
                    if isinstance(earlier, InProgressBlob):
                        earlier.retire(whole=False)
                    self._check_room(made.more_room(chunks), digest)
                    self._states[digest] = made
                    claimed = made.claim(chunks)
                with disk(f"making room for blob {digest.short}"):
                    write_no_sync(_leaf_file(path), b"".join(leaves), scratch=self.scratch)
                made.create(claimed)
            except BaseException:
                with self._lock:
                    self._states.pop(digest, None)
                    made.retire(whole=False)
                    if earlier is not None and path.exists():
                        self._states[digest] = InterruptedBlob(earlier.room)
                raise
        if isinstance(earlier, InterruptedBlob):
            try:
                made.recheck(chunks)
            except StoreError:
                made.close()
                raise
        return made

    def in_progress(self, digest: Digest) -> InProgressBlob | None:
        """Return the blob if it was fetched since the start and is not whole: some of its chunks can be read."""
        state = self._states.get(digest)
        return state if isinstance(state, InProgressBlob) else None

    def known_leaves(self, digest: Digest, size: int) -> list[bytes] | None:
        """Return the leaf hashes that an earlier, interrupted attempt left, if they are right."""
        try:
            raw = _leaf_file(self._partial_file(digest)).read_bytes()
        except OSError:
            return None
        leaves = [raw[i : i + 32] for i in range(0, len(raw), 32)]
        try:
            check_leaves(digest, size, leaves)
        except MalformedError:
            return None
        return leaves

    def _promote(self, blob: InProgressBlob) -> None:
        """Move a complete file to the whole blobs. Raises BlobMissing when it was removed, or is whole already."""
        with self._files_lock:
            blob.check_kept()
            path = self._file_to_write(blob.digest)
            write_no_sync(_leaf_file(path), b"".join(blob.leaves), scratch=self.scratch)
            os.rename(blob.path, path)
            flush_folder(path.parent)
            self._register(blob.digest, blob.size, blob.leaves)

    def _forget_in_progress(self) -> None:
        """Close the files of all blobs in progress. The caller holds both locks, and closes the store."""
        for digest, state in list(self._states.items()):
            if isinstance(state, InProgressBlob):
                del self._states[digest]
                state.retire(whole=False)

    def _partial_file(self, digest: Digest) -> Path:
        return self.folder / "partial" / digest.hex()

    def _remove_partial_files(self, digest: Digest) -> None:
        path = self._partial_file(digest)
        remove(path)
        remove(_leaf_file(path))

    # -- inside ------------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Read the names and sizes of what is on disk. Contents are checked chunk by chunk when they are read."""
        for draft in self.scratch.iterdir():
            shutil.rmtree(draft) if draft.is_dir() and not draft.is_symlink() else remove(draft)
        for entry in (e for sub in (self.folder / "blobs").iterdir() if sub.is_dir() for e in os.scandir(sub)):
            if _HEX.fullmatch(entry.name):
                self._states[Digest.parse(entry.name)] = WholeBlob(entry.stat().st_size)
        for entry in os.scandir(self.folder / "partial"):
            if _HEX.fullmatch(entry.name):
                digest = Digest.parse(entry.name)
                if digest in self._states:
                    self._remove_partial_files(digest)
                else:
                    found = entry.stat()
                    used = min(found.st_size, 512 * found.st_blocks)  # most of a slice's file is a hole
                    self._states[digest] = InterruptedBlob(used)
            elif entry.name.endswith(".leaves") and not (self.folder / "partial" / entry.name[:64]).exists():
                os.unlink(entry.path)  # its blob was finished; the crash came just before this

    def _file(self, digest: Digest) -> Path:
        return blob_file(self.folder, digest)

    def _check_room(self, size: int, digest: Digest) -> None:
        used = self.used_bytes
        if used + size > self.limit_bytes:
            raise StoreFull(
                f"blob {digest.short} needs {size:,} bytes, and {used:,} of the {self.limit_bytes:,} that the store "
                "may use are taken: allow it more disk (--disk)"
            )

    def _register(self, digest: Digest, size: int, leaves: Sequence[bytes]) -> None:
        """Note that the whole blob is in its place. The blob in progress ends."""
        with self._files_lock, disk(f"keeping blob {digest.short}"):
            with self._lock:
                earlier = self._states.get(digest)
                self._states[digest] = WholeBlob(size)
                self._leaf_lists.renew(digest, b"".join(leaves))
                if isinstance(earlier, InProgressBlob):
                    earlier.retire(whole=True)
            if not isinstance(earlier, WholeBlob):
                self._remove_partial_files(digest)

    def _leaves_raw(self, digest: Digest) -> bytes:
        size = self.size(digest)
        with self._lock:
            if (raw := self._leaf_lists.get(digest)) is not None:
                self._leaf_lists.move_to_end(digest)
                return raw
        path = self._file(digest)
        with suppress(OSError, MalformedError):
            raw = _leaf_file(path).read_bytes()
            check_leaves(digest, size, [raw[i : i + 32] for i in range(0, len(raw), 32)])
            with self._lock:
                self._leaf_lists.renew(digest, raw)
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
            raise self._unreadable(digest, e) from None
        with disk(f"writing the leaves of blob {digest.short}"):
            raw = b"".join(leaves)
            write_no_sync(_leaf_file(path), raw, scratch=self.scratch)
        with self._lock:
            self._leaf_lists.renew(digest, raw)
        return raw

    def _unreadable(self, digest: Digest, e: OSError) -> StoreError:
        if e.errno == errno.EIO:
            return self._corrupt(digest, "the disk cannot read it")
        return disk_error(f"reading blob {digest.short}", e)

    def _corrupt(self, digest: Digest, why: str) -> BlobCorrupt:
        with self._files_lock:
            held = self.has(digest)
            if held:  # otherwise another thread has removed it, and it may be arriving again
                self.remove(digest)
        error = BlobCorrupt(
            f"blob {digest.short} on disk was damaged ({why}) and is removed; it has to be fetched again"
        )
        if held:
            log.warning("%s", error)
        return error

    def _file_to_write(self, digest: Digest) -> Path:
        """Return the file of a blob. Its folder is made, durably, if there is none. Raises OSError."""
        path = self._file(digest)
        if not path.parent.exists():
            path.parent.mkdir(exist_ok=True)
            flush_folder(path.parent.parent)
        return path

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


def blob_file(folder: Path, digest: Digest) -> Path:
    """Return where the store in a folder has a whole blob."""
    name = digest.hex()
    return folder / "blobs" / name[:2] / name


def _leaf_file(path: Path) -> Path:
    return path.with_name(path.name + ".leaves")
