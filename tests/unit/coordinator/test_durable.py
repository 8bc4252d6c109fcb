"""Files that survive a power cut: a disk that fills up makes an error, and no line is lost unnoticed."""

from __future__ import annotations

import resource

import pytest

from coordinator import durable
from coordinator.durable import LineFile


def test_a_disk_that_takes_a_part_of_the_lines_is_an_error_and_the_torn_line_is_ended(tmp_path):
    file = LineFile(tmp_path / "lines")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError):
            file.append([b"x" * 60, b"y" * 60])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.append([b"z"])
    assert file.read(1000) == [b"x" * 60, b"y" * 39, b"z"]


def test_a_file_that_the_first_line_makes_is_in_its_folder_after_a_power_cut(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(durable, "sync", synced.append)
    file = LineFile(tmp_path / "lines")
    file.append([b"x"])
    file.append([b"y"])
    assert synced == [tmp_path]


def test_a_file_that_root_makes_in_a_services_folder_is_the_services(tmp_path, monkeypatch):
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(durable.os, "geteuid", lambda: 0)
    monkeypatch.setattr(durable.os, "fchown", lambda _fd, *owner: given.append(owner))
    file = LineFile(tmp_path / "lines", mode=0o600)
    file.append([b"x"])
    file.append([b"y"])
    folder = tmp_path.stat()
    assert given == [(folder.st_uid, folder.st_gid)]
    monkeypatch.setattr(durable.os, "geteuid", lambda: 1000)
    LineFile(tmp_path / "others").append([b"x"])
    assert len(given) == 1
