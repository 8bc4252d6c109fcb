"""Files are mapped without being held open, and unmapped with their last view."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.memory_map import mapped_file
from tests.support.open_files import few_files


def mappings(path: Path) -> int:
    """Return the number of this process's mappings of a file."""
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_more_files_are_mapped_than_can_be_open(tmp_path):
    views = []
    with few_files(16):
        for i in range(200):
            (tmp_path / f"{i}").write_bytes(bytes([i]) * 5000)
            views.append(mapped_file(tmp_path / f"{i}"))
    assert all(len(view) == 5000 and bytes(view[4990:]) == bytes([i]) * 10 for i, view in enumerate(views))


def test_a_mapping_outlives_its_file_sees_what_is_written_and_ends_with_its_last_view(tmp_path):
    path = tmp_path / "blob"
    path.write_bytes(b"a" * 10_000)
    view = mapped_file(path)
    with open(path, "r+b") as file:
        file.write(b"b")
    path.unlink()
    part = view[:3]
    del view
    assert bytes(part) == b"baa" and mappings(path) == 1
    del part
    assert mappings(path) == 0


def test_a_mapping_is_not_written_to(tmp_path):
    (tmp_path / "blob").write_bytes(b"abc")
    with pytest.raises(TypeError):
        mapped_file(tmp_path / "blob")[0] = 1


def test_an_empty_file_is_empty_and_none_is_an_error(tmp_path):
    (tmp_path / "empty").touch()
    assert not mapped_file(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        mapped_file(tmp_path / "none")
