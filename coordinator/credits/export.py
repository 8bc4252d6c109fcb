"""Exports all credits as CSV or Parquet: one row for each accepted update, page by page, never whole in memory."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from coordinator.errors import CoordinatorError
from protocol.ledger.entries import LedgerEntry, RoundEntry, SettleEntry, VoidEntry, decode_entry, decode_line

CSV_TYPE = "text/csv; charset=utf-8"
PARQUET_TYPE = "application/vnd.apache.parquet"
MAX_ENTRIES = 1000
"""Entries of the log in one answer."""

ROW_GROUP = 50_000
"""Rows of a Parquet row group: the maximum in memory, besides a page."""


class ParquetMissingError(CoordinatorError):
    """Parquet was requested, and pyarrow is not installed."""


class Lines(Protocol):
    """The credit lines of a round entry."""

    @property
    def entry(self) -> int: ...

    @property
    def lines(self) -> Sequence[bytes]: ...


class EntrySource(Protocol):
    """A source of entries and lines: a coordinator's own log, or a client of one."""

    async def entries(self, first: int, limit: int) -> tuple[list[bytes], int]: ...

    async def lines(self, first: int, limit: int) -> tuple[Sequence[Lines], int]: ...


class CreditRow(NamedTuple):
    """One accepted update. `time`: unix milliseconds of the entry; `status`: pending, settled or voided.

    Keys and digests are in hex.
    """

    entry: int
    line: int
    time: int
    round: int
    record: str
    peer: str
    update: str
    windows: int
    tokens: int
    micro_credits: int
    status: str


COLUMNS = tuple(CreditRow.__annotations__)


async def credit_rows(source: EntrySource) -> AsyncIterator[list[CreditRow]]:
    """Yield every credit line of the log as it is now, in order, with its status.

    Memory holds a byte for each entry, the voided lines, and a page. Raises what the source raises, and MalformedError
    for entries that do not parse.
    """
    settled, voided = bytearray(), set[tuple[int, int]]()
    first, size = 0, None
    while size is None or first < size:
        page, now = await source.entries(first, MAX_ENTRIES)
        size = now if size is None else size
        if not page:
            break
        for sent in page[: size - first]:
            what = decode_entry(sent).payload
            settled.append(0)
            if isinstance(what, SettleEntry) and what.entry < len(settled):
                settled[what.entry] = 1
            elif isinstance(what, VoidEntry):
                voided.add((what.entry, what.line))
        first += len(page)
    first = 0
    while first < len(settled):
        found, following = await source.lines(first, MAX_ENTRIES)
        if following <= first:
            break
        entries = await _entries(source, first, following)
        # In a thread: a page can be thousands of lines.
        rows = await asyncio.to_thread(_rows, found, entries, settled, voided)
        if rows:
            yield rows
        first = following


def _rows(
    found: Sequence[Lines], entries: Mapping[int, LedgerEntry], settled: bytearray, voided: set[tuple[int, int]]
) -> list[CreditRow]:
    rows = []
    for group in found:
        entry = entries.get(group.entry)
        if entry is None or not isinstance(entry.payload, RoundEntry) or group.entry >= len(settled):
            continue
        for i, sent in enumerate(group.lines):
            line = decode_line(sent)
            status = "voided" if (group.entry, i) in voided else "settled" if settled[group.entry] else "pending"
            rows.append(
                CreditRow(
                    group.entry,
                    i,
                    entry.time,
                    entry.payload.round,
                    str(entry.payload.record),
                    str(line.peer),
                    str(line.update),
                    line.windows,
                    line.tokens,
                    line.micro_credits,
                    status,
                )  # fmt: skip
            )
    return rows


async def _entries(source: EntrySource, first: int, end: int) -> dict[int, LedgerEntry]:
    found: dict[int, LedgerEntry] = {}
    while first < end:
        page, _ = await source.entries(first, min(MAX_ENTRIES, end - first))
        if not page:
            break
        found.update({first + i: decode_entry(sent) for i, sent in enumerate(page)})
        first += len(page)
    return found


def exported(source: EntrySource, form: str) -> AsyncIterator[bytes]:
    """Return the file in pieces; `form` is "csv" or "parquet". Raises ParquetMissingError, and as `credit_rows`."""
    return (as_parquet if form == "parquet" else as_csv)(credit_rows(source))


async def as_csv(pages: AsyncIterator[Sequence[CreditRow]]) -> AsyncIterator[bytes]:
    """Yield RFC 4180 text, with a header."""
    yield _csv([COLUMNS])
    async for rows in pages:
        yield await asyncio.to_thread(lambda some=rows: _csv(some))


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


async def as_parquet(pages: AsyncIterator[Sequence[CreditRow]]) -> AsyncIterator[bytes]:
    """Yield row groups of about ROW_GROUP rows, zstd. Raises ParquetMissingError before anything else."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ParquetMissingError(
            "Parquet needs pyarrow, which is not installed here: pip install 'cairn[parquet]', or take CSV"
        ) from None
    texts = {"record", "peer", "update", "status"}
    schema = pa.schema([(name, pa.string() if name in texts else pa.int64()) for name in COLUMNS])
    sink = _Pieces()
    writer = pq.ParquetWriter(pa.PythonFile(sink, mode="w"), schema, compression="zstd")
    waiting: list[CreditRow] = []

    def write() -> None:
        columns = [pa.array(values, f.type) for values, f in zip(zip(*waiting, strict=True), schema, strict=True)]
        writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=ROW_GROUP)
        waiting.clear()

    async for rows in pages:
        waiting.extend(rows)
        if len(waiting) >= ROW_GROUP:
            await asyncio.to_thread(write)
            yield sink.taken()
    if waiting:
        await asyncio.to_thread(write)
    writer.close()
    yield sink.taken()


class _Pieces(io.RawIOBase):
    """A file that is read while it is written."""

    def __init__(self):
        super().__init__()
        self._pieces: list[bytes] = []
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any, /) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._at += len(piece)
        return len(piece)

    def taken(self) -> bytes:
        """Return what was written since the last call."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)
