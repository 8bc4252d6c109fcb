"""The logs of a process stay readable, whatever strangers send."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.logs import (
    BURST,
    LIBRARY_BURST,
    MAX_CHARACTERS,
    MAX_TRACEBACK,
    REPEAT_SECONDS,
    LineLimit,
    set_up_logging,
)


class Screen(logging.Handler):
    """A handler that keeps the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def screen() -> Iterator[Screen]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield Screen()
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = before
    root.setLevel(level)


def test_a_flood_of_one_statement_is_cut_in_file_and_terminal_and_others_are_not(tmp_path: Path, screen: Screen):
    set_up_logging(tmp_path / "peer.log", terminal=screen)
    flood, other = logging.getLogger("peer.node.flood"), logging.getLogger("peer.node.other")
    for i in range(2 * BURST):
        flood.warning("refused a message: %s", f"kind {i}, as a stranger likes it")
    other.warning("the disk is full")
    assert len(screen.lines) == BURST + 1 and screen.lines[-1] == "the disk is full"
    assert len((tmp_path / "peer.log").read_text().splitlines()) == BURST + 1


def test_a_line_that_asks_nothing_of_people_is_in_the_file_alone(tmp_path: Path, screen: Screen):
    set_up_logging(tmp_path / "peer.log", terminal=screen)
    logging.getLogger("peer.x").info("a DHT node gave no usable answer", extra={"file_only": True})
    logging.getLogger("peer.x").info("training")
    assert screen.lines == ["training"]
    assert "no usable answer" in (tmp_path / "peer.log").read_text()


def test_a_line_of_a_library_is_logged_a_few_times(tmp_path: Path, screen: Screen):
    """uvicorn warns of every invalid request, and of every upgrade that is asked for."""
    set_up_logging(tmp_path / "coordinator.log", terminal=screen)
    for i in range(1000):
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request %d received.", i)
    assert len(screen.lines) == LIBRARY_BURST


def record(text: str, kind: str = "", line: int = 1) -> logging.LogRecord:
    made = logging.LogRecord("peer.x", logging.WARNING, "x.py", line, "%s", (text,), None)
    made.kind = kind
    return made


def test_later_a_line_passes_again_and_says_how_many_did_not():
    now = 0.0
    limit = LineLimit(lambda: now)
    assert sum(limit.filter(record(f"a{i}")) for i in range(3 * BURST)) == BURST
    now = 10.0
    first, second = record("b"), record("c")
    assert limit.filter(first) and not limit.filter(second)
    assert first.getMessage() == f"b ({2 * BURST:,} such lines before it were left out)"


def test_reports_of_one_kind_do_not_hide_those_of_another():
    limit = LineLimit(lambda: 0.0)
    for i in range(2 * BURST):
        limit.filter(record(f"a{i}", "refused"))
    assert not limit.filter(record("a", "refused")) and limit.filter(record("a", "drift"))


def test_the_same_text_is_logged_once_a_minute_with_a_count():
    now = 0.0
    limit = LineLimit(lambda: now)
    passed: list[tuple[float, str]] = []
    while now < 4 * REPEAT_SECONDS:
        for text in ("blob a did not come", "blob b did not come"):
            line = record(text)
            if limit.filter(line):
                passed.append((now, line.getMessage()))
        now += 5.0
    times = [n * REPEAT_SECONDS for n in range(4)]
    assert [t for t, _ in passed] == [t for t in times for _ in "ab"]
    assert passed[0][1] == "blob a did not come"
    assert passed[4][1] == "blob a did not come (11 such lines before it were left out)"


def test_a_text_that_comes_now_and_then_is_always_logged():
    now = 0.0
    limit = LineLimit(lambda: now)
    for _ in range(10):
        line = record("the coordinator does not answer")
        assert limit.filter(line) and "left out" not in line.getMessage()
        now += REPEAT_SECONDS


def test_a_long_text_is_cut_and_a_record_counts_once_for_all_handlers():
    limit = LineLimit(lambda: 0.0)
    long = record("x" * 100_000)
    assert limit.filter(long) and limit.filter(long) and len(long.getMessage()) == MAX_CHARACTERS + 3
    assert sum(limit.filter(record(f"a{i}")) for i in range(2 * BURST)) == BURST - 1


def test_a_line_that_cannot_be_formatted_does_no_harm_to_its_caller(tmp_path: Path, screen: Screen):
    """logging itself catches such mistakes of libraries, but only after the filters."""
    set_up_logging(tmp_path / "peer.log", terminal=screen)
    logging.getLogger("peer.x").warning("%d of %d", "one")
    assert len(screen.lines) == 1 and "cannot be formatted" in screen.lines[0] and "test_logs.py" in screen.lines[0]


def test_a_long_traceback_is_cut_in_the_middle(tmp_path: Path, screen: Screen):
    set_up_logging(tmp_path / "peer.log", terminal=screen)
    try:
        raise ValueError("begins" + "x" * 100_000 + "ends")
    except ValueError:
        logging.getLogger("peer.x").exception("failed")
    text = (tmp_path / "peer.log").read_text()
    assert len(text) < MAX_TRACEBACK + 200 and "Traceback" in text and "begins" in text and text.endswith("ends\n")
