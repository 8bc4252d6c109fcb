"""The degrees of parallelism of a peer: four numbers whose product is the number of its ranks.

Pure: counts, bytes and text in, a decision out. The shape is torchtitan's `ParallelDims`: one dataclass owns and checks
the degrees.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from peer.errors import TrainingError

AXES = ("pp", "dp", "fsdp", "tp")
"""The mesh's axes, outermost first: ranks that communicate most are adjacent."""

MAX_RANKS = 64
"""Maximum number of ranks, all on one machine."""

USABLE = 0.8
"""Usable share of a GPU's memory: the rest is for activations of one window, buffers and fragments."""

LISTED = 12
"""Layouts that an error lists at most."""

Interconnect = Literal["nvlink", "pcie"]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The degrees that a model and a run allow. `tp`: a multiple of every possible degree; `pp`: maximum stages.

    `parameters`: with those of a frozen base. `model_bytes`: weights, gradients and moments. `round_bytes`: what the
    devices hold of the state between rounds. `batch`: windows of an inner step, split over dp * fsdp. `no_fsdp`,
    `no_tp`, `no_pp`: the reason when it is not possible at all. `frozen_bytes`: of the frozen base. `base_at_once`: of
    these in bf16, what a rank gathers at once where fsdp divides it.
    """

    kind: str
    parameters: int
    model_bytes: int
    round_bytes: int
    batch: int
    tp: int = 1
    pp: int = 1
    no_fsdp: str = ""
    no_tp: str = ""
    no_pp: str = ""
    frozen_bytes: int = 0
    base_at_once: int = 0


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """`dp` copies of a model, each in `pp` stages, each stage sharded over `fsdp` and its matrices over `tp`.

    `zero` = 3 gathers a layer's shards for each pass over it, 2 once for both passes (more memory, less traffic).
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 3

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.fsdp * self.tp * self.pp

    @property
    def shares(self) -> int:
        """Number of shares that a step's windows are split into."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        """Return the text that `parse` reads: "fsdp=4,tp=2"; "dp=1" for one process."""
        words = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return ",".join([*(words or ["dp=1"]), *(["zero=2"] if self.zero == 2 else [])])

    @classmethod
    def parse(cls, text: str) -> ParallelDims:
        """Read "fsdp=4,tp=2": dp, fsdp, tp, pp, each once, and zero=2 or zero=3. Raises TrainingError."""
        found: dict[str, int] = {}
        for word in text.split(","):
            degree = re.fullmatch(rf"\s*({'|'.join(AXES)}|zero)\s*=\s*([0-9]{{1,9}})\s*", word)
            if not degree or degree[1] in found or not 1 <= int(degree[2]) <= MAX_RANKS:
                raise TrainingError(
                    f"--parallel {text[:60]}: {word[:20]!r} is no degree; write auto, or some of "
                    "dp=N, fsdp=N, tp=N, pp=N with commas between them, such as fsdp=4,tp=2"
                )
            found[degree[1]] = int(degree[2])
        if found.get("zero", 3) not in (2, 3) or ("zero" in found and found.get("fsdp", 1) == 1):
            raise TrainingError(f"--parallel {text[:60]}: zero is 2 or 3, and goes with fsdp, such as fsdp=4,zero=2")
        return cls(**found)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position on each axis."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def share(self, rank: int) -> int:
        """Return the number of the share of a step's windows that a rank trains on."""
        at = self.coordinates(rank)
        return at["dp"] * self.fsdp + at["fsdp"]


def rejection(degrees: ParallelDims, world: int, limits: ModelLimits) -> str:
    """Return why these degrees do not work on `world` ranks, as text that follows their name; "" if they do."""
    d = degrees
    if d.world != world:
        return f"makes {d.world} ranks, and there are {world}"
    if d.fsdp > 1 and limits.no_fsdp:
        return limits.no_fsdp
    if d.tp > 1 and (limits.no_tp or limits.tp % d.tp):
        return limits.no_tp or f"splits the model's heads {d.tp} ways: tp must divide {limits.tp}"
    if d.pp > limits.pp:
        return limits.no_pp or f"makes {d.pp} stages of {limits.pp} layers"
    if d.shares > limits.batch:
        return f"splits a step's {limits.batch} windows (inner.batch) {d.shares} ways"
    return ""


