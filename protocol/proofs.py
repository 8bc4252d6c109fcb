"""Proofs about an append-only log: that an entry is in it, and that a later tree extends an earlier one (RFC 9162).

Proofs are made from the hashes of complete subtrees, which a log stores once each. `node(level, index)` is the hash
over the leaves index * 2**level up to (index + 1) * 2**level. They are verified with nothing but the trees' roots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from protocol.errors import MalformedError
from protocol.ids import MAX_COUNT, Digest, sha256
from protocol.merkle import LEAF_BYTES, tree_hash

SubtreeHash = Callable[[int, int], bytes]
"""The hash of a complete subtree, by level and index: 32 bytes. Level 0 are the leaf hashes."""

MAX_PROOF = 64
"""No proof of a log that fits MAX_COUNT has more hashes: two for each level at most, and in fact fewer."""

EMPTY = tree_hash([])
"""The root of a log without entries."""


@dataclass(frozen=True, slots=True)
class Subtree:
    """A subtree that has become complete: its place and its hash."""

    level: int
    index: int
    hash: bytes


def completed_subtrees(leaf_index: int, leaf: bytes, node: SubtreeHash) -> list[Subtree]:
    """Return the subtrees that are complete once leaf number `leaf_index` (from 0) is appended, the leaf itself first.

    `node` is asked only for subtrees that were complete before. To store all of them is enough for every proof: two
    hashes for each leaf in the long run.
    """
    found = [Subtree(0, leaf_index, bytes(leaf))]
    level, index = 0, leaf_index
    while index % 2:
        both = _join(node(level, index - 1), found[-1].hash)
        level, index = level + 1, index // 2
        found.append(Subtree(level, index, both))
    return found


class MerkleFrontier:
    """A log's right edge: as many hashes as its size has bits set, from which it grows and its root follows.

    >>> log = MerkleFrontier()
    >>> for leaf in leaves: store(log.append(leaf))
    >>> log.root()
    """

    def __init__(self, size: int = 0, node: SubtreeHash | None = None):
        """Empty, or where a log of `size` leaves ends that `node` knows."""
        self.size = size
        self._edge: dict[int, bytes] = {}
        """By level: the complete subtree that waits for a right neighbour."""
        if size and node is None:
            raise ValueError("a log that is not empty needs its nodes")
        if node is not None:
            self._edge = {level: node(level, index) for level, index in _peaks(0, size)}

    def append(self, leaf: bytes) -> list[Subtree]:
        """Append a leaf; return the subtrees that it completes."""
        made = completed_subtrees(self.size, leaf, lambda level, _: self._edge[level])
        for done in made[:-1]:
            self._edge.pop(done.level, None)
        self._edge[made[-1].level] = made[-1].hash
        self.size += 1
        return made

    def root(self) -> Digest:
        """Return the root of the leaves so far."""
        return _fold([self._edge[level] for level in sorted(self._edge, reverse=True)])


def root_at(size: int, node: SubtreeHash) -> Digest:
    """Return the root that a log had at a number of leaves. O(log size) nodes."""
    return _hash(0, size, node)


def inclusion_proof(index: int, size: int, node: SubtreeHash) -> tuple[bytes, ...]:
    """Return the audit path of leaf number `index` in the tree over the first `size` leaves (section 2.1.3.1).

    These are hashes from the leaf's level upwards, without the leaf. Raises MalformedError when there is no such leaf.
    """
    if not 0 <= index < size <= MAX_COUNT:
        raise MalformedError(f"there is no entry {index} in a log of {size}")
    path: list[bytes] = []
    start, count = 0, size
    while count > 1:
        k = _split(count)
        if index - start < k:
            path.append(_hash(start + k, count - k, node))
            count = k
        else:
            path.append(_hash(start, k, node))
            start, count = start + k, count - k
    return tuple(reversed(path))


def consistency_proof(first: int, second: int, node: SubtreeHash) -> tuple[bytes, ...]:
    """Return the proof that the tree over `second` leaves extends the one over `first` leaves (section 2.1.4.1).

    Empty when there is nothing to prove: both are the same, or the first is empty. Raises MalformedError when the first
    is the larger.
    """
    if not 0 <= first <= second <= MAX_COUNT:
        raise MalformedError(f"a log of {second} entries does not extend one of {first}")
    if first in (0, second):
        return ()
    path: list[bytes] = []
    start, count, known = 0, second, True
    while first - start != count:
        k = _split(count)
        if first - start <= k:
            path.append(_hash(start + k, count - k, node))
            count = k
        else:
            path.append(_hash(start, k, node))
            start, count, known = start + k, count - k, False
    if not known:
        path.append(_hash(start, count, node))
    return tuple(reversed(path))


def check_inclusion(leaf: bytes, index: int, size: int, path: Sequence[bytes], root: bytes) -> None:
    """Raise MalformedError unless the path proves that the leaf hash has number `index`.

    The tree is that with this root and size (section 2.1.3.2).
    """
    _check_form(path, leaf, root)
    if not 0 <= index < size <= MAX_COUNT:
        raise MalformedError(f"there is no entry {index} in a log of {size}")
    fn, sn, r = index, size - 1, bytes(leaf)
    for p in path:
        if sn == 0:
            raise MalformedError("an inclusion proof that is too long")
        if fn & 1 or fn == sn:
            r = _join(p, r)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            r = _join(r, p)
        fn, sn = fn >> 1, sn >> 1
    if sn or r != root:
        raise MalformedError(f"this does not prove that entry {index} is in the log of {size} entries with that root")


def check_consistency(first: int, first_root: bytes, second: int, second_root: bytes, path: Sequence[bytes]) -> None:
    """Raise MalformedError unless the path proves that the second tree extends the first (section 2.1.4.2)."""
    _check_form(path, first_root, second_root)
    wrong = MalformedError(f"this does not prove that the log of {second} entries extends the one of {first} entries")
    if not 0 <= first <= second <= MAX_COUNT:
        raise wrong
    if first in (0, second):
        # The RFC's proofs begin at one entry; an empty log is a beginning of every log.
        same = first_root == (EMPTY if first == 0 else second_root)
        if path or not same or (second == 0 and second_root != EMPTY):
            raise wrong
        return
    if not path:
        raise wrong
    steps = list(path)
    if first & (first - 1) == 0:  # a power of two: the first tree is itself a node of the second
        steps.insert(0, bytes(first_root))
    fn, sn = first - 1, second - 1
    while fn & 1:
        fn, sn = fn >> 1, sn >> 1
    fr = sr = steps[0]
    for c in steps[1:]:
        if sn == 0:
            raise wrong
        if fn & 1 or fn == sn:
            fr, sr = _join(c, fr), _join(c, sr)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            sr = _join(sr, c)
        fn, sn = fn >> 1, sn >> 1
    if sn or fr != first_root or sr != second_root:
        raise wrong


def _check_form(path: Sequence[bytes], *others: bytes) -> None:
    if len(path) > MAX_PROOF or any(len(h) != LEAF_BYTES for h in (*path, *others)):
        raise MalformedError(f"a proof is at most {MAX_PROOF} hashes of {LEAF_BYTES} bytes")


def _join(left: bytes, right: bytes) -> bytes:
    return sha256(b"\x01", left, right)


def _split(count: int) -> int:
    """Return the largest power of two that is less than `count` (at least 2)."""
    return 1 << (count - 1).bit_length() - 1


def _peaks(start: int, count: int) -> Iterable[tuple[int, int]]:
    """Level and index of the complete subtrees that make up `count` leaves from `start`, a multiple of the largest."""
    while count:
        level = count.bit_length() - 1
        yield level, start >> level
        start, count = start + (1 << level), count - (1 << level)


def _hash(start: int, count: int, node: SubtreeHash) -> Digest:
    """Return the tree hash over `count` leaves from `start`."""
    return _fold([node(level, index) for level, index in _peaks(start, count)])


def _fold(peaks: list[bytes]) -> Digest:
    if not peaks:
        return EMPTY
    hash = peaks[-1]
    for left in reversed(peaks[:-1]):
        hash = _join(left, hash)
    return Digest(hash)
