"""A replayable run on the shipped corpus, and a judge that makes the checks of audits with the product's own code."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.adversaries.lineup import HOLD_ROUNDS, Profile
from benchmarks.convergence.corpus import corpus
from benchmarks.convergence.studies import NESTEROV
from peer.auditor.job import ClaimedUpdate
from peer.auditor.loss_check import LossCheck
from peer.auditor.replay import Replayed, compare, replay
from peer.training.data import WindowReader
from peer.training.round_files import RoundFiles
from peer.training.single_process import SingleProcessBackend
from protocol.audits import TRAINED_WINDOW_PASSES
from protocol.codec import Codec, make_codec
from protocol.ids import Digest, PeerKey, sha256
from protocol.layout import is_outer_tensor
from protocol.messages import Score
from protocol.model import build_model, load_state, model_layout, parameters_of, plain_config
from protocol.outer import Contribution, apply
from protocol.spec import OuterSpec, RunSpec
from protocol.state import state_layout

CPU = torch.device("cpu")
NOWHERE = {"digest": "0" * 64, "size": 0}

State = dict[str, Tensor]
"""The tensors of a state by name: parameters, outer momentum, reference norms."""


def peer_key(number: int) -> PeerKey:
    """Return the key of a peer."""
    return PeerKey(sha256(b"adversaries", number.to_bytes(2, "little")))


@dataclass
class World:
    """One run: spec, data and the state that it begins with. `files`: a folder for blobs."""

    profile: Profile
    seed: int
    outer: OuterSpec = field(default_factory=lambda: OuterSpec.model_validate(NESTEROV))

    def __post_init__(self) -> None:
        p = self.profile
        prepared = corpus(p.vocabulary, p.window).prepared
        manifest = prepared.manifest
        config = plain_config({**p.model, "vocab_size": p.vocabulary})
        self.model = build_model(config, device=CPU, seed=self.seed)
        layout = model_layout(self.model)
        tokens = p.rounds * p.target * p.window
        fields: dict[str, Any] = {
            "name": "adversaries", "owner": peer_key(2**16 - 1).hex(), "seed": self.seed,
            "model": {"config": config, "tensors": [(t.name, list(t.shape)) for t in layout.tensors]},
            "genesis": NOWHERE, "tokenizer": NOWHERE,
            "data": {
                "window": p.window, "dtype": manifest.dtype,
                "train": [s.model_dump() for s in manifest.train.shards],
                "validation": [s.model_dump() for s in manifest.validation.shards],
            },
            "inner": {
                "optimizer": "muon", "lr": p.lr, "batch": p.batch,
                "schedule": {
                    "kind": "cosine", "warmup_tokens": int(0.04 * tokens), "total_tokens": tokens, "min_ratio": 0.1,
                },
            },
            "codec": {"kind": "sign", "beta": 0.0},
            "outer": self.outer.model_dump(),
            "round": {
                "target_tokens": p.target * p.window, "max_update_tokens": p.most * p.window, "exchange": "gather",
            },
            "audit": {"replayable": True},
            "credit": {"hold_rounds": HOLD_ROUNDS},
        }  # fmt: skip
        self.spec = RunSpec.model_validate(fields)
        self.codec: Codec = make_codec(self.spec.codec, layout)
        shards = {Digest.parse(s.digest): prepared.folder / f"{s.digest}.tokens"
                  for s in (*manifest.train.shards, *manifest.validation.shards)}  # fmt: skip
        self.reader = WindowReader(self.spec.data, shards, vocabulary=p.vocabulary)
        self.held_out = WindowReader(self.spec.data, shards, part="validation", vocabulary=p.vocabulary)

    def genesis(self) -> State:
        """Return the first state."""
        state = {n: t.detach().clone() for n, t in parameters_of(self.model).items()}
        for t in state_layout(self.codec.layout, self.outer).tensors:
            if is_outer_tensor(t.name):
                state[t.name] = torch.zeros(t.shape)
        return state

    def flat(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the parameters of a state: fp32 [parameters]."""
        return torch.cat([state[t.name].reshape(-1) for t in self.codec.layout.tensors])

    def named(self, flat: Tensor) -> State:
        """Return views of a flat vector by name."""
        layout = self.codec.layout
        parts = flat.split([t.numel for t in layout.tensors])
        return {t.name: part.view(t.shape) for t, part in zip(layout.tensors, parts, strict=True)}

    def apply(self, state: State, updates: list[Contribution]) -> None:
        """Move a state on by accepted updates."""
        apply(state, updates, self.codec, self.outer)

    @torch.inference_mode()
    def loss(self, state: State, most: int = 512) -> float:
        """Return the validation loss in nats a token."""
        load_state(self.model, {t.name: state[t.name] for t in self.codec.layout.tensors})
        total = self.held_out.total
        n = min(most, total)
        summed = 0.0
        for first in range(0, n, 64):
            windows = self.held_out.read([i * total // n for i in range(first, min(n, first + 64))])
            logits = self.model(input_ids=windows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
            summed += float(loss) * len(windows)
        return summed / n


def claimed(author: PeerKey, first: int, end: int) -> ClaimedUpdate:
    """Return the claim of an update whose blob is not in a file."""
    return ClaimedUpdate(author, first, first, end, Path(os.devnull))


class Judge:
    """One auditor's process: it trains an honest update, and checks anybody's."""

    def __init__(self, world: World, device: torch.device = CPU):
        self.world = world
        self.backend = SingleProcessBackend(world.spec, device, lambda: None)
        self.files = RoundFiles.of(world.spec)
        self.cost = 0.0
        """Of all checks, in windows of training."""
        usual = self.backend.inner.window_losses

        def counted(windows: Tensor) -> Tensor:
            self.cost += len(windows) / TRAINED_WINDOW_PASSES
            return usual(windows)

        self.backend.inner.window_losses = counted

    def honest(self, state: State, claim: ClaimedUpdate, accepted: int, *, in_bf16: bool = False) -> Replayed:
        """Return what an honest author announces. `accepted`: windows of the chain up to the state."""
        self.backend.outer.base = {n: self.backend.outer.offload.place(t) for n, t in state.items()}
        self.backend.inner.in_bf16 = in_bf16
        self.cost += claim.windows
        return replay(self.world.spec, self.backend, self.world.reader, self.files, claim, accepted, None)

    def replayed(self, state: State, claim: ClaimedUpdate, blob: bytes, accepted: int) -> tuple[Score, ...]:
        """Return the scores of a replay; one in the other precision follows, if the first does not find the update."""
        replays = [self.honest(state, claim, accepted)]
        scores = compare(self.world.codec, blob, replays)
        if any(not s.passed for s in scores):
            replays.append(self.honest(state, claim, accepted, in_bf16=True))
            scores = compare(self.world.codec, blob, replays)
        return scores

    def loss_checked(
        self, state: State, seed: bytes, claim: ClaimedUpdate, blob: bytes, own: tuple[ClaimedUpdate, bytes] | None
    ) -> tuple[Score, ...]:
        """Return the scores of a loss check. `own`: the auditor's update of the record."""
        self.backend.outer.base = {n: self.backend.outer.offload.place(t) for n, t in state.items()}
        self.backend.inner.in_bf16 = False
        check = LossCheck(self.world.spec, seed, self.backend, self.world.reader)
        return check.scores(claim, blob, own)


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for files between processes."""
    return tempfile.TemporaryDirectory(prefix="cairn-adversaries-")
