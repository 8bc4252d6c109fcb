"""The documents in a person's files: plain text, JSONL or Parquet, compressed or not, on disk or at fsspec addresses.

Documents are read one after the other in a fixed order and split into bounded segments, so that a corpus of any size
needs little memory.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from coordinator.authoring.errors import DataInputError
from protocol import extras
from protocol.plain_text import one_line

TEXT, JSONL, PARQUET = (".txt", ".text", ".md"), (".jsonl", ".ndjson"), (".parquet",)
COMPRESSED = {".gz": "gzip", ".xz": "xz", ".bz2": "bz2", ".zst": "zstd"}
MAX_LINE = 256 * 1024 * 1024
"""Maximum bytes of one JSONL line."""

BUFFER = 1024 * 1024
"""Bytes read from a file at a time."""

ZST_BUFFER = 4096
"""Bytes of .zst unpacked at a time: they become 128 MiB at most."""

SEGMENT = 256 * 1024
"""Maximum characters of a segment."""

REMOTE = ("aiohttp", "azure", "botocore", "fsspec", "gcsfs", "httpx")
"""The libraries whose errors are a server's: some are an OSError, and others are not."""

NAME_FIELD = "name the one that holds the text with --field, in a run.toml as data.field"

TRAINING = frozenset({"train", "training"})
HELD_OUT = frozenset({"dev", "eval", "evaluation", "test", "testing", "val", "valid", "validation"})
"""Words in a path by which a data set's files say their split, as on Hugging Face."""

