"""The answers of the page and its API, as JSON values: read-only."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.audit_index import AuditCase
from coordinator.checkpoints.archive import FILES
from coordinator.checkpoints.archiver import CheckpointArchiver
from coordinator.checkpoints.settings import AboutTable
from coordinator.credits.leaderboard import Grouping, Leaderboard
from coordinator.directives import DirectiveEffects
from coordinator.history import charts
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger_thread import LedgerThread
from coordinator.limits import ConcurrencyLimit
from coordinator.overview import Overview, PeerOverview, RoundOverview, round_overview
from coordinator.page import json_view, pictures
from coordinator.page.feed import Feed
from coordinator.page.run_card import run_card
from coordinator.round_observations import RoundObservations
from coordinator.swarm import SwarmView
from protocol.ids import Digest, PeerKey, Round
from protocol.invite import Invite
from protocol.ledger.credits import Balance, RoundCredits
from protocol.spec import RunSpec

NEWEST_OF_PEER = 64
"""Newest rounds that the view of one peer covers."""

AUDITS_OF_PEER = 10
"""Cases in the view of one peer."""

MAX_UNDECIDED = 25
"""Undecided cases in one answer."""

MAX_READS = 8
"""Pages of old rounds that are read from the ledger at once."""

MAX_CHAIN_READS = 2
"""Old certificates that are read from the chain at once: the coordinator's own reads wait behind them."""

_FOLDER = re.compile(r"round-[0-9]{6,12}")

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


