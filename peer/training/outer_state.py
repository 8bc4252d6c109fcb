"""The outer side of a peer's training in one process: progress becomes updates, accepted updates the next state.

Four sets of tensors have the layout's names. `base` is the replicated state, the same bits on every peer. `local` are
the model's own parameters, which the inner optimizer changes. Progress is counted from `anchor`: the parameters at the
last announcement, or the base since the last round. `feedback` is progress that was not sent yet (error feedback).

    announce   feedback <- beta * feedback + (anchor - local); anchor <- local
               blob = encode(feedback); feedback <- feedback - decode(blob)
    advance    base <- apply(base, accepted)
    rebase     local <- base + (local - anchor); anchor <- base
    add_back   feedback <- feedback + decode(blob)     (a missed update, or the values its round did not transmit)

Only `advance` and `rebase` use `base`: inner steps go on while the base advances, and are moved onto it afterwards.
With beta = 1 nothing is ever lost: decoded updates + feedback + (anchor - local) is all progress that was made.

Every operation is elementwise, apart from the codec and `apply`, which work on whole flattened tensors by chunks.
`ShardedOuterState` therefore does the same on the chunks that a rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from peer.mapped import mapped_files
from protocol.codec import Batch, Codec
from protocol.outer import Contribution, apply
from protocol.reduce import Reduction, apply_reduced
from protocol.spec import OuterSpec
from protocol.untransmitted import ResidualMask


class OuterState:
    """`OuterSide` of one process."""

    def __init__(self, local: Mapping[str, Tensor], codec: Codec, beta: float, spec: OuterSpec):
        """Start without a base. `local`: the model's tensors (fp32, contiguous, one device), changed in place."""
        self.local = dict(local)
        self.codec = codec
        self.beta = beta
        self.spec = spec
        self.base: dict[str, Tensor] | None = None
        """The replicated state with its outer momentum; None before the first `load`, and after one that failed."""
        self.anchor = {n: t.clone() for n, t in self.local.items()}
        self.feedback = {n: torch.zeros_like(t) for n, t in self.local.items()}

    @property
    def holds_base(self) -> bool:
        return self.base is not None

    def drop_base(self) -> None:
        """Release the base."""
        self.base = None

    @torch.no_grad()
    def announce(self) -> bytes:
        """Return an update's blob of all progress that was not sent. Raise CodecError when it is not finite."""
        for name, e in self.feedback.items():
            e.mul_(self.beta).add_(self.anchor[name]).sub_(self.local[name])
            self.anchor[name].copy_(self.local[name])
        return bytes(self.codec.encode(self.feedback))

    def advance(self, contributions: Sequence[Contribution]) -> None:
        """Move the base to the next state by a round's accepted updates; `rebase` is then due.

        Raise CodecError, after which there is no base; anchor and feedback are as before.
        """
        if self.base is None:
            raise ValueError("advance before a state was loaded")
        try:
            apply(self.base, contributions, self.codec, self.spec)
        except BaseException:
            self.base = None
            raise

    def advance_reduced(self, parts: Sequence[Path]) -> None:
        """Do the same by the files of a round's reduced shards, all and in order. Raise CodecError or OSError."""
        if self.base is None:
            raise ValueError("advance before a state was loaded")
        try:
            apply_reduced(self.base, mapped_files(parts), Reduction.of(self.codec), self.spec)
        except BaseException:
            self.base = None
            raise

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace the base, and move the progress since the anchor onto it. The tensors of `state` become its own."""
        self.base = dict(state)
        self.rebase()

    @torch.no_grad()
    def rebase(self) -> None:
        """Move the progress since the anchor onto the base."""
        if self.base is None:
            raise ValueError("rebase before a state was loaded")
        for name, local in self.local.items():
            local.sub_(self.anchor[name]).add_(self.base[name])
            self.anchor[name].copy_(self.base[name])

    def add_back(self, blob: bytes, only: bytes | None = None) -> None:
        """Add an own update that was not accepted to the feedback. Raise CodecError.

        `only`: a packed `ResidualMask` of the values that the round which accepted it did not transmit.
        """
        self.codec.check(blob)
        self.codec.add_to(blob, self.feedback, mask=selector(self.codec, only, self.feedback))

    @torch.no_grad()
    def subtract(self, blob: bytes, factor: float, only: bytes | None = None) -> None:
        """Take out of the feedback what `add_back` added, times `factor`, the decay since then. Raise CodecError."""
        self.codec.check(blob)
        decoded = {n: torch.zeros_like(t) for n, t in self.feedback.items()}
        self.codec.add_to(blob, decoded, mask=selector(self.codec, only, decoded))
        for name, e in self.feedback.items():
            e.sub_(decoded[name].mul_(factor))

    @torch.no_grad()
    def progress(self) -> dict[str, Tensor]:
        """Return the progress since the anchor as a change of the parameters (local - anchor), in fresh tensors."""
        return {n: self.progress_of(n) for n in self.local}

    @torch.no_grad()
    def progress_of(self, name: str) -> Tensor:
        """Return the same of one parameter."""
        return self.local[name] - self.anchor[name]

    @torch.no_grad()
    def resume(self, feedback: Mapping[str, Tensor], progress: Mapping[str, Tensor]) -> None:
        """Restore saved feedback and progress; before the first `load`."""
        for name, local in self.local.items():
            self.feedback[name].copy_(feedback[name])
            local.copy_(self.anchor[name]).add_(progress[name].to(local.device))


def selector(codec: Codec, only: bytes | None, into: Mapping[str, Tensor]) -> Callable[[Batch], Tensor] | None:
    """Return the `only` argument of `Codec.add_to` for a packed `ResidualMask`. Raise CodecError."""
    if only is None:
        return None
    device = next((t.device for t in into.values()), torch.device("cpu"))
    return ResidualMask.from_bytes(codec, only, device).batch_mask
