"""The cost of a key: a proof of work that the coordinator of a run may ask of new keys (Back 2002, "Hashcash").

The hash is scrypt (RFC 7914) over 4 MiB. A graphics card computes SHA-256 thousands of times as fast as a processor;
scrypt needs memory for each try, so the distance is far smaller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from protocol.ids import PeerKey, RunId

MAX_WORK_BITS = 24
"""At 9 ms a try on one core, 24 bits are 42 hours."""

_COST, _BLOCK = 4096, 8


def is_proof(run: RunId, key: PeerKey, nonce: int, bits: int) -> bool:
    """Return whether the hash of run, key and nonce begins with `bits` zero bits. About 10 ms."""
    salt = b"cairn/v1/proof-of-work" + run + key
    tried = hashlib.scrypt(nonce.to_bytes(8, "big"), salt=salt, n=_COST, r=_BLOCK, p=1, maxmem=2**23, dklen=8)
    return int.from_bytes(tried, "big") >> (64 - bits) == 0


def find_proof(run: RunId, key: PeerKey, bits: int, nonces: Iterable[int]) -> int | None:
    """Return the first of these nonces that is a proof; None if none is. About 2**bits must be tried."""
    return next((nonce for nonce in nonces if is_proof(run, key, nonce, bits)), None)
