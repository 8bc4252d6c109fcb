"""The outer step, `apply`: a pure function of state and accepted updates that gives the same bits on every machine.

How that is done: everything per tensor (norms, clip factors, weights) is exact or correctly rounded double arithmetic,
made fp32 once; everything per coordinate is one fp32 multiplication, addition or division at a time, in the canonical
order of authors. IEEE 754 fixes the result of each, on a CPU and on a GPU. So: no fused multiply-add (addcmul, add with
alpha, lerp, foreach, torch.compile), no sums over coordinates, no atomics, no division by a scalar (on CUDA that is a
multiplication by a rounded reciprocal). Subnormal numbers are kept: do not call torch.set_flush_denormal.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from protocol.codec.interface import Blob, Codec
from protocol.codec.runs import Run
from protocol.errors import CodecError
from protocol.ids import PeerKey
from protocol.layout import MOMENTUM, Part
from protocol.spec import OuterSpec
from protocol.state import held

TINY_WEIGHT = 2.0**-100
"""Below every weight that a round can give (a window in 2**53, among 10,000 updates), above nothing."""


@dataclass(frozen=True)
class Contribution:
    """An accepted update: whose, of how many windows, and its blob, which has passed `Codec.check`."""

    author: PeerKey
    windows: int
    blob: Blob


def apply(
    state: Mapping[str, Tensor],
    contributions: Sequence[Contribution],
    codec: Codec,
    outer: OuterSpec,
    run_chunks: int | None = None,
    parts: Sequence[Part] | None = None,
) -> None:
    """state[r] to state[r+1] in place, from the accepted updates in any order.

    For each tensor: mean = sum(w_i * clip_i * value_i) / sum(w_i over those who sent the coordinate) with the weights
    of `shares` and the factors of `clip_factors`; then state -= lr * mean, or Nesterov's step (Sutskever et al. 2013,
    in PyTorch's form): m <- mu * m + mean, state -= lr * (mean + mu * m). A coordinate that nobody sent has mean 0.
    With mean = "all", and for codecs in which everyone sends everything, the weights' sum is 1 and nothing is divided.
    Nothing accepted: nothing changes, momentum neither.

    `state` holds fp32 tensors, all on one device; `run_chunks` bounds the scratch memory and changes no bit. With
    `parts` (of the codec's layout) the state's tensors, momentum too, are these parts only, and get the bits that they
    have in the whole: several processes can hold a state together (see `held`). Raises CodecError for blobs of another
    run before anything is changed; a blob that never passed `check` can raise it half way: the state is then lost.
    """
    ordered = sorted(contributions, key=lambda c: c.author)
    if any(a.author == b.author for a, b in zip(ordered, ordered[1:], strict=False)):
        raise CodecError("two updates by one author in a round: a record lists each author once")
    for c in ordered:
        codec.check_header(c.blob)
    values = held(state, codec.layout, parts)
    momenta: dict[int, tuple[int, Tensor]] = {}
    if outer.optimiser == "nesterov":
        momenta = held(state, codec.layout, parts, MOMENTUM)
    if not ordered or not values:
        return
    weights = shares([c.windows for c in ordered], outer.weight_cap)
    by_senders = outer.mean == "senders" and not codec.everyone_sends
    device = next(iter(values.values()))[1].device
    factors = _factors(ordered, weights, codec, outer, device)
    runs = list(codec.runs(run_chunks, parts=parts, device=device))
    scratch = _Scratch(max(run.numel for run in runs), device, by_senders)
    for run in runs:
        mean = _mean(ordered, weights, factors, codec, run, scratch)
        for piece in run.pieces:
            start, value = values[piece.index]
            here = run.source(piece, start)
            momentum = momenta[piece.index][1][here] if momenta else None
            _step(value[here], momentum, mean[run.within(piece)], outer)


def shares(windows: Sequence[int], cap: float) -> list[float]:
    """Each update's share of the round's weight: by windows, none above `cap`; they sum to 1 but for rounding.

    What is above the cap is cut to a common level (so that the cap holds of what remains). When n * cap < 1 no shares
    keep the cap, and all are equal. Exact until the last rounding. Raises CodecError for an update without windows.
    """
    if any(w < 1 for w in windows):
        raise CodecError("an update of no windows cannot be weighed")
    most, n = Fraction(cap), len(windows)
    if n * most <= 1:
        return [1 / n] * n
    rest = sum(windows)
    level = Fraction(max(windows))
    for cut, largest in enumerate(sorted(windows, reverse=True)):
        # With `cut` updates at a common level, level = most * (cut * level + rest).
        level = most * rest / (1 - cut * most) if cut else most * rest
        if level >= largest:
            break
        rest -= largest
    kept = [min(Fraction(w), level) for w in windows]
    total = sum(kept)
    return [float(w / total) for w in kept]


def clip_factors(norms: Sequence[float]) -> list[float]:
    """What brings each norm down to the median norm: min(1, median / norm), and 1 for a norm of 0.

    The median of an even number is the mean of the middle two. When more than half of the norms are 0, so is the
    median, and the others' factors are 0: most updates say that this tensor should stay.
    """
    ordered = sorted(norms)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return [min(1.0, median / norm) if norm else 1.0 for norm in norms]


def _factors(
    ordered: Sequence[Contribution],
    weights: Sequence[float],
    codec: Codec,
    outer: OuterSpec,
    device: torch.device,
) -> list[Tensor]:
    """By what each update's values count, weight times clip factor: for each update fp32 [tensors]."""
    tensors = len(codec.layout.tensors)
    clips = [[1.0] * tensors] * len(ordered)
    if outer.clip == "median" and len(ordered) > 1:
        energies = [codec.energies(c.blob, device) for c in ordered]
        by_tensor = [clip_factors([math.sqrt(e) for e in each]) for each in zip(*energies, strict=True)]
        clips = list(zip(*by_tensor, strict=True))
    products = [[w * c for c in clip] for w, clip in zip(weights, clips, strict=True)]
    return [torch.tensor(p, dtype=torch.float64).to(torch.float32).to(device) for p in products]


class _Scratch:
    """Sums over one run, allocated once for the largest run: fresh memory would cost more than the arithmetic."""

    def __init__(self, largest: int, device: torch.device, by_senders: bool):
        self.total = torch.empty(largest, dtype=torch.float32, device=device)
        self.weight = torch.empty_like(self.total) if by_senders else None


def _mean(
    ordered: Sequence[Contribution],
    weights: Sequence[float],
    factors: Sequence[Tensor],
    codec: Codec,
    run: Run,
    scratch: _Scratch,
) -> Tensor:
    """The robust mean over one run: fp32 [run.numel], a view of the scratch."""
    total = scratch.total[: run.numel].zero_()
    weight = None if scratch.weight is None else scratch.weight[: run.numel].zero_()
    # The tensor of each chunk.
    tensors = torch.tensor([p.index for p in run.pieces]).repeat_interleave(torch.tensor([p.count for p in run.pieces]))
    tensors = tensors.to(total.device)
    for update, share, factor in zip(ordered, weights, factors, strict=True):
        decoded = codec.decode_run(update.blob, run, total.device)
        if weight is not None:
            # A coordinate that a sparse codec lists with a scale of 0 was not sent.
            _add(weight, decoded.positions, decoded.values.ne(0).to(torch.float32).mul_(fp32(share)))
        values = decoded.values.view(run.count, -1).mul_(factor[tensors].unsqueeze(1)).view(-1)
        _add(total, decoded.positions, values)
    if weight is not None:
        total.div_(weight.clamp_min_(TINY_WEIGHT))
    return total


def _add(total: Tensor, positions: Tensor | None, values: Tensor) -> None:
    """total[positions] += values. Positions are distinct, so reading, adding and writing back is well defined."""
    if positions is None:
        total.add_(values)
    elif total.device.type == "cpu":
        total.index_add_(0, positions, values)  # the same addition in half the time; on CUDA it would be an atomic one
    else:
        total[positions] = total.take(positions).add_(values)


def _step(values: Tensor, momentum: Tensor | None, mean: Tensor, outer: OuterSpec) -> None:
    """One optimiser step on a run, in place; `mean` is used up."""
    lr, mu = fp32(outer.lr), fp32(outer.momentum)
    if momentum is not None:
        momentum.mul_(mu).add_(mean)
        mean.add_(momentum.mul(mu))
    if lr != 1.0:
        mean.mul_(lr)
    values.sub_(mean)


def fp32(value: float) -> float:
    """The nearest fp32 (ties to even)."""
    return struct.unpack("<f", struct.pack("<f", value))[0]
