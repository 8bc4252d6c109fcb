"""A tiny valid run, for tests that need one: its owner, its spec, and peers that it admits."""

from __future__ import annotations

from typing import Any

from protocol.identity import Identity
from protocol.ids import Digest, sha256
from protocol.message_codec import KeySigner
from protocol.messages import Admission, Signed
from protocol.spec import RunSpec


def identity(name: str | int) -> Identity:
    """Return the identity of a name."""
    return Identity(sha256(f"test identity {name}".encode()))


def digest(name: str | int) -> Digest:
    """Return the digest of a name."""
    return Digest(sha256(f"test digest {name}".encode()))


OWNER = identity("owner")

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def _tiny_llama_tensors() -> list[tuple[str, list[int]]]:
    hidden, wide, vocabulary = 32, 64, 256
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{p}_proj.weight": [hidden, hidden] for p in "qkvo"}
        shapes |= {f"{at}.mlp.{p}_proj.weight": [wide, hidden] for p in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": [hidden, wide]}
        shapes |= {f"{at}.{n}_layernorm.weight": [hidden] for n in ("input", "post_attention")}
    return sorted(shapes.items())


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
"""Fields over those of a tiny Llama, for a model with experts."""
TINY_LLAMA_TENSORS = _tiny_llama_tensors()
"""The layout of a model of TINY_LLAMA by `protocol.model.model_layout`: 28,832 parameters."""


def spec_fields(**changes: Any) -> dict[str, Any]:
    """Return the fields of a tiny valid spec as plain values; `changes` replace top-level fields, None removes one."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "owner": OWNER.key.hex(),
        "seed": 1,
        "model": {"config": dict(TINY_LLAMA), "tensors": list(TINY_LLAMA_TENSORS)},
        "genesis": {"digest": digest("genesis").hex(), "size": 524_288},
        "tokenizer": {"digest": digest("tokenizer").hex(), "size": 1000},
        "data": {
            "window": 16,
            "dtype": "uint16",
            "train": [{"digest": digest("shard").hex(), "size": 20_000, "tokens": 10_000}],
            "validation": [{"digest": digest("held out").hex(), "size": 2_000, "tokens": 1_000}],
        },
        "inner": {"batch": 4, "lr": 0.001, "schedule": {"kind": "constant"}},
        "codec": {"kind": "sparse", "k": 256},
        "round": {
            "target_tokens": 1024,
            "max_seconds": 30,
            "exchange_seconds": 10,
            "propose_seconds": 2,
            "patience_seconds": 10,
            "heartbeat_seconds": 0.5,
            "member_seconds": 4,
            "max_update_tokens": 16_384,
        },
    } | changes
    return {name: value for name, value in fields.items() if value is not None}


def tiny_spec(**changes: Any) -> RunSpec:
    """Return a tiny valid spec; `changes` replace whole top-level fields (see `spec_fields`)."""
    return RunSpec.model_validate(spec_fields(**changes))


def admission(
    spec: RunSpec, peer: Identity, *, not_before: int = 0, not_after: int = 2**33, name: str = ""
) -> Signed[Admission]:
    """Return the owner's admission of a peer to this run."""
    body = Admission(spec.run_id, peer.key, not_before, not_after, name or f"peer {peer.key.short}")
    return KeySigner(OWNER).sign(body)
