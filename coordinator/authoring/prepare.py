"""`prepare`: from documents to a folder of token shards, with a tokenizer and a manifest, for `cairn data prepare`.

manifest.json is written last, so a folder with a manifest is complete. The same documents and settings give the same
digests; preparing again into the same folder compares the manifest and does nothing.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, ValidationError

from coordinator import durable
from coordinator.authoring import tokens
from coordinator.authoring.chat_template import ChatTemplate, chat_spec, load_template, own_ends
from coordinator.authoring.conversations import ConversationReader, ConversationTable, Counts, MarkedDocument
from coordinator.authoring.documents import DocumentFile, TextSegment, find_sources, read_documents
from coordinator.authoring.errors import DataInputError, RunChangedError
from coordinator.authoring.shards import PARTIAL, ShardWriter, WindowWriter
from coordinator.authoring.window_packer import WindowPacker
from protocol.errors import os_reason
from protocol.ids import Digest
from protocol.merkle import MAX_BLOB, blob_digest
from protocol.spec import BlobRef, ChatSpec, DataShard, Section, explain

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
LOCK = ".lock"
"""The file that is locked; a folder that has it was prepared, or begun to be."""

SHARD_TOKENS = 2**26
_SHARD_FILE = re.compile(r"[0-9a-f]{64}\.(tokens|leaves)")


class SourceRef(Section):
    """A file that data were prepared from."""

    name: str
    fingerprint: str
    split: Literal["train", "validation", "mix"]


class PrepareSettings(Section):
    """The settings that decide the shards, beside the documents."""

    field: str
    vocabulary: int | None
    tokenizer: str | None
    end_of_text: str | None
    validation_every: int
    shard_tokens: int
    window: int | None = None
    """Tokens of a window, of conversations; those of text have any."""

    conversations: ConversationTable | None = None
    template: str | None = None
    """The digest of the chat template and its special tokens."""


class ConversationData(Section):
    """The windows of conversations: the mean of their trained tokens, and the fate of long conversations."""

    window: int
    window_tokens: int
    trained: int
    """Trained tokens in all training windows."""

    dropped: int
    cut: int
    split: int
    at_answers: int = 0
    """Conversations of which each answer became a document."""

    spelled: tokens.SpelledToken | None = None
    """The special token that most conversations spell out in their messages."""

    chat: ChatSpec | None

    @property
    def fates(self) -> str:
        """The fates of conversations that did not stay whole or spell special tokens, for a person."""
        told = f"longer than a window: {self.dropped:,} left out, {self.cut:,} cut, {self.split:,} split"
        if self.at_answers:
            told += (
                f"; {self.at_answers:,} conversations were split at their answers, since the chat template writes "
                "earlier answers differently"
            )
        if (found := self.spelled) is not None:
            told += (
                f"; messages of {found.documents:,} conversations spell out {found.text!r}, which became that special "
                "token: take it out unless it is meant"
            )
        return told


class DataSplit(Section):
    """One split of the data: its shards, and their numbers of documents and tokens.

    Manifests of earlier versions also have bytes of text.
    """

    model_config = ConfigDict(extra="ignore")

    shards: list[DataShard]
    documents: int
    tokens: int


class Manifest(Section):
    """The contents of a prepared folder, and its sources."""

    format: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocabulary: int
    end_of_text: str
    end_of_text_id: int
    tokenizer: BlobRef
    train: DataSplit
    validation: DataSplit
    settings: PrepareSettings
    sources: list[SourceRef]
    conversations: ConversationData | None = None
    spelled: tokens.SpelledToken | None = None
    """The special token that most documents spell out."""

    @property
    def documents(self) -> int:
        """Documents of both splits."""
        return self.train.documents + self.validation.documents

    @property
    def trained(self) -> int:
        """Tokens that a pass over the training data trains."""
        return self.train.tokens if self.conversations is None else self.conversations.trained


@dataclass(frozen=True)
class Prepared:
    """A complete prepared folder."""

    folder: Path
    manifest: Manifest

    @property
    def blobs(self) -> dict[Digest, Path]:
        """The path of every blob in the folder: shards and tokenizer."""
        shards = [*self.manifest.train.shards, *self.manifest.validation.shards]
        return {s.name: self.folder / f"{s.digest}.tokens" for s in shards} | {
            self.manifest.tokenizer.name: self.folder / TOKENIZER
        }


def prepare(
    inputs: Sequence[str],
    out: Path,
    *,
    field: str = "text",
    vocabulary: int | None = None,
    tokenizer: Path | None = None,
    end_of_text: str | None = None,
    validation_every: int = 0,
    validation: Sequence[str] = (),
    shard_tokens: int = SHARD_TOKENS,
    window: int | None = None,
    conversations: ConversationTable | None = None,
    base: Path | None = None,
    replace: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Prepared:
    """Turn documents into token shards in the folder `out`.

    Args:
        inputs: files, folders, patterns or fsspec addresses of text, JSONL or Parquet (see `documents.find_sources`).
        field: the JSONL field or Parquet column that holds the text.
        vocabulary: train a byte-level BPE of this size on the training documents; or
        tokenizer: use this tokenizer.json. Exactly one of the two.
        end_of_text: the token that ends each document, for a given tokenizer.
        validation_every: every n-th document (the n-th, 2n-th, ...) is held out; 0: none. Or
        validation: inputs whose documents are all held out.
        shard_tokens: maximum tokens in a shard.
        window, conversations: the documents are conversations, packed into windows of this size.
        base: the folder that relative inputs start from; by default the current folder.
        replace: replace a folder that was prepared from other documents or settings; by default that is an error.
        report: called with one line about each step.

    Raises DataInputError, and RunChangedError for a folder with other contents unless `replace` is given.
    """
    try:
        check_choices(vocabulary, tokenizer, validation_every, validation, conversations)
    except ValueError as e:
        raise DataInputError(str(e)) from None
    if shard_tokens < 2 or shard_tokens * 4 > MAX_BLOB:
        raise DataInputError(f"shard_tokens = {shard_tokens}: write a number from 2 to {MAX_BLOB // 4}")
    base = base or Path.cwd()
    train, held_out = find_documents(inputs, validation, base, report)
    mixed = [find_sources(m.sources, base, report) for m in conversations.mix] if conversations else []
    seen = {s.place for s in (*train, *held_out)}
    for part in mixed:
        places = {s.place for s in part}
        if twice := places & seen:
            raise DataInputError(
                f"{min(twice)} is in data.conversations.mix and among the other documents: name it once"
            )
        seen |= places
    given = tokens.load(tokenizer, end_of_text) if tokenizer else None
    if given and tokenizer and end_of_text is None and not replace and (out / MANIFEST).exists():
        # A folder keeps the token that an earlier version found.
        before = load_prepared(out).manifest
        if before.settings.tokenizer == str(blob_digest(given.file)) and before.end_of_text != given.end:
            given = tokens.load(tokenizer, before.end_of_text)
    template = None
    if conversations is not None:
        if window is None or shard_tokens <= window:
            raise DataInputError(f"conversations: give a window of fewer than {shard_tokens:,} tokens")
        assert tokenizer is not None and given is not None  # `check_choices`
        named = conversations.chat_template
        file = base / Path(named).expanduser() if named else None
        template = load_template(file, tokenizer, given.end, given.begin)
    settings = PrepareSettings(
        field=field,
        vocabulary=vocabulary,
        tokenizer=str(blob_digest(given.file)) if given else None,
        end_of_text=given.end if given else None,
        validation_every=validation_every,
        shard_tokens=shard_tokens,
        window=window if conversations else None,
        conversations=conversations,
        template=_template_digest(template),
    )
    sources = [SourceRef(name=s.name, fingerprint=s.fingerprint(), split="train") for s in train]
    sources += [SourceRef(name=s.name, fingerprint=s.fingerprint(), split="validation") for s in held_out]
    sources += [SourceRef(name=s.name, fingerprint=s.fingerprint(), split="mix") for part in mixed for s in part]
    was_begun = (out / LOCK).exists()
    if not was_begun and not (out / MANIFEST).exists() and (strange := _shard_files(out)):
        raise DataInputError(
            f"{out} has {strange[0].name}, but no {MANIFEST}: choose another folder, or empty this one"
        )
    if not was_begun and not (out / MANIFEST).exists() and not _may_replace(out / TOKENIZER, given):
        raise DataInputError(f"{out / TOKENIZER} is another tokenizer: choose another folder, or move it away")
    with _locked(out):
        if (out / MANIFEST).exists():
            there = load_prepared(out)
            differences = _differences(there.manifest, settings, sources)
            if not differences:
                return Prepared(out, there.manifest)
            if not replace:
                raise RunChangedError(
                    f"{out} was prepared differently ({'; '.join(differences)}): choose another folder, or remove "
                    "this one"
                )
            _clear(out)
        elif was_begun:
            _clear(out)  # after a kill
        run = given
        if run is None:
            report(f"training a tokenizer of {vocabulary} tokens")
            run = tokens.train((p for p, held_out in _documents(train, settings) if not held_out), vocabulary or 0)
        try:
            if conversations is None or tokenizer is None:
                manifest = _write(out, run, train, held_out, settings, sources, report)
            else:
                marked = _MarkedWriter(out, run, template, tokenizer, settings, conversations)
                manifest = marked.write(train, held_out, mixed, sources, report)
        except BaseException:
            _clear(out)  # the owner might publish its shards
            raise
        durable.replace(out / TOKENIZER, run.file)
        durable.replace(out / MANIFEST, manifest.model_dump_json(indent=1).encode())
    return Prepared(out, manifest)


def find_documents(
    inputs: Sequence[str], validation: Sequence[str], base: Path, report: Callable[[str], None]
) -> tuple[list[DocumentFile], list[DocumentFile]]:
    """Return the files for training, and those of which every document is held out. Raises DataInputError."""
    train, held_out = find_sources(inputs, base, report), find_sources(validation, base, report)
    twice = {s.place for s in train} & {s.place for s in held_out}
    if twice:
        raise DataInputError(f"{min(twice)} is both for training and for validation")
    return train, held_out


def check_choices(
    vocabulary: object, tokenizer: object, validation_every: int, validation: Sequence[str], conversations: object
) -> None:
    """Raise ValueError unless there is one tokenizer, and at most one rule for what is held out."""
    if conversations is not None and tokenizer is None:
        raise ValueError("conversations need the base model's tokenizer: write tokenizer (a tokenizer.json)")
    if (vocabulary is None) == (tokenizer is None):
        raise ValueError("write either vocabulary (tokens of a tokenizer to train) or tokenizer (a tokenizer.json)")
    if validation_every and validation:
        raise ValueError("write either validation_every or validation, not both")
    if validation_every == 1:
        raise ValueError("validation_every = 1 would hold out every document: write 2 or more")


def check_held_out(every: int, documents: int) -> None:
    """Raise DataInputError if `validation_every` holds out none of these documents."""
    if documents < every:
        raise DataInputError(
            f"validation_every = {every}, but there are only {documents} documents: none is held out; write a smaller "
            "number, or name files for validation"
        )


def load_prepared(folder: Path) -> Prepared:
    """Load a folder that `prepare` has filled. Raises DataInputError if it is not complete."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DataInputError(f"{folder}: no {MANIFEST} in it: make it with `cairn data prepare`") from None
    except OSError as e:
        raise DataInputError(f"{folder / MANIFEST}: {os_reason(e)}") from None
    except ValidationError as e:
        raise DataInputError(explain(e, str(folder / MANIFEST)) + "\nprepare the data again") from None
    prepared = Prepared(folder, manifest)
    sizes = {s.name: s.size for s in (*manifest.train.shards, *manifest.validation.shards)}
    sizes[manifest.tokenizer.name] = manifest.tokenizer.size
    for digest, path in prepared.blobs.items():
        found = path.stat().st_size if path.is_file() else -1
        if found != sizes[digest]:
            what = "is missing" if found < 0 else f"has {found} bytes instead of {sizes[digest]}"
            raise DataInputError(f"{path} {what}: remove {folder} and prepare the data again")
    return prepared


