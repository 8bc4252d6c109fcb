"""Totals and recent averages of peers, accounts and teams, kept up to date as rounds become final."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from coordinator.errors import RefusedError, TooManyError
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger import BindingRow, Ledger
from coordinator.ledger_thread import LedgerThread
from coordinator.names import ChosenNames
from coordinator.tasks import finish
from protocol.errors import ProtocolError
from protocol.ids import PeerKey, RunId
from protocol.ledger.credits import PeerBalances
from protocol.ledger.statements import AccountBinding, open_binding
from protocol.messages import CLOCK_TOLERANCE

log = logging.getLogger(__name__)

HALF_LIFE = 7 * 86_400.0
"""Seconds in which a recent average halves when nothing is earned."""

FORGET = 10 * HALF_LIFE
"""Seconds from which recent averages are read at a start: older credits weigh less than a thousandth."""

PAGE = 500
MAX_PEERS_OF_ACCOUNT = 1000

MAX_BINDINGS_OF_PEER = 50
"""Consents of a peer that are stored. An account's newer statement around one of them replaces its older one."""

HOUR = 3600.0
"""Seconds to which the ledger's times of credits are rounded."""

FORGOTTEN_AT_ONCE = 1000
"""Peers whose bindings are deleted in one transaction."""


Grouping = Literal["peer", "account", "team"]
Earned = list[tuple[PeerKey, float, int]]
"""Peers, times (unix seconds) and micro-credits."""


@dataclass(frozen=True, slots=True)
class CreditSummary:
    """Totals of a peer, an account or a team, in micro-credits; `recent` is micro-credits a day.

    `account` is the one to which a peer is bound, `peers` are those of an account.
    """

    key: str
    kind: Grouping
    name: str
    team: str
    settled: int
    pending: int
    voided: int
    recent: int
    tokens: int
    rounds: int
    account: PeerKey | None = None
    peers: tuple[PeerKey, ...] = ()


class RecentAverageCredit:
    """Exponential means of credits a day, by key, like BOINC's recent average credit.

    See https://github.com/BOINC/boinc, lib/util.cpp (update_average), and
    https://boinc.berkeley.edu/wiki/Computation_credit. With the half-life h, credit that was earned a time t ago weighs

        ln 2 / h * 2**(-t / h)

    The integral of this weight is 1: a constant c credits a day have the average c. BOINC spreads an amount over the
    time since the previous one, which is the same for intervals much shorter than h (it uses this form itself for the
    shortest ones). Here an amount counts at the time when its round became final, so the order of adding does not
    matter.
    """

    def __init__(self):
        self._means: dict[PeerKey, tuple[float, float]] = {}  # key -> micro-credits a day, at a time (unix seconds)
        self.newest = 0.0
        """The latest time at which an amount was added."""

    def add(self, key: PeerKey, micro_credits: int, at: float) -> None:
        """Add an amount (negative: taken back) at a time in unix seconds, which may be in the past."""
        self.newest = max(self.newest, at)
        mean, then = self._means.get(key, (0.0, at))
        gain = micro_credits * math.log(2) / (HALF_LIFE / 86_400)
        if at >= then:
            self._means[key] = (mean * 0.5 ** ((at - then) / HALF_LIFE) + gain, at)
        else:
            self._means[key] = (mean + gain * 0.5 ** ((then - at) / HALF_LIFE), then)

    def of(self, key: PeerKey, now: float) -> float:
        """Return micro-credits a day at a time (unix seconds)."""
        mean, at = self._means.get(key, (0.0, now))
        return max(0.0, mean * 0.5 ** (max(0.0, now - at) / HALF_LIFE))


@dataclass(slots=True)
class _Account:
    team: str
    time: int
    peers: set[PeerKey]


