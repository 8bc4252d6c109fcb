"""The node's side of a trainer process."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from peer.channel import (
    Failed,
    FromTrainer,
    MakeUpdate,
    Progress,
    TrainerLink,
    UpdateMade,
)
from protocol.ids import Digest
from tests.support.waiting import ended

T = TypeVar("T", bound=FromTrainer)


class Node:
    """A node that sends, waits for a kind of answer, and keeps every message that it received."""

    def __init__(self, link: TrainerLink):
        self.link = link
        self.heard: list[FromTrainer] = []
        self.messages = aiter(link)

    async def until(self, kind: type[T], when=lambda _: True) -> T:
        while True:
            message = await ended(anext(self.messages))
            self.heard.append(message)
            if isinstance(message, kind) and when(message):
                return message
            assert not isinstance(message, Failed), message

    async def failures(self) -> list[Failed]:
        """Return the failures from now on, up to the fatal one."""
        said: list[Failed] = []
        while not any(f.fatal for f in said):
            message = await ended(anext(self.messages))
            self.heard.append(message)
            said += [message] if isinstance(message, Failed) else []
        return said

    async def ask(self, message, kind: type[T]) -> T:
        await self.link.send(message)
        return await self.until(kind)

    async def trained(self, windows: int) -> Progress:
        return await self.until(Progress, lambda p: p.windows >= windows)

    async def update(self, number: int, parent: Digest, out: Path) -> UpdateMade:
        return await self.ask(MakeUpdate(number, parent, out), UpdateMade)
