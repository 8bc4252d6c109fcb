"""The player of a scenario's steps, one after the other; `judge` checks the expectations."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from dataclasses import dataclass, field
from functools import singledispatchmethod

from protocol.ids import PeerKey
from protocol.invite import Invite
from tests.e2e.chains import Branch
from tests.scenarios import script
from tests.scenarios.judge import Failed, Judge
from tests.scenarios.metered import Metered
from tests.scenarios.script import HOME, Scenario, Step
from tests.scenarios.seen import Seen
from tests.scenarios.slowed import Slowed
from tests.scenarios.swarm import Swarm


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


QUIET = ("history", "start", "rounds", "wait")
"""Steps before the first fault: the rounds meanwhile are what `expect pace` compares with."""


class Play:
    """One swarm's. `go` does all; what a step found is in words."""

    def __init__(self, scenario: Scenario, swarm: Swarm):
        self.scenario = scenario
        self.swarm = swarm
        self.seen = Seen(swarm)
        self.outcome = Outcome(scenario)
        self._up: list[str] = []
        """Peers that are to run: started, and neither stopped nor without power."""
        self._metered = Metered(swarm, scenario)
        self._judge = Judge(swarm, self.seen, self._metered, self._up)

    async def go(self) -> Outcome:
        """Steps until one fails. Never raises for the swarm's faults."""
        began = time.monotonic()
        watching = [asyncio.create_task(w.watch()) for w in (self.seen, self._metered)]
        slowed = [Slowed(self.swarm, self.seen, h.name, h.speed) for h in self.scenario.hosts if h.speed < 1]
        try:
            await asyncio.wait_for(self._all(), self.scenario.limit_seconds)
        except asyncio.TimeoutError:
            self.outcome.steps.append(Done("all", time.monotonic() - began, "the scenario's time is over", ok=False))
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            for slow in slowed:
                slow.stop()
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
        if step.do not in QUIET and self._judge.usual is None:
            self._judge.usual = self.seen.pace(50, self._judge.settled)
        began = time.monotonic()
        try:
            do = self._judge.expect if step.do.startswith("expect ") else self.do
            found, ok = await do(step) or "", True
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
            branch = self._judge.branches(self.scenario.peers)
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

    def _peers(self, step: script.OfPeers) -> list[str]:
        return list(step.peers) or list(self._up)

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
            await self._trains(name, step.seconds)
        self._judge.settled = max(self.seen.rounds.values(), default=0)
        return f"all train after {time.monotonic() - began:.0f} s" if step.wait else ""

    async def _trains(self, name: str, seconds: float) -> None:
        await self.swarm.until(f"{name} trains", lambda: self.swarm.alive(name) in self.seen.ready, seconds)

    def _start(self, name: str, invite: Invite | None = None) -> None:
        self.swarm.power_on(name)
        self.seen.forget(name)
        self._metered.forget(name)
        self.swarm.start_peer(name, invite=invite)
        if name not in self._up:
            self._up.append(name)

    async def _off(self, name: str) -> None:
        self.seen.last_look(name)
        await asyncio.to_thread(self.swarm.power_off, name)
        self.seen.forget(name)
        if name in self._up:
            self._up.remove(name)

    @do.register
    async def _(self, step: script.History) -> str:
        await asyncio.to_thread(self.swarm.make_history, step.peers, step.rounds)
        return f"{step.rounds} rounds by {len(step.peers)} peers"

    @do.register
    async def _(self, step: script.Rounds) -> str:
        names = self._peers(step)
        began = time.monotonic()
        goal = self.seen.rounds.get(names[0], 0) + step.count

        def there() -> bool:
            return all(self.seen.rounds.get(self.swarm.alive(n), 0) >= goal for n in names)

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
    async def _(self, step: script.Interrupt) -> str:
        told = []
        for name in step.peers:
            here = await self.swarm.until(
                f"{name} has {step.share:.0%} of a state",
                lambda n=name: self._metered.came(self.swarm.alive(n), step.share), step.seconds,
            )  # fmt: skip
            self.swarm.wan.cut(name)
            await asyncio.sleep(step.off)
            self.swarm.wan.heal(name)
            told.append(f"{name} after {here / 1e6:.1f} MB")
        return ", ".join(told)

    @do.register
    async def _(self, step: script.PowerOff) -> None:
        for name in self._peers(step):
            await self._off(name)

    @do.register
    async def _(self, step: script.Stop) -> None:
        names = self._peers(step)
        await asyncio.to_thread(self.swarm.stop, *names)
        self._up[:] = [n for n in self._up if n not in names]

    @do.register
    async def _(self, step: script.Freeze) -> None:
        for name in self._peers(step):
            if step.exchanging:
                await self.swarm.until(f"{name} exchanges", lambda n=name: self._exchanges(n), 60, every=0.02)
            self.swarm.signal(name, signal.SIGSTOP)

    def _exchanges(self, name: str) -> bool:
        """Return whether a peer is exchanging, by a status less than 0.1 s old."""
        s = self.swarm.shown(self.swarm.alive(name))
        return s is not None and s.phase == "exchanging" and self.swarm.age(name) < 0.1

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
                out = sum(n in off or n not in self.seen.ready for n in names)
                if name not in off and out < len(names) // 2 and draw.random() < 1 / step.life:
                    off[name], kills = time.monotonic(), kills + 1
                    await self._off(name)
        for name in off:
            self._start(name)
        for name in names:
            await self._trains(name, 120)
        return f"{kills} times a peer lost power within {step.rounds} rounds"

    @do.register
    async def _(self, step: script.Damage) -> str:
        done = [self.swarm.tear(n) if step.how == "torn" else self.swarm.fill_disk(n) for n in step.peers]
        return ", ".join(d[:8] for d in done if d)


def _told(step: Step) -> str:
    """Describe a step in a few words."""
    said = [step.do]
    for key, value in step.model_dump(exclude={"do", "seconds", "wait"}, exclude_defaults=True).items():
        if key == "between":
            said.append(" | ".join(" ".join(side) for side in value))
        elif isinstance(value, tuple):
            said.append(" ".join(value))
        else:
            said.append(f"{key} {value}")
    return " ".join(said)