def layouts(world: int, limits: ModelLimits) -> list[ParallelDims]:
    """Return all degrees that work on `world` ranks (zero = 3), those with fewer kinds of parallelism first."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    every = (ParallelDims(*degrees) for degrees in product(divisors, repeat=4))
    found = [d for d in every if not rejection(d, world, limits)]
    return sorted(found, key=lambda d: (sum(getattr(d, axis) > 1 for axis in AXES), d.pp, d.tp, d.fsdp))


def check(degrees: ParallelDims, world: int, limits: ModelLimits) -> ParallelDims:
    """Return the same degrees. Raises TrainingError, with the layouts that would work, when they do not."""
    if reason := rejection(degrees, world, limits):
        works = [str(d) for d in layouts(world, limits)]
        list_ = "; ".join(works[:LISTED]) + ("; ..." if len(works) > LISTED else "")
        instead = f"on {world} ranks these work: {list_}" if works else f"no layout works on {world} ranks: use fewer"
        raise TrainingError(f"--parallel {degrees} {reason}; {instead}")
    return degrees


def memory(degrees: ParallelDims, limits: ModelLimits, largest: int = 0) -> int:
    """Return the bytes on each rank without activations: its shares of model, frozen base and state between rounds.

    `largest`: the elements of the largest tensor, which each rank gathers for a moment.
    """
    split = degrees.fsdp * degrees.tp * degrees.pp
    gathered = 0
    if degrees.fsdp > 1:
        whole = limits.parameters // (degrees.tp * degrees.pp) * 2
        gathered = whole if degrees.zero == 2 else limits.base_at_once
    shares = (limits.model_bytes + limits.frozen_bytes) // split + limits.round_bytes // degrees.world
    return shares + gathered + 8 * largest


def choose(
    world: int, memory_bytes: int, link: Interconnect, limits: ModelLimits, largest: int = 0
) -> tuple[ParallelDims, str]:
    """Return the degrees for `world` ranks, and the reason in one line.

    `memory_bytes`: of each rank. The choice splits as little as fits: dp moves the fewest bytes.
    Next comes fsdp, whose traffic overlaps with computation on any link. Then comes tp with NVLink (it communicates
    four times a layer), or pp without. Raises TrainingError when nothing fits.
    """
    works = layouts(world, limits)
    if not works:
        check(ParallelDims(dp=world), world, limits)
    room = int(memory_bytes * USABLE)

    def needs(d: ParallelDims) -> int:
        return memory(d, limits, largest)

    fitting = [d for d in works if needs(d) <= room]
    if not fitting:
        least = min(works, key=needs)
        more = "larger GPUs" if limits.no_fsdp else "more GPUs, or larger ones"  # dp divides no model
        raise TrainingError(
            f"{_gib(needs(least))} a GPU is the least that {limits.parameters:,} parameters need on {world} of them "
            f"(with {least}), and {_gib(room)} of each can be used: use {more}, or allow more with --gpu-memory if "
            "that is set"
        )
    if link == "nvlink":
        best = min(fitting, key=lambda d: (d.pp, d.tp, d.fsdp))
    else:
        best = min(fitting, key=lambda d: (d.tp, d.pp, d.fsdp))
    if best.fsdp > 1 and link != "nvlink" and needs(replace(best, zero=2)) <= room:
        best = replace(best, zero=2)
    return best, _why(best, world, room, link, limits, needs)


def _why(best: ParallelDims, world: int, room: int, link: Interconnect, limits: ModelLimits, needs) -> str:
    """Return the reason for people."""
    over = {"nvlink": "over NVLink", "pcie": "over PCIe"}[link]
    whole = ParallelDims(dp=world)
    if best.fsdp == best.tp == best.pp == 1:
        return f"{best}: the model fits on each of {world} ranks, so only gradients travel, {over}"
    if rejection(whole, world, limits):
        reason = f"dp={world} {rejection(whole, world, limits)}"
    else:
        reason = f"dp={world} would need {_gib(needs(whole))} of {_gib(room)} on each"
    return f"{best}: {_gib(needs(best))} a rank before activations, {over}; {reason}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
