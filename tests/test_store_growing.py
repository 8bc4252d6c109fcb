"""What comes of a blob before it has a digest: checked, bounded, forgotten, or adopted and not fetched again."""

from __future__ import annotations

import random

import pytest

from peer.store import BlobMissing, Store, StoreFull
from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.merkle import CHUNK, blob_digest, blob_leaves

DATA = random.Random(1).randbytes(4 * CHUNK + 99)
LEAVES = blob_leaves(DATA)
DIGEST = blob_digest(DATA)
NAME, OTHER = Digest(b"n" * 32), Digest(b"o" * 32)


def chunk(index: int) -> bytes:
    return DATA[index * CHUNK : (index + 1) * CHUNK]


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store", 1 << 40) as s:
        yield s


def test_a_file_that_is_being_made_is_served_as_far_as_it_is_final(store, tmp_path):
    path = tmp_path / "growing"
    path.write_bytes(DATA[: 2 * CHUNK + 5])
    made = store.made(NAME, len(DATA), path)
    made.grow(CHUNK - 1)
    assert made.known == 0 and not made.has(0)
    made.grow(2 * CHUNK + 5)
    assert made.known == 2 and made.leaves[:2] == LEAVES[:2] and made.read_chunk(1) == chunk(1)
    assert made.bitmap() == b"\x03"
    with pytest.raises(BlobMissing):
        made.read_chunk(2)
    path.write_bytes(DATA)
    path.rename(tmp_path / "whole")  # its maker is done with it
    made.grow(len(DATA))
    assert made.leaves == LEAVES and made.read_chunk(4) == chunk(4)
    assert store.used_bytes == 0
    store.let_go(NAME)
    assert store.growing(NAME) is None and (tmp_path / "whole").exists()
    with pytest.raises(BlobMissing):
        made.read_chunk(0)


def test_a_file_that_is_cut_short_is_missing_not_wrong(store, tmp_path):
    path = tmp_path / "growing"
    path.write_bytes(DATA[:CHUNK])
    made = store.made(NAME, len(DATA), path)
    with pytest.raises(BlobMissing):
        made.grow(2 * CHUNK)
    assert made.known == 1


def test_only_chunks_that_were_named_are_taken(store):
    ahead = store.ahead(NAME, len(DATA))
    assert ahead.hint(1, LEAVES[1:3]) and ahead.missing() == [1, 2]
    for index, data in ((0, chunk(0)), (1, chunk(2)), (1, chunk(1)[:-1]), (5, chunk(0))):
        with pytest.raises((MalformedError, IndexError)):
            ahead.write(index, data)
    ahead.write(2, chunk(2))
    ahead.write(2, chunk(2))
    assert ahead.missing() == [1] and ahead.read_chunk(2) == chunk(2)
    assert ahead.room == store.used_bytes == CHUNK


def test_a_word_that_cannot_be_or_was_another_is_not_believed(store):
    ahead = store.ahead(NAME, len(DATA))
    assert ahead.hint(0, LEAVES[:2]) and ahead.hint(1, LEAVES[1:3])
    assert not ahead.hint(2, [LEAVES[3]])
    assert not ahead.hint(4, LEAVES[:2]) and not ahead.hint(5, [LEAVES[0]]) and not ahead.hint(-1, [LEAVES[0]])
    assert ahead.missing() == [0, 1, 2]


def came(store: Store, chunks: list[int], hinted: int = 5) -> None:
    ahead = store.ahead(NAME, len(DATA))
    assert ahead.hint(0, LEAVES[:hinted])
    for index in chunks:
        ahead.write(index, chunk(index))


def finished(store: Store) -> list[int]:
    """Fetch what is left; which chunks that was."""
    partial = store.partial(DIGEST, len(DATA), LEAVES)
    left = partial.missing()
    for index in left:
        partial.write(index, chunk(index))
    partial.finish()
    partial.close()
    assert store.read(DIGEST) == DATA and store.used_bytes == len(DATA)
    return left


def test_what_came_is_not_fetched_again_and_not_hashed_again(store, monkeypatch):
    came(store, [0, 3, 4])
    store.became(NAME, DIGEST)
    assert store.growing(NAME) is None and store.known_leaves(DIGEST, len(DATA)) == LEAVES
    assert store.used_bytes == 2 * CHUNK + 99
    with monkeypatch.context() as m:
        m.setattr("peer.store.partial.leaf_hash", lambda data: pytest.fail("it was checked when it came"))
        partial = store.partial(DIGEST, len(DATA), LEAVES)
    assert partial.missing() == [1, 2] and partial.read_chunk(3) == chunk(3)
    partial.close()
    assert finished(store) == [1, 2]


def test_without_all_leaves_what_came_is_used_all_the_same(store):
    came(store, [0, 2], hinted=3)
    store.became(NAME, DIGEST)
    assert store.known_leaves(DIGEST, len(DATA)) is None
    assert finished(store) == [1, 3, 4]


def test_chunks_of_another_blob_are_not_taken_for_this_one(store):
    ahead = store.ahead(NAME, len(DATA))
    other = random.Random(2).randbytes(CHUNK)
    assert ahead.hint(0, [blob_leaves(other)[0], *LEAVES[1:]])
    ahead.write(0, other)
    ahead.write(1, chunk(1))
    store.became(NAME, DIGEST)
    assert store.known_leaves(DIGEST, len(DATA)) is None
    assert finished(store) == [0, 2, 3, 4]


def test_what_is_not_announced_is_dropped_and_its_disk_comes_back(store):
    came(store, [0, 1])
    assert len(list(store.scratch.iterdir())) == 1
    ahead = store.growing(NAME)
    store.let_go(NAME)
    assert store.used_bytes == 0 and not list(store.scratch.iterdir())
    with pytest.raises(BlobMissing):
        ahead.write(2, chunk(2))
    store.let_go(NAME)  # nothing, and no error


def test_a_blob_that_is_here_or_on_its_way_already_needs_none_of_it(store):
    came(store, [0, 1])
    partial = store.partial(DIGEST, len(DATA), LEAVES)
    store.became(NAME, DIGEST)
    assert partial.left == 5 and store.used_bytes == len(DATA) and not list(store.scratch.iterdir())
    partial.close()


def test_it_never_takes_room_from_what_is_needed(tmp_path):
    with Store(tmp_path, 4 * CHUNK) as store:
        came(store, [0, 1, 2])
        other = store.ahead(OTHER, CHUNK)
        assert other.hint(0, [LEAVES[3]])
        other.write(0, chunk(3))
        ahead = store.ahead(NAME, len(DATA))  # the newest wins
        assert ahead.hint(0, LEAVES) and store.used_bytes == CHUNK
        for index in range(3):
            ahead.write(index, chunk(index))
        with pytest.raises(StoreFull):
            ahead.write(3, chunk(3))
        store.put(bytes(2 * CHUNK))
        assert store.used_bytes == 2 * CHUNK and store.growing(NAME) is None and store.growing(OTHER) is None


def test_a_restart_forgets_it(tmp_path):
    with Store(tmp_path, 1 << 40) as store:
        came(store, [0, 1])
    with Store(tmp_path, 1 << 40) as store:
        assert store.growing(NAME) is None and store.used_bytes == 0 and not list(store.scratch.iterdir())


def test_a_restart_after_it_became_a_blob_goes_on_from_there(tmp_path):
    with Store(tmp_path, 1 << 40) as store:
        came(store, [0, 1])
        store.became(NAME, DIGEST)
    with Store(tmp_path, 1 << 40) as store:
        assert finished(store) == [2, 3, 4]