class Leaderboard:
    """The leaderboard. `load`, then `load_recent` in the background, and `refresh` when the ledger has grown.

    Totals are those of `IndexedChain.balances`; only names, teams and recent averages are kept here. Used on the event
    loop.
    """

    def __init__(
        self,
        run: RunId,
        ledger: LedgerThread,
        chain: IndexedChain,
        name_of: Callable[[PeerKey], str],
        is_admitted: Callable[[PeerKey], bool],
        now: Callable[[], float],
    ):
        """Prepare; only peers for which `is_admitted` returns True are bound, and stay so without credits."""
        self._run = run
        self._ledger = ledger
        self._name_of = name_of
        self._chain = chain
        self._is_admitted = is_admitted
        self._now = now
        self.rounds = 0
        """Final rounds that have been read."""

        self._unread = 0
        """Rounds before this one are not in the recent averages yet."""
        self._recent = RecentAverageCredit()
        self._reading_recent = asyncio.Lock()
        self._bound: dict[PeerKey, AccountBinding] = {}
        self._accounts: dict[PeerKey, _Account] = {}
        self._names = ChosenNames()
        self._consents: dict[PeerKey, set[tuple[PeerKey, int]]] = {}
        """The accounts to which each peer has consented, and its times."""
        self._teams: dict[str, list[PeerKey]] | None = None
        self._ranked: dict[Grouping, tuple[list[tuple[str, str]], dict[str, int]]] = {}
        """The keys of each grouping with their teams, those with most credits first; and the place of each key."""
        self._ranked_for: Mapping[PeerKey, PeerBalances] = {}
        """The balances by which `_ranked` was sorted."""

        self._binding = asyncio.Lock()

    async def load(self) -> None:
        """Read the bindings of peers to accounts. Raises LedgerError."""
        self.rounds, rows = await self._ledger.read(lambda ledger: (ledger.size(), ledger.bindings()))
        self._unread = self.rounds
        for b in await asyncio.to_thread(_verified, rows, self._run):
            self._accept(b)

    async def load_recent(self) -> None:
        """Read the credits of recent weeks, up to where `load` read. Raises LedgerError.

        It reads in pieces, newest first, so that a long run delays nobody.
        """
        async with self._reading_recent:
            async for start, earned in self._recently_earned(self._unread):
                self._add(self._recent, earned)
                self._unread = start

    async def _recently_earned(self, end: int) -> AsyncIterator[tuple[int, Earned]]:
        """Yield what was earned in recent weeks before round number `end`, and where each piece begins."""
        since = int((self._now() - FORGET) * 1000)
        first = await self._ledger.read(lambda ledger: ledger.first_since(since))
        while end > first:
            start = max(first, end - PAGE)
            yield start, await self._ledger.read(lambda ledger, a=start, b=end: ledger.earned(a, b))
            end = start

    async def _read_again(self) -> None:
        """Read the recent credits once more, after the clock was set back: what was added meanwhile has decayed them.

        Raises LedgerError; then nothing is changed.
        """
        async with self._reading_recent:
            recent = RecentAverageCredit()
            async for _, earned in self._recently_earned(self.rounds):
                self._add(recent, earned)
            self._recent, self._unread = recent, 0

    def _add(self, recent: RecentAverageCredit, earned: Earned) -> None:
        """Add amounts at their times, the latest of which is now: a clock that was ahead wrote times to come."""
        latest = self._latest()
        for peer, at, micro_credits in earned:
            recent.add(peer, micro_credits, min(at, latest))

    def _latest(self) -> float:
        """Return the present as the ledger rounds it: the middle of the hour."""
        return (self._now() // HOUR + 0.5) * HOUR

    async def refresh(self) -> None:
        """Read the new rounds, and what they void of earlier ones. Raises LedgerError."""
        if self._recent.newest > self._latest() + HOUR:
            await self._read_again()
        while True:
            first = self.rounds

            def read(ledger: Ledger, first: int = first) -> tuple[int, Earned]:
                end = max(first, min(ledger.size(), first + PAGE))  # fewer if the database has lost commits
                return end, ledger.earned(first, end)

            self.rounds, earned = await self._ledger.read(read)
            self._add(self._recent, earned)
            if self.rounds < first + PAGE:
                return

    async def bind(self, sent: bytes) -> int:
        """Store a binding that both signed; return how many peers the account has then. It may be repeated.

        Raises MalformedError, SignatureError, AdmissionError, RefusedError, TooManyError, LedgerError.
        """
        b = open_binding(sent, self._run)
        self._check(b)
        return await finish(self._bind(b))  # a stored binding counts here, though the caller goes away

    async def _bind(self, b: AccountBinding) -> int:
        async with self._binding:
            self._check(b)
            known = self._bound.get(b.peer)
            if known is None or known.encoded != b.encoded:
                row = BindingRow(b.peer, b.account, b.peer_time, b.encoded)
                await self._ledger.run(lambda ledger: ledger.add_binding(row))
                self._accept(b)  # only when it is on disk: a repetition would be answered as if it were
            return len(self._accounts[b.account].peers)

    async def forget_absent(self) -> None:
        """Forget the bindings of peers whose admission is forgotten and that never earned anything. Raises LedgerError.

        Keys cost nothing: without this, strangers fill the table of accounts for ever.
        """
        absent = [p for p in self._bound if not self._is_kept(p)]
        for i in range(0, len(absent), FORGOTTEN_AT_ONCE):
            async with self._binding:  # none of them is bound meanwhile
                gone = [p for p in absent[i : i + FORGOTTEN_AT_ONCE] if not self._is_kept(p)]
                await self._ledger.run(lambda ledger, gone=gone: ledger.forget_bindings(gone))
                for peer in gone:
                    del self._consents[peer]
                    self._leave(self._bound.pop(peer))
                self._ranked, self._teams = {}, None

    def _is_kept(self, peer: PeerKey) -> bool:
        return self._is_admitted(peer) or peer in self._chain.balances or self._chain.has_credits(peer)

    def _check(self, b: AccountBinding) -> None:
        """Raise RefusedError or TooManyError if a binding must not be stored."""
        now = self._now()
        if max(b.precedence) > now + CLOCK_TOLERANCE:
            ahead = max(b.precedence) - now
            raise RefusedError(f"your clock is {ahead:.0f} s ahead of the coordinator's: set it, then bind again")
        known = self._bound.get(b.peer)
        if known is not None and known.encoded == b.encoded:
            return
        if not self._is_admitted(b.peer):
            raise RefusedError(f"peer {b.peer.short} is not known here: join this run again, then bind")
        if known is not None and b.precedence <= known.precedence:
            raise RefusedError(f"peer {b.peer.short} has signed something newer: set your clock right, then bind again")
        account = self._accounts.get(b.account)
        if account is not None and b.peer not in account.peers and len(account.peers) >= MAX_PEERS_OF_ACCOUNT:
            raise TooManyError(f"an account has at most {MAX_PEERS_OF_ACCOUNT} peers: make another")
        consents = self._consents.get(b.peer, set())
        if (b.account, b.peer_time) not in consents and len(consents) >= MAX_BINDINGS_OF_PEER:
            raise TooManyError(f"peer {b.peer.short} was bound {MAX_BINDINGS_OF_PEER} times: that is all it can be")

    def _accept(self, b: AccountBinding) -> None:
        self._consents.setdefault(b.peer, set()).add((b.account, b.peer_time))
        old = self._bound.get(b.peer)
        if old is not None and b.precedence <= old.precedence:
            return
        if old is not None and old.account != b.account:
            self._leave(old)
        self._bound[b.peer] = b
        account = self._accounts.setdefault(b.account, _Account(b.team, b.account_time, set()))
        account.peers.add(b.peer)
        if b.account_time >= account.time:
            account.team, account.time = b.team, b.account_time
            self._names.set(b.account, b.name)
        self._ranked, self._teams = {}, None

    def _leave(self, b: AccountBinding) -> None:
        """Take a peer out of its account; an account without peers is gone."""
        peers = self._accounts[b.account].peers
        peers.discard(b.peer)
        if not peers:
            del self._accounts[b.account]
            self._names.set(b.account, "")

    def of(self, key: PeerKey) -> CreditSummary:
        """Return the totals of an account or a peer with this key; all zero for a key that is unknown."""
        return self._account_view(key) if key in self._accounts else self._peer_view(key)

    def leaderboard(self, by: Grouping, limit: int, after: str = "", team: str = "") -> list[CreditSummary]:
        """Return those with most credits first, after the row of a key; none after a key that is unknown.

        Only accounts and teams with a peer that has earned something are listed. With `team`, only that team, its
        accounts, or their peers.
        """
        if self._ranked_for is not self._chain.balances:
            self._ranked, self._ranked_for, self._teams = {}, self._chain.balances, None
        if by not in self._ranked:
            ranked = [(key, of) for _, key, of in sorted(self._standings(by))]
            self._ranked[by] = (ranked, {key: i for i, (key, _) in enumerate(ranked)})
        ranked, places = self._ranked[by]
        start = 0 if not after else places.get(after, len(ranked)) + 1
        found = (key for key, of in islice(ranked, start, None) if not team or of == team)
        return [self._view(by, key) for key in islice(found, limit)]

    def _standings(self, by: Grouping) -> Iterator[tuple[int, str, str]]:
        """Yield the credits of each in a grouping (negative), its key, and its team."""
        earned = {p: b.settled.micro_credits + b.pending.micro_credits for p, b in self._chain.balances.items()}
        if by == "peer":
            for peer, credits in earned.items():
                yield -credits, str(peer), self._team_of(peer)
        elif by == "account":
            for key in self._earning():
                account = self._accounts[key]
                yield -sum(earned.get(p, 0) for p in account.peers), str(key), account.team
        else:
            for team, peers in self._in_teams().items():
                yield -sum(earned.get(p, 0) for p in peers), team, team

    def _earning(self) -> set[PeerKey]:
        """Return the accounts with a peer that has earned something: strangers make any number of others."""
        return {self._bound[p].account for p in self._chain.balances if p in self._bound}

    def _view(self, by: Grouping, key: str) -> CreditSummary:
        if by == "team":
            return self._team_view(key)
        return self._peer_view(PeerKey.parse(key)) if by == "peer" else self._account_view(PeerKey.parse(key))

    def _in_teams(self) -> dict[str, list[PeerKey]]:
        """Return the peers of each team, of its accounts that have earned something; collected once for all teams."""
        if self._teams is None:
            self._teams = {}
            for a in (self._accounts[key] for key in self._earning()):
                if a.team:
                    self._teams.setdefault(a.team, []).extend(a.peers)
        return self._teams

    def _peer_view(self, peer: PeerKey) -> CreditSummary:
        bound = self._bound.get(peer)
        account = None if bound is None else bound.account
        return self._sum(str(peer), "peer", self._name_of(peer), self._team_of(peer), (peer,), account)

    def _team_of(self, peer: PeerKey) -> str:
        """Return the team of a peer's account ("": none)."""
        bound = self._bound.get(peer)
        return "" if bound is None else self._accounts[bound.account].team

    def _account_view(self, key: PeerKey) -> CreditSummary:
        a = self._accounts[key]
        return self._sum(str(key), "account", self._names.shown(key), a.team, sorted(a.peers))

    def _team_view(self, team: str) -> CreditSummary:
        return self._sum(team, "team", team, team, self._in_teams()[team])

    def _sum(
        self, key: str, kind: Grouping, name: str, team: str, peers: Iterable[PeerKey], account: PeerKey | None = None
    ) -> CreditSummary:
        peers, now, nothing = tuple(peers), self._now(), PeerBalances()
        found = [self._chain.balances.get(p, nothing) for p in peers]
        return CreditSummary(
            key, kind, name, team,
            settled=sum(s.settled.micro_credits for s in found),
            pending=sum(s.pending.micro_credits for s in found),
            voided=sum(s.voided.micro_credits for s in found),
            recent=round(sum(self._recent.of(p, now) for p in peers)),
            tokens=sum(s.settled.tokens + s.pending.tokens for s in found),
            rounds=sum(s.settled.rounds + s.pending.rounds for s in found),
            account=account,
            peers=peers if kind == "account" else (),
        )  # fmt: skip


def _verified(rows: Sequence[BindingRow], run: RunId) -> list[AccountBinding]:
    """Return the stored bindings that verify: tens of thousands take seconds."""
    found = []
    for row in rows:
        try:
            found.append(open_binding(row.encoded, run))
        except ProtocolError as e:
            log.error("a binding of peer %s in the database does not verify, and is left out: %s", row.peer.short, e)
    return found
