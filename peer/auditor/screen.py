"""The screen: an update's signs beside those of its own round, and of earlier ones. It trains nothing.

Updates of one round were trained from one state, so more of their signs are equal than by chance. One that agrees with
them half as much as usual is noise, turned around, or of other work. One that agrees more with an earlier round was
trained from an old state, or is a copy. Such an update is replayed; a screen alone accuses nobody.

`agreement` is the share of signs that are equal to the sign of the others' sum. `fresh` is by how much it exceeds the
same share beside the sum of an earlier round, the greatest of them. Thresholds are relative to the record's median:
levels drift with the learning rate, and differ by model.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import median

import torch
from torch import Tensor

from peer.auditor.job import ScreenJob
from peer.training.round_files import RoundFiles
from protocol.codec import Codec, make_codec
from protocol.messages import Score
from protocol.spec import parse_spec

CHANCE = 0.5
"""Share of equal signs of two updates that have nothing in common."""

USUAL_SHARE = 0.5
"""Share of the median's agreement above chance that an honest update reaches."""

FRESH_MARGIN = 0.015
"""Honest updates are less fresh than the median by no more than this, or agree most with their own round."""

MEASURED_VALUES = 2**16
"""Values of an update that are compared, and the rest of a tensor. By chance they agree in 0.5 +- 0.002."""


def screen(job: ScreenJob, chooser: Random) -> tuple[Score, ...]:
    """Return the scores of a job's update, by ascending name. Raise CairnError, and OSError.

    `chooser` draws the tensors that are compared: nobody else can know them.
    """
    spec = parse_spec(job.spec_path.read_bytes())
    codec, files = make_codec(spec.codec, spec.model.layout), RoundFiles.of(spec)
    vocabulary = spec.model.config.get("vocab_size")
    tensors = chosen_tensors(codec, vocabulary if isinstance(vocabulary, int) else None, chooser)
    updates = torch.stack([signs(codec, files.update(path), tensors) for path in job.updates])
    earlier = []
    for paths in job.earlier:
        total = torch.zeros_like(updates[0], dtype=torch.int16)
        for path in paths:
            total += signs(codec, files.update(path), tensors)
        earlier.append(total)
    return compare_signs(updates, earlier)


def chosen_tensors(codec: Codec, vocabulary: int | None, chooser: Random) -> list[int]:
    """Return indices of tensors that have MEASURED_VALUES together, or all.

    Those with a row for each token come last: where a token did not come, weight decay decides, in each round alike.
    """
    tensors = codec.layout.tensors
    order = chooser.sample(range(len(tensors)), len(tensors))
    order.sort(key=lambda i: tensors[i].shape[:1] == (vocabulary,))
    chosen = list[int]()
    for index in order:
        if sum(tensors[i].numel for i in chosen) >= MEASURED_VALUES:
            break
        if chosen and tensors[index].shape[:1] == (vocabulary,):
            break
        chosen.append(index)
    return sorted(chosen)


def signs(codec: Codec, blob: bytes, tensors: Sequence[int]) -> Tensor:
    """Return the signs of an update's values: int8 [values], 0 where it has none. Raise CodecError.

    They have the codec's order, the same for each update. Many tensors at once are five times faster to decode.
    """
    codec.check_header(blob)
    parts = []
    for batch in codec.batches(slices=[codec.layout.full_slices[i] for i in tensors]):
        decoded = codec.decode_batch(blob, batch)
        part = torch.zeros(batch.numel, dtype=torch.int8)
        part[slice(None) if decoded.positions is None else decoded.positions] = decoded.values.sign().to(torch.int8)
        parts.append(part)
    return torch.cat(parts)


def compare_signs(updates: Tensor, earlier: Sequence[Tensor]) -> tuple[Score, ...]:
    """Return the scores of the first of a record's updates (int8 [updates, values]).

    `earlier`: for each earlier record the sum of its updates' signs, int16 [values].
    """
    total = updates.sum(0, dtype=torch.int16)
    agreements = [agreement(u, total - u) for u in updates]
    scores = [Score("agreement", agreements[0], CHANCE + USUAL_SHARE * (median(agreements) - CHANCE))]
    if earlier:
        fresh = [a - max(agreement(u, e) for e in earlier) for a, u in zip(agreements, updates, strict=True)]
        scores.append(Score("fresh", fresh[0], min(0.0, median(fresh) - FRESH_MARGIN)))
    return tuple(scores)


def agreement(update: Tensor, total: Tensor) -> float:
    """Return the share of signs that are those of a sum, of the values where both have one."""
    products = update * total.sign().to(torch.int8)  # 1 where both have a sign and these are equal, -1 if they are not
    compared = int(products.count_nonzero())
    return (1 + int(products.sum(dtype=torch.int64)) / compared) / 2 if compared else CHANCE
