"""A run for the benchmark: its owner, its spec, its first state (zeros), and who is in it. There is no coordinator."""

from __future__ import annotations

import os
import time
from pathlib import Path

import base58
import torch

from benchmarks.exchange_wan.job import Job
from benchmarks.exchange_wan.setting import TARGET, WINDOW, Setting
from peer.store import Store
from protocol.identity import Identity
from protocol.ids import sha256
from protocol.layout import Layout
from protocol.merkle import blob_digest
from protocol.message_codec import KeySigner
from protocol.messages import Admission
from protocol.spec import OuterSpec, RunSpec
from protocol.state import checkpoint_chunks, state_digest, state_layout

PORT = 7450
OWNER = Identity(sha256(b"the owner of a benchmark's run"))
TOKENIZER = b"no tokenizer: nothing is trained"
SHARD = bytes(2 * 1000)


def identity(number: int) -> Identity:
    """Peer `number`'s."""
    return Identity(sha256(f"a benchmark's peer {number}".encode()))


def addresses(job: Job, but: int) -> list[str]:
    """Addresses of the other peers."""
    found = []
    for i, ip in enumerate(job.ips):
        if i != but:
            found.append(f"/ip4/{ip}/tcp/{PORT}/p2p/{base58.b58encode(identity(i).key.libp2p_id).decode()}")
    return found


def spec_of(job: Job) -> RunSpec:
    """Return the run's spec, the same for everybody with the same job."""
    layout = Setting(job.parameters, len(job.ips)).layout
    states = state_layout(layout, OuterSpec())
    return RunSpec.model_validate(
        {
            "name": "exchange",
            "owner": OWNER.key.hex(),
            "model": {"config": {"model_type": "llama"}, "tensors": [[t.name, list(t.shape)] for t in layout.tensors]},
            "genesis": {"digest": state_digest(states, _zeros(states), 1).hex(), "size": states.checkpoint_size},
            "tokenizer": {"digest": blob_digest(TOKENIZER).hex(), "size": len(TOKENIZER)},
            "data": {
                "window": WINDOW,
                "train": [{"digest": blob_digest(SHARD).hex(), "size": len(SHARD), "tokens": len(SHARD) // 2}],
            },
            "inner": {"batch": 1, "schedule": {"kind": "constant"}},
            "codec": dict(job.codec or {}),
            # A peer announces at the instant at which its trainer says that it has done them all.
            "round": {
                "target_tokens": TARGET * WINDOW,
                "max_update_tokens": TARGET * WINDOW,
                "max_seconds": 3600,
                "exchange_seconds": job.exchange_seconds,
                "patience_seconds": 2 * job.exchange_seconds,
            },
            "admission": {"seconds": 30 * 86_400},
            "checkpoint": {"every": 256},
        }
    )


def write_genesis(spec: RunSpec, file: Path) -> None:
    """Write the first state's checkpoint, which all peers link to."""
    layout = state_layout(spec.model.layout, spec.outer)
    with open(file, "wb") as out:
        for chunk in checkpoint_chunks(layout, _zeros(layout)):
            out.write(chunk)


def _zeros(layout: Layout) -> dict[str, torch.Tensor]:
    """Return tensors of zeros, fp32 in a layout's shapes."""
    return {t.name: torch.zeros(t.shape) for t in layout.tensors}


def furnish(store: Store, spec: RunSpec, genesis: Path) -> None:
    """Put what the spec names into a peer's store, as if it had fetched it."""
    store.put(TOKENIZER)
    store.put(SHARD)
    if not store.has(spec.genesis.name):
        link = store.scratch / "genesis"
        os.link(genesis, link)
        store.adopt(link, spec.genesis.name)


def admission(spec: RunSpec, number: int) -> bytes:
    """Return the owner's signed message, encoded."""
    now = int(time.time())
    body = Admission(spec.run_id, identity(number).key, now - 3600, now + 86_400, f"p{number + 1}")
    return KeySigner(OWNER).sign(body).encoded
