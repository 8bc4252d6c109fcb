"""The swarm at one moment, for people: page, gRPC and metrics. The state comes first, as a message."""

from __future__ import annotations

import time
from collections import Counter as CountOf
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from coordinator.alerts.tracker import Alert
from coordinator.audit_index import AuditCase
from coordinator.chain_indexer import ChainIndexer
from coordinator.directives import DirectiveEffects
from coordinator.history import tokens_per_second
from coordinator.indexed_chain import IndexedChain
from coordinator.non_participation import NonParticipation
from coordinator.peer_registry import PeerRegistry, TrackedPeer
from coordinator.round_observations import RoundObservation, RoundObservations, TypicalDurations
from coordinator.swarm import RestingState
from protocol.chain import genesis_digest
from protocol.ids import Digest, PeerKey
from protocol.ledger.credits import Balance, RoundCredits
from protocol.messages import TRAINING_PHASES, Heartbeat
from protocol.spec import RunSpec, is_total_reached
from protocol.units import count, duration

NEWEST = 20
MAX_ASKED = 8
"""Names of peers that are to come again."""

_ORDER = {
    "training": 0, "exchanging": 0, "paused": 0, "syncing": 1, "joining": 1, "resting": 2, "silent": 2, "observing": 3,
    "gone": 4, "banned": 5, "barred": 5,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeerOverview:
    """One peer. Its own reports are for display only; credits follow from the chain.

    `since` is when it began what it does now (unix seconds). For a silent or gone one it is when it was last received,
    or when its last observed round was certified. `up` and `down` are bytes a second. `last_round` is the newest round
    it was in, of those in memory. `absence` is why it is not in the newest one. `conviction` is the newest case that
    convicted it, of those that are kept.
    """

    peer: PeerKey
    name: str
    phase: str
    heartbeat: Heartbeat | None
    seconds_since: float
    settled: int
    pending: int
    since: float | None = None
    up: float = 0.0
    down: float = 0.0
    last_round: int | None = None
    absence: NonParticipation | None = None
    conviction: AuditCase | None = None


@dataclass(frozen=True, slots=True)
class RoundOverview:
    """One round: its credits, its observation, and the names of absent peers (None: nothing was observed)."""

    credits: RoundCredits
    observed: RoundObservation | None
    absent: tuple[str, ...] | None
    final: bool


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that is shown.

    `round` is the one being trained; `state` is the newest state digest that the chain names, or the archived last one
    of a run that is over or paused. `tokens_with_voided` are `tokens` and those that were voided later.
    """

    name: str
    run: str
    health: str
    message: str
    round: int
    head: Digest
    state: Digest
    state_round: int
    tokens: int
    tokens_with_voided: int
    total_tokens: int
    tokens_per_second: float
    loss: float | None
    training: int
    peers: tuple[PeerOverview, ...]
    rounds: tuple[RoundOverview, ...]
    settled: int
    pending: int
    final_round: int | None
    problem: str
    next_round_seconds: float | None
    validation_round: int | None = None
    """Round of the newest evaluated state; its loss is None if the model's output was not finite."""
    validation_loss: float | None = None
    archive_problem: str = ""
    """Why states are not archived, copied or evaluated; empty when all is well."""
    missing_state: str = ""
    """Why the last state of a run that is over or paused is not archived, and who can help; empty otherwise."""
    diverged: tuple[str, ...] = ()
    """Names of peers that report another state than the chain names, or, at the head, than the majority."""

    alerts: tuple[Alert, ...] = ()
    convictions: tuple[AuditCase, ...] = ()
    """The newest cases that convicted somebody, newest first: at most NEWEST."""

    @property
    def over(self) -> str:
        """How the run ended, in words; empty while it goes on or is paused."""
        return {"finished": f"finished: {self.message}", "ended": self.message}.get(self.health, "")

    @property
    def is_halted(self) -> bool:
        """True while the run is paused and no peer works at the open round: this time is not part of the round."""
        return self.health == "paused" and not self.training


@dataclass(eq=False)
class OverviewBuilder:
    """Builds overviews from the coordinator's parts."""

    spec: RunSpec
    chain: IndexedChain
    indexer: ChainIndexer
    directives: DirectiveEffects
    registry: PeerRegistry
    observations: RoundObservations
    name_of: Callable[[PeerKey], str]
    alerts: Callable[[], tuple[Alert, ...]]
    updates_problem: Callable[[], str]
    resting_state: Callable[[], RestingState | None]
    rival: Callable[[], str]
    """Returns the address publisher's problem."""
    monotonic: Callable[[], float] = time.monotonic
    _last_rounds: tuple[Digest | None, dict[PeerKey, RoundCredits]] = field(default=(None, {}), init=False)
    _rounds: dict[Digest, RoundOverview] = field(default_factory=dict, init=False)
    _round: int = field(default=-1, init=False)
    _moved_at: float | None = field(default=None, init=False)

    def build(self, now: float) -> Overview:
        """Return the swarm as it is now (unix seconds)."""
        chain, spec = self.chain, self.spec
        newest = chain.newest(NEWEST)
        head = chain.head
        training = chain.training_round
        if training != self._round or self._moved_at is None:
            self._round, self._moved_at = training, self.monotonic()
        peers = self._peers(now)
        working = [p for p in peers if p.phase in TRAINING_PHASES]
        if not working:
            self._moved_at = self.monotonic()  # nobody can be late
        points = chain.points(last=16)
        tokens = chain.progress
        goes_on = bool(working) and not is_total_reached(spec.total_tokens, tokens)
        rate = tokens_per_second(points, now) if self.indexer.caught_up and goes_on else 0.0
        loss = points[-1].loss if points else None
        due = self._next_round(working, head[1] if head else genesis_digest(self.spec.run_id), now)
        health, message = self._health(working, training, tokens, loss, rate, due)
        last = self.resting_state()
        if missing := self._missing_state(last, now):
            message += f"; {missing}"
        state, state_round = (newest[0].base_state, newest[0].round) if newest else (spec.genesis.name, 0)
        if last is not None and last.state is not None:
            state, state_round = last.state, last.round
        return Overview(
            name=spec.name,
            run=str(self.spec.run_id),
            health=health,
            message=message,
            round=training,
            head=head[1] if head else genesis_digest(self.spec.run_id),
            state=state,
            state_round=state_round,
            tokens=tokens,
            tokens_with_voided=points[-1].tokens if points else 0,
            total_tokens=spec.total_tokens,
            tokens_per_second=rate,
            loss=loss,
            training=len(working),
            peers=peers,
            rounds=self._round_views(newest),
            settled=chain.settled_micro_credits,
            pending=sum(b.micro_credits for b in chain.pending.values()),
            final_round=chain.posted[0] if chain.posted else None,
            problem=self.indexer.problem or self.rival(),
            missing_state=missing,
            next_round_seconds=due if health == "healthy" else None,
            diverged=self._diverged(working),
            alerts=self.alerts(),
            convictions=tuple(islice((c for c in chain.audits.decided if c.is_conviction), NEWEST)),
        )

    def _missing_state(self, last: RestingState | None, now: float) -> str:
        """Return who must come again so that the last state is archived; "" when it is, or while the run goes on."""
        if last is None or last.state is not None:
            return ""
        text = f"the last state, of round {last.round}, is not archived"
        away = ("silent", "gone", "resting")
        absent = [p for p in last.wanted if self.registry.phase(self.registry.get(p), now) in away]
        needed = last.needed - (len(last.wanted) - len(absent))
        if needed <= 0:
            return f"{text} yet: it is being fetched"
        names = [self.name_of(p) for p in absent[:MAX_ASKED]]
        more = f" and {len(absent) - len(names)} more" if len(absent) > len(names) else ""
        some = f"{needed} of " if needed < len(absent) else ""
        return f"{text}: ask {some}{', '.join(names)}{more} to join again"

    def _diverged(self, working: list[PeerOverview]) -> tuple[str, ...]:
        """Return the names of peers with another state than the chain names.

        A record's child names the state after it; at the head, the majority of the peers does.
        """
        named = {c.parent: c.base_state for c in self.chain.newest(NEWEST)}
        claims = [(p, h.head, h.state) for p in working if (h := p.heartbeat) is not None and h.state is not None]
        head = self.chain.head
        if head is not None and head[1] not in named:
            for state, count in CountOf(s for _, h, s in claims if h == head[1]).most_common(1):
                if 2 * count > sum(h == head[1] for _, h, _ in claims):
                    named[head[1]] = state
        return tuple(p.name for p, h, s in claims if named.get(h, s) != s)

    def _health(
        self,
        working: list[PeerOverview],
        training: int,
        tokens: int,
        loss: float | None,
        rate: float,
        due: float | None,
    ) -> tuple[str, str]:
        chain, spec = self.chain, self.spec
        if problem := self.indexer.problem:
            return "trouble", f"the coordinator cannot follow the chain: {problem}"
        if problem := self.rival():
            return "trouble", problem
        if is_total_reached(spec.total_tokens, tokens):
            return (
                "finished",
                f"all {count(spec.total_tokens)} tokens are trained, in {training} rounds, loss {loss:.2f}",
            )
        if self.directives.order is not None:
            return self.directives.order
        if not working:
            if training == 0:
                return "waiting", "no peer is training yet"
            missing = f"; {problem}" if (problem := self.updates_problem()) else ""
            return "idle", f"no peer is training; the chain stands at round {training}{missing}"
        who = f"{len(working)} peer{'s' if len(working) != 1 else ''} training"
        if not self.indexer.caught_up:
            return "catching up", f"{who}; the coordinator has read the chain up to round {training} and goes on"
        r = self.directives.round_policy
        late = 0.0 if self._moved_at is None else self.monotonic() - self._moved_at
        if late > r.max_seconds + r.exchange_seconds + r.patience_seconds:
            return "stalled", f"{who}, but round {training} has not ended for {duration(late)}: the peers' logs say why"
        newest = chain.newest(4)
        recent = {c.record for c in newest} | {c.parent for c in newest} | {genesis_digest(self.spec.run_id)}
        strays = [p for p in working if self._off_branch(p, training, recent)]
        if 3 * len(strays) > len(working):
            names = ", ".join(p.name for p in strays[:5])
            return "split", f"{len(strays)} of {len(working)} training peers are on another chain or behind: {names}"
        after = "" if due is None else f"; next round in {duration(due)}" if due >= 1 else "; the next round is due"
        if loss is None:
            return "healthy", f"{who} in round 0; nothing is accepted yet{after}"
        speed = f", {count(rate)} tokens/s" if rate else ""
        return "healthy", f"{who}, round {training}, loss {loss:.2f}{speed}{after}"

    def _next_round(self, working: list[PeerOverview], head: Digest, now: float) -> float | None:
        """Return the seconds until the round that is being trained is decided; None if unknown."""
        s, r, window = self.observations, self.directives.round_policy, self.spec.data.window_tokens
        work = []
        for p in working:
            if (h := p.heartbeat) is not None:
                # A peer without a report of this round yet will be as fast in it as before.
                tokens = h.windows * window + h.tokens_per_second * p.seconds_since if h.head == head else 0.0
                work.append((tokens, h.tokens_per_second))
        return next_round_seconds(
            work,
            target_tokens=r.target_tokens,
            max_seconds=r.max_seconds,
            elapsed=None if s.began is None else now - s.began,
            announced=None if s.first_announced is None else now - s.first_announced,
            typical=s.typical(),
        )

    @staticmethod
    def _off_branch(p: PeerOverview, training: int, recent: set[Digest]) -> bool:
        """Return whether a peer is on another branch, or more than two rounds behind.

        A peer that is ahead of this coordinator is not.
        """
        h = p.heartbeat
        if h is None or h.round > training:
            return False
        return h.round < training - 2 or h.head not in recent

    def _peers(self, now: float) -> tuple[PeerOverview, ...]:
        """Return the peers that are here or were lately: training ones first, then by credits.

        Those that are gone are listed while they have pending credits or a remembered round, or are barred or banned:
        a long run has tens of thousands of others.
        """
        chain = self.chain
        views, nothing = [], Balance()
        last_rounds, missing = self._rounds_of_peers()
        barred = [key for key, _ in chain.audits.bars(chain.training_round)]
        banned = filter(chain.has_credits, self.directives.bans)
        for peer in dict.fromkeys([*self.registry.keys(), *chain.pending, *last_rounds, *barred, *banned]):
            known = self.registry.get(peer)
            phase = self._phase(peer, known, now)
            last = last_rounds.get(peer)
            if phase == "gone" and last is None and peer not in chain.pending:
                continue
            heartbeat, since = (known.heartbeat, now - known.heard_at) if known else (None, 0.0)
            settled = chain.settled.get(peer, nothing).micro_credits
            pending = chain.pending.get(peer, nothing).micro_credits
            if phase in ("gone", "observing") and not settled + pending:
                continue  # a gone peer without credits is no news, and an observer does not train
            if known is not None:
                began = known.heard_at if phase in ("silent", "gone") else known.since
            elif began := self._certified_at(last):  # not here since the coordinator has started
                since = now - began
            up, down = (known.up_per_second, known.down_per_second) if known else (0.0, 0.0)
            views.append(
                PeerOverview(
                    peer, self.name_of(peer), phase, heartbeat, max(0.0, since), settled, pending, began, up, down,
                    last.round if last else None, missing.get(peer), chain.audits.conviction_of(peer),
                )
            )  # fmt: skip
        views.sort(key=lambda v: (_ORDER.get(v.phase, 6), -(v.settled + v.pending), v.peer))
        return tuple(views)

    def _phase(self, peer: PeerKey, known: TrackedPeer | None, now: float) -> str:
        if peer in self.directives.bans:
            return "banned"
        if self.chain.audits.barred_until(peer, self.chain.training_round) is not None:
            return "barred"
        return self.registry.phase(known, now)

    def _certified_at(self, credits: RoundCredits | None) -> float | None:
        seen = None if credits is None else self.observations.get(credits.record)
        return None if seen is None else seen.certified

    def _rounds_of_peers(self) -> tuple[dict[PeerKey, RoundCredits], dict[PeerKey, NonParticipation]]:
        """Return the newest round of each peer, and why peers are not in the newest round."""
        chain = self.chain
        head = chain.head[1] if chain.head else None
        if self._last_rounds[0] != head:
            self._last_rounds = (head, {e.peer: c for c in reversed(chain.remembered) for e in c.lines})
        seen = self.observations.get(head) if head is not None else None
        return self._last_rounds[1], {a.peer: a for a in (seen.absent or () if seen else ())}

    def _round_views(self, newest: list[RoundCredits]) -> tuple[RoundOverview, ...]:
        """Return overviews of rounds, each built once, and again when final: it may have thousands of names."""
        made = {}
        for credits in newest:
            known = self._rounds.get(credits.record)
            final = self.chain.is_final(credits.round)
            made[credits.record] = known if known is not None and known.final == final else self._round_view(credits)
        self._rounds = made
        return tuple(made.values())

    def _round_view(self, credits: RoundCredits) -> RoundOverview:
        final = self.chain.is_final(credits.round)
        return round_overview(credits, self.observations.get(credits.record), final, self.name_of)


def round_overview(
    credits: RoundCredits, observed: RoundObservation | None, final: bool, name_of: Callable[[PeerKey], str]
) -> RoundOverview:
    """Return the overview of one round from its credits and its observation."""
    absent = None if observed is None or observed.absent is None else tuple(name_of(a.peer) for a in observed.absent)
    return RoundOverview(credits, observed, absent, final)


def next_round_seconds(
    work: Iterable[tuple[float, float]],
    *,
    target_tokens: int,
    max_seconds: float,
    elapsed: float | None,
    announced: float | None,
    typical: TypicalDurations | None,
) -> float | None:
    """Return the seconds until the round that is being trained is decided; 0 if it is due, None if unknown.

    `work` has the tokens of each training peer in this round, and its tokens a second, by its own reports. `elapsed`
    and `announced` are the seconds since it began, and since its first update was announced (None: unknown, not yet).
    """
    after = typical.after if typical is not None else 0.0
    if announced is not None:
        return max(0.0, after - announced) if typical is not None else None
    done, rate = 0.0, 0.0
    for tokens, speed in work:
        done += tokens
        rate += speed
    if rate > 0:
        left = max(0.0, target_tokens - done) / rate
        if elapsed is not None:
            left = min(left, max(0.0, max_seconds - elapsed))
        return left + after
    if typical is not None and elapsed is not None:
        return max(0.0, typical.whole - elapsed)
    return None
