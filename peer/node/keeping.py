"""Decides what stays on disk: the last checkpoints, every blob since the oldest of them, and what the spec names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.ids import Digest
from protocol.messages import Certificate
from protocol.spec import RunSpec


def assets(spec: RunSpec) -> set[Digest]:
    """The blobs that the spec itself names."""
    named = [spec.genesis, spec.tokenizer, *spec.data.train, *spec.data.validation]
    return {b.name for b in named}


def to_keep(
    spec: RunSpec, path: Sequence[Certificate], held_states: Iterable[Digest], own: Iterable[Digest]
) -> set[Digest]:
    """The digests to keep, of all in the store.

    `path`: the chain's newest certificates, oldest first, as far back as is kept in memory. `held_states`: checkpoints
    in the store that no certificate vouches for yet (the newest). `own`: updates of ours that are undecided.
    """
    keep = assets(spec) | set(held_states) | set(own)
    every, wanted = spec.checkpoint.every, spec.checkpoint.keep
    marks = [i for i, c in enumerate(path) if c.record.body.round % every == 0]
    # One checkpoint more than `keep`: a member that is fetching the oldest must not see it vanish.
    recent = marks[-(wanted + 1) :]
    keep |= {path[i].record.body.base_state for i in recent}
    since = recent[0] if len(marks) > wanted else 0
    for certificate in path[since:]:
        keep |= {u.body.blob for u in certificate.record.body.updates}
    return keep
