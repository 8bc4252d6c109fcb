"""The records below the tree's root are found by height and by digest, also when digests begin alike."""

from __future__ import annotations

from protocol.ids import Digest, sha256
from protocol.path_below import PathBelow


def test_records_are_found_by_height_and_by_digest():
    path, records = PathBelow(), [Digest(sha256(b"record", i.to_bytes(4, "big"))) for i in range(500)]
    for record in records:
        path.append(record)
    assert len(path) == 500
    for i, record in enumerate(records):
        assert path.at(i) == record and path.height(record) == i
    assert path.height(Digest(sha256(b"another"))) is None


def test_digests_that_begin_alike_are_told_apart():
    path, records = PathBelow(), [Digest(b"same" + bytes([n]) * 28) for n in (9, 3, 7, 0, 255)]
    for record in records:
        path.append(record)
    assert [path.height(r) for r in records] == [0, 1, 2, 3, 4]
    for other in (b"same" + bytes([5]) * 28, b"samd" + b"\xff" * 28, b"samf" + bytes(28), bytes(32), b"\xff" * 32):
        assert path.height(Digest(other)) is None
