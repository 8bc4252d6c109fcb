"""An archive for tests: real small models, a chain made by hand that names them, a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tests.support.coordinator_fakes as fakes
from coordinator.checkpoints.archive import Archive, ArchivedState
from coordinator.checkpoints.archiver import CheckpointArchiver
from coordinator.checkpoints.evaluations import EvaluationLog
from coordinator.checkpoints.retention import RetentionPolicy
from coordinator.checkpoints.settings import CheckpointSettings
from protocol.chain import genesis_digest
from protocol.ids import Digest, Round
from protocol.layout import is_outer_tensor
from protocol.merkle import blob_digest
from protocol.message_codec import KeySigner, encode_certificate
from protocol.messages import Finalization, Signed
from protocol.model import build_model, parameters_of
from protocol.spec import RunSpec, sign_spec
from protocol.state import checkpoint_chunks, state_layout
from tests.support.specs import OWNER, TINY_LLAMA


def tokenizer_json() -> bytes:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


def checkpoint(spec: RunSpec, seed: int, change: Any = None) -> bytes:
    """Write the canonical file of a state."""
    tensors = {n: p.detach().clone() for n, p in parameters_of(build_model(TINY_LLAMA, seed=seed)).items()}
    if change is not None:
        change(tensors)
    layout = state_layout(spec.model.layout, spec.outer)
    tensors |= {t.name: torch.zeros(t.shape) for t in layout.tensors if is_outer_tensor(t.name)}
    return b"".join(checkpoint_chunks(layout, tensors))


class CheckpointWorld:
    """An owner's folder with the states of a chain, `rounds` long, archived as `checkpoint.every` (5) says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any):
        self.folder = folder
        tokens = np.random.default_rng(0).integers(0, 256, 20 * 16 + 1).astype("<u2")
        tokens[: len(text)] = (text := np.frombuffer(b"The people of the United States", dtype=np.uint8)[:16])
        self.shard, self.tokenizer = folder / "shard", folder / "tokenizer"
        tokens.tofile(self.shard)
        self.tokenizer.write_bytes(tokenizer_json())
        draft = fakes.make_spec()
        self.files: dict[int, Path] = {}
        self.digests: dict[int, Digest] = {}
        self._plain = draft
        genesis = self.state(0)
        data = draft.data.model_dump(mode="json") | {
            "validation": [{"digest": str(blob_digest(self.shard.read_bytes())), "size": 642, "tokens": 321}]
        }
        self.spec = fakes.make_spec(
            **{
                "genesis": {"digest": str(genesis), "size": self.files[0].stat().st_size},
                "tokenizer": {
                    "digest": str(blob_digest(self.tokenizer.read_bytes())),
                    "size": self.tokenizer.stat().st_size,
                },
                "data": data,
            }
            | changes
        )
        self.shards = [self.shard]
        self.envelope = sign_spec(OWNER, self.spec).encoded
        monkeypatch.setattr(fakes, "state", lambda r: self.digests.get(r) or fakes.Digest(bytes([r]) * 32))
        self.swarm = fakes.FakeSwarm(self.spec)
        (folder / "run").mkdir(exist_ok=True)
        self.evaluations = EvaluationLog(folder / "run")
        self.archive = Archive(
            folder / "run" / "checkpoints", self.spec, policy=RetentionPolicy(newest=3), spec_envelope=self.envelope,
            losses=self.evaluations.losses, on_left=self.evaluations.mark_left,
        )  # fmt: skip
        self.posted = -1

    def state(self, round_: int, change: Any = None) -> Digest:
        """Make the state with which a round begins."""
        data = checkpoint(self._plain, round_, change)
        self.files[round_] = self.folder / f"state-{round_}"
        self.files[round_].write_bytes(data)
        self.digests[round_] = blob_digest(data)
        return self.digests[round_]

    def rounds(self, count: int, work: Mapping[int, int] | None = None) -> None:
        for _ in range(count):
            number = len(self.swarm.chain.certificates)
            if number % 5 == 0 and number not in self.digests:
                self.state(number)
            self.swarm.round(work or {1: 2, 2: 1})

    def add(self, round_: int, **more: Any) -> ArchivedState:
        """Archive the state of this round."""
        chain = self.swarm.chain
        record = chain.certificates[round_ - 1].digest if round_ else genesis_digest(self.spec.run_id)
        return self.archive.add(
            self.files[round_], self.tokenizer, round=round_, state=self.digests[round_], record=record,
            tokens=48 * round_, **more,
        )  # fmt: skip

    def mark_final(self, archived: ArchivedState) -> ArchivedState:
        """Signed by the owner, by the record that names it."""
        c = self.swarm.chain.certificates[archived.round]
        final = KeySigner(OWNER).sign(Finalization(self.spec.run_id, c.record.body.round, c.digest))
        return self.archive.mark_final(archived, final.encoded, encode_certificate(c))

    def final(self, round_: int) -> ArchivedState:
        """Archive a finalized state; the spec finalizes round 0."""
        while len(self.swarm.chain.certificates) <= round_:
            self.rounds(1)
        archived = self.add(round_)
        return self.mark_final(archived) if round_ else archived

    def newest_final(self) -> ArchivedState | None:
        """Return the newest archived state with a finalization."""
        return next((a for a in reversed(self.archive.all()) if a.final), None)

    async def finalization_of(self, round_: Round, record: Digest) -> Signed[Finalization] | None:
        if round_ > self.posted or self.swarm.chain.certificates[round_].digest != record:
            return None
        return KeySigner(OWNER).sign(Finalization(self.spec.run_id, round_, record))

    def keeper(self, **settings: Any) -> CheckpointArchiver:
        """Make an archiver, by default without evaluation."""
        wanted = CheckpointSettings.model_validate({"evaluation": {"every": 0}} | settings)
        return CheckpointArchiver(self.archive, self.evaluations, self.spec, self.swarm, wanted, shards=self.shards)


def nan(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values())).fill_(float("nan"))


class Uniform(torch.nn.Module):
    """Knows nothing: every token is as likely. Notes what it was asked."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.firsts: list[int] = []

    def forward(self, input_ids: torch.Tensor, use_cache: bool = True):
        self.firsts += input_ids[:, 0].tolist()
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 256))


def shards(folder: Path, *windows: int) -> list[Path]:
    """Write shards with these numbers of windows; each window begins with its number over all shards."""
    paths, number = [], 0
    for n, count in enumerate(windows):
        tokens = np.zeros(count * 16 + 1, dtype="<u2")
        for i in range(count):
            tokens[i * 16] = number
            number += 1
        paths.append(folder / str(n))
        tokens.tofile(paths[-1])
    return paths
