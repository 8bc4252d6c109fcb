"""Judges what is expected of a scenario's swarm: by the chains on its disks, by what its peers show, by the lines."""

from __future__ import annotations

import asyncio
import re
import time
from functools import singledispatchmethod
from statistics import mean

from tests.e2e.chains import Branch, check_windows
from tests.scenarios import script
from tests.scenarios.counted import Goodput
from tests.scenarios.credited import credits_complete
from tests.scenarios.metered import Metered
from tests.scenarios.script import HOME
from tests.scenarios.seen import Seen
from tests.scenarios.swarm import Swarm


class Failed(Exception):
    """A failed expectation; the message describes the result."""


OPEN_UPDATES = 2
"""Of a peer: the one that is being decided, and one that was just left out."""


class Judge:
    """`expect` says in words what was found, or raises Failed."""

    def __init__(self, swarm: Swarm, seen: Seen, metered: Metered, up: list[str]):
        """`up`: those that are to run now; whoever starts and stops them keeps the list."""
        self.swarm = swarm
        self.seen = seen
        self.metered = metered
        self.usual: float | None = None
        """Seconds of a round before the first fault."""
        self.settled = 0
        """The round in which the last peer that was started began to train."""
        self._up = up

    def _peers(self, step: script.OfPeers) -> list[str]:
        return list(step.peers) or list(self._up)

    def branches(self, names: list[str]) -> dict[str, Branch]:
        """Return the branches of the peers that have made a key."""
        there = [n for n in names if n == HOME or self.swarm.key_of(n) is not None]
        return {n: self.swarm.branch("coordinator" if n == HOME else n) for n in there}

    async def _longest(self, names: list[str]) -> Branch:
        return max((await asyncio.to_thread(self.branches, names)).values(), key=lambda b: b.height)

    def _ready(self, name: str) -> int | None:
        return self.seen.ready.get(self.swarm.alive(name))

    @singledispatchmethod
    async def expect(self, step: object) -> str | None:
        raise NotImplementedError(type(step).__name__)

    @expect.register
    async def _(self, step: script.OneChain) -> str:
        names, began = self._peers(step), time.monotonic()
        holders = {n for n in names if n != HOME}
        before = await asyncio.to_thread(self.branches, names)
        apart, same_since = "nothing was seen", False
        while time.monotonic() < began + step.seconds:
            await asyncio.sleep(0.3)
            branches = await asyncio.to_thread(self.branches, names)
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
        """Return the number of rounds by which the winning branch has grown."""
        had = [sum(a == b for a, b in zip(b.records, now.records, strict=False)) for b in before.values()]
        return now.height - max(had, default=0)

    @staticmethod
    def _apart(branches: dict[str, Branch]) -> str:
        """Return the peers that are not on the longest branch, ignoring its last record; "" if all are."""
        longest = max(branches.values(), key=lambda b: b.height)
        for name, branch in branches.items():
            if branch.records != longest.records[: branch.height]:
                shared = sum(a == b for a, b in zip(branch.records, longest.records, strict=False))
                return f"{name} is on another branch since round {shared}"
            if branch.height < longest.height - 1:
                return f"{name} has {branch.height} rounds of {longest.height}"
        return ""

    @expect.register
    async def _(self, step: script.Forks) -> str:
        branches = await asyncio.to_thread(self.branches, self._peers(step))
        longest = max(b.side for b in branches.values())
        told = (
            f"{max(b.stored - b.height for b in branches.values())} records on branches that lost, {longest} in a row"
        )
        if longest > step.most:
            raise Failed(told)
        return told

    @expect.register
    async def _(self, step: script.Contribute) -> str:
        names = self._peers(step)
        longest = max((await asyncio.to_thread(self.branches, names)).values(), key=lambda b: b.height)
        last = longest.path[-step.last :]
        if len(last) < step.last:
            raise Failed(f"there are only {len(last)} rounds")
        counts = {n: sum(self.swarm.key(n) in c.record.body.contributors for c in last) for n in names}
        told = ", ".join(f"{n} {c}" for n, c in counts.items())
        if any(c < step.share * len(last) for c in counts.values()):
            raise Failed(f"of the last {len(last)} rounds: {told}")
        return f"of the last {len(last)} rounds: {told}"

    @expect.register
    async def _(self, step: script.Joined) -> str:
        told = []
        for name in self._peers(step):
            ready = await self.swarm.until(f"{name} trains", lambda n=name: self._ready(n), step.seconds)

            def first(n: str = name, since: int = ready) -> int | None:
                return next((r + 1 for r in self.swarm.rounds_with(self.swarm.alive(n)) if r >= since), None)

            at = await self.swarm.until(f"{name} contributes after round {ready}", first, step.seconds, every=0.5)
            told.append(f"{name} ready in round {ready}, its work in round {at - 1}")
            if at - ready > step.rounds:
                raise Failed(told[-1])
        return ", ".join(told)

    @expect.register
    async def _(self, step: script.Credits) -> str:
        return await credits_complete(self.swarm, self._peers(step)[0], step.seconds)

    @expect.register
    async def _(self, step: script.Pace) -> str:
        now = self.seen.pace(step.last)
        if now is None or not self.usual:
            raise Failed("too few rounds were seen to judge the pace")
        told = f"{now:.1f} s a round, {self.usual:.1f} s before"
        if now > step.factor * self.usual:
            raise Failed(told)
        return told

    @expect.register
    async def _(self, step: script.Audits) -> str:
        names, end = self._peers(step), time.monotonic() + step.seconds
        honest, liars = ({self.swarm.key(n): n for n in of} for of in (names, step.liars))
        while True:
            bodies = [(c.digest, c.record.body) for c in (await self._longest(names)).path]
            authors = {(record, u.digest): u.author for record, body in bodies for u in body.updates}
            replays = [r.body for _, body in bodies for r in body.reports if r.body.check == "replay"]
            of_honest = [r for r in replays if authors[r.record, r.update] in honest]
            failed = sum(not r.passed for r in of_honest)
            convicted = {d.author: body.round for _, body in bodies for d in body.decisions if d.convicted}
            told = f"{len(of_honest)} replays of honest updates, {failed} of them failed"
            told += "".join(
                f"; {liars.get(k) or honest.get(k) or k} convicted in round {r}" for k, r in convicted.items()
            )
            if failed or convicted.keys() - liars.keys():
                raise Failed(told)
            if len(of_honest) >= step.least and convicted.keys() == liars.keys():
                return told
            if time.monotonic() > end:
                raise Failed(told)
            await asyncio.sleep(0.5)

    @expect.register
    async def _(self, step: script.Logged) -> str:
        found = {n: len(re.findall(step.pattern, self.swarm.log(n))) for n in self._peers(step)}
        told = ", ".join(f"{n} {count} times" for n, count in found.items())
        if not all(step.least <= count <= step.most for count in found.values()):
            raise Failed(f"{step.pattern!r} logged: {told}")
        return told

    @expect.register
    async def _(self, step: script.Ended) -> str:
        for name in self._peers(step):
            process = self.swarm.processes[name]
            await self.swarm.until(f"{name} ends", lambda p=process: not p.running, step.seconds)
            if not self.swarm.printed(name, step.pattern):
                raise Failed(f"{name} ended with {process.last_words()!r}")
        return self.swarm.processes[self._peers(step)[0]].last_words().rpartition("\n")[2][:160]

    @expect.register
    async def _(self, step: script.Download) -> str:
        told = []
        for name in self._peers(step):
            d = self.metered.download(name)
            if d is None:
                raise Failed(f"{name} was not seen to fetch a state")
            told.append(f"{name}: {d}")
            if d.share < step.share or len(d.donors) < step.donors or d.times > step.most:
                raise Failed("; ".join(told))
        return "; ".join(told)

    @expect.register
    async def _(self, step: script.Goodput) -> str:
        names = self._peers(step)
        branch = await self._longest(names)
        check_windows(branch)
        parts = {n: self.seen.counted.goodput(n, self.swarm.key(n), branch) for n in names}
        whole = sum(parts.values(), Goodput(0, 0, 0))
        training = [share for n in names if (share := self.seen.training.get(n)) is not None]
        told = f"{whole} accepted" + (f"; trainers trained {mean(training):.0%} of their time" if training else "")
        if step.each or whole.share < step.share:
            told += " (" + ", ".join(f"{n} {g.share:.1%}" for n, g in parts.items()) + ")"
        if whole.share < step.share or (step.each and any(g.share < step.share for g in parts.values())):
            raise Failed(told)
        return told

    @expect.register
    async def _(self, step: script.PutBack) -> str:
        names, end = self._peers(step), time.monotonic() + step.seconds
        while True:
            branch = await self._longest(names)
            told, whole, good = list[str](), 0, True
            for name in names:
                s = self.swarm.shown(self.swarm.alive(name))
                if s is None:
                    raise Failed(f"{name} shows nothing of itself")
                key = self.swarm.key(name)
                kept = sum(key in c.record.body.contributors for c in branch.path)
                told.append(f"{name} {s.own_updates} made, {kept} accepted, {s.missed_updates} put back")
                whole += s.missed_updates
                good = good and s.own_updates - kept - s.missed_updates <= OPEN_UPDATES
            if good and whole >= step.least:
                return "; ".join(told)
            if time.monotonic() > end:
                raise Failed("; ".join(told))
            await asyncio.sleep(0.5)

    @expect.register
    async def _(self, step: script.Carried) -> str:
        names = self._peers(step)
        path = (await self._longest(names)).path[self.settled :]
        counts = {n: sum(self.swarm.key(n) in c.record.body.contributors for c in path) for n in names}
        told = f"of {len(path)} rounds: " + ", ".join(f"{n} in {c}" for n, c in counts.items())
        if any(not step.fewest <= c <= step.share * len(path) for c in counts.values()):
            raise Failed(told)
        return told
