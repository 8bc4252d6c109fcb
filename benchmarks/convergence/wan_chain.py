"""The contributors of each round and their windows, read from the chain in a coordinator's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.authoring.resolve import SPEC
from protocol.chain import Chain
from protocol.envelope import open_envelope
from protocol.message_codec import MessageDecoder
from protocol.rounds.policy import RoundPolicy
from protocol.spec import KIND, MAX_SPEC, RunSpec, parse_spec


@dataclass(frozen=True)
class ChainRound:
    """One accepted round. `loss`: the contributors' training loss, by windows; `update_sizes` in bytes."""

    round: int
    windows: int
    loss: float
    update_sizes: tuple[int, ...]


def read_spec(home: Path) -> RunSpec:
    """Return the spec of the run in a coordinator's folder."""
    sent = (home / "run" / SPEC).read_bytes()
    return parse_spec(open_envelope(sent, KIND, limit=MAX_SPEC + 1024).payload)


def read_chain(spec: RunSpec, store: Path) -> list[ChainRound]:
    """Return the path from the genesis to the head, oldest first.

    Every certificate is verified. Raises ProtocolError.
    """
    decoder = MessageDecoder(spec.run_id, spec.owner_key)
    chain = Chain(spec.run_id, spec.genesis.name, RoundPolicy.of(spec).chain_limits)
    for file in sorted((store / "chain").glob("*-*")):
        chain.add(decoder.decode_certificate(file.read_bytes()[32:]))
    rounds = []
    for certificate in chain.path(chain.genesis, chain.head):
        body = certificate.record.body
        windows = sum(u.body.windows for u in body.updates)
        loss = sum(u.body.loss * u.body.windows for u in body.updates) / windows
        rounds.append(ChainRound(body.round, windows, loss, tuple(u.body.blob_size for u in body.updates)))
    return rounds
