"""The assignment of data windows to peers: a pure function of (spec seed, peer key, counter).

A peer counts the windows that it trains on, from 0. Its pass p over the data is the counters [p*n, (p+1)*n), for n
training windows; in each pass it sees every window exactly once, in its own order. So a peer's
assignment is exactly uniform over each pass, and peers are independent of each other. Anyone can compute the windows
of any peer, one counter at a time, as audits need.

The order is a keyed permutation of [0, n): a Feistel network (Luby and Rackoff 1988) of FEISTEL_ROUNDS rounds over the
smallest even number of bits that holds n. The permutation follows its cycle until it falls below n (Black and
Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002; fewer than 4 steps expected). Its round keys are
SHA-256 of seed, peer and pass; its round function is the finaliser of splitmix64 (Steele, Lea and Flood 2014). It
mixes well and is no cipher: nothing here is secret.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.errors import MalformedError
from protocol.ids import MAX_COUNT, PeerKey, sha256
from protocol.spec import DataShard, windows_in

FEISTEL_ROUNDS = 8
MAX_WINDOWS_PER_CALL = 2**20
"""Most windows that one call of `windows_of` gives."""


def windows_of(seed: int, peer: PeerKey, first: int, count: int, total: int) -> np.ndarray:
    """Return the windows that `peer` trains on at the counters [first, first + count): int64 [count], in [0, total).

    `seed` is the spec's, `total` its data's `train_windows`. Raises MalformedError for what is out of range.
    """
    if not 1 <= total <= MAX_COUNT or not 0 <= seed <= MAX_COUNT:
        raise MalformedError(f"an assignment over {total} windows with seed {seed}: out of range")
    if not (0 <= first <= MAX_COUNT and 0 <= count <= MAX_WINDOWS_PER_CALL):
        raise MalformedError(f"an assignment of {count} windows from counter {first}: out of range")
    out = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        pass_, start = divmod(first + done, total)
        n = min(count - done, total - start)
        out[done : done + n] = _permuted(
            np.arange(start, start + n, dtype=np.uint64), _round_keys(seed, peer, pass_), total
        )
        done += n
    return out


def _round_keys(seed: int, peer: PeerKey, pass_: int) -> np.ndarray:
    """uint64 [FEISTEL_ROUNDS] from two SHA-256 blocks."""
    material = seed.to_bytes(8, "little") + bytes(peer) + pass_.to_bytes(8, "little")
    keys = b"".join(sha256(b"cairn/v1/assignment", bytes([block]), material) for block in range(FEISTEL_ROUNDS // 4))
    return np.frombuffer(keys, dtype="<u8").astype(np.uint64)


def _permuted(x: np.ndarray, keys: np.ndarray, total: int) -> np.ndarray:
    """x (uint64, below total) under the permutation of [0, total) that the keys name."""
    half = max(1, -(-(total - 1).bit_length() // 2))
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    x = _feistel(x, keys, shift, mask)
    outside = np.flatnonzero(x >= np.uint64(total))
    while outside.size:  # ends: a cycle that begins below total returns there
        x[outside] = _feistel(x[outside], keys, shift, mask)
        outside = outside[x[outside] >= np.uint64(total)]
    return x.astype(np.int64)


def _feistel(x: np.ndarray, keys: np.ndarray, shift: np.uint64, mask: np.uint64) -> np.ndarray:
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << shift) | right


def _mixed(z: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser; uint64 arithmetic modulo 2**64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class WindowTable:
    """The places of windows: global window index -> shard and first token."""

    window: int
    ends: tuple[int, ...]
    """ends[i]: windows in shards 0 to i together."""

    @classmethod
    def of(cls, shards: Sequence[DataShard], window: int) -> WindowTable:
        """Return the table of a spec's shards, in the spec's order (`data.train` or `data.validation`)."""
        ends, total = [], 0
        for shard in shards:
            total += windows_in(shard.tokens, window)
            ends.append(total)
        return cls(window, tuple(ends))

    @property
    def total(self) -> int:
        """Windows in all shards together."""
        return self.ends[-1] if self.ends else 0

    def locate(self, index: int) -> tuple[int, int]:
        """(shard, first token) of a window; its tokens are [first, first + window + 1). Raises MalformedError."""
        if not 0 <= index < self.total:
            raise MalformedError(f"window {index} of {self.total}")
        shard = bisect_right(self.ends, index)
        before = self.ends[shard - 1] if shard else 0
        return shard, (index - before) * self.window
