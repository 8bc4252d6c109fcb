"""What the page and its API show: the parts of a coordinator put together as JSON values. Reading only."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path
from typing import Any, Protocol

from coordinator.chain_indexer import ChainIndexer
from coordinator.checkpoints.archive import FILES, ArchivedState, read_manifest
from coordinator.history import charts
from coordinator.ledger_thread import LedgerThread
from coordinator.overview import Overview, PeerOverview, RoundOverview, round_overview
from coordinator.page import json_view
from coordinator.page.feed import Feed
from coordinator.round_charts import round_charts
from coordinator.round_observations import RoundObservations
from coordinator.swarm import SwarmView
from protocol.ids import PeerKey
from protocol.ledger.credits import Balance, RoundAccount

MAX_LINES = 20_000
"""Entries in one answer of /api/rounds: in a large swarm there are fewer rounds in it."""

_FOLDER = re.compile(r"round-[0-9]{6,12}")

Standings = Callable[[str, int, str], Awaitable[list[dict[str, Any]]]]
"""By "peer", "account" or "team", how many, after the line of which key: lines of the leaderboard."""


class ModelShown(Protocol):
    """Who keeps samples and checkpoints: rows as /api/samples and /api/checkpoints have them, newest first."""

    async def samples(self, before: int | None, limit: int) -> list[dict[str, Any]]: ...

    async def checkpoints(self) -> list[dict[str, Any]]: ...

    def validation(self) -> list[tuple[int, float]]:
        """Round of a state and its validation loss, ascending."""
        ...


_BY: dict[str, Callable[[PeerOverview], Any]] = {
    "name": lambda p: (p.name or str(p.peer)).casefold(),
    "since": lambda p: p.since or 0.0,
    "round": lambda p: p.heartbeat.round if p.heartbeat else -1,
    "loss": lambda p: p.heartbeat.loss if p.heartbeat else 0.0,
    "speed": lambda p: p.heartbeat.tokens_per_second if p.heartbeat else 0.0,
    "up": lambda p: p.heartbeat.bytes_up if p.heartbeat else 0,
    "down": lambda p: p.heartbeat.bytes_down if p.heartbeat else 0,
    "credits": lambda p: p.settled + p.pending,
    "device": lambda p: (p.heartbeat.device if p.heartbeat else "").casefold(),
    "last_round": lambda p: -1 if p.last_round is None else p.last_round,
}


class PageApi:
    """The page's source (`coordinator.page.endpoints.Source`)."""

    def __init__(
        self,
        *,
        feed: Feed,
        look: Callable[[], Overview],
        follower: ChainIndexer,
        sightings: RoundObservations,
        ledger: LedgerThread,
        view: SwarmView,
        name_of: Callable[[PeerKey], str],
        checkpoints: Path,
        metrics_text: Callable[[], bytes],
        now: Callable[[], float],
        standings: Standings | None = None,
        model: ModelShown | None = None,
    ):
        self.feed = feed
        self.metrics_text = metrics_text
        self._look = look
        self._follower = follower
        self._sightings = sightings
        self._ledger = ledger
        self._view = view
        self._name_of = name_of
        self._checkpoints = checkpoints
        self._now = now
        self._standings = standings
        self._model = model
        self._charts: tuple[object, dict[str, Any]] | None = None

    @property
    def head(self) -> Hashable:
        """What all that is shown of rounds belongs to: the newest record, and the newest final one."""
        return self._follower.head, self._follower.settled

    def status(self) -> dict[str, Any]:
        return json_view.status(self._look(), self._name_of, self._now())

    def event(self) -> dict[str, Any]:
        """What every viewer is sent."""
        return json_view.event(self._look(), self._now())

    # -- peers -----------------------------------------------------------------------------------------------

    def peers(self, sort: str, descending: bool, text: str, offset: int, limit: int) -> dict[str, Any]:
        every = self._look().peers
        wanted = text.casefold()
        found = [p for p in every if wanted in _searched(p)] if wanted else list(every)
        if sort != "state":  # in the order of an overview already
            found.sort(key=_BY[sort], reverse=descending)
        elif descending:
            found.reverse()
        page = [json_view.peer(p) for p in found[offset : offset + limit]]
        return {"total": len(every), "matching": len(found), "offset": offset, "peers": page}

    def peer(self, key: PeerKey) -> dict[str, Any] | None:
        shown = next((p for p in self._look().peers if p.peer == key), None)
        f, nothing = self._follower, Balance()
        settled, pending = f.settled_balances.get(key, nothing), f.pending.get(key, nothing)
        if shown is None:
            if not settled.rounds + pending.rounds:
                return None
            shown = PeerOverview(
                key, self._name_of(key), "gone", None, 0.0, settled.micro_credits, pending.micro_credits
            )
        newest = []
        for account in f.newest(64):
            entry = next((e for e in account.entries if e.peer == key), None)
            seen = self._sightings.get(account.record)
            absence = next((a for a in (seen.absent or () if seen else ()) if a.peer == key), None)
            if entry is not None or absence is not None:
                newest.append(
                    {
                        "round": account.round,
                        "record": str(account.record),
                        "final": self._is_final(account),
                        "tokens": entry.tokens if entry else 0,
                        "micro_credits": entry.micro_credits if entry else 0,
                        "absence": None if absence is None else {"reason": absence.reason, "words": absence.words},
                    }
                )
        return {
            "peer": json_view.peer(shown),
            "name": shown.name,
            "tokens": settled.tokens + pending.tokens,
            "rounds": settled.rounds + pending.rounds,
            "newest": newest,
        }

    async def leaderboard(self, by: str, limit: int, after: str) -> list[dict[str, Any]]:
        """Without anybody who keeps standings: by peer, from the balances."""
        if self._standings is not None:
            return await self._standings(by, limit, after)
        if by != "peer":
            return []
        f, nothing = self._follower, Balance()
        every = []
        for key in f.settled_balances.keys() | f.pending.keys():
            settled, pending = f.settled_balances.get(key, nothing), f.pending.get(key, nothing)
            every.append((settled.micro_credits + pending.micro_credits, key, settled, pending))
        every.sort(key=lambda line: (-line[0], line[1]))
        first = next((i + 1 for i, line in enumerate(every) if str(line[1]) == after), 0)
        return [
            {
                "key": str(key),
                "kind": "peer",
                "name": self._name_of(key),
                "team": "",
                "account": None,
                "micro_credits_settled": settled.micro_credits,
                "micro_credits_pending": pending.micro_credits,
                "micro_credits_voided": 0,
                "recent": None,
                "tokens": settled.tokens + pending.tokens,
                "rounds": settled.rounds + pending.rounds,
                "peers": [],
            }
            for _, key, settled, pending in every[first : first + limit]
        ]

    # -- rounds ----------------------------------------------------------------------------------------------

    async def accounts(self, after: int, limit: int) -> list[dict[str, Any]]:
        newest = self._follower.newest(1)
        limit = min(limit, max(1, MAX_LINES // max(1, len(newest[0].entries) if newest else 1)))
        return [json_view.account(a, self._is_final(a), self._name_of) for a in await self._read(after, limit)]

    async def newest_rounds(self, before: int, limit: int) -> dict[str, Any]:
        f = self._follower
        before = min(before, f.head[0] + 1 if f.head else 0)
        first = max(0, before - limit)
        remembered = {int(a.round): a for a in f.newest(limit + len(f.open) + 64) if first <= a.round < before}
        if len(remembered) == before - first:
            found = [remembered[r] for r in range(first, before)]
        else:
            found = await self._read(first - 1, before - first)
        rows = [json_view.round_row(self._round_view(a), self._name_of) for a in reversed(found)]
        return {"rounds": rows, "next": first if first > 0 else None}

    async def round(self, number: int) -> dict[str, Any] | None:
        account = await self._one(number)
        if account is None:
            return None
        announced = dict(self._sightings.announcements(account.record))
        return json_view.round_page(self._round_view(account), announced, self._name_of)

    async def certificate(self, number: int) -> dict[str, Any] | None:
        account = await self._one(number)
        found = None if account is None else await self._view.certificates_after(account.parent, 1)
        if account is None or not found or found[0].digest != account.record:
            return None
        return json_view.certificate(found[0], self._name_of)

    async def _one(self, number: int) -> RoundAccount | None:
        f = self._follower
        found = next((a for a in f.newest(len(f.open) + 64) if a.round == number), None)
        if found is not None:
            return found
        rows = await self._read(number - 1, 1)
        return rows[0] if rows and rows[0].round == number else None

    async def _read(self, after: int, limit: int) -> list[RoundAccount]:
        """Rounds after a number: the ledger's, then those that are not final yet."""
        accounts = await self._ledger.read(lambda ledger: ledger.accounts(after=after, limit=limit))
        at = accounts[-1].round if accounts else after
        return accounts + [a for a in self._follower.open if a.round > at][: limit - len(accounts)]

    def _is_final(self, account: RoundAccount) -> bool:
        settled = self._follower.settled
        return settled is not None and account.round <= settled[0]

    def _round_view(self, account: RoundAccount) -> RoundOverview:
        return round_overview(account, self._sightings.get(account.record), self._is_final(account), self._name_of)

    # -- charts ----------------------------------------------------------------------------------------------

    async def charts(self) -> dict[str, Any]:
        """Made once a round."""
        f = self._follower
        head = f.head[1] if f.head else None
        validated = [] if self._model is None else self._model.validation()
        key = (head, len(self._sightings), len(validated), validated[-1:])
        if self._charts is None or self._charts[0] != key:
            points = [*f.history.points(), *f.open_points()]
            by_round = {p.round: p for p in points} if validated else {}
            validation = []
            for number, loss in validated:
                before = by_round.get(number - 1)  # a state is what the record before it led to
                validation.append(
                    {
                        "round": number,
                        "tokens": before.tokens if before else 0 if number == 0 else None,
                        "seen": before.seen_at if before else None,
                        "loss": json_view.rounded(loss),
                    }
                )
            self._charts = (key, json_view.charts(charts(points), round_charts(list(self._sightings)), validation))
        return self._charts[1]

    # -- the model -------------------------------------------------------------------------------------------

    async def samples(self, before: int, limit: int) -> list[dict[str, Any]]:
        return [] if self._model is None else await self._model.samples(before, limit)

    async def checkpoints(self) -> list[dict[str, Any]]:
        if self._model is not None:
            return await self._model.checkpoints()
        return await asyncio.to_thread(self._archived)

    def checkpoint_file(self, folder: str, name: str) -> Path | None:
        """The path of a file of an archived checkpoint; None when there is none of that name."""
        if not _FOLDER.fullmatch(folder) or name not in FILES:
            return None
        path = self._checkpoints / folder / name
        return path if path.is_file() else None

    def _archived(self) -> list[dict[str, Any]]:
        """What is archived, newest first. Few: an archive keeps a handful."""
        found = []
        for folder in self._checkpoints.glob("round-*"):
            sheet = read_manifest(folder)
            if sheet is None or not _FOLDER.fullmatch(folder.name):
                continue
            files = [
                {"name": name, "bytes": (folder / name).stat().st_size} for name in FILES if (folder / name).is_file()
            ]
            found.append(self._sheet(sheet, files))
        return sorted(found, key=lambda c: -c["round"])

    def _sheet(self, a: ArchivedState, files: list[dict[str, Any]]) -> dict[str, Any]:
        settled = self._follower.settled
        return {
            "round": a.round,
            "state": str(a.state),
            "record": str(a.record),
            "tokens": a.tokens,
            "bytes": sum(f["bytes"] for f in files),
            "files": files,
            "final": a.round == 0 or (settled is not None and a.round <= settled[0] + 1),
            "copied": False,
            "validation_loss": None,
        }


def _searched(p: PeerOverview) -> str:
    device = p.heartbeat.device if p.heartbeat else ""
    return f"{p.name}\n{device}\n{p.peer}\n{p.phase}".casefold()
