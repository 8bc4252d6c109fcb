"""A run in short, for people who look at it or may join it: from its spec, and its owner's words about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.checkpoints.settings import AboutTable
from protocol.invite import Invite
from protocol.spec import RunSpec

MAX_TYPE = 64
"""Characters of a model's type that are shown."""

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "context": ("max_position_embeddings", "n_positions", "n_ctx"),
    "vocabulary": ("vocab_size",),
}
"""Names of a model's sizes in the configs of different types."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def run_card(spec: RunSpec, began: float | None, invite: Invite | None, about: AboutTable) -> dict[str, Any]:
    """Return the run as a JSON value; `began` is when its first round was certified, in unix seconds."""
    data, adapter = spec.data, spec.model.adapter
    return {
        "name": spec.name,
        "run": str(spec.run_id),
        "owner": spec.owner,
        "about": about.model_dump(),
        "began": began,
        "total_tokens": spec.total_tokens,
        "model": {
            "type": str(spec.model.config["model_type"])[:MAX_TYPE],
            "parameters": spec.model.layout.numel,
            "bytes": spec.genesis.size,
            "adapter": adapter
            and {"rank": adapter.rank, "alpha": adapter.alpha, "dtype": adapter.dtype, "base": adapter.parameters},
        }
        | _sizes(spec.model.config),
        "data": {
            "tokens": sum(s.tokens for s in data.train),
            "window": data.window,
            "window_tokens": data.window_tokens,
            "windows": data.train_windows,
            "validation_tokens": sum(s.tokens for s in data.validation),
            "addresses": list(data.addresses),
        },
        "settings": {
            name: getattr(spec, name).model_dump(mode="json") for name in ("inner", "codec", "outer", "round", "audit")
        },
        "join": {
            "admission": spec.admission.mode,
            "invite": None if invite is None else str(invite),
            "local": invite is not None and all(c.host in LOOPBACK for c in invite.coordinators),
        },
    }


def _sizes(config: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the sizes of a model; None for those that its config does not name."""
    found: dict[str, int | None] = {}
    for size, names in _NAMES.items():
        values = (config.get(name) for name in names)
        found[size] = next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0), None)
    return found
