"""What a keeper of checkpoints knows, as the page asks for it (`coordinator.showing.ModelShown`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Evaluated(Protocol):
    """The evaluations that a keeper keeps."""

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Each with `round` and `loss` (None where it was not finite), ascending by round."""
        ...


class Keeps(Protocol):
    """Of a keeper, what is asked here."""

    @property
    def evaluations(self) -> Evaluated: ...

    def samples_json(self, before: int | None, limit: int) -> bytes: ...

    def checkpoints_json(self) -> bytes: ...


class KeptModel:
    """Samples, checkpoints and validation losses of a run."""

    def __init__(self, keeper: Keeps):
        self._keeper = keeper

    async def samples(self, before: int | None, limit: int) -> list[dict[str, Any]]:
        return json.loads(self._keeper.samples_json(before, limit))

    async def checkpoints(self) -> list[dict[str, Any]]:
        """In a thread: it looks at the disk."""
        return json.loads(await asyncio.to_thread(self._keeper.checkpoints_json))

    def validation(self) -> list[tuple[int, float]]:
        return [(r["round"], float(r["loss"])) for r in self._keeper.evaluations.rows() if r.get("loss") is not None]
