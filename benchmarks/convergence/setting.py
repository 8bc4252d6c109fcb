"""The setting that all methods share: model, data, tokens, global batch, schedule, evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.convergence.corpus import Corpus, corpus
from peer.training.schedule import factor
from protocol.assignment import windows_of
from protocol.ids import PeerKey
from protocol.layout import Layout
from protocol.model import build_model, model_layout, plain_config
from protocol.spec import InnerSpec, Schedule


@dataclass(frozen=True)
class Profile:
    """A size of the comparison. `batch`: windows in one inner step of one peer; `steps`: inner steps of each peer."""

    name: str
    model: Mapping[str, Any]
    vocabulary: int
    window: int
    peers: int
    batch: int
    steps: int
    lr: float
    """The first learning rate of each method's search."""
    device: str = "cpu"
    planned: int | None = None
    """The steps of the learning rate's schedule, where the training stops before its end."""

    @property
    def tokens(self) -> int:
        """Tokens trained on in all, by all peers."""
        return self.steps * self.step_tokens

    @property
    def step_tokens(self) -> int:
        """The global batch, in tokens."""
        return self.peers * self.batch * self.window


def llama(hidden: int, intermediate: int, layers: int, heads: int, window: int) -> dict[str, Any]:
    """Return the config of a Llama with tied embeddings, without its vocabulary."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": window,
        "tie_word_embeddings": True,
    }


PROFILES = {
    p.name: p
    for p in (
        Profile("tiny", llama(64, 172, 2, 4, 64), 512, 64, peers=4, batch=4, steps=1500, lr=4e-3),
        Profile("broad", llama(64, 172, 2, 4, 64), 512, 64, peers=4, batch=16, steps=750, lr=4e-3),
        Profile("drawn", {**llama(64, 172, 2, 4, 64), "initializer_range": 0.125}, 512, 64, 4, 16, 750, lr=1.6e-2),
        Profile("start", llama(64, 172, 2, 4, 64), 512, 64, 4, 16, steps=180, lr=4e-3, planned=750),
        Profile("one", llama(64, 172, 2, 4, 64), 512, 64, peers=1, batch=64, steps=750, lr=1.6e-2),
        Profile("eight", llama(64, 172, 2, 4, 64), 512, 64, peers=8, batch=8, steps=750, lr=1.6e-2),
        Profile("many", llama(64, 172, 2, 4, 64), 512, 64, peers=16, batch=4, steps=750, lr=1.6e-2),
        Profile("manylong", llama(64, 172, 2, 4, 64), 512, 64, peers=16, batch=4, steps=3000, lr=8e-3),
        Profile("wide", llama(64, 172, 2, 4, 64), 512, 64, peers=16, batch=16, steps=750, lr=1.6e-2),
        Profile("long", llama(64, 172, 2, 4, 64), 512, 64, peers=4, batch=16, steps=3000, lr=1.6e-2),
        Profile("longer", llama(64, 172, 2, 4, 64), 512, 64, peers=4, batch=16, steps=7200, lr=8e-3),
        Profile("small", llama(192, 512, 2, 6, 128), 1024, 128, peers=4, batch=4, steps=900, lr=2e-3),
        Profile("medium", llama(320, 864, 4, 5, 128), 2048, 128, peers=4, batch=4, steps=1500, lr=1e-3),
        Profile("gpu20m", llama(384, 1024, 8, 6, 512), 8192, 512, 8, 4, steps=720, lr=8e-3, device="cuda"),
        Profile("gpu20m4", llama(384, 1024, 8, 6, 512), 8192, 512, 4, 8, steps=720, lr=8e-3, device="cuda"),
        Profile("gpu150m", llama(768, 2048, 16, 12, 1024), 32768, 1024, 8, 16, 5000, 6e-4, device="cuda"),
    )
}
"""0.13 million parameters: small batches; large ones; weights drawn for the width, 1 / sqrt(64); their start. Then 1, 8
and 16 peers of the same global batch. Then more steps of 16 peers (manylong), more windows of 16 (wide), more steps of
4 (long, longer). Then 1.1, 5.4, 17 (8 peers; 4) and 150 million parameters."""

WARMUP = 0.04
"""Share of the training over which the learning rate rises; then a cosine to MIN_RATIO."""
MIN_RATIO = 0.1


@dataclass(frozen=True)
class Setting:
    """One profile and one seed, with the data: what a method trains on."""

    profile: Profile
    seed: int
    corpus: Corpus = field(repr=False)
    compiled: bool = False

    @classmethod
    def of(cls, profile: Profile, seed: int, *, compiled: bool = False) -> Setting:
        return cls(profile, seed, corpus(profile.vocabulary, profile.window), compiled)

    @property
    def device(self) -> torch.device:
        return torch.device(self.profile.device)

    def model(self, *, compiled: bool | None = None) -> torch.nn.Module:
        """Return a fresh model with the seed's initial weights, the same for every peer and method."""
        model = build_model(_config(self.profile), device=self.device, seed=self.seed)
        if self.compiled if compiled is None else compiled:
            model.compile()
        return model

    @property
    def layout(self) -> Layout:
        return _layout(self.profile)

    def key(self, peer: int) -> PeerKey:
        """Return the key that decides a peer's windows."""
        return PeerKey(hashlib.sha256(b"convergence/%d" % peer).digest())

    def windows(self, peer: int, first: int, count: int, *, own_data: bool = False) -> Tensor:
        """Return a peer's windows from number `first` on: int64 [count, window + 1], by the product's assignment.

        With `own_data` the peer draws from its own part of the corpus only (one president's addresses).
        """
        tokens = self.corpus.presidents[peer % len(self.corpus.presidents)] if own_data else self.corpus.train
        window = self.profile.window
        total = (len(tokens) - 1) // window
        starts = windows_of(self.seed, self.key(peer), first, count, total) * window
        at = starts[:, None] + np.arange(window + 1)[None, :]
        return torch.from_numpy(tokens[at].astype(np.int64))

    def global_batch(self, number: int) -> Tensor:
        """Return every peer's windows of inner step `number`: int64 [peers, batch, window + 1]."""
        batch = self.profile.batch
        return torch.stack([self.windows(p, number * batch, batch) for p in range(self.profile.peers)])

    def factor(self, done: float) -> float:
        """Return the factor of the learning rate after this share of the training."""
        total = (self.profile.planned or self.profile.steps) * self.profile.step_tokens
        schedule = Schedule(kind="cosine", warmup_tokens=int(WARMUP * total), total_tokens=total, min_ratio=MIN_RATIO)
        return factor(schedule, done * self.profile.tokens)

    def inner(self, lr: float, batch: int | None = None, optimizer: str = "adamw") -> InnerSpec:
        """Return the inner optimizer of the product's trainer.

        Raises pydantic's ValidationError for one that it has not.
        """
        fields = {"optimizer": optimizer, "lr": lr, "batch": batch or self.profile.batch}
        return InnerSpec.model_validate({**fields, "schedule": Schedule(kind="constant")})

    @torch.inference_mode()
    def loss(self, model: torch.nn.Module, most: int) -> float:
        """Return the validation loss in nats a token, over at most `most` evenly spaced held-out windows."""
        held, window = self.corpus.validation, self.profile.window
        total = (len(held) - 1) // window
        n = min(most, total)
        starts = (np.arange(n) * total // n) * window
        blocks = torch.from_numpy(held[starts[:, None] + np.arange(window + 1)[None, :]].astype(np.int64))
        summed = 0.0
        for block in blocks.split(64):
            block = block.to(self.device)
            logits = model(input_ids=block[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), block[:, 1:].flatten())
            summed += float(loss) * len(block)
        return summed / n


@lru_cache
def _config_of(name: str) -> dict[str, Any]:
    profile = PROFILES[name]
    return plain_config({**profile.model, "vocab_size": profile.vocabulary})


def _config(profile: Profile) -> dict[str, Any]:
    return _config_of(profile.name)


@lru_cache
def _layout_of(name: str) -> Layout:
    return model_layout(build_model(_config_of(name), device="meta"))


def _layout(profile: Profile) -> Layout:
    return _layout_of(profile.name)
