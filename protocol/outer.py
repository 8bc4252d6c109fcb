"""The outer step, `apply`: a pure function of state and accepted updates that gives the same bits on every machine.

All values per tensor (norms, clip factors, weights) are exact or correctly rounded double arithmetic, converted to
fp32 once. All values per coordinate are single fp32 multiplications, additions or divisions, in the canonical order
of authors. IEEE 754 fixes the result of each, on a CPU and on a GPU. So there is no fused multiply-add (addcmul, add
with alpha, lerp, foreach, torch.compile), no sum over coordinates, and no atomic operation. There is no division by a
scalar, since CUDA multiplies by a rounded reciprocal. Subnormal numbers are kept: do not call
torch.set_flush_denormal.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor

from protocol.codec.batches import Batch
from protocol.codec.interface import Blob, Codec
from protocol.errors import CodecError
from protocol.ids import PeerKey
from protocol.layout import MOMENTUM, REFERENCE_NORMS, Layout, TensorShape, TensorSlice
from protocol.spec import OuterSpec
from protocol.state import flat_view, local_views

MAX_FP32 = (2 - 2**-23) * 2.0**127
MIN_WEIGHT = 2.0**-100
"""Below every weight that a round can give (a window in 2**53, among MAX_CONTRIBUTORS updates), and above 0."""

GROWTH = 2.0
"""A limit is at most this times the limit of the round before."""

MIN_LIMIT = 2.0**-24
"""The least limit of a norm other than 0: too little to matter, and at most 24 rounds of doubling from 1."""


@dataclass(frozen=True)
class Contribution:
    """An accepted update: its author, its weighed windows, and its blob, which has passed `Codec.check`."""

    author: PeerKey
    windows: int
    blob: Blob


def apply(
    state: Mapping[str, Tensor],
    contributions: Sequence[Contribution],
    codec: Codec,
    outer: OuterSpec,
    batch_blocks: int | None = None,
    slices: Sequence[TensorSlice] | None = None,
    device: torch.device | None = None,
) -> None:
    """state[r] to state[r+1] in place, from the accepted updates in any order.

    For each tensor, mean = sum(w_i * clip_i * value_i) / sum(w_i over those who sent the coordinate). The weights are
    those of `mean_weights` and the factors those of `clip_factors`. Then state -= lr * mean, or Nesterov's step
    (Sutskever et al. 2013, in PyTorch's form): m <- mu * m + mean, state -= lr * (mean + mu * m). A coordinate that
    nobody sent has mean 0. With mean = "all", and for codecs in which everyone sends everything, the weights' sum is 1
    and nothing is divided. The reference norms become the round's limits (`clip_limit`). With no contributions nothing
    changes, not even the momentum.

    `state` holds fp32 tensors, all on one device. `device` does the work (None: the same), and `batch_blocks` bounds
    the scratch memory: neither changes a bit. With `slices` (of the codec's layout) the state's tensors, momentum too,
    are these slices only, and the reference norms are whole. They get the same bits as in the whole, so several
    processes can hold a state together. Raises CodecError for blobs of another run, and MalformedError for such a
    state, before anything is changed. A blob that never passed `check` can raise CodecError half way: the state is then
    lost.
    """
    for c in contributions:
        codec.check_header(c.blob)
    target = OuterOptimizer(state, codec.layout, outer, slices)
    device = device or target.device
    reference = reference_norms(state, codec.layout) if outer.clip == "median" else None
    ordered = canonical_order(contributions)
    if not ordered:
        return
    clipping = None if reference is None else Clipping.of(ordered, codec, outer, device, reference)
    if target.values:
        mean = RobustMean(ordered, codec, outer, device, slices, clipping, batch_blocks=batch_blocks)
        for batch in mean.batches:
            target.step(batch, mean.batch_mean(batch))
    if reference is not None and clipping is not None:
        reference.copy_(torch.tensor(clipping.limits, dtype=torch.float64).to(torch.float32))


def reference_norms(state: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """Return the state's reference norms, fp32 [tensors of the layout], not a copy. Raises MalformedError."""
    return flat_view(state, TensorShape(REFERENCE_NORMS, (len(layout.tensors),)))


def canonical_order(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Return the contributions in canonical order. Raises CodecError unless each author is there once."""
    ordered = sorted(contributions, key=lambda c: c.author)
    if any(a.author == b.author for a, b in zip(ordered, ordered[1:], strict=False)):
        raise CodecError("two updates by one author in a round: a record lists each author once")
    return ordered


class OuterOptimizer:
    """Applies the outer step in place to a state, or to slices of it (see `local_views`). Raises MalformedError."""

    def __init__(
        self, state: Mapping[str, Tensor], layout: Layout, outer: OuterSpec, slices: Sequence[TensorSlice] | None
    ):
        self.outer = outer
        self.values = local_views(state, layout, slices)
        self.momenta: dict[int, tuple[int, Tensor]] = {}
        if outer.optimizer == "nesterov":
            self.momenta = local_views(state, layout, slices, MOMENTUM)

    @property
    def device(self) -> torch.device:
        return next((value.device for _, value in self.values.values()), torch.device("cpu"))

    def step(self, batch: Batch, mean: Tensor) -> None:
        """One optimizer step on a batch of the layout; `mean`, fp32 [batch.numel], is used up. Its device works."""
        lr, mu = round_to_fp32(self.outer.lr), round_to_fp32(self.outer.momentum)
        for segment in batch.segments:
            start, value = self.values[segment.index]
            here, change = batch.source_slice(segment, start), mean[batch.batch_slice(segment)]
            if self.momenta:
                with _on(mean.device, self.momenta[segment.index][1][here]) as momentum:
                    momentum.mul_(mu).add_(change)
                    change.add_(momentum.mul(mu))
            if lr != 1.0:
                change.mul_(lr)
            with _on(mean.device, value[here]) as changed:
                changed.sub_(change)


@contextmanager
def _on(device: torch.device, values: Tensor) -> Iterator[Tensor]:
    """Yield values on a device, to change; a copy is written back at the end."""
    there = values.to(device)
    yield there
    if there is not values:
        values.copy_(there)


def mean_weights(windows: Sequence[int], cap: float) -> list[float]:
    """Return each update's share of the round's weight: by windows, none above `cap`; the sum is 1 up to rounding.

    Shares above the cap are reduced to a common level, so that the cap holds for the result. When n * cap < 1 no shares
    keep the cap, and all are equal. Exact until the last rounding. Raises CodecError for an update without windows.
    """
    if any(w < 1 for w in windows):
        raise CodecError("an update of no windows cannot be weighed")
    most, n = Fraction(cap), len(windows)
    if n * most <= 1:
        return [1 / n] * n
    remaining = sum(windows)
    level = Fraction(max(windows))
    for cut, largest in enumerate(sorted(windows, reverse=True)):
        # With `cut` updates at a common level, level = most * (cut * level + remaining).
        level = most * remaining / (1 - cut * most) if cut else most * remaining
        if level >= largest:
            break
        remaining -= largest
    kept = [min(Fraction(w), level) for w in windows]
    total = sum(kept)
    return [float(w / total) for w in kept]


def clip_limit(norms: Sequence[float], weights: Sequence[int], reference: float = 0.0) -> float:
    """Return the norm that no update may exceed in a round: a lower median, within a factor 2 of `reference`.

    There are two medians, by number and by weight. The limit is the value between them that is nearest to the
    reference, the limit of the round before. So neither many keys with little weight nor few keys with most of it bring
    the limit beyond the others' norms. A half of both cannot raise it, and a majority of both moves it by at most a
    factor 2. With a reference of 0 (or NaN, or below), which every run begins with, it is the smaller of the two. A
    limit above 0 is at least MIN_LIMIT. `weights`: 0 or more, not all 0.
    """
    low, high = sorted((lower_median(norms, [1] * len(norms)), lower_median(norms, weights)))
    limit = low
    if reference > 0:
        limit = min(max(reference, low), high)
        limit = min(max(limit, reference / 2), GROWTH * reference)
    return min(max(limit, MIN_LIMIT), MAX_FP32) if limit > 0 else 0.0


def greatest_limit(reference: float) -> float:
    """Return what the next round's `clip_limit` cannot exceed; 0 without a reference, with which nothing is known."""
    return min(max(GROWTH * reference, MIN_LIMIT), MAX_FP32) if reference > 0 else 0.0


def foreseen_factors(blob: Blob, codec: Codec, reference: Tensor, device: torch.device | str = "cpu") -> list[float]:
    """Return the factors that bring each tensor of a blob to its `greatest_limit`: of an update not yet in a record.

    A round clips at least as much, but in a tensor without a reference, as in a run's first round: there the factor is
    0. Factors are exactly fp32, and the same on every machine. `blob` has passed `Codec.check`.
    """
    norms = map(math.sqrt, codec.sum_squares(blob, device))
    limits = map(greatest_limit, reference.tolist())
    return [round_to_fp32(clip_factors([n], limit)[0]) for n, limit in zip(norms, limits, strict=True)]


def lower_median(norms: Sequence[float], weights: Sequence[int]) -> float:
    """Return the smallest norm that has, with all below it, at least half of the weight."""
    ordered = sorted(zip(norms, weights, strict=True))
    up_to = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(up_to, (up_to[-1] + 1) // 2)][0]


def clip_factors(norms: Sequence[float], limit: float) -> list[float]:
    """Return the factors that bring each norm down to the limit: min(1, limit / norm), and 1 for a norm of 0.

    In a run's first round the limit is 0 when half of the norms are, and so are the others' factors. The tensor stays.
    """
    return [min(1.0, limit / norm) if norm else 1.0 for norm in norms]


@dataclass(frozen=True)
class Clipping:
    """The clip of a round's updates. Exact double arithmetic, so the same on every machine.

    `factors`: of each update, in canonical order, one for each of the layout's tensors. `limits`: of each tensor.
    """

    factors: Sequence[Sequence[float]]
    limits: Sequence[float]

    @classmethod
    def of(
        cls,
        ordered: Sequence[Contribution],
        codec: Codec,
        outer: OuterSpec,
        device: torch.device,
        reference: Tensor | None,
        slices: Sequence[TensorSlice] | None = None,
    ) -> Clipping:
        """Return the clip of the tensors' norms to each tensor's `clip_limit`, by the `reference` if it is given.

        `reference`: fp32 [tensors]. With `slices`, norms are of these, and nothing else is read. Raises CodecError.
        """
        energies = [codec.sum_squares(c.blob, device, slices) for c in ordered]
        norms = [[math.sqrt(e) for e in each] for each in zip(*energies, strict=True)]
        references = [0.0] * len(norms) if reference is None else reference.tolist()
        shares = mean_weights([c.windows for c in ordered], outer.weight_cap)
        weights = [round(share * 2**53) for share in shares]  # whole numbers, so that sums are exact
        limits = [clip_limit(n, weights, r) for n, r in zip(norms, references, strict=True)]
        by_tensor = [clip_factors(n, limit) for n, limit in zip(norms, limits, strict=True)]
        return cls(list(zip(*by_tensor, strict=True)), limits)


class RobustMean:
    """The mean of a round's updates, batch by batch. `apply` steps by it, and a committee encodes it.

    Robust: a peer's weight is capped, and no update's tensor counts with more than the round's limit.
    """

    def __init__(
        self,
        ordered: Sequence[Contribution],
        codec: Codec,
        outer: OuterSpec,
        device: torch.device,
        slices: Sequence[TensorSlice] | None,
        clipping: Clipping | None,
        *,
        batch_blocks: int | None = None,
    ):
        """Prepare the mean of updates of this codec over `slices` (None: all; not empty). `clipping` None: of none.

        There is at least one update, in canonical order, with checked header. Raises CodecError.
        """
        self._ordered = ordered
        self._codec = codec
        self._weights = mean_weights([c.windows for c in ordered], outer.weight_cap)
        clips = [[1.0] * len(codec.layout.tensors)] * len(ordered) if clipping is None else clipping.factors
        products = [[w * c for c in clip] for w, clip in zip(self._weights, clips, strict=True)]
        self._factors = [torch.tensor(p, dtype=torch.float64).to(torch.float32).to(device) for p in products]
        """The factor of each update's values, weight times clip factor: for each update fp32 [tensors]."""
        self.batches: list[Batch] = list(codec.batches(batch_blocks, slices=slices, device=device))
        # Sums over one batch, allocated once for the largest: fresh memory would cost more than the arithmetic.
        by_senders = outer.mean == "senders" and not codec.sends_all
        self._total = torch.empty(max(batch.numel for batch in self.batches), dtype=torch.float32, device=device)
        self._weight = torch.empty_like(self._total) if by_senders else None

    def batch_mean(self, batch: Batch) -> Tensor:
        """Return the mean over one of `batches`: fp32 [numel], which the caller may use up before the next call."""
        total = self._total[: batch.numel].zero_()
        weight = None if self._weight is None else self._weight[: batch.numel].zero_()
        # The tensor of each block.
        counts = torch.tensor([p.count for p in batch.segments])
        tensors = torch.tensor([p.index for p in batch.segments]).repeat_interleave(counts).to(total.device)
        for update, share, factor in zip(self._ordered, self._weights, self._factors, strict=True):
            decoded = self._codec.decode_batch(update.blob, batch, total.device)
            if weight is not None:
                # A coordinate that a sparse codec lists with a scale of 0 was not sent.
                _add(weight, decoded.positions, decoded.values.ne(0).to(torch.float32).mul_(round_to_fp32(share)))
            values = decoded.values.view(batch.count, -1).mul_(factor[tensors].unsqueeze(1)).view(-1)
            _add(total, decoded.positions, values)
        if weight is not None:
            total.div_(weight.clamp_min_(MIN_WEIGHT))
        return total


def _add(total: Tensor, positions: Tensor | None, values: Tensor) -> None:
    """total[positions] += values. Positions are distinct, so reading, adding and writing back is well defined."""
    if positions is None:
        total.add_(values)
    elif total.device.type == "cpu":
        total.index_add_(0, positions, values)  # the same addition in half the time; on CUDA it would be an atomic one
    else:
        total[positions] = total.take(positions).add_(values)


def round_to_fp32(value: float) -> float:
    """Return the nearest fp32 (ties to even)."""
    return struct.unpack("<f", struct.pack("<f", value))[0]
