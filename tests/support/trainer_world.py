"""A run small enough for tests of the trainer: a Llama of 14,000 parameters, a shard of counted tokens, its genesis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from peer.channel import Applied, Apply, Load, RoundUpdates, Start, UpdateFile, UpdateMade
from peer.durable import write_durably
from peer.training.trainer import Trainer
from protocol.adapter import base_file_layout, build_adapted, draw_adapter, quantised_forms
from protocol.ids import Digest, PeerKey, sha256
from protocol.layout import Layout
from protocol.merkle import blob_digest
from protocol.model import build_model, parameters_of, plain_config
from protocol.quantised import ABSMAX
from protocol.spec import (
    AdapterSettings,
    AdapterSpec,
    AuditSpec,
    BlobRef,
    CodecSpec,
    DataShard,
    DataSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RoundSpec,
    RunSpec,
    Schedule,
)
from protocol.state import DTYPES, checkpoint_chunks, state_layout

WINDOW, BATCH = 16, 4
GENESIS = Digest(sha256(b"genesis"))


def peer_key(n: int) -> PeerKey:
    return PeerKey(sha256(b"peer", bytes([n])))


def record_digest(n: int) -> Digest:
    return Digest(sha256(b"record", bytes([n])))


@dataclass(frozen=True)
class World:
    """The run's files under one folder, and the messages that begin a trainer's life in it."""

    folder: Path
    spec: RunSpec
    genesis: Path

    @classmethod
    def make(
        cls,
        folder: Path,
        *,
        codec: CodecSpec | None = None,
        outer: OuterSpec | None = None,
        config: Mapping[str, Any] | None = None,
        replayable: bool = False,
        text: np.ndarray | None = None,
        adapter: AdapterSettings | None = None,
        **inner,
    ) -> World:
        """`config`: fields of the model's, over those of a tiny one; `inner`: of the spec's.

        `replayable`: with the codec "sign", without error feedback, and with tokens that differ from window to window.
        `text`: other training data, as tokens. `adapter`: train one, on a frozen base with the weights of seed 1.
        """
        config = plain_config(
            {
                "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
                "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
                "max_position_embeddings": 64, "tie_word_embeddings": False, **(config or {}),
            }
        )  # fmt: skip
        counted = np.arange(4096, dtype=np.uint32) * 7
        drawn = np.random.default_rng(0).integers(0, 64, 4096, dtype=np.uint32) if replayable else 0
        text = (counted + drawn) % 64 if text is None else text
        tokens = text.astype("<u2").tobytes()
        shard = blob_digest(tokens)
        write_durably(folder / f"{shard}.tokens", [tokens])
        model = build_model(config, seed=1)
        outer = outer or OuterSpec()
        tensors, part = parameters_of(model), None
        if adapter is not None:
            tensors, part = on_base(folder, config, adapter, tensors)
        trained = Layout.of({n: tuple(t.shape) for n, t in tensors.items()})
        layout = state_layout(trained, outer)
        tensors |= {
            t.name: next(iter(tensors.values())).new_zeros(t.shape) for t in layout.tensors if t.name not in tensors
        }
        genesis = folder / "genesis.safetensors"
        write_durably(genesis, checkpoint_chunks(layout, tensors))
        data = genesis.read_bytes()
        nowhere = BlobRef(digest="0" * 64, size=0)
        spec = RunSpec(
            name="tiny",
            owner=peer_key(0).hex(),
            seed=5,
            model=ModelSpec(config=config, tensors=[(t.name, list(t.shape)) for t in trained.tensors], adapter=part),
            genesis=BlobRef(digest=blob_digest(data).hex(), size=len(data)),
            tokenizer=nowhere,
            data=DataSpec(window=WINDOW, train=[DataShard(digest=shard.hex(), size=len(tokens), tokens=len(text))]),
            inner=InnerSpec(
                **({"optimizer": "adamw", "lr": 3e-3, "batch": BATCH, "schedule": Schedule(kind="constant")} | inner)
            ),
            codec=codec or (CodecSpec(kind="sign", beta=0.0) if replayable else CodecSpec(kind="sparse", k=256)),
            outer=outer,
            round=RoundSpec(
                target_tokens=10 * BATCH * WINDOW,
                max_update_tokens=40 * BATCH * WINDOW,
                **({"exchange": "gather"} if replayable else {}),
            ),
            audit=AuditSpec(replayable=replayable),
        )
        write_durably(folder / "spec.json", [spec.canonical()])
        return cls(folder, spec, genesis)

    def start(self, n: int) -> Start:
        home = self.folder / f"peer{n}"
        home.mkdir(exist_ok=True)
        shard, adapter = self.spec.data.train[0].digest, self.spec.model.adapter
        return Start(
            self.folder / "spec.json", peer_key(n), home / "trainer", "cpu", 1,
            {shard: str(self.folder / f"{shard}.tokens")},
            base=None if adapter is None else self.folder / f"{adapter.base.digest}.safetensors",
        )  # fmt: skip

    def load(self, *replay: RoundUpdates, restore: tuple[Path, ...] = (), next_window: int = 0) -> Load:
        accepted = sum(u.windows for r in replay for u in r.updates)
        return Load(self.genesis, self.spec.genesis.name, GENESIS, 0, replay, restore, next_window, accepted)


def on_base(
    folder: Path, config: Mapping[str, Any], adapter: AdapterSettings, base: dict[str, Tensor]
) -> tuple[dict[str, Tensor], AdapterSpec]:
    """Write the base's file; return the adapter's initial values, and its part of the spec."""
    stored = {name: t.to(DTYPES[adapter.kind]) for name, t in base.items()}
    adapted = build_adapted(config, adapter)
    for name, form in quantised_forms(adapted, adapter).items():
        stored[name], stored[name + ABSMAX] = form.quantise(stored[name])
    data = b"".join(checkpoint_chunks(base_file_layout(adapted, adapter), stored))
    ref = BlobRef(digest=blob_digest(data).hex(), size=len(data))
    write_durably(folder / f"{ref.digest}.safetensors", [data])
    drawn = draw_adapter(config, adapter, seed=5)
    initial = {name: stored[name].float() if name in stored else value for name, value in drawn.items()}
    return initial, AdapterSpec(**adapter.model_dump(), base=ref, parameters=sum(t.numel() for t in base.values()))


def accepted_round(number: int, *made: tuple[int, UpdateMade]) -> RoundUpdates:
    """Return round `number`'s record, which accepts these updates of peers."""
    files = sorted(
        (UpdateFile(peer_key(n), m.end_window - m.first_window, m.blob_path) for n, m in made), key=lambda u: u.author
    )
    return RoundUpdates(number, record_digest(number), tuple(files))


def apply(trainer: Trainer, ask: Apply) -> Applied:
    """Do all that a trainer's two threads do for one Apply."""
    move = trainer.base.advance(ask)
    answer = trainer.base.applied(move.record, ask.write_checkpoint)
    trainer.swap_base(move)
    return answer


def finish(trainer: Trainer) -> None:
    """Poll the checkpointer, as the loop does, until everything is saved."""
    while not trainer.checkpointer.is_idle:
        trainer.checkpointer.step(now=True)


def saved_counter(trainer: Trainer) -> int | None:
    state = trainer.folder.read()
    return None if state is None else state.windows.counter
