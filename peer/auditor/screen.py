"""The screen: an update's signs beside those of its own round, and of earlier ones. It trains nothing.

Updates of one round were trained from one state, so more of their signs are equal than by chance. One that agrees with
them half as much as usual is noise, turned around, or of other work. One that agrees more with an earlier round was
trained from an old state, or is a copy. One that is nearly another's of its round is one work under two keys. Such an
update is replayed; a screen alone accuses nobody.

`agreement` is the share of signs that are equal to the sign of the others' sum. `fresh` is by how much it exceeds the
same share beside the sum of an earlier round, the greatest of them. `apart` is the share of signs that differ from the
most similar update. Thresholds are relative to the record: levels drift with the learning rate, and differ by model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from statistics import median

import torch
from torch import Tensor

from peer.auditor.job import ScreenJob
from peer.memory_map import mapped_files
from protocol.codec import Codec, make_codec
from protocol.codec.interface import Blob
from protocol.layout import BLOCK, Layout, TensorSlice
from protocol.messages import Score
from protocol.spec import parse_spec

CHANCE = 0.5
"""Share of equal signs of two updates that have nothing in common."""

USUAL_SHARE = 0.5
"""Share of the median's agreement above chance that an honest update reaches."""

FRESH_MARGIN = 0.015
"""Honest updates are less fresh than the median by no more than this, or agree most with their own round."""

APART_MARGIN = 0.1
"""Two honest updates share no more signs than a record's usual pair, the lower quartile, and this share of all."""

LEAST_SHARED = 2**10
"""Values that two updates must both have to be compared as a pair: a sparse codec sends few."""

MEASURED_VALUES = 2**14, 2**16
"""Values of an update that are compared, and the rest of a block. By chance they agree in 0.5 +- 0.004, or +- 0.002."""

DOUBT = 0.005
"""An update that fails in the few values, or passes by less than this, is compared in the many, which decide."""


def screen(job: ScreenJob, chooser: Random) -> tuple[Score, ...]:
    """Return the scores of a job's update, by ascending name. Raises CairnError, and OSError.

    `chooser` draws the blocks that are compared: nobody else can know them. No other part of a file is read.
    """
    spec = parse_spec(job.spec_path.read_bytes())
    vocabulary = spec.model.config.get("vocab_size")
    updates, *earlier = (mapped_files(paths) for paths in (job.updates, *job.earlier) if paths)
    return compare_blobs(
        make_codec(spec.codec, spec.model.layout), vocabulary if isinstance(vocabulary, int) else None,
        updates, earlier, chooser,
    )  # fmt: skip


def compare_blobs(
    codec: Codec, vocabulary: int | None, updates: Sequence[Blob], earlier: Sequence[Sequence[Blob]], chooser: Random
) -> tuple[Score, ...]:
    """Return the scores of the first of a record's updates beside those of earlier records. Raises CodecError."""
    scores: tuple[Score, ...] = ()
    for values in MEASURED_VALUES:
        blocks = chosen_blocks(codec.layout, vocabulary, values, chooser)
        scores = compare_signs(signs(codec, updates, blocks), [signs(codec, blobs, blocks) for blobs in earlier])
        if all(s.value >= s.threshold + DOUBT for s in scores):
            break
    return scores


def chosen_blocks(layout: Layout, vocabulary: int | None, values: int, chooser: Random) -> list[TensorSlice]:
    """Return blocks that have this number of values together, or all if there are not twice as many.

    Each value is as likely to be among them. None is of a tensor with a row for each token, if there are others: where
    a token did not come, weight decay decides, in each round alike.
    """
    tensors = layout.tensors
    without = [i for i, t in enumerate(tensors) if t.shape[:1] != (vocabulary,)]
    whole = [layout.full_slices[i] for i in without] or list(layout.full_slices)
    ends = list(accumulate(t.numel for t in whole))
    if ends[-1] < 2 * values:
        return whole
    chosen = set[TensorSlice]()
    while sum(b.numel for b in chosen) < values:
        at = chooser.randrange(ends[-1])
        place = bisect_right(ends, at)
        tensor = whole[place]
        start = (at - ends[place] + tensor.numel) // BLOCK * BLOCK
        chosen.add(TensorSlice(tensor.index, start, min(start + BLOCK, tensor.stop)))
    return sorted(chosen, key=lambda b: (b.index, b.start))


def signs(codec: Codec, blobs: Sequence[Blob], blocks: Sequence[TensorSlice]) -> Tensor:
    """Return the signs of updates' values: int8 [updates, values], 0 where one has none. Raises CodecError.

    Values have the codec's order. Many updates and blocks at once are five times faster to decode.
    """
    for blob in blobs:
        codec.check_header(blob)
    parts = []
    for batch in codec.batches(slices=blocks):
        decoded = codec.decode_batches(blobs, batch)
        part = found = decoded.values.sign().to(torch.int8)
        if decoded.positions is not None:
            part = torch.zeros(len(blobs) * batch.numel, dtype=torch.int8)
            part[decoded.positions] = found
        parts.append(part.view(len(blobs), -1))
    return torch.cat(parts, 1)


def compare_signs(updates: Tensor, earlier: Sequence[Tensor]) -> tuple[Score, ...]:
    """Return the scores of the first of a record's updates (int8 [updates, values]).

    `earlier`: the updates of each earlier record.
    """
    pairs, scores = _pairs(updates), list[Score]()
    n = len(updates)
    if n > 1:
        usual = sorted(pairs[i][j] for i in range(n) for j in range(i))[n * (n - 1) // 8]
        most = usual + APART_MARGIN
        scores.append(Score("apart", 1 - max(pairs[0][1:]), 1 - most))
        # Of one work under many keys one counts: else it would be the usual, and honest updates strange.
        distinct = list[int]()
        for i in range(n):
            if all(pairs[i][j] <= most for j in distinct):
                distinct.append(i)
        updates = updates[distinct]
    agreements = _agreements(updates, updates.sum(0, dtype=torch.int16) - updates)
    scores.insert(0, Score("agreement", agreements[0], CHANCE + USUAL_SHARE * (median(agreements) - CHANCE)))
    if earlier:
        old = zip(*(_agreements(updates, before.sum(0, dtype=torch.int16)) for before in earlier), strict=True)
        fresh = [a - max(others) for a, others in zip(agreements, old, strict=True)]
        scores.append(Score("fresh", fresh[0], min(0.0, median(fresh) - FRESH_MARGIN)))
    return tuple(scores)


def _pairs(updates: Tensor) -> list[list[float]]:
    """Return for each two updates the share of equal signs, of the values that both have; by chance if they are few."""
    signs_ = updates.float()
    balance, compared = signs_ @ signs_.T, signs_.abs() @ signs_.abs().T  # whole numbers below 2^24: exact
    shares = (1 + balance / compared.clamp(min=1)) / 2
    return torch.where(compared >= LEAST_SHARED, shares, CHANCE).tolist()


def _agreements(updates: Tensor, totals: Tensor) -> list[float]:
    """Return each update's share of signs that are those of a sum, of the values where both have one."""
    products = updates * totals.sign().to(torch.int8)  # 1 where both have a sign and these are equal, -1 if they differ
    compared, balance = (p.sum(1, dtype=torch.int32).tolist() for p in (products.abs(), products))
    return [(1 + b / c) / 2 if c else CHANCE for b, c in zip(balance, compared, strict=True)]