@dataclass(eq=False, kw_only=True)
class PageApi:
    """The source of every answer in `coordinator.page.endpoints`; methods return None where there is no such thing."""

    spec: RunSpec
    about: AboutTable
    published_invite: Callable[[], Invite | None]
    feed: Feed
    overview: Callable[[], Overview]
    chain: IndexedChain
    directives: DirectiveEffects
    observations: RoundObservations
    ledger: LedgerThread
    view: SwarmView
    name_of: Callable[[PeerKey], str]
    credits: Leaderboard
    archiver: CheckpointArchiver
    metrics_text: Callable[[], Awaitable[bytes]]
    now: Callable[[], float]
    _peers: tuple[Overview, dict[tuple[str, bool], list[tuple[str, PeerOverview]]]] | None = field(
        default=None, init=False
    )
    _charts: tuple[object, dict[str, Any]] | None = field(default=None, init=False)
    _cases: tuple[object, dict[tuple[Digest, Round | None], dict[str, Any]]] | None = field(default=None, init=False)
    """The cases that were shown since the newest record, by update and deciding round: each has up to 66 reports."""
    _reads: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit(MAX_READS, MAX_READS), init=False)
    _chain_reads: ConcurrencyLimit = field(
        default_factory=lambda: ConcurrencyLimit(MAX_CHAIN_READS, MAX_CHAIN_READS), init=False
    )

    @property
    def head(self) -> Hashable:
        """The key of everything that is shown of rounds: the newest record, and the newest final one."""
        return self.chain.head, self.chain.posted

    def status(self) -> dict[str, Any]:
        return json_view.status(self.overview(), self.name_of, self.now())

    def event(self) -> dict[str, Any]:
        return json_view.event(self.overview(), self.now())

    def run(self) -> dict[str, Any]:
        """Return the run in short: model, data, settings, and how to take part."""
        first = self.chain.history.first or next(iter(self.chain.points(0)), None)
        began = first.seen_at if first is not None and first.round == 0 else None
        return run_card(self.spec, None if began is None else round(began), self.published_invite(), self.about)

    def peers(self, sort: str, descending: bool, text: str, offset: int, limit: int) -> dict[str, Any]:
        every, wanted = self._peers_by(sort, descending), text.casefold()
        found = [p for searched, p in every if wanted in searched]
        page = [json_view.peer(p, self.name_of) for p in found[offset : offset + limit]]
        return {"total": len(every), "matching": len(found), "offset": offset, "peers": page}

    def _peers_by(self, sort: str, descending: bool) -> list[tuple[str, PeerOverview]]:
        """Return the peers in this order, each with its text for searches: made once for an overview."""
        o = self.overview()
        if self._peers is None or self._peers[0] is not o:
            self._peers = (o, {("state", False): [(_searched(p), p) for p in o.peers]})  # an overview's own order
        orders = self._peers[1]
        if (sort, descending) not in orders:
            every = orders["state", False]
            orders[sort, descending] = (
                every[::-1] if sort == "state"
                else sorted(every, key=lambda found: _BY[sort](found[1]), reverse=descending)
            )  # fmt: skip
        return orders[sort, descending]

    def peer(self, key: PeerKey) -> dict[str, Any] | None:
        if (shown := self._peer_overview(key)) is None:
            return None
        chain, newest = self.chain, []
        settled, pending = self._balances(key)
        for credits in chain.newest(NEWEST_OF_PEER):
            entry = next((e for e in credits.lines if e.peer == key), None)
            seen = self.observations.get(credits.record)
            absence = next((a for a in (seen.absent or () if seen else ()) if a.peer == key), None)
            if entry is not None or absence is not None:
                newest.append(
                    {
                        "round": credits.round,
                        "record": str(credits.record),
                        "final": self.chain.is_final(credits.round),
                        "tokens": entry.tokens if entry else 0,
                        "micro_credits": entry.micro_credits if entry else 0,
                        "absence": None if absence is None else json_view.absence(absence),
                    }
                )
        return {
            "peer": json_view.peer(shown, self.name_of),
            "name": shown.name,
            "tokens": settled.tokens + pending.tokens,
            "rounds": settled.rounds + pending.rounds,
            "newest": newest,
            "audits": [self._case(c) for c in chain.audits.of_peer(key)[:AUDITS_OF_PEER]],
        }

    def peer_badge(self, key: PeerKey) -> bytes | None:
        if (shown := self._peer_overview(key)) is None:
            return None
        settled, pending = self._balances(key)
        return pictures.volunteer_badge(self.name_of(key), shown.settled, settled.rounds + pending.rounds)

    def account_badge(self, key: PeerKey) -> bytes | None:
        found = self.credits.of(key)
        if found.kind != "account":
            return None
        return pictures.volunteer_badge(found.name, found.settled, found.rounds)

    def _peer_overview(self, key: PeerKey) -> PeerOverview | None:
        """Return a peer of the overview, or one that is gone and of which the chain has rounds or audits."""
        shown = next((p for p in self.overview().peers if p.peer == key), None)
        settled, pending = self._balances(key)
        if shown is None and (settled.rounds or pending.rounds or self.chain.audits.of_peer(key)):
            return PeerOverview(
                key, self.name_of(key), "gone", None, 0.0, settled.micro_credits, pending.micro_credits,
                conviction=self.chain.audits.conviction_of(key),
            )  # fmt: skip
        return shown

    def _balances(self, key: PeerKey) -> tuple[Balance, Balance]:
        """Return a peer's settled and pending balance."""
        nothing = Balance()
        return self.chain.settled.get(key, nothing), self.chain.pending.get(key, nothing)

    def audits(self, offset: int, limit: int) -> dict[str, Any]:
        """Return decided cases, newest first, and the newest undecided ones."""
        decided, undecided = self.chain.audits.decided, self.chain.audits.undecided
        return {
            "total": len(decided),
            "offset": offset,
            "decided": [self._case(c) for c in decided[offset : offset + limit]],
            "undecided_total": len(undecided),
            "undecided": [self._case(c) for c in undecided[:MAX_UNDECIDED]],
        }

    def _case(self, case: AuditCase) -> dict[str, Any]:
        if self._cases is None or self._cases[0] != self.head:
            self._cases = self.head, {}
        shown, name = self._cases[1], (case.update, case.stated)
        if name not in shown:
            final = case.outcome is not None and self.chain.is_final(case.outcome.stated)
            shown[name] = json_view.audit_case(case, final, self.name_of)
        return shown[name]

    def leaderboard(self, by: Grouping, limit: int, after: str, team: str) -> list[dict[str, Any]]:
        """Return rows by "peer", "account" or "team", those with most credits first, after the row of a key."""
        return [json_view.credit_summary(c) for c in self.credits.leaderboard(by, limit, after, team)]

    async def newest_rounds(self, before: int, limit: int) -> dict[str, Any]:
        chain = self.chain
        before = min(before, chain.head[0] + 1 if chain.head else 0)
        first = max(0, before - limit)
        remembered = {int(c.round): c for c in chain.remembered if first <= c.round < before}
        if len(remembered) == before - first:
            found = [remembered[r] for r in range(first, before)]
        else:
            found = await self._read(first - 1, before - first)
        rows = [json_view.round_row(self._round_view(a), self.name_of) for a in reversed(found)]
        return {"rounds": rows, "next": first if first > 0 else None}

    async def round(self, number: int) -> dict[str, Any] | None:
        credits = await self._one(number)
        if credits is None:
            return None
        announced = dict(self.observations.announcements(credits.record))
        return json_view.round_page(self._round_view(credits), announced, self.name_of)

    async def certificate(self, number: int) -> dict[str, Any] | None:
        """Return a round's certificate. Raises TooManyError."""
        if (credits := await self._one(number)) is None:
            return None
        free = self._chain_reads.take(None)
        try:
            found = await self.view.certificates_after(credits.parent, 1)
        finally:
            free()
        if not found or found[0].digest != credits.record:
            return None
        return json_view.certificate(found[0], self.name_of)

    async def _one(self, number: int) -> RoundCredits | None:
        found = next((c for c in self.chain.remembered if c.round == number), None)
        if found is not None:
            return found
        rows = await self._read(number - 1, 1)
        return rows[0] if rows and rows[0].round == number else None

    async def _read(self, after: int, limit: int) -> list[RoundCredits]:
        """Return rounds after a number: posted ones, then open ones. Raises TooManyError."""
        free = self._reads.take(None)
        try:
            rounds = await self.ledger.read(lambda ledger: ledger.round_credits(after=after, limit=limit))
        finally:
            free()
        at = rounds[-1].round if rounds else after
        return rounds + [c for c in self.chain.open if c.round > at][: limit - len(rounds)]

    def _round_view(self, credits: RoundCredits) -> RoundOverview:
        return round_overview(
            credits, self.observations.get(credits.record), self.chain.is_final(credits.round), self.name_of
        )

    def charts(self) -> dict[str, Any]:
        """Return all charts, made once a round."""
        chain = self.chain
        head = chain.head[1] if chain.head else None
        validated = self.archiver.validation_points()
        marks = tuple(self.directives.marks)
        key = (head, len(self.observations), len(validated), validated[-1:], marks)
        if self._charts is None or self._charts[0] != key:
            points = chain.points()
            by_round = {p.round: p for p in points} if validated else {}
            validation = []
            for number, loss in validated:
                before = by_round.get(number - 1)  # the record before a state led to it
                validation.append(
                    {
                        "round": number,
                        "tokens": before.tokens if before else 0 if number == 0 else None,
                        "seen_at": before.seen_at if before else None,
                        "loss": json_view.rounded(loss),
                    }
                )
            rounds = json_view.round_charts(list(self.observations))
            self._charts = (key, json_view.charts(charts(points), rounds, validation, marks))
        return self._charts[1]

    def samples(self, before: int, limit: int) -> list[dict[str, Any]]:
        """Return texts of rounds before `before`, the newest round first."""
        return self.archiver.samples(before, limit)

    async def checkpoints(self) -> list[dict[str, Any]]:
        """Return the archived states, newest first."""
        return await asyncio.to_thread(self.archiver.checkpoints)  # it reads each folder

    def checkpoint_file(self, folder: str, name: str) -> Path | None:
        if not _FOLDER.fullmatch(folder) or name not in FILES:
            return None
        path = self.archiver.archive.folder / folder / name
        return path if path.is_file() else None


def _searched(p: PeerOverview) -> str:
    device = p.heartbeat.device if p.heartbeat else ""
    return f"{p.name}\n{device}\n{p.peer}\n{p.phase}".casefold()
