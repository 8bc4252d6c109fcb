"""How the updates of a round get around: all to all ("gather"), or part by part through committees ("reduce").

Here is what everybody must reckon alike, in integers: how a round goes, and in how many parts. The parts themselves,
and what a committee does with one, are in `reduce`.
"""

from __future__ import annotations

from typing import Literal

from protocol.merkle import chunk_count

Exchange = Literal["gather", "reduce", "auto"]

MAX_PARTS = 1024


def part_count(contributors: int, blob_size: int) -> int:
    """Into how many parts a round is cut that so many contribute to, with updates of `blob_size` bytes.

    One for each contributor, so that all have the same work; none much smaller than a chunk of an update's blob, which
    is fetched whole.
    """
    return max(1, min(contributors, chunk_count(blob_size), MAX_PARTS))


def exchange_mode(exchange: Exchange, contributors: int, update_size: int, reduced_size: int, committee: int) -> bool:
    """Whether a round reduces, when so many are expected to contribute.

    "auto" does when a peer then moves less than half of the bytes: it fetches all others' updates else, and now its
    committees' slices (`committee` updates, on average) and all reduced parts (`reduced_size` bytes together).
    """
    if exchange == "auto":
        return (contributors - 1) * update_size > 2 * (committee * update_size + reduced_size)
    return exchange == "reduce"
