"""The results of evaluations, by round: two files that only grow."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from coordinator.checkpoints.archive import ArchivedState
from coordinator.errors import CoordinatorError
from coordinator.json_lines import JsonLines, Row
from protocol.ids import Digest

log = logging.getLogger(__name__)

EVALUATIONS, SAMPLES = "evaluations.jsonl", "samples.jsonl"
MOST_EVALUATIONS, MOST_SAMPLES = 10_000, 2_000


class EvaluationLog:
    """The rows of evaluations.jsonl and samples.jsonl. Raises CoordinatorError.

    An evaluation has time, round, state, record, tokens, loss, perplexity, windows, seconds, device. A sample has time,
    round, state, prompt, text, temperature, validation_loss. `left` marks states that the chain has left. Losses are in
    nats per token, None if the model's output was not finite.
    """

    def __init__(self, folder: Path):
        self._rows = JsonLines(folder / EVALUATIONS, MOST_EVALUATIONS)
        self._samples = JsonLines(folder / SAMPLES, MOST_SAMPLES)
        self._by_round: tuple[list[Row], list[Row]] = ([], [])

    def add(self, archived: ArchivedState, measured: Row | None, texts: list[Row]) -> None:
        """Add the result of an evaluation."""
        about = {"time": round(time.time(), 3), "round": archived.round, "state": str(archived.state)}
        loss = measured["loss"] if measured else None
        try:
            if measured is not None:
                more = {"record": str(archived.record), "tokens": archived.tokens, "perplexity": perplexity(loss)}
                self._rows.add(about | more | measured)
        finally:
            if texts:
                self._samples.add(*(about | t | {"validation_loss": loss} for t in texts))

    def save(self) -> None:
        """Write what a full disk has kept out of the files."""
        for file in (self._rows, self._samples):
            file.save()

    def mark_left(self, states: Collection[Digest]) -> None:
        """Mark rows of states that the chain has left: they are kept, and count no more. A full disk is logged."""
        left = {str(s) for s in states}
        for file in (self._rows, self._samples):
            try:
                file.change(lambda row: row | {"left": True} if row.get("state") in left else row)
            except CoordinatorError as e:
                log.warning("%s", e)

    def rows(self) -> list[Row]:
        """Return one row for each evaluated state of the chain, by round; the newest evaluation of each round."""
        every = self._rows.rows
        if self._by_round[0] is not every:  # each change makes a new list
            by_round = {r["round"]: r for r in every if isinstance(r.get("round"), int) and not r.get("left")}
            self._by_round = (every, [by_round[k] for k in sorted(by_round)])
        return self._by_round[1]

    def done(self) -> dict[str, int]:
        """Return the round of each evaluated state of the chain: one with a loss, or with texts alone."""
        return {r["state"]: r["round"] for r in (*self._texts(), *self.rows()) if "state" in r}

    def newest(self) -> Row | None:
        """Return the row of the highest round."""
        rows = self.rows()
        return rows[-1] if rows else None

    def losses(self) -> Mapping[Digest, float]:
        """Return the losses by state; only finite ones."""
        return {Digest.parse(r["state"]): float(r["loss"]) for r in self.rows() if r.get("loss") is not None}

    def samples(self, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Return at most `limit` samples of rounds before `before`, newest first."""
        found: list[dict[str, Any]] = []
        for r in sorted(self._texts(), key=lambda r: -r["round"]):
            if len(found) >= limit:
                break
            if before is None or r["round"] < before:
                names = ("round", "state", "prompt", "text", "temperature", "validation_loss")
                found.append({name: r.get(name) for name in names})
        return found

    def _texts(self) -> list[Row]:
        return [r for r in self._samples.rows if isinstance(r.get("round"), int) and not r.get("left")]


def perplexity(loss: float | None) -> float | None:
    """Return exp(loss), None if that is no number."""
    return None if loss is None or loss > 700 else math.exp(loss)
