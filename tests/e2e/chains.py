"""Reads the chain from a store's folder, also while its process runs, and checks what must hold of every chain."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from peer.node.chain_store import DIRECTIVE, FINALIZATION
from protocol.chain import Chain
from protocol.errors import FinalizedConflict, UnknownParent
from protocol.ids import Digest, PeerKey
from protocol.message_codec import MessageDecoder
from protocol.messages import Certificate, Directive, Finalization, Signed
from protocol.rounds.policy import RoundPolicy
from protocol.spec import RunSpec


@dataclass(frozen=True)
class Branch:
    """The head's path from the genesis, oldest first, and how many certificates lie in the store in all.

    `side`: how many records the longest branch has that is not on the path.
    """

    path: tuple[Certificate, ...]
    stored: int
    final: Signed[Finalization] | None
    side: int = 0

    @property
    def height(self) -> int:
        return len(self.path)

    @property
    def records(self) -> list[Digest]:
        return [c.digest for c in self.path]

    @property
    def windows(self) -> dict[PeerKey, int]:
        """Accepted windows of each author."""
        found: dict[PeerKey, int] = defaultdict(int)
        for c in self.path:
            for u in c.record.body.updates:
                found[u.author] += u.body.windows
        return dict(found)


_OPENERS: dict[bytes, MessageDecoder] = {}


READINGS = 20
"""Of a chain that is written meanwhile: a listing may have a record and not its parent, which came a moment before."""


def read_branch(spec: RunSpec, store: Path) -> Branch:
    """Read the chain, and verify every certificate like a stranger's. Raises ProtocolError for one that is none."""
    for _ in range(READINGS):
        with suppress(UnknownParent, FileNotFoundError):  # a node also removes records that lost
            return _read(spec, store)
        time.sleep(0.1)
    return _read(spec, store)


def _read(spec: RunSpec, store: Path) -> Branch:
    decoder = _OPENERS.setdefault(bytes(spec.run_id), MessageDecoder(spec.run_id, spec.owner_key))
    chain = Chain(spec.run_id, spec.genesis.name, RoundPolicy.of(spec).chain_limits)
    final = None
    if (value := store / "values" / FINALIZATION).exists():  # first, as a node does: no ban cuts records up to it
        final = decoder.decode(value.read_bytes(), Finalization)
        chain.add_finalization(final)
    if (word := store / "values" / DIRECTIVE).exists():
        chain.add_directive(decoder.decode(word.read_bytes(), Directive))
    stored, parents = 0, dict[Digest, Digest]()
    for file in sorted((store / "chain").glob("*-*")):
        certificate = decoder.decode_certificate(file.read_bytes()[32:])
        parents[certificate.digest] = certificate.record.body.parent
        try:
            chain.add(certificate)
        except FinalizedConflict:
            pass  # a rival of what is final, or of a round that was rolled back
        except UnknownParent:
            if chain.rollback is None and certificate.record.body.parent not in parents:
                raise  # otherwise it is built on such a record
        stored += 1
    path = chain.path(chain.genesis, chain.head)
    return Branch(path, stored, final, longest_side(parents, {c.digest for c in path}))


def longest_side(parents: Mapping[Digest, Digest], main: Set[Digest]) -> int:
    """Return the length of the longest branch off the main path, of records with their parents, oldest first."""
    lengths = dict[Digest, int]()
    for record, parent in parents.items():
        if record not in main:
            lengths[record] = lengths.get(parent, 0) + 1
    return max(lengths.values(), default=0)


def check_windows(branch: Branch) -> None:
    """Check that no window is counted twice: each author's accepted ranges follow each other."""
    ends: dict[PeerKey, int] = defaultdict(int)
    for c in branch.path:
        for u in c.record.body.updates:
            assert u.body.first_window >= ends[u.author], (c.record.body.round, u.author.short)
            assert u.body.end_window > u.body.first_window
            ends[u.author] = u.body.end_window


def check_same(branches: dict[str, Branch]) -> int:
    """Check that all hold the same chain, as far as each has it; return the shortest length."""
    shortest = min(b.height for b in branches.values())
    one = next(iter(branches.values()))
    for name, b in branches.items():
        check_windows(b)
        assert b.records[:shortest] == one.records[:shortest], f"{name} is on another branch"
    return shortest