_KINDS = {list: "a list", dict: "an object", bool: "true or false", type(None): "null", str: "text"}


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """One file of documents: its file system and path, and its name in manifests and errors."""

    fs: Any
    path: str
    name: str

    @property
    def suffixes(self) -> tuple[str, str]:
        """Format and compression: (".jsonl", ".xz") of a.jsonl.xz; the compression may be empty."""
        stem, last = os.path.splitext(self.path.lower())
        if last in COMPRESSED:
            return os.path.splitext(stem)[1], last
        return last, ""

    @property
    def is_local(self) -> bool:
        """True for a file on this machine's disk."""
        return "file" in ((self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol)

    @property
    def place(self) -> str:
        """Its location: the same by whichever path or link it was named."""
        return os.path.realpath(self.path) if self.is_local else f"{self.fs.protocol}:{self.path}"

    def fingerprint(self) -> str:
        """Return a text that changes with the file: SHA-256 of a local file, else the file system's own key.

        Raises DataInputError.
        """
        with _named_errors(self):
            if not self.is_local:
                return f"remote:{self.fs.ukey(self.path)}"
            digest = hashlib.sha256()
            with self.fs.open(self.path, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class TextSegment:
    """Consecutive text of a document; `last` ends the document."""

    text: str
    last: bool


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A line of JSONL or a row of Parquet, and its place for errors."""

    where: str
    fields: dict[str, Any]

    def text(self, field: str) -> str:
        """Return the text in a field; "" for null. Raises DataInputError."""
        if field not in self.fields:
            there = ", ".join(map(repr, list(self.fields)[:10])) or "nothing"
            raise DataInputError(f"{self.where}: no field {field!r}: there is {there}; {NAME_FIELD}")
        text = self.fields[field]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise DataInputError(f"{self.where}: field {field!r} holds {kind_of(text)}, not text; {NAME_FIELD}")
        return checked_text(text, self.where)


def checked_text(text: str, where: str) -> str:
    """Return text that has a UTF-8 form. Raises DataInputError for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataInputError(
            f"{where}: text with half a surrogate pair: correct the escapes \\ud800 to \\udfff"
        ) from None
    return text


def kind_of(value: object) -> str:
    """Return what a JSON value that is no text is, in words."""
    return _KINDS.get(type(value), "a number")


def find_sources(
    inputs: Sequence[str], base: Path, report: Callable[[str], None] = lambda line: None
) -> list[DocumentFile]:
    """Return the files that inputs name, in their order, each file once.

    An input is a file, a folder (all files in it with a supported ending), a pattern such as `data/*.jsonl.gz`, or an
    fsspec address of one of these. A folder's and a pattern's files are sorted by name. Of a folder with JSONL or
    Parquet plain text is left out, which is reported: it describes them. Files that are held out by their names beside
    others for training are reported, too. Relative paths are relative to `base`. Raises DataInputError.
    """
    import fsspec.core

    found: dict[str, DocumentFile] = {}
    for given in inputs:
        path = given if "://" in given else str(Path(given).expanduser())
        is_pattern = any(c in given for c in "*?[")
        if "://" not in given:
            is_pattern = is_pattern and not os.path.exists(base / path)
            path = os.path.join(glob.escape(str(base)) if is_pattern else base, path)
        with _server_errors(given):
            try:
                fs, path = fsspec.core.url_to_fs(path)
                folder, paths = _matches(fs, path, given, is_pattern, report)
            except (OSError, ValueError, ImportError) as e:
                raise DataInputError(f"{given}: {e}") from None
        for p in paths:
            name = os.path.relpath(p, folder).replace(os.sep, "/") if folder else p.rsplit("/", 1)[-1]
            if not _is_utf8(name):
                raise DataInputError(f"{ascii(name)}: a file name that is not UTF-8: rename the file")
            source = DocumentFile(fs, p, name)
            if source.suffixes[0] not in TEXT + JSONL + PARQUET:
                raise DataInputError(
                    f"{given}: {name} is no known kind of document: name files "
                    f"{', '.join(TEXT + JSONL + PARQUET)}, each also with {', '.join(COMPRESSED)}"
                )
            found.setdefault(source.place, source)
    return list(found.values())


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _matches(fs: Any, path: str, given: str, is_pattern: bool, report: Callable[[str], None]) -> tuple[str, list[str]]:
    """Return the folder that names are relative to ("" for none), and the sorted paths. Raises DataInputError."""
    if is_pattern:
        paths = sorted(p for p in fs.glob(path) if not fs.isdir(p) and not p.rsplit("/", 1)[-1].startswith("."))
        if not paths:
            raise DataInputError(f"{given}: no file matches this pattern")
        return "", paths
    if fs.isdir(path):
        endings = TEXT + JSONL + PARQUET
        visible = (p for p in fs.find(path) if "/." not in f"/{p.removeprefix(path)}")
        paths = sorted(p for p in visible if DocumentFile(fs, p, "").suffixes[0] in endings)
        if not paths:
            raise DataInputError(f"{given}: no document in this folder: looking for {', '.join(endings)}")
        rest = [p for p in paths if DocumentFile(fs, p, "").suffixes[0] not in TEXT]
        if rest and len(rest) < len(paths):
            gone = sorted(set(paths) - set(rest))
            report(
                f"{given}: it has JSONL or Parquet, so plain text in it is left out ({_first(gone, path)}): name such "
                "a file to train on it"
            )
            paths = rest
        words = {p: frozenset(re.split(r"[^a-z0-9]+", p.removeprefix(path).lower())) for p in rest}
        held_out = [p for p in rest if words[p] & HELD_OUT and not words[p] & TRAINING]
        if held_out and any(words[p] & TRAINING for p in rest):
            report(
                f"{given}: all its files are taken, though some are for training by their names, and others not "
                f"({_first(held_out, path)}): name those that you mean, if this is not it"
            )
        return path, paths
    if not fs.exists(path):
        raise DataInputError(f"{given}: no such file or folder (the path is {path})")
    return "", [path]


def _first(paths: Sequence[str], folder: str) -> str:
    """Return the first of these paths, and their number, for a report."""
    return f"{os.path.relpath(paths[0], folder)!r}, {len(paths)} in all"


def read_documents(source: DocumentFile, field: str) -> Iterator[TextSegment]:
    """Yield the documents of one file, without empty ones. Raises DataInputError."""
    if source.suffixes[0] in TEXT:
        with _named_errors(source):
            yield from _read_text(source)
        return
    for row in read_rows(source, [field]):
        text = row.text(field)
        if text.strip():
            yield from segments_of(text)


def read_rows(source: DocumentFile, columns: Sequence[str]) -> Iterator[DocumentRow]:
    """Yield the rows of a JSONL or Parquet file. Raises DataInputError.

    Of Parquet only these columns are read, those that are there.
    """
    with _named_errors(source):
        yield from (_read_jsonl(source) if source.suffixes[0] in JSONL else _read_parquet(source, columns))


@contextmanager
def _server_errors(name: str) -> Iterator[None]:
    """Raise what a server's failure raises as DataInputError with this name."""
    try:
        yield
    except Exception as e:
        if isinstance(e, TimeoutError) or type(e).__module__.partition(".")[0] in REMOTE:
            why = one_line(str(e), 300) or type(e).__name__  # it may quote what a server sent
            raise DataInputError(f"{name}: its server failed: {why}: try again, or leave it out") from None
        raise


@contextmanager
def _named_errors(source: DocumentFile) -> Iterator[None]:
    """Raise what reading a file raises as DataInputError with its name."""
    try:
        with _server_errors(source.name):
            yield
    except UnicodeDecodeError as e:
        raise _not_text(source.name, e) from None
    except Exception as e:
        if type(e) is ValueError and not source.is_local:  # fsspec's, of a server that sends whole files only
            why = one_line(str(e), 300)
            raise DataInputError(
                f"{source.name}: its server does not send a part of it: {why}: download it, and name your copy"
            ) from None
        if isinstance(e, OSError) and e.strerror:
            raise DataInputError(
                f"{source.name}: cannot be read: {e.strerror.lower()}: make it readable, or leave it out"
            ) from None
        libraries = ("_lzma", "lzma", "zlib", "zstandard", "pyarrow")
        if isinstance(e, OSError | EOFError) or type(e).__module__.partition(".")[0] in libraries:
            why = " ".join(str(e).split())
            raise DataInputError(
                f"{source.name}: damaged, or not what its ending says: {why}: get it again, or leave it out"
            ) from None
        raise


def _not_text(where: str, e: UnicodeDecodeError) -> DataInputError:
    return DataInputError(f"{where}: not UTF-8 text (byte 0x{e.object[e.start]:02x}): convert it, e.g. iconv -t UTF-8")


def _open(source: DocumentFile) -> IO[bytes]:
    _, compression = source.suffixes
    if compression == ".zst":
        try:
            import zstandard  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise DataInputError(
                f"{source.name}: reading .zst needs one more package: {extras.pip_install('zstandard')}"
            ) from None
        return io.BufferedReader(_ZstFile(source.fs.open(source.path, "rb")), BUFFER)
    try:
        file = source.fs.open(source.path, "rb", compression=COMPRESSED.get(compression))
    except ValueError as e:
        raise DataInputError(f"{source.name}: {e}") from None
    return io.BufferedReader(file, BUFFER)  # a bucket's file itself reads no line of limited length


class _ZstFile(io.RawIOBase):
    """The contents of a .zst file. Unlike zstandard's own reader it reads all frames, and refuses a cut one."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._blocks = _unpacked(file)
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._held = memoryview(block)
        size = min(len(buffer), len(self._held))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _unpacked(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the contents of the frames of a .zst file, block by block. Raises EOFError for a cut one."""
    import zstandard  # pyright: ignore[reportMissingImports]

    frame = None
    while block := file.read(ZST_BUFFER):
        while block:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(block)
            block = b""
            if frame.eof:
                frame, block = None, frame.unused_data
    if frame is not None:
        raise EOFError("it ends in the middle")


def _read_text(source: DocumentFile) -> Iterator[TextSegment]:
    """Yield one document for the whole file, of any length."""
    held, some = "", False
    with _open(source) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as file:
        while block := file.read(SEGMENT):
            held += block
            some = some or bool(held.strip())
            while some and len(held) > SEGMENT:
                end = _end_of_segment(held, 0)
                yield TextSegment(held[:end], False)
                held = held[end:]
            held = held if some else ""
    if some:
        yield TextSegment(held, True)


def segments_of(text: str) -> Iterator[TextSegment]:
    """Yield a document in segments."""
    at = 0
    while len(text) - at > SEGMENT:
        end = _end_of_segment(text, at)
        yield TextSegment(text[at:end], False)
        at = end
    yield TextSegment(text[at:], True)


def _end_of_segment(text: str, at: int) -> int:
    """Return the end of the segment that begins at `at`: after at most SEGMENT characters, if possible at a space."""
    middle, end = at + SEGMENT // 2, at + SEGMENT
    found = max(text.rfind("\n", middle, end), text.rfind(" ", middle, end))
    return found if found > at else end


def _read_jsonl(source: DocumentFile) -> Iterator[DocumentRow]:
    with _open(source) as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise DataInputError(f"{source.name}: line {number} is longer than {MAX_LINE >> 20} MiB")
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as e:
                raise _not_text(f"{source.name}: line {number}", e) from None
            except (ValueError, RecursionError) as e:
                raise DataInputError(f"{source.name}: line {number} is not JSON: {e}") from None
            where = f"{source.name}: line {number}"
            if not isinstance(row, dict):
                raise DataInputError(f"{where} is not a JSON object: write one with named fields")
            yield DocumentRow(where, row)


def _read_parquet(source: DocumentFile, columns: Sequence[str]) -> Iterator[DocumentRow]:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise DataInputError(
            f"{source.name}: reading Parquet needs one more package: {extras.install('parquet')}"
        ) from None
    with _open(source) as file:
        table = pq.ParquetFile(file)
        there = table.schema_arrow.names
        wanted = [c for c in columns if c in there]
        if not wanted:
            names, found = " or ".join(map(repr, columns)), ", ".join(map(repr, there[:10]))
            raise DataInputError(f"{source.name}: no column {names}: there is {found}; {NAME_FIELD}")
        number = 0
        for batch in table.iter_batches(batch_size=64, columns=wanted):
            for row in batch.to_pylist():
                number += 1
                yield DocumentRow(f"{source.name}: row {number}", {k: _without_null(v) for k, v in row.items()})


def _without_null(value: Any) -> Any:
    """Return a value without the fields that are null: Parquet adds them to make all rows alike."""
    if isinstance(value, dict):
        return {k: _without_null(v) for k, v in value.items() if v is not None}
    return [_without_null(v) for v in value] if isinstance(value, list) else value
