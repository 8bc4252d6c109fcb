"""A chain that has only its genesis, and the keys and limits of the tests that build on it."""

from __future__ import annotations

from protocol.chain import Chain, ChainLimits
from protocol.ids import Digest, PeerKey, RunId, sha256
from tests.simulation.signer import FakeSigner

RUN = RunId(sha256(b"run"))


STATE = Digest(sha256(b"state"))


KEYS = sorted(PeerKey(sha256(b"key", bytes([i]))) for i in range(6))


OWNER = FakeSigner(PeerKey(sha256(b"owner")))


LIMITS = ChainLimits(max_update_windows=100, max_members=5)


def new(**limits) -> Chain:
    values = {"max_update_windows": 100, "max_members": 5, **limits}
    return Chain(RUN, STATE, ChainLimits(**values))
