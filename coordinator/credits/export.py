"""Exports all credits as CSV or Parquet: one row for each accepted update, page by page, never whole in memory."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Protocol

from coordinator.errors import CoordinatorError
from protocol import extras
from protocol.ledger.audit import CreditedRounds

CSV_TYPE = "text/csv; charset=utf-8"
PARQUET_TYPE = "application/vnd.apache.parquet"
MAX_ROUNDS = 1000
"""Rounds in one answer."""

ROW_GROUP = 50_000
"""Rows of a Parquet row group: the maximum in memory, besides a page."""


class ParquetMissingError(CoordinatorError):
    """Parquet was requested, and pyarrow is not installed."""


class RoundSource(Protocol):
    """A source of credited rounds: a coordinator itself, or a client of one."""

    async def rounds(self, first: int, limit: int) -> CreditedRounds: ...


class CreditRow(NamedTuple):
    """One accepted update. `time`: unix milliseconds when its round was counted; `status`: pending, settled or voided.

    `number` counts final rounds. Keys and digests are in hex.
    """

    number: int
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


async def credit_rows(source: RoundSource) -> AsyncIterator[list[CreditRow]]:
    """Yield every credit line as it is now, in order, with its status. Raises what the source raises."""
    first, size = 0, None
    while size is None or first < size:
        page = await source.rounds(first, MAX_ROUNDS)
        size = page.size if size is None else size
        if not page.rounds:
            break
        # In a thread: a page can be thousands of lines.
        rows = await asyncio.to_thread(_rows, page)
        if rows:
            yield rows
        first += len(page.rounds)


def _rows(page: CreditedRounds) -> list[CreditRow]:
    return [
        CreditRow(
            r.number, i, r.time, r.round, str(r.record), str(x.peer), str(x.update), x.windows, x.tokens,
            x.micro_credits, r.status(i, page.settled),
        )
        for r in page.rounds
        for i, x in enumerate(r.lines)
    ]  # fmt: skip


def exported(source: RoundSource, form: str) -> AsyncIterator[bytes]:
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
            f"Parquet needs pyarrow, which is not installed here: {extras.install('parquet')}, or take CSV"
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
