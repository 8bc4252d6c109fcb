"""What the page shows of the archive: checkpoints, samples of text, and what states were worth."""

from __future__ import annotations

import asyncio
from typing import Any

from coordinator.checkpoints.archiver import CheckpointArchiver


class ModelKept:
    """A keeper as the page asks it (`coordinator.page.api.ModelShown`)."""

    def __init__(self, keeper: CheckpointArchiver):
        self._keeper = keeper

    async def samples(self, before: int | None, limit: int) -> list[dict[str, Any]]:
        return self._keeper.samples(before, limit)

    async def checkpoints(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._keeper.checkpoints)  # it looks at each folder

    def validation(self) -> list[tuple[int, float]]:
        return sorted((round_, loss) for round_, _, loss in self._keeper.validation_points())