def _documents(sources: Sequence[DocumentFile], settings: PrepareSettings) -> Iterator[tuple[TextSegment, bool]]:
    """Yield the segments of all documents, and whether their document is held out."""
    every, number = settings.validation_every, 0
    for source in sources:
        for segment in read_documents(source, settings.field):
            yield segment, bool(every) and number % every == every - 1
            number += segment.last


def _write(
    out: Path,
    run: tokens.RunTokenizer,
    train: Sequence[DocumentFile],
    held_out: Sequence[DocumentFile],
    settings: PrepareSettings,
    sources: list[SourceRef],
    report: Callable[[str], None],
) -> Manifest:
    dtype = "uint16" if run.size <= 2**16 else "uint32"
    writers = [ShardWriter(out, split, dtype, settings.shard_tokens) for split in ("train", "validation")]
    documents, counts = [0, 0], [0, 0]
    stream = itertools.chain(
        _documents(train, settings), ((p, True) for s in held_out for p in read_documents(s, settings.field))
    )
    splits: deque[int] = deque()  # split (1: held out) of each segment that is being encoded, in order

    def segments() -> Iterator[TextSegment]:
        for segment, is_held_out in stream:
            splits.append(int(is_held_out))
            yield segment

    try:
        for ids, last in run.encode(segments()):
            split = splits.popleft()
            writers[split].add(ids)
            counts[split] += len(ids)
            documents[split] += last
            if last and sum(documents) % 10_000 == 0:
                report(f"{sum(documents):,} documents, {sum(counts):,} tokens")
        shards = [w.finish() for w in writers]
    finally:
        for writer in writers:
            writer.close()
    if not counts[0]:
        raise DataInputError("no text to train on in these documents")
    check_held_out(settings.validation_every, sum(documents))
    report(f"{sum(documents):,} documents, {sum(counts):,} tokens, {documents[1]:,} documents held out")
    return _manifest(run, dtype, zip(shards, documents, counts, strict=True), settings, sources)


