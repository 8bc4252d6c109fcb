"""Blobs and their digests: RFC 9162's tree, and chunks that each can be checked alone."""

from __future__ import annotations

import array
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.merkle import (
    CHUNK,
    blob_digest,
    blob_leaves,
    check_leaves,
    chunk_count,
    chunk_size,
    leaf_hash,
    leaves_of,
    tree_hash,
)

# The inputs and roots of the reference tests of certificate-transparency-go and of google/trillian (merkle tree of the
# first n inputs, n = 1 to 8; and of none).
CT_INPUTS = [
    bytes.fromhex(h)
    for h in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]
CT_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


@pytest.mark.parametrize("count", range(9))
def test_roots_are_those_of_certificate_transparency(count: int):
    assert tree_hash([leaf_hash(data) for data in CT_INPUTS[:count]]).hex() == CT_ROOTS[count]


def rfc_9162(entries: list[bytes]) -> bytes:
    """MTH of RFC 9162 section 2.1.1, as it is written there."""
    if not entries:
        return hashlib.sha256().digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\x00" + entries[0]).digest()
    k = 1
    while 2 * k < len(entries):
        k *= 2
    return hashlib.sha256(b"\x01" + rfc_9162(entries[:k]) + rfc_9162(entries[k:])).digest()


@given(st.lists(st.binary(max_size=4), max_size=70))
def test_the_tree_is_rfc_9162s(entries: list[bytes]):
    assert tree_hash([leaf_hash(e) for e in entries]) == rfc_9162(entries)


SIZES = st.one_of(
    st.integers(0, 2**40),
    st.builds(lambda n, d: max(0, n * CHUNK + d), st.integers(0, 100), st.integers(-2, 2)),
)


@given(SIZES)
def test_chunks_cover_a_blob_without_gap(size: int):
    count = chunk_count(size)
    if count:
        assert (count - 1) * CHUNK + chunk_size(size, count - 1) == size
        assert 1 <= chunk_size(size, count - 1) <= CHUNK
    else:
        assert size == 0
    if count > 1:
        assert chunk_size(size, 0) == CHUNK == chunk_size(size, count - 2)


@given(SIZES, st.integers(-3, 10**7))
def test_there_is_no_chunk_beyond_the_blob(size: int, index: int):
    if 0 <= index < chunk_count(size):
        chunk_size(size, index)
    else:
        with pytest.raises(MalformedError):
            chunk_size(size, index)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_a_blob_is_named_by_the_tree_over_its_chunks(size: int):
    data = bytes(range(251)) * (size // 251 + 1)
    data = data[:size]
    chunks = [data[i : i + CHUNK] for i in range(0, size, CHUNK)]
    assert len(blob_leaves(data)) == chunk_count(size)
    assert blob_leaves(data) == leaves_of(chunks) == leaves_of(memoryview(c) for c in chunks)
    assert blob_digest(data) == rfc_9162(chunks)
    check_leaves(blob_digest(data), size, blob_leaves(data))


def test_a_view_of_numbers_has_the_digest_of_its_bytes():
    numbers = array.array("f", range(CHUNK // 2))
    assert blob_digest(memoryview(numbers)) == blob_digest(numbers.tobytes())


def test_leaves_of_another_blob_size_or_order_are_refused():
    data = bytes(CHUNK) + b"x" * CHUNK + b"end"
    digest, size, leaves = blob_digest(data), len(data), blob_leaves(data)
    for wrong_size, wrong in [
        (size, leaves[::-1]),
        (size, leaves[:2]),
        (size, [*leaves, leaves[0]]),
        (size, []),
        (size, [leaves[0], leaves[1], leaf_hash(b"eng")]),
        (size, [leaves[0][:31], leaves[1], leaves[2]]),
        (size + CHUNK, leaves),
        (-1, leaves),
    ]:
        with pytest.raises(MalformedError):
            check_leaves(digest, wrong_size, wrong)


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=9), st.binary(min_size=32, max_size=32))
def test_only_the_leaves_under_a_digest_are_accepted(leaves: list[bytes], other: bytes):
    digest = tree_hash(leaves)
    check_leaves(digest, len(leaves) * CHUNK, leaves)
    if other != digest:
        with pytest.raises(MalformedError):
            check_leaves(Digest(other), len(leaves) * CHUNK, leaves)


def test_a_leaf_is_not_an_inner_node():
    # RFC 9162's prefixes: without them the blob made of two hashes would have the digest of the tree above them.
    left, right = leaf_hash(b"left"), leaf_hash(b"right")
    assert leaf_hash(left + right) != tree_hash([left, right])
