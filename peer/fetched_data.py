"""The data that every peer of a run fetches before it trains. Without torch, since `cairn runs` tells it at once."""

from __future__ import annotations

from protocol.data_address import public_url
from protocol.spec import DataShard, RunSpec


def fetched_shards(spec: RunSpec, *, private_data: bool) -> list[DataShard]:
    """Return the training shards that a peer fetches from members: none if it may read them at an address."""
    readable = any(private_data or public_url(address) for address in spec.data.addresses)
    return [] if readable else list(spec.data.train)


def data_bytes(spec: RunSpec, *, private_data: bool) -> int:
    """Return the bytes of tokenizer, training data and frozen base model that a peer fetches from members."""
    base = 0 if spec.model.adapter is None else spec.model.adapter.base.size
    return base + spec.tokenizer.size + sum(shard.size for shard in fetched_shards(spec, private_data=private_data))
