"""A run's past: a chain of real records, with real states, made by the protocol's own functions instead of waited for.

In each round two of the authors, in turn, send an update: one of a few of noise, compressed by the run's codec. The
state advances as on every peer. The authors' stores are left as they would be after having run all along.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from peer.keyfile import load_or_make
from peer.node.blob_retention import assets
from peer.node.enrollment import ADMISSION, SPEC, run_folder
from peer.store import Store
from protocol.chain import Chain, genesis_digest
from protocol.codec import make_codec
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round
from protocol.merkle import blob_digest
from protocol.message_codec import KeySigner, encode_certificate
from protocol.messages import Admission, Certificate, RoundRecord, Signed, UpdateHeader, Vote
from protocol.outer import Contribution, apply
from protocol.rounds.policy import RoundPolicy
from protocol.rounds.retention import retained
from protocol.spec import RunSpec
from protocol.state import checkpoint_chunks, state_digest, state_layout, tensors_from_checkpoint

WINDOWS = 8
"""Of each update: little against what a round has, so that no fork of the past can be heavier than what follows."""

STEP = 1e-4
"""The standard deviation of what an update changes: the model stays about what it was."""

POOL = 3
"""Number of different updates of each author, which are repeated in turn."""

DISK = 10**9


class History:
    """The past of one run, round by round."""

    def __init__(self, spec: RunSpec, genesis: bytes, owner: Identity, authors: Sequence[Identity]):
        self.spec = spec
        self.certificates: list[Certificate] = []
        self.blobs: dict[Digest, bytes] = {}
        """The updates of all rounds, and the states at the rounds that are a multiple of `checkpoint.every`."""
        self.admissions = {i.key: _admission(spec, owner, i.key) for i in authors}
        self._signers = [KeySigner(i) for i in sorted(authors, key=lambda i: i.key)]
        self._next = dict.fromkeys(self.admissions, 0)
        self._run = spec.run_id
        self._codec = make_codec(spec.codec, spec.model.layout)
        self._layout = state_layout(spec.model.layout, spec.outer)
        self._state = tensors_from_checkpoint(self._layout, genesis)
        self._base = spec.genesis.name
        self._head = genesis_digest(spec.run_id)
        self._draw = torch.Generator().manual_seed(spec.seed)
        self._updates = {s.key: [self._update(s.key) for _ in range(POOL)] for s in self._signers}

    def round(self) -> Certificate:
        """One more."""
        number = Round(len(self.certificates))
        n = len(self._signers)
        signers = [self._signers[i] for i in sorted({number % n, (number + 1) % n})]
        updates = {s.key: self._updates[s.key][number % POOL] for s in signers}
        headers = tuple(self._header(s, number, updates[s.key]) for s in signers)
        record = signers[0].sign(RoundRecord(self._run, number, self._head, self._base, 0, headers))
        votes = tuple(s.sign(Vote(self._run, number, record.digest)) for s in signers)
        self.certificates.append(Certificate(record, votes))
        self._head = record.digest
        work = [Contribution(author, WINDOWS, blob) for author, blob in updates.items()]
        apply(self._state, work, self._codec, self.spec.outer)
        self._base = state_digest(self._layout, self._state, 1)
        if (number + 1) % self.spec.checkpoint.every == 0:
            self.blobs[self._base] = b"".join(checkpoint_chunks(self._layout, self._state))
        return self.certificates[-1]

    def _update(self, author: PeerKey) -> bytes:
        noise = {t.name: torch.randn(t.shape, generator=self._draw) * STEP for t in self._codec.layout.tensors}
        blob = self._codec.with_author(self._codec.encode(noise), author)
        self.blobs[blob_digest(blob)] = blob
        return blob

    def _header(self, signer: KeySigner, number: Round, blob: bytes) -> Signed[UpdateHeader]:
        first = self._next[signer.key]
        self._next[signer.key] = first + WINDOWS
        return signer.sign(
            UpdateHeader(
                self._run, number, self._head, self._base, first, first, first + WINDOWS, 1, blob_digest(blob),
                len(blob), 5.0, self.admissions[signer.key],
            )
        )  # fmt: skip

    def leave_to(self, author: PeerKey, envelope: bytes, folder: Path, *, whole: bool = True) -> None:
        """Make the store of this author; with `whole` false, a copy of another author's to be completed.

        Raises StoreError.
        """
        with Store(folder, DISK) as store:
            store.write_value(SPEC, envelope)
            store.write_value(ADMISSION, self.admissions[author])
            if not whole:
                return
            for c in self.certificates:
                store.append_certificate(encode_certificate(c), c.record.body.round, c.record.digest)
            policy = RoundPolicy.of(self.spec)
            chain = Chain(self.spec.run_id, self.spec.genesis.name, policy.chain_limits)
            for c in self.certificates:
                chain.add(c)
            keep = {*assets(self.spec), self._base, *retained(policy, chain)}
            for digest, blob in self.blobs.items():
                if digest in keep:
                    store.put(blob)


def _admission(spec: RunSpec, owner: Identity, peer: PeerKey) -> bytes:
    return KeySigner(owner).sign(Admission(spec.run_id, peer, 0, 2**33, "")).encoded


def make_history(
    spec: RunSpec, envelope: bytes, genesis: bytes, owner: Identity, homes: Mapping[str, Path], rounds: int
) -> History:
    """Make a number of rounds by the peers with these homes (identities are made), and their stores after these."""
    identities = [load_or_make(home / "identity.key") for home in homes.values()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on cores that others use, more only wait for each other
    try:
        history = History(spec, genesis, owner, identities)
        for _ in range(rounds):
            history.round()
    finally:
        torch.set_num_threads(threads)
    first: Path | None = None
    for identity, home in zip(identities, homes.values(), strict=True):
        store = run_folder(home, spec.run_id) / "store"
        if first is not None:
            shutil.copytree(first, store)  # each certificate on the disk for good: once is enough
        history.leave_to(identity.key, envelope, store, whole=first is None)
        first = first or store
    return history
