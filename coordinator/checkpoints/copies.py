"""Copies of archived states at another address, any that fsspec knows; runs as a separate process.

ADDRESS/round-000030-1a2b3c4d/...   the first digits of the state: an existing copy is never overwritten

The manifest (cairn.json) is written last, with the name, bytes and digest of each file, when all others were read back
and compared. A folder without one is no checkpoint, and the next attempt continues with it. If there will be none, the
next job deletes it. That it is of this run is known by its spec.signed, which is written first and deleted last.

Job: address, run, folders, waiting (states that later jobs copy), policy ([newest, every, best, bytes, waiting]),
losses (by state), left (states that the chain has left), mbits. Rows: {"present": [states]}, {"copied": state,
"bytes"}, {"skipped": state} (the policy would not keep it), {"removed": state}; in between empty ones, as signs of
life.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.checkpoints.archive import (
    FILES,
    MANIFEST,
    MAX_MANIFEST,
    SPEC,
    ArchivedState,
    parse_manifest,
    read_manifest,
)
from coordinator.checkpoints.job import Row, serve_job
from coordinator.checkpoints.retention import RetentionCandidate, RetentionPolicy, to_delete
from coordinator.errors import CoordinatorError
from protocol.envelope import open_envelope
from protocol.errors import MalformedError, ProtocolError, os_reason
from protocol.ids import Digest, RunId
from protocol.merkle import CHUNK, MAX_BLOB, blob_digest, leaves_of, read_chunks, tree_hash
from protocol.spec import KIND, MAX_SPEC
from protocol.strict_json import integer_field, read_json

if TYPE_CHECKING:
    from coordinator.checkpoints.verification import ReadFile  # it imports torch, which copying does not need

MAX_SPEC_FILE = MAX_SPEC + 1024
PART = 8 * 1024 * 1024
PARTS = 9000
"""Stores that accept a file in parts accept at most 10,000, of at least 5 MiB each."""


class CopyError(CoordinatorError):
    """An address that does not accept or return files as it should."""


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """A whole copy at the address: its folder there, what its manifest says, and its bytes."""

    path: str
    archived: ArchivedState
    size: int


def _work(job: Row, say: Callable[[Row], None]) -> None:
    place = CopyStore(job["address"], RunId.parse(job["run"]), say, job["mbits"])
    place.keep(
        [Path(f) for f in job["folders"]],
        RetentionPolicy(*job["policy"]),
        job["losses"],
        {Digest.parse(s) for s in job["left"]},
        {Digest.parse(s) for s in job["waiting"]},
    )


class CopyStore:
    """An address for the copies of one run. Every method raises CopyError, in one line with the remedy."""

    def __init__(self, address: str, run: RunId, say: Callable[[Row], None] = lambda _: None, mbits: float = 0.0):
        self.address = address.rstrip("/")
        self._run = run
        self._say = say
        self._mbits = mbits
        self._fs, self._root = file_system(self.address)
        self._reported = 0.0

    def keep(
        self, folders: list[Path], policy: RetentionPolicy, losses: dict[str, float], left: set[Digest],
        waiting: Iterable[Digest] = (),
    ) -> None:  # fmt: skip
        """Copy missing states, oldest first; delete those that the policy does not keep, or that the chain has left.

        Remains of an interrupted copy or deletion are deleted, unless their state is `waiting` for a later call.
        """
        there, halves = self._look()
        self._say({"present": [str(t.archived.state) for t in there]})
        for t in [t for t in there if t.archived.state in left]:
            there.remove(t)
            self.remove(t)
        states = {t.archived.state for t in there}
        for a in [a for folder in folders if (a := read_manifest(folder)) is not None and a.state not in states]:
            if a.state in _to_delete([*there, StoredCopy("", a, a.size)], policy, losses):
                self._say({"skipped": str(a.state)})  # it would be deleted as soon as it was copied
            else:
                there.append(self.copy(a))
        wanted = {state.short for state in (*waiting, *(t.archived.state for t in there))}
        for path in [path for path in halves if path.rsplit("-", 1)[-1] not in wanted]:
            self._delete(path)
        gone = _to_delete(there, policy, losses)
        for t in [t for t in there if t.archived.state in gone]:
            self.remove(t)

    def list(self) -> list[StoredCopy]:
        """Return the whole copies of this run at the address, oldest first."""
        return self._look()[0]

    def _look(self) -> tuple[list[StoredCopy], list[str]]:
        """Return the whole copies of this run, oldest first, and the folders of half ones."""
        found, halves = [], []
        with self._explained("listing"):
            self._fs.invalidate_cache()
            try:
                paths = [str(n).rstrip("/") for n in self._fs.ls(self._root, detail=False)]
            except FileNotFoundError:
                return [], []
        for path in paths:
            if not path.rsplit("/", 1)[-1].startswith("round-"):
                continue
            if (data := self._small_file(f"{path}/{MANIFEST}", MAX_MANIFEST)) is None:
                if self._has_our_spec(path):
                    halves.append(path)
            elif (t := self._whole_copy(path, data)) is not None:
                found.append(t)
        return sorted(found, key=lambda t: t.archived.round), halves

    def copy(self, archived: ArchivedState) -> StoredCopy:
        """Copy one state; files that an earlier attempt sent completely are not sent again."""
        path = f"{self._root}/round-{archived.round:06d}-{archived.state.short}"
        files = sorted((f for f in archived.files() if f[0] != MANIFEST), key=lambda f: f[0] != SPEC)
        with self._explained("writing to"):
            self._fs.makedirs(path, exist_ok=True)
        listed = []
        for name, size in files:
            digest = self._digest(archived.folder / name)
            if not self._is(f"{path}/{name}", size, digest):
                self._send(archived.folder / name, f"{path}/{name}", size)
                if not self._is(f"{path}/{name}", size, digest):
                    raise CopyError(
                        f"{self.address}: {name} reads back otherwise than it was written: it is sent again"
                    )
            listed.append({"name": name, "bytes": size, "digest": str(digest)})
        try:
            manifest = json.loads((archived.folder / MANIFEST).read_bytes()) | {"files": listed}
        except (OSError, ValueError) as e:
            raise CopyError(f"{archived.folder / MANIFEST} cannot be read: {e}") from None
        with self._explained("writing to"):
            self._fs.pipe_file(f"{path}/{MANIFEST}", (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())
        data = self._small_file(f"{path}/{MANIFEST}", MAX_MANIFEST)
        made = None if data is None else self._whole_copy(path, data)
        if made is None:
            raise CopyError(f"{self.address}: {MANIFEST} does not read back: the copy is begun again")
        self._say({"copied": str(archived.state), "bytes": made.size})
        return made

    def remove(self, there: StoredCopy) -> None:
        """Delete a copy."""
        self._delete(there.path)
        self._say({"removed": str(there.archived.state)})

    def _delete(self, path: str) -> None:
        """Delete a folder: its manifest first, so that the rest is no checkpoint, and its spec last."""
        with self._explained("removing from"):
            for name in (MANIFEST, *(name for name in FILES if name not in (MANIFEST, SPEC))):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(f"{path}/{name}")
            with suppress(FileNotFoundError):  # without a spec there is nothing more, where folders are no files
                self._fs.rm(path, recursive=True)

    def _small_file(self, path: str, limit: int) -> bytes | None:
        """Return the first `limit` bytes of a file; None if there is none."""
        with self._explained("reading from"):
            try:
                return self._fs.cat_file(path, start=0, end=limit)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return None

    def _has_our_spec(self, path: str) -> bool:
        try:
            envelope = self._small_file(f"{path}/{SPEC}", MAX_SPEC_FILE) or b""
            return blob_digest(open_envelope(envelope, KIND, limit=MAX_SPEC_FILE).payload) == self._run
        except ProtocolError:
            return False

    def _whole_copy(self, path: str, data: bytes) -> StoredCopy | None:
        """Return the whole copy in the folder of this manifest; None for one of another run, and if this is none."""
        archived = parse_manifest(Path(path), data)
        if archived is None or archived.run != self._run:
            return None
        try:
            listed = [f for f in read_json(data, MANIFEST, MAX_MANIFEST)["files"] if f["name"] in FILES]
            size = sum(integer_field(f, "bytes", MAX_BLOB) for f in listed)
        except (KeyError, TypeError, AttributeError, MalformedError):
            return None
        return StoredCopy(path, archived, size + len(data))

    def _is(self, path: str, size: int, digest: Digest) -> bool:
        """Return whether this file exists with these bytes: all of it is read back."""
        with self._explained("reading from"):
            try:
                self._fs.invalidate_cache()
                if self._fs.size(path) != size:
                    return False
                with self._fs.open(path, "rb", block_size=PART) as file:
                    return tree_hash(leaves_of(self._chunks(file))) == digest
            except FileNotFoundError:
                return False

    def _send(self, source: Path, path: str, size: int) -> None:
        began, sent = time.monotonic(), 0
        with self._explained("writing to"), source.open("rb") as file:
            with self._fs.open(path, "wb", block_size=max(PART, -(-size // PARTS))) as to:
                for chunk in self._chunks(file):
                    to.write(chunk)
                    sent += len(chunk)
                    if self._mbits:
                        time.sleep(max(0.0, began + sent * 8e-6 / self._mbits - time.monotonic()))

    def _digest(self, path: Path) -> Digest:
        try:
            with path.open("rb") as file:
                return tree_hash(leaves_of(self._chunks(file)))
        except OSError as e:
            raise CopyError(f"{path} cannot be read: {os_reason(e)}") from None

    def _chunks(self, file: Any) -> Iterator[bytes]:
        """Yield the chunks of a file, and report a sign of life each second."""
        for chunk in read_chunks(file):
            yield chunk
            if (now := time.monotonic()) > self._reported + 1:
                self._say({})
                self._reported = now

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except CoordinatorError:
            raise
        except Exception as e:  # noqa: BLE001 - any file system, any error: told in one line
            why = " ".join(str(e).split())[:300] or type(e).__name__
            raise CopyError(
                f"{doing} {self.address}: {why}: is the address right, may this account write there, and is there room?"
            ) from None


def _to_delete(there: list[StoredCopy], policy: RetentionPolicy, losses: dict[str, float]) -> set[Digest]:
    kept = [
        RetentionCandidate(t, t.archived.round, t.size, bool(t.archived.final), losses.get(str(t.archived.state)))
        for t in there
    ]
    return {k.key.archived.state for k in to_delete(kept, policy)}


def file_reader(address: str, *, redirects: bool = True) -> ReadFile:
    """Return a function that reads a folder's file once, from the beginning, chunk by chunk. Raises CopyError.

    `redirects`: follow those of a web server. Not of one that a stranger names: it could choose another address.
    """
    from fsspec.implementations.local import LocalFileSystem

    fs, root = file_system(address.rstrip("/"), redirects=redirects)
    local = isinstance(fs, LocalFileSystem)
    # A web server need not serve ranges: a file that is read once comes as one stream.
    size = 0 if _is_web(address) else PART

    def read(name: str) -> Iterator[bytes]:
        try:
            path = f"{root}/{name}"
            if local and fs.info(path)["type"] != "file":
                raise OSError("it is not a regular file")  # to open a pipe may take for ever
            with fs.open(path, "rb", block_size=size) as file:
                while chunk := file.read(CHUNK):
                    while 0 < len(chunk) < CHUNK and (more := file.read(CHUNK - len(chunk))):
                        chunk += more  # one read of a remote file may give fewer
                    yield chunk
        except Exception as e:  # noqa: BLE001 - any file system, any error
            cause = e.__cause__ if isinstance(e.__cause__, OSError) else e  # so is a web server that is down
            if isinstance(cause, FileNotFoundError):
                raise CopyError(f"{address}: {name} is not there: not a whole copy of an archived state") from None
            why = " ".join(str(cause).split())[:300] or type(cause).__name__
            raise CopyError(f"{address}/{name}: cannot be read: {why}") from None

    return read


def file_names(address: str) -> list[str] | None:
    """Return the names in a folder; None if it cannot list them, as a web server. Raises CopyError."""
    fs, root = file_system(address.rstrip("/"))
    if _is_web(address):
        return None
    try:
        return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in fs.ls(root, detail=False)]
    except Exception:  # noqa: BLE001 - any file system, any error
        return None


def _is_web(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def file_system(address: str, *, redirects: bool = True) -> tuple[Any, str]:
    """Return the file system of an address, and the path on it. Raises CopyError."""
    import fsspec.core

    try:
        options: dict[str, Any] = {"skip_instance_cache": True}
        if _is_web(address):
            import aiohttp

            options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)}
            options["allow_redirects"] = redirects
        return fsspec.core.url_to_fs(address, **options)
    except ImportError as e:
        scheme = address.split("://", 1)[0]
        raise CopyError(
            f"{address}: {' '.join(str(e).split())}: install the package for {scheme}:// beside Cairn"
        ) from None
    except (ValueError, OSError) as e:
        raise CopyError(f"{address} is not an address: {e}: write a folder, or such as s3://bucket/runs") from None


if __name__ == "__main__":
    serve_job(_work)
