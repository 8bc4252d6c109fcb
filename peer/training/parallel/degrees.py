"""How many ways a peer splits its work over its ranks: four numbers whose product is the number of ranks.

Pure: counts, bytes and words in, a decision out. The shape is torchtitan's (`ParallelDims`): one dataclass that owns
and checks the degrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from peer.errors import TrainingError

AXES = ("pp", "dp", "fsdp", "tp")
"""The mesh's axes, outermost first: ranks that talk most lie next to each other."""

MAX_RANKS = 64
"""Of one machine."""

INNER_BYTES = 16
"""A parameter's share of the model: itself, gradient and two moments, fp32."""
OUTER_BYTES = 12
"""Its base, anchor and feedback: always split over all ranks."""
USABLE = 0.8
"""Of a GPU's memory: the rest is for activations of one window, buffers and fragments."""
LISTED = 12

Link = Literal["nvlink", "pcie", "none"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model and a run allow. `tp`: the degrees of tensor parallelism divide it; `pp`: stages at most.

    `batch`: windows of an inner step, split over dp * fsdp.
    `no_tp`, `no_pp`: why not, where it is not possible at all.
    """

    kind: str
    parameters: int
    batch: int
    tp: int = 1
    pp: int = 1
    no_tp: str = ""
    no_pp: str = ""


@dataclass(frozen=True, slots=True)
class Degrees:
    """`dp` copies of a model, each in `pp` stages, each stage sharded over `fsdp` and its matrices over `tp`.

    `zero` = 3 gathers a layer's shards for each pass over it, 2 once for both passes (more memory, fewer bytes).
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 3

    @property
    def world(self) -> int:
        """Ranks."""
        return self.dp * self.fsdp * self.tp * self.pp

    @property
    def shares(self) -> int:
        """Parts that a step's windows are split into."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        """As `parse` reads it: "fsdp=4,tp=2"; "dp=1" for one process."""
        words = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return ",".join([*(words or ["dp=1"]), *(["zero=2"] if self.zero == 2 else [])])

    @classmethod
    def parse(cls, text: str) -> Degrees:
        """From "fsdp=4,tp=2": dp, fsdp, tp, pp, each once, and zero=2 or zero=3. Raises TrainingError."""
        found: dict[str, int] = {}
        for word in text.split(","):
            name, _, number = (part.strip() for part in word.partition("="))
            known = name in (*AXES, "zero") and name not in found
            if not known or not number.isascii() or not number.isdigit() or not 1 <= int(number[:9]) <= MAX_RANKS:
                raise TrainingError(
                    f"--parallel {text[:60]}: {word[:20]!r} is no degree; write auto, or some of "
                    "dp=N, fsdp=N, tp=N, pp=N with commas between them, such as fsdp=4,tp=2"
                )
            found[name] = int(number)
        if found.get("zero", 3) not in (2, 3) or ("zero" in found and found.get("fsdp", 1) == 1):
            raise TrainingError(f"--parallel {text[:60]}: zero is 2 or 3, and goes with fsdp, such as fsdp=4,zero=2")
        return cls(**found)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def share(self, rank: int) -> int:
        """Which of the `shares` of a step's windows a rank trains on."""
        at = self.coordinates(rank)
        return at["dp"] * self.fsdp + at["fsdp"]


def why_not(degrees: Degrees, world: int, limits: Limits) -> str:
    """What speaks against these degrees on `world` ranks, in words that follow their name; "" when nothing does."""
    d = degrees
    if d.world != world:
        return f"makes {d.world} ranks, and there are {world}"
    if d.tp > 1 and (limits.no_tp or limits.tp % d.tp):
        return limits.no_tp or f"splits the model's heads {d.tp} ways: tp must divide {limits.tp}"
    if d.pp > limits.pp:
        return limits.no_pp or f"makes {d.pp} stages of {limits.pp} layers"
    if d.shares > limits.batch:
        return f"splits a step's {limits.batch} windows (inner.batch) {d.shares} ways"
    return ""


def layouts(world: int, limits: Limits) -> list[Degrees]:
    """All that would work on `world` ranks (zero = 3), those of fewer kinds of parallelism first."""
    found = [d for d in _products(world) if not why_not(d, world, limits)]
    return sorted(found, key=lambda d: (sum(getattr(d, axis) > 1 for axis in AXES), d.pp, d.tp, d.fsdp))


def check(degrees: Degrees, world: int, limits: Limits) -> Degrees:
    """The same degrees. Raises TrainingError, with the layouts that would work, when they do not."""
    if reason := why_not(degrees, world, limits):
        works = [str(d) for d in layouts(world, limits)]
        list_ = "; ".join(works[:LISTED]) + ("; ..." if len(works) > LISTED else "")
        instead = f"on {world} ranks these work: {list_}" if works else f"no layout works on {world} ranks: use fewer"
        raise TrainingError(f"--parallel {degrees} {reason}; {instead}")
    return degrees


def memory(degrees: Degrees, parameters: int, largest: int = 0) -> int:
    """Bytes on each rank without activations: its share of the model, of the state between peers, and one tensor.

    `largest`: the numbers in the largest tensor, which is whole on each rank for a moment.
    """
    split = degrees.fsdp * degrees.tp * degrees.pp
    gathered = parameters // (degrees.tp * degrees.pp) * 2 if degrees.zero == 2 and degrees.fsdp > 1 else 0
    return INNER_BYTES * parameters // split + OUTER_BYTES * parameters // degrees.world + gathered + 8 * largest


def choose(world: int, memory_bytes: int | None, link: Link, limits: Limits, largest: int = 0) -> tuple[Degrees, str]:
    """The degrees for so many ranks, and one line that says why. `memory_bytes`: of each; None does not bound.

    As little splitting as fits: dp moves the fewest bytes. Beyond that fsdp, whose traffic any link hides; then tp
    where there is NVLink (it speaks four times a layer), and pp where there is not. Raises TrainingError when nothing
    fits.
    """
    works = layouts(world, limits)
    if not works:
        check(Degrees(dp=world), world, limits)
    room = None if memory_bytes is None else int(memory_bytes * USABLE)

    def needs(d: Degrees) -> int:
        return memory(d, limits.parameters, largest)

    fitting = [d for d in works if room is None or needs(d) <= room]
    if not fitting:
        least = min(works, key=needs)
        raise TrainingError(
            f"{_gib(needs(least))} a GPU is the least that {limits.parameters:,} parameters need on {world} of them "
            f"(with {least}), and {_gib(room or 0)} of each can be used: use more GPUs, or larger ones"
        )
    if link == "nvlink":
        best = min(fitting, key=lambda d: (d.pp, d.tp, d.fsdp))
    else:
        best = min(fitting, key=lambda d: (d.tp, d.pp, d.fsdp))
    if best.fsdp > 1 and link != "nvlink" and (room is None or needs(replace(best, zero=2)) <= room):
        best = replace(best, zero=2)
    return best, _why(best, world, room, link, limits, needs)


def _why(best: Degrees, world: int, room: int | None, link: Link, limits: Limits, needs) -> str:
    """The line for people."""
    if world == 1:
        return "one process"
    over = {"nvlink": "over NVLink", "pcie": "over PCIe", "none": "on CPUs"}[link]
    whole = Degrees(dp=world)
    if best.fsdp == best.tp == best.pp == 1:
        return f"{best}: the model fits on each of {world} ranks, so only gradients travel, {over}"
    if why_not(whole, world, limits):
        reason = f"dp={world} {why_not(whole, world, limits)}"
    else:
        reason = f"dp={world} would need {_gib(needs(whole))} of {_gib(room or 0)} on each"
    return f"{best}: {_gib(needs(best))} a rank before activations, {over}; {reason}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _products(world: int) -> Iterator[Degrees]:
    """All ways to write `world` as dp * fsdp * tp * pp."""
    for pp in _divisors(world):
        for tp in _divisors(world // pp):
            for fsdp in _divisors(world // pp // tp):
                yield Degrees(world // pp // tp // fsdp, fsdp, tp, pp)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if gcd(k, n) == k]
