"""The states that members keep as checkpoints, and the blobs that they must keep: one rule for all uses."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.chain import Chain
from protocol.ids import Digest
from protocol.messages import Certificate
from protocol.rounds.blobs import applied_blobs
from protocol.rounds.policy import RoundPolicy
from protocol.spec import is_total_reached


def is_checkpoint(policy: RoundPolicy, height: int, weight: int) -> bool:
    """Return whether the state of a round (its number, and the windows accepted up to it) is to be kept.

    That is each `checkpoint_every`-th state, and the last one of a run. The genesis is an asset of the run.
    """
    last = is_total_reached(policy.total_windows, weight)
    return height > 0 and (height % policy.checkpoint_every == 0 or last)


def kept_starts(policy: RoundPolicy, path: Sequence[Certificate]) -> tuple[int, ...]:
    """Return the indices into a path whose base states members keep, newest first, and the first index last.

    Members keep one checkpoint more than `checkpoint_keep`; older ones are not worth a request.
    """
    marks = [i for i in range(len(path) - 1, -1, -1) if path[i].record.body.round % policy.checkpoint_every == 0]
    return tuple(dict.fromkeys([*marks[: policy.checkpoint_keep + 1], 0])) if path else ()


def retained(policy: RoundPolicy, chain: Chain) -> set[Digest]:
    """Return the checkpoints to keep, and all blobs that were applied since the oldest of them."""
    path, marks = _recent(policy, chain)
    keep = {path[i].record.body.base_state for i in marks}
    for certificate in path[marks[0] if len(marks) > policy.checkpoint_keep else 0 :]:
        keep.update(applied_blobs(certificate))
    return keep


def retained_states(policy: RoundPolicy, chain: Chain) -> set[Digest]:
    """Return the checkpoints to keep."""
    path, marks = _recent(policy, chain)
    return {path[i].record.body.base_state for i in marks}


def _recent(policy: RoundPolicy, chain: Chain) -> tuple[tuple[Certificate, ...], list[int]]:
    """Return the end of the chain, and the places in it of the records that name a checkpoint to keep."""
    height = chain.height(chain.head) - policy.checkpoint_every * (policy.checkpoint_keep + 2)
    start = chain.ancestor_at(chain.head, max(chain.height(chain.root), height)) or chain.root
    path = chain.path(start, chain.head)
    marks = [i for i, certificate in enumerate(path) if certificate.record.body.round % policy.checkpoint_every == 0]
    # One checkpoint more than `checkpoint_keep`: a member that is fetching the oldest must not see it vanish.
    return path, marks[-(policy.checkpoint_keep + 1) :]
