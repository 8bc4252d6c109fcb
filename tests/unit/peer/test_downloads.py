"""A download, for people: how much is here, and how fast it comes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.node.downloads import Download, DownloadTable
from peer.node.rate_meter import RATE_SECONDS, RateMeter
from protocol.ids import Digest, sha256
from protocol.merkle import CHUNK

BLOB = Digest(sha256(b"blob"))
SIZE = 10 * CHUNK - 100


class Disk:
    """A store with one blob, of which `left` chunks are to come; None before it is opened."""

    left: int | None = None
    rechecked = 0

    def has(self, blob: Digest) -> bool:
        return self.left == 0

    def in_progress(self, blob: Digest) -> Any:
        return None if self.left is None else SimpleNamespace(left=self.left, rechecked=self.rechecked)


def test_a_rate_is_that_of_the_last_seconds():
    meter = RateMeter()
    assert meter.note(1000, 5.0) == 0.0
    assert meter.note(1100, 6.0) == 100.0
    rates = [meter.note(1100 + 10 * i, 6.0 + i) for i in range(60)]
    assert rates[-1] == pytest.approx(10.0)
    assert meter.note(0, 70.0) == 0.0, "a number that began again"
    assert RateMeter().note(5, RATE_SECONDS) == 0.0


def test_a_download_is_told_while_it_lasts_and_logged_at_its_beginning_and_end(caplog):
    disk, times = Disk(), iter([0.0, 1.0, 2.0, 5.0, 6.0])
    downloads = DownloadTable(cast(Any, disk), lambda: next(times))
    with caplog.at_level(logging.INFO, logger="peer.node.downloads"):
        with downloads.noted("the checkpoint", BLOB, SIZE):
            assert downloads.under_way() == [Download("the checkpoint", str(BLOB), 0, SIZE, 0.0)]
            disk.left = 6
            with downloads.noted("the same by another name", BLOB, SIZE):
                (seen,) = downloads.under_way()
            assert (seen.held, seen.per_second) == (4 * CHUNK - 100, round((4 * CHUNK - 100) / 1.0, 1))
            disk.left = 0
        assert downloads.under_way() == []
    assert [r.message for r in caplog.records] == [
        f"fetching the checkpoint {BLOB.short} (2.6 MB)",
        f"the checkpoint {BLOB.short} is here, after 5.0 s (524 kB/s)",
    ]


def test_what_was_on_disk_before_the_start_is_no_part_of_the_speed(caplog):
    disk, times = Disk(), iter([0.0, 1.0, 2.0, 3.0, 4.0])
    downloads = DownloadTable(cast(Any, disk), lambda: next(times))
    with caplog.at_level(logging.INFO, logger="peer.node.downloads"):
        with downloads.noted("the checkpoint", BLOB, SIZE):
            rates = []
            for left, rechecked in ((10, 0), (4, 6), (2, 6)):
                disk.left, disk.rechecked = left, rechecked
                rates += [d.per_second for d in downloads.under_way()]
            disk.left = 0
    assert rates == [0.0, 0.0, (2 * CHUNK - 100) / 2.0]
    assert caplog.records[-1].message.endswith("is here, after 4.0 s (262 kB/s)")  # the last 4 chunks


def test_a_download_that_fails_is_over(caplog):
    downloads = DownloadTable(cast(Any, Disk()))
    with caplog.at_level(logging.INFO, logger="peer.node.downloads"), pytest.raises(ZeroDivisionError):
        with downloads.noted("the checkpoint", BLOB, SIZE):
            raise ZeroDivisionError
    assert downloads.under_way() == [] and len(caplog.records) == 1
