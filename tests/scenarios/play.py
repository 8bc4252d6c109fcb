"""Does a scenario's steps, one after the other, and judges what is expected of the swarm."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from dataclasses import dataclass, field
from functools import singledispatchmethod

from protocol.ids import PeerKey
from protocol.invite import Invite
from tests.e2e.chains import Branch, check_windows
from tests.scenarios import script
from tests.scenarios.credited import credits_complete
from tests.scenarios.script import HOME, Scenario, Step
from tests.scenarios.seen import Seen
from tests.scenarios.swarm import Swarm


class Failed(Exception):
    """What was expected did not come; says what was seen instead."""


@dataclass
class Done:
    """A step and what came of it."""

    step: str
    seconds: float
    found: str
    ok: bool = True


@dataclass
class Outcome:
    """`peers`: for each, the figures that the report shows."""

    scenario: Scenario
    steps: list[Done] = field(default_factory=list)
    peers: dict[str, dict[str, float]] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0
    late_ms: float = 0.0
    logs: str = ""

    @property
    def ok(self) -> bool:
        return len(self.steps) == len(self.scenario.steps) and all(s.ok for s in self.steps)


QUIET = ("start", "rounds", "wait")
"""Steps before the first fault: the rounds meanwhile are what `expect pace` compares with."""


class Play:
    """One swarm's. `go` does all; what a step found is in words."""

    def __init__(self, scenario: Scenario, swarm: Swarm):
        self.scenario = scenario
        self.swarm = swarm
        self.seen = Seen(swarm)
        self.outcome = Outcome(scenario)
        self._usual: float | None = None
        self._settled = 0
        """The round in which the last peer that was started began to train."""
        self._up: list[str] = []
        """Peers that are to run: started, and neither stopped nor without power."""

    async def go(self) -> Outcome:
        """Steps until one fails. Never raises for the swarm's faults."""
        began = time.monotonic()
        watching = asyncio.create_task(self.seen.watch())
        try:
            await asyncio.wait_for(self._all(), self.scenario.limit_seconds)
        except asyncio.TimeoutError:
            self.outcome.steps.append(Done("all", time.monotonic() - began, "the scenario's time is over", ok=False))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self.outcome.seconds = time.monotonic() - began
        self._sum_up()
        return self.outcome

    async def _all(self) -> None:
        self.swarm.start_coordinator()
        await self.swarm.coordinator_ready()
        for step in self.scenario.steps:
            if not await self._one(step):
                break

    async def _one(self, step: Step) -> bool:
        if step.do not in QUIET and self._usual is None:
            self._usual = self.seen.pace(50, self._settled)
        began = time.monotonic()
        try:
            found, ok = await self.do(step) or "", True
        except (AssertionError, Failed) as e:
            first, _, logs = str(e).partition("\n")
            found, ok = first, False
            self.outcome.logs = logs or self.swarm.logs()
        self.outcome.steps.append(Done(_told(step), time.monotonic() - began, found, ok))
        took = self.outcome.steps[-1].seconds
        print(f"  {'' if ok else 'FAILED '}{_told(step)}: {found or 'done'} ({took:.0f} s)", flush=True)
        return ok

    def _sum_up(self) -> None:
        counters = self.swarm.wan.counters()
        self.outcome.late_ms = counters.late_ms
        try:
            branch = self._branches(self.scenario.peers)
        except AssertionError:
            branch = {}
        longest = max(branch.values(), key=lambda b: b.height, default=None)
        self.outcome.rounds = longest.height if longest else 0
        for name in self.scenario.peers:
            key, host = self.swarm.key_of(name), counters.hosts[name]
            self.outcome.peers[name] = {
                "rounds": self._in(longest, key) if longest and key else 0,
                "windows": longest.windows.get(key, 0) if longest and key else 0,
                "up": host.tx_bytes,
                "down": host.rx_bytes,
            }

    @staticmethod
    def _in(branch: Branch, key: PeerKey) -> int:
        return sum(key in c.record.body.contributors for c in branch.path)

    def _peers(self, step: script._OfPeers) -> list[str]:
        return list(step.peers) or list(self._up)

    def _branches(self, names: list[str]) -> dict[str, Branch]:
        there = [n for n in names if n == HOME or self.swarm.key_of(n) is not None]
        return {n: self.swarm.branch("coordinator" if n == HOME else n) for n in there}

    # -- what is done ----------------------------------------------------------------------------------------

    @singledispatchmethod
    async def do(self, step: object) -> str | None:
        raise NotImplementedError(type(step).__name__)

    @do.register
    async def _(self, step: script.Start) -> str:
        began = time.monotonic()
        for name in step.peers:
            self._start(name, self.swarm.old_invite if step.old_invite else None)
        for name in step.peers if step.wait else ():
            await self.swarm.until(f"{name} trains", lambda n=name: self._alive(n) in self.seen.ready, step.seconds)
        self._settled = max(self.seen.rounds.values(), default=0)
        return f"all train after {time.monotonic() - began:.0f} s" if step.wait else ""

    def _start(self, name: str, invite: Invite | None = None) -> None:
        self.swarm.power_on(name)
        self.seen.forget(name)
        self.swarm.start_peer(name, invite=invite)
        if name not in self._up:
            self._up.append(name)

    async def _off(self, name: str) -> None:
        await asyncio.to_thread(self.swarm.power_off, name)
        self.seen.forget(name)
        if name in self._up:
            self._up.remove(name)

    def _alive(self, name: str) -> str:
        assert self.swarm.processes[name].running, f"{name} has ended\n{self.swarm.logs(name)}"
        return name

    @do.register
    async def _(self, step: script.Rounds) -> str:
        names = self._peers(step)
        began = time.monotonic()
        goal = self.seen.rounds.get(names[0], 0) + step.count

        def there() -> bool:
            return all(self.seen.rounds.get(self._alive(n), 0) >= goal for n in names)

        await self.swarm.until(f"{', '.join(names)} reach round {goal}", there, step.seconds)
        return f"round {goal}, {(time.monotonic() - began) / step.count:.1f} s a round"

    @do.register
    async def _(self, step: script.Wait) -> None:
        await asyncio.sleep(step.seconds)

    @do.register
    async def _(self, step: script.Cut) -> None:
        self._cut(step.between, oneway=step.oneway)

    def _cut(self, between: tuple[script.Names, script.Names], *, heal: bool = False, oneway: bool = False) -> None:
        for a in between[0]:
            for b in between[1]:
                self.swarm.wan.cut(a, b, heal=heal, oneway=oneway)

    @do.register
    async def _(self, step: script.Heal) -> None:
        self.swarm.wan.heal()

    @do.register
    async def _(self, step: script.Flap) -> None:
        for _ in range(step.times):
            self._cut(step.between)
            await asyncio.sleep(step.off)
            self._cut(step.between, heal=True)
            await asyncio.sleep(step.on)

    @do.register
    async def _(self, step: script.PowerOff) -> None:
        for name in self._peers(step):
            await self._off(name)

    @do.register
    async def _(self, step: script.Stop) -> None:
        names = self._peers(step)
        await asyncio.to_thread(self.swarm.stop, *names)
        self._up = [n for n in self._up if n not in names]

    @do.register
    async def _(self, step: script.Freeze) -> None:
        for name in self._peers(step):
            self.swarm.signal(name, signal.SIGSTOP)

    @do.register
    async def _(self, step: script.Thaw) -> None:
        for name in self._peers(step):
            self.swarm.signal(name, signal.SIGCONT)

    @do.register
    async def _(self, step: script.Coordinator) -> None:
        self.swarm.power_on(HOME)
        if step.moved:
            self.swarm.move_coordinator()
        self.swarm.start_coordinator()
        await self.swarm.coordinator_ready()

    @do.register
    async def _(self, step: script.Churn) -> str:
        draw = random.Random(step.seed)
        names, off, kills = self._peers(step), dict[str, float](), 0
        end, now = time.monotonic() + step.seconds, max(self.seen.first)
        last = now + step.rounds
        while now < last:
            if time.monotonic() > end:
                raise Failed(f"round {now} after {step.seconds:.0f} s, where {last} was to come")
            await asyncio.sleep(0.1)
            for name in [n for n, since in off.items() if time.monotonic() - since >= step.away]:
                del off[name]
                self._start(name)
            if max(self.seen.first) == now:
                continue
            now = max(self.seen.first)
            for name in names:
                if name not in off and len(off) < len(names) // 2 and draw.random() < 1 / step.life:
                    off[name], kills = time.monotonic(), kills + 1
                    await self._off(name)
        for name in off:
            self._start(name)
        for name in names:
            await self.swarm.until(f"{name} trains", lambda n=name: self._alive(n) in self.seen.ready, 120)
        return f"{kills} times a peer lost power within {step.rounds} rounds"

    @do.register
    async def _(self, step: script.Damage) -> str:
        done = [self.swarm.tear(n) if step.how == "torn" else self.swarm.fill_disk(n) for n in step.peers]
        return ", ".join(d[:8] for d in done if d)

    # -- what is expected ------------------------------------------------------------------------------------

    @do.register
    async def _(self, step: script.OneChain) -> str:
        names, began = self._peers(step), time.monotonic()
        holders = {n for n in names if n != HOME}
        before = await asyncio.to_thread(self._branches, names)
        apart, same_since = "nothing was seen", False
        while time.monotonic() < began + step.seconds:
            await asyncio.sleep(0.3)
            branches = await asyncio.to_thread(self._branches, names)
            apart = self._apart(branches)
            if apart or not same_since:
                # States that were held on branches that lost do not count, nor those seen before all were on one.
                self.seen.forget_states()
                same_since = not apart
                continue
            states = {r: {n: s for n, s in of.items() if n in holders} for r, of in self.seen.states.items()}
            for r, of in states.items():
                if len(set(of.values())) > 1:
                    raise Failed(f"{len(set(of.values()))} different states after the same record of round {r[0]}")
            if whole := [r for r, of in states.items() if of.keys() == holders]:
                for branch in branches.values():
                    check_windows(branch)
                after = self._rounds_since(before, max(branches.values(), key=lambda b: b.height))
                if after > step.rounds:
                    raise Failed(f"one chain only after {after} rounds")
                return f"{len(names)} on one chain, the state after round {max(whole)[0]} equal, after {after} rounds"
            apart = f"no state seen that all hold ({ {r[0]: len(of) for r, of in states.items()} })"
        raise Failed(f"not one chain after {step.seconds:.0f} s: {apart}")

    @staticmethod
    def _rounds_since(before: dict[str, Branch], now: Branch) -> int:
        """By how many rounds the branch that stands has grown."""
        had = [sum(a == b for a, b in zip(b.records, now.records, strict=False)) for b in before.values()]
        return now.height - max(had, default=0)

    @staticmethod
    def _apart(branches: dict[str, Branch]) -> str:
        """Who is not on the longest branch, but for its last record; "" when all are."""
        longest = max(branches.values(), key=lambda b: b.height)
        for name, branch in branches.items():
            if branch.records != longest.records[: branch.height]:
                shared = sum(a == b for a, b in zip(branch.records, longest.records, strict=False))
                return f"{name} is on another branch since round {shared}"
            if branch.height < longest.height - 1:
                return f"{name} has {branch.height} rounds of {longest.height}"
        return ""

    @do.register
    async def _(self, step: script.Contribute) -> str:
        names = self._peers(step)
        longest = max((await asyncio.to_thread(self._branches, names)).values(), key=lambda b: b.height)
        last = longest.path[-step.last :]
        if len(last) < step.last:
            raise Failed(f"there are only {len(last)} rounds")
        counts = {n: sum(self.swarm.key(n) in c.record.body.contributors for c in last) for n in names}
        told = ", ".join(f"{n} {c}" for n, c in counts.items())
        if any(c < step.share * len(last) for c in counts.values()):
            raise Failed(f"of the last {len(last)} rounds: {told}")
        return f"of the last {len(last)} rounds: {told}"

    @do.register
    async def _(self, step: script.Joined) -> str:
        told = []
        for name in self._peers(step):
            ready = await self.swarm.until(f"{name} trains", lambda n=name: self.seen.ready.get(n), step.seconds)

            def first(n: str = name, since: int = ready) -> int | None:
                return next((r + 1 for r in self.swarm.rounds_with(self._alive(n)) if r >= since), None)

            at = await self.swarm.until(f"{name} contributes after round {ready}", first, step.seconds, every=0.5)
            told.append(f"{name} ready in round {ready}, its work in round {at - 1}")
            if at - ready > step.rounds:
                raise Failed(told[-1])
        return ", ".join(told)

    @do.register
    async def _(self, step: script.Pace) -> str:
        now = self.seen.pace(step.last)
        if now is None or not self._usual:
            raise Failed("too few rounds were seen to judge the pace")
        told = f"{now:.1f} s a round, {self._usual:.1f} s before"
        if now > step.factor * self._usual:
            raise Failed(told)
        return told

    @do.register
    async def _(self, step: script.Credits) -> str:
        return await credits_complete(self.swarm, self._peers(step)[0], step.seconds)

    @do.register
    async def _(self, step: script.Logged) -> str:
        names = self._peers(step)
        found = [n for n in names if self.swarm.has_logged(n, step.pattern)]
        if len(found) < len(names):
            raise Failed(f"{', '.join(n for n in names if n not in found)} did not log {step.pattern!r}")
        return ", ".join(found)

    @do.register
    async def _(self, step: script.Ended) -> str:
        for name in self._peers(step):
            process = self.swarm.processes[name]
            await self.swarm.until(f"{name} ends", lambda p=process: not p.running, step.seconds)
            if not self.swarm.printed(name, step.pattern):
                raise Failed(f"{name} ended with {process.last_words()!r}")
        return self.swarm.processes[self._peers(step)[0]].last_words(1)[:160]


def _told(step: Step) -> str:
    """A step in a few words."""
    said = [step.do]
    for key, value in step.model_dump(exclude={"do", "seconds", "wait"}, exclude_defaults=True).items():
        if key == "between":
            said.append(" | ".join(" ".join(side) for side in value))
        elif isinstance(value, tuple):
            said.append(" ".join(value))
        else:
            said.append(f"{key} {value}")
    return " ".join(said)
