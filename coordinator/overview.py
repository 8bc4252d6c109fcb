"""The swarm at one moment, as people are told of it: page, gRPC and metrics. State first, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.credits import Balance
from coordinator.follower import Follower
from coordinator.history import tokens_per_second
from coordinator.peers import PeerBook
from protocol.chain import genesis_digest
from protocol.ids import Digest, PeerKey
from protocol.messages import Heartbeat
from protocol.spec import RunSpec

NEWEST = 20
WORKING = ("training", "exchanging")
_ORDER = {"training": 0, "exchanging": 0, "syncing": 1, "joining": 1, "silent": 2, "observing": 3, "gone": 4}


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer. What it says of itself is for display only; credits are the chain's."""

    peer: PeerKey
    name: str
    phase: str
    heartbeat: Heartbeat | None
    seconds_since: float
    settled: int
    pending: int


@dataclass(frozen=True, slots=True)
class RoundView:
    """One round: who was in, with how many tokens; who trained and was not in (None: nobody looked)."""

    round: int
    record: Digest
    tokens: int
    loss: float
    contributors: tuple[tuple[str, int], ...]
    absent: tuple[str, ...] | None
    final: bool


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that is shown. `round` is the one being trained; `state` is the state digest at its parent's base."""

    name: str
    run: str
    health: str
    words: str
    round: int
    head: Digest
    state: Digest
    state_round: int
    tokens: int
    total_tokens: int
    tokens_per_second: float
    loss: float | None
    working: int
    peers: tuple[PeerView, ...]
    rounds: tuple[RoundView, ...]
    settled: int
    pending: int
    final_round: int | None
    problem: str


class Overlooker:
    """Makes overviews of the parts that know."""

    def __init__(self, spec: RunSpec, follower: Follower, book: PeerBook, name_of: Callable[[PeerKey], str]):
        self._spec = spec
        self._run = spec.run_id
        self._follower = follower
        self._book = book
        self._name_of = name_of
        self._round = -1
        self._moved_at: float | None = None

    def look(self, now: float) -> Overview:
        """The swarm now."""
        f, spec = self._follower, self._spec
        newest = f.newest(NEWEST)
        head = f.head
        training = head[0] + 1 if head else 0
        if training != self._round or self._moved_at is None:
            self._round, self._moved_at = training, now
        peers = self._peers(now)
        working = [p for p in peers if p.phase in WORKING]
        if not working:
            self._moved_at = now  # nobody can be late
        points = [*f.history.points(last=16), *f.open_points()]
        tokens = points[-1].tokens if points else 0
        rate = tokens_per_second(points, now) if f.caught_up else 0.0
        loss = points[-1].loss if points else None
        health, words = self._health(working, training, tokens, loss, rate, now)
        return Overview(
            name=spec.name,
            run=str(self._run),
            health=health,
            words=words,
            round=training,
            head=head[1] if head else genesis_digest(self._run),
            state=newest[0].base_state if newest else spec.genesis.name,
            state_round=newest[0].round if newest else 0,
            tokens=tokens,
            total_tokens=spec.total_tokens,
            tokens_per_second=rate,
            loss=loss,
            working=len(working),
            peers=peers,
            rounds=tuple(self._round_view(a) for a in newest),
            settled=sum(b.micro_credits for b in f.settled_balances.values()),
            pending=sum(b.micro_credits for b in f.pending.values()),
            final_round=f.settled[0] if f.settled else None,
            problem=f.problem,
        )

    def _health(
        self, working: list[PeerView], training: int, tokens: int, loss: float | None, rate: float, now: float
    ) -> tuple[str, str]:
        f, spec = self._follower, self._spec
        if f.problem:
            return "trouble", f"the coordinator cannot follow the chain: {f.problem}"
        if spec.total_tokens and tokens >= spec.total_tokens:
            return (
                "finished",
                f"all {amount(spec.total_tokens)} tokens are trained, in {training} rounds, loss {loss:.2f}",
            )
        if f.ordered is not None:
            return f.ordered
        if not working:
            if training == 0:
                return "waiting", "no peer is training yet"
            return "idle", f"no peer is training; the chain stands at round {training}"
        who = f"{len(working)} peer{'s' if len(working) != 1 else ''} training"
        if not f.caught_up:
            return "catching up", f"{who}; the coordinator has read the chain up to round {training} and goes on"
        r = spec.round
        late = now - (self._moved_at or now)
        if late > r.max_seconds + r.exchange_seconds + r.patience_seconds:
            return "stalled", f"{who}, but round {training} has not ended for {duration(late)}: the peers' logs say why"
        newest = f.newest(4)
        recent = {a.record for a in newest} | {a.parent for a in newest} | {genesis_digest(self._run)}
        astray = [p for p in working if self._astray(p, training, recent)]
        if 3 * len(astray) > len(working):
            names = ", ".join(p.name for p in astray[:5])
            return "split", f"{len(astray)} of {len(working)} training peers are on another chain or behind: {names}"
        if loss is None:
            return "healthy", f"{who} in round 0; nothing is accepted yet"
        speed = f", {amount(rate)} tokens/s" if rate else ""
        return "healthy", f"{who}, round {training}, loss {loss:.2f}{speed}"

    @staticmethod
    def _astray(p: PeerView, training: int, recent: set[Digest]) -> bool:
        """On another branch, or more than two rounds behind. One that is ahead, this coordinator has yet to hear of."""
        h = p.heartbeat
        if h is None or h.round > training:
            return False
        return h.round < training - 2 or h.head not in recent

    def _peers(self, now: float) -> tuple[PeerView, ...]:
        """Everyone heard of or credited; those who train first, then by credits."""
        f = self._follower
        views, nothing = [], Balance()
        for peer in dict.fromkeys([*self._book.keys(), *f.settled_balances, *f.pending]):
            known = self._book.get(peer)
            phase = self._book.phase(known, now)
            heartbeat, since = (known.heartbeat, now - known.heard_at) if known else (None, 0.0)
            settled = f.settled_balances.get(peer, nothing).micro_credits
            pending = f.pending.get(peer, nothing).micro_credits
            if phase in ("gone", "observing") and not settled + pending:
                continue  # one that earned nothing and is gone is no news; an observer is no trainer
            views.append(PeerView(peer, self._name_of(peer), phase, heartbeat, max(0.0, since), settled, pending))
        views.sort(key=lambda v: (_ORDER.get(v.phase, 5), -(v.settled + v.pending), v.peer))
        return tuple(views)

    def _round_view(self, account) -> RoundView:
        absent = self._follower.absent(account.record)
        settled = self._follower.settled
        return RoundView(
            account.round,
            account.record,
            account.tokens,
            account.loss,
            tuple((self._name_of(e.peer), e.tokens) for e in account.entries),
            None if absent is None else tuple(self._name_of(p) for p in absent),
            settled is not None and account.round <= settled[0],
        )


def amount(number: float) -> str:
    """8123 -> "8.1k": for people."""
    for top, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= top:
            return f"{number / top:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """75 -> "1 min": for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