def _manifest(
    run: tokens.RunTokenizer, dtype: Literal["uint16", "uint32"], made: Iterable[tuple[list[DataShard], int, int]],
    settings: PrepareSettings, sources: list[SourceRef], conversations: ConversationData | None = None,
) -> Manifest:  # fmt: skip
    """Return the manifest; `made` has shards, documents and tokens of each split."""
    train, validation = (DataSplit(shards=s, documents=d, tokens=t) for s, d, t in made)
    return Manifest(
        dtype=dtype,
        vocabulary=run.size,
        end_of_text=run.end,
        end_of_text_id=run.end_id,
        tokenizer=BlobRef(digest=str(blob_digest(run.file)), size=len(run.file)),
        train=train,
        validation=validation,
        settings=settings,
        sources=sources,
        conversations=conversations,
        spelled=run.most_spelled,
    )


@dataclass
class _MarkedWriter:
    """Writes conversations, and text beside them, as windows of marked tokens."""

    out: Path
    run: tokens.RunTokenizer
    template: ChatTemplate | None
    tokenizer: Path
    settings: PrepareSettings
    table: ConversationTable

    def __post_init__(self):
        self.counts = Counts()
        self.window = self.settings.window or 0
        self.reader = ConversationReader(
            self.run, self.template, self.table, self.window, self.settings.field, self.counts
        )
        self.writers = [
            WindowWriter(self.out, split, self.window, self.settings.shard_tokens, self.run.end_id)
            for split in ("train", "validation")
        ]
        self.packers = [WindowPacker(self.window, self.run.end_id, w.add) for w in self.writers]
        self.documents, self.trained = [0, 0], [0, 0]
        self.row = 0
        """The row of the last piece: a row is a document, however many pieces it gave."""

    def write(
        self,
        train: Sequence[DocumentFile],
        held_out: Sequence[DocumentFile],
        mixed: Sequence[Sequence[DocumentFile]],
        sources: list[SourceRef],
        report: Callable[[str], None],
    ) -> Manifest:
        """Write the shards, and return the manifest. Raises DataInputError."""
        every, split = self.settings.validation_every, 0
        try:
            for piece in self.reader.documents(train):
                if piece.row != self.row:
                    split = int(bool(every) and sum(self.documents) % every == every - 1)
                self._add(piece, split, report)
            if self.counts.dropped and not sum(self.documents):
                raise DataInputError(
                    f"nothing of {self.counts.dropped:,} conversations or answers fits into a window of "
                    f'{self.window:,} tokens: take a larger window, or data.conversations.long = "split"'
                )
            check_held_out(every, sum(self.documents))
            for piece in self.reader.documents(held_out):
                self._add(piece, 1, report)
            if not self.trained[0]:
                raise DataInputError("nothing to train on in these documents")
            self._mix(mixed, report)
            roles = self.counts.roles
            if roles and (missing := [r for r in self.table.train_on if r not in roles]):
                raise DataInputError(
                    f"data.conversations.train_on: no message has the role {missing[0][:60]!r}: there are "
                    f"{', '.join(sorted(roles))[:300]}: correct it, or leave it out"
                )
            for packer in self.packers:
                packer.finish()
            shards = [w.finish() for w in self.writers]
        finally:
            for writer in self.writers:
                writer.close()
        c, (windows, _) = self.counts, [p.windows for p in self.packers]
        ends = sorted(c.ends | (c.closing & own_ends(self.tokenizer)))
        chat = chat_spec(self.template, ends, self.tokenizer) if self.template and ends else None
        conversations = ConversationData(
            window=self.window,
            window_tokens=max(1, round(self.trained[0] / windows)),
            trained=self.trained[0],
            dropped=c.dropped,
            cut=c.cut,
            split=c.split,
            at_answers=c.at_answers,
            spelled=tokens.most_of(c.spelled, self.run.end),
            chat=chat,
        )
        report(
            f"{sum(self.documents):,} documents, {self.trained[0]:,} trained tokens in {windows:,} windows, "
            f"{self.documents[1]:,} documents held out; {conversations.fates}"
        )
        counts = [self.window * p.windows for p in self.packers]
        made = zip(shards, self.documents, counts, strict=True)
        return _manifest(self.run, "uint32", made, self.settings, sources, conversations)

    def _add(self, piece: MarkedDocument, split: int, report: Callable[[str], None]) -> None:
        self.packers[split].add(piece.tokens)
        self.trained[split] += piece.trained
        if piece.row == self.row:
            return
        self.row = piece.row
        self.documents[split] += 1
        if sum(self.documents) % 10_000 == 0:
            report(f"{sum(self.documents):,} documents, {sum(self.trained):,} trained tokens")

    def _mix(self, mixed: Sequence[Sequence[DocumentFile]], report: Callable[[str], None]) -> None:
        """Add the first documents of each source in the mix, until it has its share. Raises DataInputError."""
        whole = self.trained[0] / (1 - sum(m.share for m in self.table.mix))
        for source, files in zip(self.table.mix, mixed, strict=True):
            wanted, before = round(source.share * whole), self.trained[0]
            for piece in self.reader.documents(files):
                if self.trained[0] - before >= wanted:
                    break
                self._add(piece, 0, report)
            found = self.trained[0] - before
            if found > 1.1 * wanted:
                report(
                    f"{', '.join(source.sources)[:200]}: {found:,} trained tokens, {found / whole:.1%} instead of "
                    f"{source.share:.1%}: the last piece came whole"
                )
            if found < wanted:
                raise DataInputError(
                    f"{', '.join(source.sources)[:200]}: a share of {source.share:g} is {wanted:,} trained tokens, and "
                    f"these documents have {found:,}: add some, or write a share of {found / whole:.2g}"
                )


