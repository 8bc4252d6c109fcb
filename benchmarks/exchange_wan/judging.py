"""Evaluation of the peers' diaries: the times of a round, and the correctness of its result. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.exchange_wan.values import is_right

Diaries = Mapping[int, Sequence[Mapping[str, Any]]]
"""By peer number, as `job.read_diary` gives them."""


@dataclass(frozen=True)
class Times:
    """Seconds since the first announcement until the last peer was there (see `setting.Round`)."""

    held: float
    certified: float
    applied: float
    own: float


def entries(diary: Sequence[Mapping[str, Any]], round: int, *what: str) -> list[Mapping[str, Any]]:
    """Return a peer's entries of these kinds in a round."""
    return [e for e in diary if e["round"] == round and e["what"] in what]


def ended(diaries: Diaries, round: int, peers: Sequence[int]) -> bool:
    """Return whether each of these peers has finished a round, or failed."""
    return all(entries(diaries[p], round, "done", "failed") for p in peers)


def times_of(diaries: Diaries, round: int, peers: Sequence[int]) -> Times:
    """Return the times of a finished round. A step that a system does not have counts as its end."""
    began = {p: entries(diaries[p], round, "announced")[0]["at"] for p in peers}
    done = {p: _end(entries(diaries[p], round, "done", "failed")[0]) for p in peers}
    # Blobs held after the end are the peer's own update of the next round.
    held = {
        p: max((e["at"] for e in entries(diaries[p], round, "held") if e["at"] <= done[p]), default=done[p])
        for p in peers
    }
    certified = {p: max((e["at"] for e in entries(diaries[p], round, "certified")), default=done[p]) for p in peers}
    first = min(began.values())
    return Times(
        max(held.values()) - first,
        max(certified.values()) - first,
        max(done.values()) - first,
        median(held[p] - began[p] for p in peers),
    )


def last_end(diaries: Diaries, round: int, peers: Sequence[int], *, since: float) -> float | None:
    """Seconds until the last of these peers was done or had failed; None when one is not."""
    if not ended(diaries, round, peers):
        return None
    return max(_end(entries(diaries[p], round, "done", "failed")[0]) for p in peers) - since


def _end(entry: Mapping[str, Any]) -> float:
    return float(entry.get("ended", entry["at"]))


def right(diaries: Diaries, round: int, peers: Sequence[int]) -> bool:
    """Return whether all these peers hold the same, right result, by values or by state digest."""
    last = {p: entries(diaries[p], round, "done") for p in peers}
    if not all(last.values()):
        return False
    if all("state" in found[0] for found in last.values()):
        states = {found[0]["state"] for found in last.values()}
        return len(states) == 1 and all(found[0]["taking_part"] >= len(peers) for found in last.values())
    shares = shares_of(diaries, round, peers)
    return len(shares) == len(peers) and is_right(shares)


def shares_of(diaries: Diaries, round: int, peers: Sequence[int]) -> list[dict[str, float]]:
    """Return the share of each mean in each peer's values, if the diaries have it."""
    found = []
    for p in peers:
        said = [e["shares"] for e in entries(diaries[p], round, "done", "failed", "values") if e.get("shares")]
        if said:
            found.append(said[-1])
    return found


def taking_part(diaries: Diaries, round: int, peers: Sequence[int]) -> int:
    """Return the number of peers whose work is in a round's result: the least that any peer reports."""
    return min((e.get("taking_part", 0) for p in peers for e in entries(diaries[p], round, "done")), default=0)


def words_of_death(diaries: Diaries, round: int, peers: Sequence[int]) -> str:
    """Describe the others' result after the round in which one died."""
    failed = [e for p in peers for e in entries(diaries[p], round, "failed")]
    shares = shares_of(diaries, round, peers)
    least = min((max(s.values()) for s in shares), default=None)
    wrong = "" if least is None else f"; of a peer's values up to {1 - least:.0%} are not the mean"
    if failed:
        return f"{len(failed)} of {len(peers)} end with an error{wrong}"
    if not ended(diaries, round, peers):
        return "not done within the time allowed"
    part = taking_part(diaries, round, peers)
    same = right(diaries, round, peers)
    if shares:
        return f"all report success{wrong}" if not same else f"success, with {part} peers"
    return f"a record with {part} of {len(peers) + 1} updates; " + ("one state" if same else "STATES DIFFER")
