"""The outer side of a peer's training: what was learnt becomes an update; accepted updates become the next state.

Four sets of tensors, by the layout's names: `base`, the replicated state, the same bits on every peer; `local`, the
model's own parameters, which the inner loop changes; `anchor`, from which progress is counted (local at the last
announcement, or the base since the last round); `feedback`, what was learnt and has not been sent (error feedback).

    announce   feedback <- beta * feedback + (anchor - local); anchor <- local
               blob = encode(feedback); feedback <- feedback - decode(blob)
    advance    base <- apply(base, accepted)
    rebase     local <- base + (local - anchor); anchor <- base
    restore    feedback <- feedback + decode(blob)          (an update that missed its round, what was dropped of one)

Nothing but these two looks at `base`: the inner loop goes on while the base advances, and is moved onto it afterwards.
With beta = 1 nothing is ever lost: decoded updates + feedback + (anchor - local) is all that was learnt.

The seam for many ranks: every operation is elementwise over the tensors it is given, apart from the codec and `apply`,
which work on whole flattened tensors by chunks. A rank that owns a range of chunks holds those ranges here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from peer.training.mapped import mapped
from protocol.codec import Codec, Run
from protocol.outer import Contribution, apply
from protocol.reduce import Reduction, apply_reduced
from protocol.spec import OuterSpec
from protocol.untransmitted import Selection


class OuterSide:
    """See the module. `local` are the model's own tensors (fp32, contiguous, one device); they are changed in place."""

    def __init__(self, local: Mapping[str, Tensor], codec: Codec, beta: float, spec: OuterSpec):
        self.local = dict(local)
        self.codec = codec
        self.beta = beta
        self.spec = spec
        self.base: dict[str, Tensor] | None = None
        """The replicated state, outer momentum included; None before the first `load`, and after one that failed."""
        self.anchor = {n: t.clone() for n, t in self.local.items()}
        self.feedback = {n: torch.zeros_like(t) for n, t in self.local.items()}

    @torch.no_grad()
    def announce(self) -> bytes:
        """An update's blob from all that was learnt and not sent. Raises CodecError when it is not finite."""
        for name, e in self.feedback.items():
            e.mul_(self.beta).add_(self.anchor[name]).sub_(self.local[name])
            self.anchor[name].copy_(self.local[name])
        return bytes(self.codec.encode(self.feedback))

    def advance(self, contributions: Sequence[Contribution]) -> None:
        """The base goes on to the next state, from a round's accepted updates; `rebase` is then due.

        Raises CodecError, and then holds no base (`local - anchor` and `feedback` are as before): it needs a `load`.
        """
        if self.base is None:
            raise ValueError("advance before a state was loaded")
        try:
            apply(self.base, contributions, self.codec, self.spec)
        except BaseException:
            self.base = None
            raise

    def advance_reduced(self, parts: Sequence[Path]) -> None:
        """The same by the files of a round's reduced parts, all and in order. Raises CodecError or OSError."""
        if self.base is None:
            raise ValueError("advance before a state was loaded")
        try:
            apply_reduced(self.base, mapped(parts), Reduction.of(self.codec), self.spec)
        except BaseException:
            self.base = None
            raise

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Another state instead of the held one; progress since the anchor is moved onto it. Takes `state` over."""
        self.base = dict(state)
        self.rebase()

    @torch.no_grad()
    def rebase(self) -> None:
        """Progress since the anchor is moved onto the base."""
        if self.base is None:
            raise ValueError("rebase before a state was loaded")
        for name, local in self.local.items():
            local.sub_(self.anchor[name]).add_(self.base[name])
            self.anchor[name].copy_(self.base[name])

    def restore(self, blob: bytes, only: bytes | None = None) -> None:
        """An own update that was not accepted: back into the feedback. Raises CodecError.

        `only`: a packed `Selection`: what the round that accepted it dropped.
        """
        self.codec.check(blob)
        self.codec.add_to(blob, self.feedback, only=chosen(self.codec, only, self.feedback))

    @torch.no_grad()
    def withdraw(self, blob: bytes, factor: float, only: bytes | None = None) -> None:
        """What was restored leaves the feedback: its update was accepted after all. `factor`: decay since."""
        self.codec.check(blob)
        decoded = {n: torch.zeros_like(t) for n, t in self.feedback.items()}
        self.codec.add_to(blob, decoded, only=chosen(self.codec, only, decoded))
        for name, e in self.feedback.items():
            e.sub_(decoded[name].mul_(factor))

    @torch.no_grad()
    def progress(self) -> dict[str, Tensor]:
        """What was learnt since the anchor, as a change of the parameters (local - anchor): fresh tensors."""
        return {n: self.progress_of(n) for n in self.local}

    @torch.no_grad()
    def progress_of(self, name: str) -> Tensor:
        """The same of one parameter."""
        return self.local[name] - self.anchor[name]

    @torch.no_grad()
    def resume(self, feedback: Mapping[str, Tensor], progress: Mapping[str, Tensor]) -> None:
        """Take up saved feedback and progress; before the first `load`."""
        for name, local in self.local.items():
            self.feedback[name].copy_(feedback[name])
            local.copy_(self.anchor[name]).add_(progress[name].to(local.device))


def chosen(codec: Codec, only: bytes | None, into: Mapping[str, Tensor]) -> Callable[[Run], Tensor] | None:
    """What `Codec.add_to` is to add of an update, from a packed `Selection`. Raises CodecError."""
    if only is None:
        return None
    device = next((t.device for t in into.values()), torch.device("cpu"))
    return Selection.unpacked(codec, only, device).over