def _template_digest(template: ChatTemplate | None) -> str | None:
    """Return a digest of what rendering depends on beside the conversations."""
    if template is None:
        return None
    return str(blob_digest(json.dumps([template.text, template.special_tokens], sort_keys=True).encode()))


def _differences(there: Manifest, settings: PrepareSettings, sources: list[SourceRef]) -> list[str]:
    """Return the differences from the time when the folder was prepared, for a person."""
    before, now = there.settings.model_dump(), settings.model_dump()
    found = [f"{k} was {before[k]}, is {now[k]}" for k in now if before[k] != now[k]]
    old = {(s.split, s.name, s.fingerprint) for s in there.sources}
    new = {(s.split, s.name, s.fingerprint) for s in sources}
    changed = sorted({name for _, name, _ in old ^ new})
    if changed:
        found.append(f"{', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''} changed, came or went")
    elif there.sources != sources:
        found.append("the documents are in another order")
    return found


def _clear(folder: Path) -> None:
    """Remove the manifest, shards and drafts that `prepare` wrote into a folder, the manifest first."""
    (folder / MANIFEST).unlink(missing_ok=True)
    drafts = (p for name in (f"{PARTIAL}*", ".*.leaves.*", ".*.json.*") for p in folder.glob(name))
    for path in (*_shard_files(folder), *drafts):
        path.unlink()


def _may_replace(path: Path, given: tokens.RunTokenizer | None) -> bool:
    """Return whether no tokenizer is there, or the given one. Raises DataInputError."""
    try:
        there = path.read_bytes()
    except FileNotFoundError:
        return True
    except OSError as e:
        raise DataInputError(f"{path}: cannot be read: {os_reason(e)}: choose another folder") from None
    return given is not None and there == given.file


def _shard_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.*") if _SHARD_FILE.fullmatch(path.name)]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for data that are only counted, and remove it. Raises DataInputError."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    except OSError as e:
        raise DataInputError(
            f"temporary files: {os_reason(e)}: free some space, or name another folder as TMPDIR"
        ) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make a folder and lock it for this process. Raises DataInputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    except OSError as e:
        raise DataInputError(f"{folder}: cannot be written to: {os_reason(e)}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataInputError(f"{folder}: another process prepares data there: wait for it, or stop it") from None
        try:
            yield
        except OSError as e:
            raise DataInputError(
                f"{folder}: {os_reason(e)}: free some space or choose another folder (TMPDIR, for a temporary one)"
            ) from None
