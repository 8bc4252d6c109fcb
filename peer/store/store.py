"""The store of one run: one folder, one process at a time.

lock          held while a process uses the store
blobs/        ab/<digest>, and beside each <digest>.leaves: the leaf hashes (a cache, checked when read)
partial/      <digest>: blobs that are still arriving, and their leaves
chain/        <round>-<digest>: certificates
values/       small named values
scratch/      drafts; emptied at every start
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from peer.durable import flush_folder, write_durably
from peer.store.blobs import BlobStore
from peer.store.disk import disk, remove
from peer.store.errors import StoreBusy, StoreError
from protocol.ids import Digest, Round, sha256

log = logging.getLogger(__name__)

_CERTIFICATE_NAME = re.compile(r"(\d{13})-([0-9a-f]{64})")
_VALUE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Store(BlobStore):
    """Blobs (see `BlobStore`), certificates and values of one run in one folder. Thread-safe.

    `limit_bytes` bounds whole and in-progress blobs together (certificates and values are small beside them). Raises
    StoreBusy when another process has the folder open. A process that forks shares the lock: start children by exec.
    """

    def __init__(self, folder: Path | str, limit_bytes: int):
        folder = Path(folder)
        with disk(f"opening the store {folder}"):
            for name in ("blobs", "partial", "chain", "values", "scratch"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock(folder)
            try:
                super().__init__(folder, limit_bytes)
            except BaseException:
                os.close(self._lock_fd)
                raise

    def close(self) -> None:
        """Let another process use the store."""
        with self._files_lock, self._lock:
            self._forget_in_progress()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- certificates: a file each, with a checksum; of one round there may be several, the branches of a fork -------

    def append_certificate(self, data: bytes, round: Round, digest: Digest, *, durable: bool = True) -> None:
        """Keep a certificate; `digest` names its record. Idempotent. Raises StoreError.

        If `durable`, it survives a power cut from then on; otherwise it takes a tenth of the time.
        """
        path = self.folder / "chain" / f"{round:013d}-{digest.hex()}"
        if path.exists():
            return
        with disk(f"writing the certificate of round {round}"):
            write_durably(path, [sha256(data), data], scratch=self.scratch, flush=durable)

    def flush_certificate(self, round: Round, digest: Digest) -> None:
        """Have a certificate survive a power cut that was kept without that. Raises StoreError."""
        path = self.folder / "chain" / f"{round:013d}-{digest.hex()}"
        with disk(f"writing the certificate of round {round}"):
            with suppress(FileNotFoundError), path.open("rb") as file:  # swept since
                os.fsync(file.fileno())
            flush_folder(path.parent)

    def certificates(self) -> Iterator[bytes]:
        """Yield all certificates, by round, then digest. One that fails its checksum is removed, with a warning.

        Raises StoreError, also once the store is closed: to read them all may take a thread minutes.
        """
        for path, round, _ in self._certificate_files():
            if self._lock_fd < 0:
                raise StoreError(f"the store {self.folder} was closed while its certificates were read: open it again")
            if (data := _read_certificate(path, round)) is not None:
                yield data

    def certificate(self, round: Round, digest: Digest) -> bytes | None:
        """Return a certificate; None if it is not here, or damaged: then it is removed. Raises StoreError."""
        return _read_certificate(self.folder / "chain" / f"{round:013d}-{digest.hex()}", round)

    def drop_certificates(self, unwanted: Callable[[Round, Digest], bool], *, first: int = 0) -> int:
        """Remove the certificates from round `first` on whose round and record `unwanted` accepts; return their number.

        Those of earlier rounds, which may be very many, cost little time.
        """
        with disk("removing old certificates"):
            old = [path for path, round, digest in self._certificate_files(first) if unwanted(round, digest)]
            for path in old:
                remove(path)
            if old:
                flush_folder(self.folder / "chain")
        return len(old)

    def _certificate_files(self, first: int = 0) -> list[tuple[Path, Round, Digest]]:
        chain = self.folder / "chain"
        with disk("listing the certificates"):
            names = sorted(name for name in os.listdir(chain) if name >= f"{first:013d}")
        matches = [m for name in names if (m := _CERTIFICATE_NAME.fullmatch(name))]
        return [(chain / m[0], Round(int(m[1])), Digest.parse(m[2])) for m in matches]

    # -- values ------------------------------------------------------------------------------------------------------

    def write_value(self, name: str, data: bytes) -> None:
        """Keep a small value under a name, in place of an older one; durable when it returns. Raises StoreError."""
        with disk(f"writing {name}"):
            write_durably(self._value_file(name), [data], scratch=self.scratch)

    def read_value(self, name: str) -> bytes | None:
        """Return the value of that name, or None."""
        with disk(f"reading {name}"), suppress(FileNotFoundError):
            return self._value_file(name).read_bytes()
        return None

    def _value_file(self, name: str) -> Path:
        if not _VALUE_NAME.fullmatch(name):
            raise StoreError(f"{name!r} is not a name for a value: use a-z, 0-9, '.', '_', '-', at most 64")
        return self.folder / "values" / name


def _read_certificate(path: Path, round: Round) -> bytes | None:
    with disk(f"reading the certificate of round {round}"):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        if sha256(content[32:]) != content[:32]:
            remove(path)
            log.warning("the certificate of round %d on disk was damaged and is removed: others have it", round)
            return None
    return content[32:]


def _lock(folder: Path) -> int:
    path = folder / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", errors="replace").strip()
        os.close(fd)
        raise StoreBusy(
            f"Cairn is already running with the folder {folder}"
            + (f" (process {holder})" if holder.isdigit() else "")
            + ": stop it first, or give this one a folder of its own with --home"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd
