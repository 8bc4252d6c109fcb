"""The outer side of a peer's training: progress becomes updates, accepted updates the next state.

Four sets of tensors have the layout's names. `base` is the replicated state, the same bits on every peer. `local` are
the model's own parameters, which the inner optimizer changes. Progress is counted from `anchor`: the parameters at the
last announcement, or the base since the last round. `feedback` is progress that was not sent yet (error feedback).

    announce   feedback <- beta * feedback + (anchor - local); anchor <- local
               blob = encode(feedback); feedback <- feedback - decode(blob)
    advance    base <- apply(base, accepted)
    rebase     local <- base + (local - anchor); anchor <- base
    add_back   feedback <- feedback + decode(blob)     (a missed update, or the values its round did not transmit)
    take_back  anchor <- anchor + feedback + decode(blob); feedback <- 0     (an update that could not be kept)

The next announcement multiplies what was added back by beta. As a whole it would harm (docs/results/convergence.md).

Only `advance` and `rebase` use `base`: inner steps go on while the base advances, and are moved onto it afterwards.
With beta = 1 nothing is ever lost: decoded updates + feedback + (anchor - local) is all progress that was made.

In a replayable run (`replayable`) an update depends on public values alone. Nothing is fed back, so the feedback's
tensors are scratch memory:

    announce     blob = encode(anchor - local)
    begin_again  local <- base - clip(decode(blob)), or base; anchor <- local

`clip` brings each tensor to a norm that no round lets more than through (`protocol.outer.foreseen_factors`). An author
chooses the scales of its update, and an auditor begins where they lead: huge ones would leave a model that no step
changes.

Every operation is elementwise, apart from the codec and `apply`, which work on whole flattened tensors by blocks. So
`OuterState` does them on whole tensors, and `ShardedOuterState` on the blocks that a rank owns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from peer.memory_map import mapped_files
from peer.training.offload import Offload
from peer.training.parallel.group import SoleRank
from peer.training.parallel.sharded_file import ShardedFile
from protocol.codec import Batch, Codec
from protocol.errors import MalformedError
from protocol.layout import Layout, TensorSlice
from protocol.outer import Contribution, apply, foreseen_factors, reference_norms
from protocol.reduce import Reduction, apply_reduced
from protocol.spec import OuterSpec
from protocol.untransmitted import ResidualMask


class OuterOperations(ABC):
    """The operations on base, anchor and feedback. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        codec: Codec,
        beta: float,
        spec: OuterSpec,
        anchor: dict[str, Tensor],
        group: SoleRank,
        offload: Offload,
        slices: Sequence[TensorSlice] | None = None,
        *,
        replayable: bool = False,
    ):
        """Start without a base. `anchor`: the model's tensors as far as they are owned: `slices`, None for all.

        Base, anchor and feedback lie where `offload` says; the arithmetic is done on its device.
        """
        self.codec = codec
        self.beta = beta
        self.spec = spec
        self.group = group
        self.slices = slices
        self.replayable = replayable
        self.offload = offload
        self.base: dict[str, Tensor] | None = None
        """The replicated state with its outer momentum; None while no state is held."""
        self.anchor = anchor
        self.feedback = {n: offload.zeros(t.shape) for n, t in anchor.items()}

    # -- what depends on the number of ranks -------------------------------------------------------------------

    @abstractmethod
    def owned_of(
        self, tensor_of: Callable[[str], Tensor | None], names: Container[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the owned values of tensors that are split as the parameters are, in layout order. Collective.

        `tensor_of(name)` returns what this rank's model holds of such a tensor (None: the parameter itself). `names`:
        restricts the parameters. The values are read-only, and valid until the next ones.
        """

    @abstractmethod
    def _change(self, how: Callable[[str, Tensor], None]) -> None:
        """Call `how(name, values)`, which changes the model's owned values in place, on every rank."""

    @abstractmethod
    def _owned(self, name: str, whole: Tensor) -> Tensor:
        """Return the owned values of a whole tensor."""

    @abstractmethod
    def file_of(self, layout: Layout) -> ShardedFile:
        """Return the file of tensors that are owned as their parameters: "prefix/parameter", or "parameter"."""

    # -- the operations ----------------------------------------------------------------------------------------

    def drop_base(self) -> None:
        """Release the base: another one is to be loaded."""
        self.base = None

    @torch.no_grad()
    def _gather_progress(self) -> None:
        """Add the progress since the anchor to the decayed feedback, as the first half of an announcement.

        In a replayable run the anchor stays: another announcement encodes the same progress again.
        """
        for name, values in self.owned_of(lambda name: None):
            for fed, anchor, local in self.offload.pieces(self.feedback[name], self.anchor[name], values):
                with self.offload.changed_on_device(fed) as sum_:
                    if self.replayable:
                        sum_.copy_(anchor).sub_(local)
                        continue
                    sum_.mul_(self.beta).add_(self.offload.on_device(anchor)).sub_(local)
                anchor.copy_(local)

    def advance(self, contributions: Sequence[Contribution]) -> None:
        """Move the base to the next state by a round's accepted updates; `rebase` is then due.

        Raises CodecError, after which there is no base; anchor and feedback are as before.
        """
        device = self.offload.device
        self._advance(lambda base: apply(base, contributions, self.codec, self.spec, slices=self.slices, device=device))

    def advance_reduced(self, parts: Sequence[Path]) -> None:
        """Do the same by the files of a round's reduced shards, all and in order. Raises CodecError or OSError."""
        reduction, device = Reduction(self.codec), self.offload.device
        self._advance(
            lambda base: apply_reduced(
                base, mapped_files(parts), reduction, self.spec, slices=self.slices, device=device
            )
        )

    def _advance(self, how: Callable[[dict[str, Tensor]], None]) -> None:
        base, self.base = self.base, None
        with self.group.together():
            if base is None:
                raise MalformedError("a round was to be applied, and no state is held")
            how(base)
        self.base = base

    @torch.no_grad()
    def rebase(self) -> None:
        """Move the progress since the anchor onto the base."""
        base = self.base
        if base is None:
            raise ValueError("rebase before a state was loaded")

        def moved(name: str, values: Tensor) -> None:
            for local, anchor, new in self.offload.pieces(values, self.anchor[name], base[name]):
                local.sub_(self.offload.on_device(anchor)).add_(self.offload.on_device(new))
                anchor.copy_(new)

        self._change(moved)

    @torch.no_grad()
    def begin_again(self, blob: bytes | None, *, clips: bool = True) -> None:
        """Give up the progress since the anchor: continue from the base less our update, or from the base itself.

        `clips`: if the run clips, the update counts with no more than the round after the base can let through. Only in
        a replayable run, for its scratch memory. Raises CodecError, after which nothing has changed.
        """
        base = self.base
        if base is None or not self.replayable:
            raise ValueError("training begins again from a state that is held, in a replayable run")
        if blob is not None:
            for scratch in self.feedback.values():
                scratch.zero_()
            self._add(blob, self.feedback, None)
            if clips and self.spec.clip == "median":
                self._clip(blob, reference_norms(base, self.codec.layout))

        def begun(name: str, values: Tensor) -> None:
            for local, anchor, new, own in self.offload.pieces(
                values, self.anchor[name], base[name], self.feedback[name]
            ):
                local.copy_(new)
                if blob is not None:
                    local.sub_(self.offload.on_device(own))
                anchor.copy_(local)

        self._change(begun)

    def _clip(self, blob: bytes, reference: Tensor) -> None:
        """Multiply the decoded values of a blob, which are the feedback, by their tensors' `foreseen_factors`."""
        factors = foreseen_factors(blob, self.codec, reference, self.offload.device)
        for tensor, factor in zip(self.codec.layout.tensors, factors, strict=True):
            if factor != 1.0 and (values := self.feedback.get(tensor.name)) is not None:
                values.mul_(factor)

    def add_back(self, blob: bytes, only: bytes | None = None) -> None:
        """Add one of our updates that was not accepted to the feedback. Raises CodecError.

        `only`: a packed `ResidualMask` of the values that the round which accepted the update did not transmit.
        """
        self._add(blob, self.feedback, only)

    @torch.no_grad()
    def take_back(self, blob: bytes) -> None:
        """Undo `announce`: all that it gathered is progress again, which no later announcement decays."""
        self.add_back(blob)
        for name, anchor in self.anchor.items():
            for fed, at in self.offload.pieces(self.feedback[name], anchor):
                at.add_(fed)
                fed.zero_()

    @torch.no_grad()
    def subtract(self, blob: bytes, factor: float, only: bytes | None = None) -> None:
        """Take out of the feedback what `add_back` added, times `factor`, the decay since then. Raises CodecError."""
        self._add(blob, self.feedback, only, -factor)

    def _add(self, blob: bytes, into: dict[str, Tensor], only: bytes | None, factor: float = 1.0) -> None:
        with self.group.together():
            mask: Callable[[Batch], Tensor] | None = None
            if only is not None:
                device = next((t.device for t in into.values()), torch.device("cpu"))
                mask = ResidualMask.from_bytes(self.codec, only, device).batch_mask
            self.codec.add_to(blob, into, self.slices, mask, factor)

    @torch.no_grad()
    def progress(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the progress since the anchor, local - anchor, by name, in fresh tensors at home. Collective."""
        for name, values in self.owned_of(lambda name: None):
            fresh = values.to(self.offload.home, copy=True)  # not pinned: that takes longer than one copy gains
            yield name, fresh.sub_(self.anchor[name].view(values.shape))

    @torch.no_grad()
    def resume(self, feedback: Mapping[str, Tensor], progress: Mapping[str, Tensor]) -> None:
        """Restore saved feedback and progress, of which the arguments have the whole; before the first `rebase`."""

        def resumed(name: str, values: Tensor) -> None:
            self.feedback[name].copy_(self._owned(name, feedback[name]))
            values.copy_(self.anchor[name]).add_(self._owned(name, progress[name]).to(values.device))

        self._change(resumed)

    @torch.no_grad()
    def resume_position(self, position: Mapping[str, Tensor]) -> None:
        """Restore a replayable run's saved parameters, of which the argument has the whole, on the base held then."""
        base = self.base
        if base is None:
            raise ValueError("parameters are restored on a state that is held")

        def resumed(name: str, values: Tensor) -> None:
            values.copy_(self._owned(name, position[name]))
            self.anchor[name].copy_(base[name])

        self._change(resumed)


class OuterState(OuterOperations):
    """The outer state of one process, in whole tensors."""

    def __init__(
        self,
        local: Mapping[str, Tensor],
        codec: Codec,
        beta: float,
        spec: OuterSpec,
        offload: Offload,
        *,
        replayable: bool = False,
    ):
        """Start without a base. `local`: the model's tensors (fp32, contiguous, one device), changed in place."""
        self.local = {t.name: local[t.name] for t in codec.layout.tensors}
        anchor = {n: offload.copy(t) for n, t in self.local.items()}
        super().__init__(codec, beta, spec, anchor, SoleRank(), offload, replayable=replayable)

    def announce(self) -> bytearray:
        """Return an update's blob of all progress that was not sent. Raises CodecError when it is not finite."""
        self._gather_progress()
        return self.codec.encode(self.feedback, self.offload.device)

    def owned_of(
        self, tensor_of: Callable[[str], Tensor | None], names: Container[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, local in self.local.items():
            if names is None or name in names:
                tensor = tensor_of(name)
                yield name, local if tensor is None else tensor

    def _change(self, how: Callable[[str, Tensor], None]) -> None:
        for name, local in self.local.items():
            how(name, local)

    def _owned(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def file_of(self, layout: Layout) -> ShardedFile:
        return ShardedFile(layout, {0: layout.full_slices})
