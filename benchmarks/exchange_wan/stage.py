"""Plays one row: starts a process for each peer on a host of its own, lets rounds begin, and watches."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean, median

from benchmarks.convergence.wan_hosts import BenchError, Hosts, Wire, hosts
from benchmarks.exchange_wan import judging
from benchmarks.exchange_wan.job import Job, publish, read_diary
from benchmarks.exchange_wan.setting import Death, Round, Row, Setting, System
from tests.wan import Topology, star

START_SECONDS, ROUND_SECONDS = 180.0, 60.0
SETTLE_SECONDS = 2.5
"""After the last round."""
AS_A_USER = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")
"""Root may give sockets what buffers it likes (SO_RCVBUFFORCE, socket(7)): a volunteer who is not root may not."""
AHEAD = 0.3
"""Seconds between the announcement of a round's start and the start."""


def play(name: str, system: System, setting: Setting, *, dies: bool, seconds: float, keep: Path | None = None) -> Row:
    """One row.

    Some rounds are played before those that are measured; with `dies`, the last host's processes are killed in the
    middle of one more round. `seconds`: how long all may take. Raises BenchError.
    """
    names = [f"p{i + 1}" for i in range(setting.peers)]
    before = set(Path("/tmp").glob("hivemind-*.sock"))
    try:
        lines = star(names, mbit=setting.mbit, rtt_ms=setting.rtt_ms).source
        with hosts(Topology.parse({**lines, "tcp": setting.tcp}), ttl=seconds + 60, keep=keep) as world:
            return _Play(world, name, system, setting, names, time.monotonic() + seconds).row(dies)
    finally:
        for left in set(Path("/tmp").glob("hivemind-*.sock")) - before:
            left.unlink(missing_ok=True)


class _Play:
    """The parts of `play`, in the order in which they happen."""

    def __init__(self, world: Hosts, name: str, system: System, setting: Setting, names: list[str], end: float):
        self.world, self.name, self.system, self.setting, self.names = world, name, system, setting, names
        self.end = end
        self.late = 0.0
        self.living = list(range(setting.peers))

    def row(self, dies: bool) -> Row:
        self._start()
        self._until("the first round is prepared", lambda: self._ready(0), START_SECONDS)
        self.world.prefer()
        warm, count = self.setting.warm, self.setting.rounds
        warming = [self._round(i) for i in range(warm)]
        self.world.wan.counters()  # forget how late the router was at the start
        self.late = 0.0
        rounds = [self._round(i) for i in range(warm, warm + count)]
        death = self._death(warm + count) if dies else None
        (self.world.folder / "stop").touch()
        time.sleep(SETTLE_SECONDS)
        return self._row(warming, rounds, death)

    def _start(self) -> None:
        folder, system, setting = self.world.folder, self.system, self.setting
        exchange_seconds = max(60.0, 4 * system.floor(setting))  # advice of `cairn run plan`
        job = Job(
            str(folder), [self.world.ip(n) for n in self.names], setting.parameters,
            dict(system.codec) if system.codec is not None else None, dict(system.options), exchange_seconds,
        )  # fmt: skip
        file = job.write()
        if system.module.endswith(".cairn_peer"):
            from benchmarks.exchange_wan.run_spec import spec_of, write_genesis

            spec = spec_of(job)
            (folder / "spec.json").write_bytes(spec.canonical())
            write_genesis(spec, folder / "genesis")
        for i, host in enumerate(self.names):
            if not system.udp:
                self.world.wan.block_udp(host)
            command = [sys.executable, "-m", system.module, str(file), str(i)]
            self.world.start(host, [*AS_A_USER, *command] if setting.ordinary else command)
        if system.module.endswith((".cairn_peer", ".hivemind_peer")):
            self._until("everybody knows everybody", lambda: self._ready(-1), START_SECONDS)
            publish(folder / "go--1", str(time.monotonic()))

    def _until(self, what: str, look, seconds: float) -> None:
        self.world.until(what, look, min(seconds, max(1.0, self.end - time.monotonic())), every=0.02)

    def _ready(self, round: int) -> bool:
        return all((self.world.folder / f"ready-{p}-{round}").exists() for p in self.living)

    def _diaries(self) -> dict[int, list]:
        return {p: read_diary(self.world.folder, p) for p in range(self.setting.peers)}

    def _ended(self, round: int) -> bool:
        return judging.ended(self._diaries(), round, self.living)

    def _begin(self, round: int) -> tuple[float, dict[str, Wire], dict[int, dict[str, float]]]:
        self._until(f"round {round} is prepared", lambda: self._ready(round), START_SECONDS)
        time.sleep(self.setting.pause)
        wire, cpu, at = self.world.wire(), self._cpu(), time.monotonic() + AHEAD
        publish(self.world.folder / f"go-{round}", repr(at))
        return at, wire, cpu

    def _cpu(self) -> dict[int, dict[str, float]]:
        return {p: self.world.cpu_seconds(self.names[p]) for p in self.living}

    def _round(self, number: int) -> Round:
        _, wire, cpu = self._begin(number)
        most = max(ROUND_SECONDS, 6 * self.system.floor(self.setting))
        self._until(f"round {number} is done", lambda: self._ended(number), most)
        diaries = self._diaries()
        for p in self.living:
            for failed in judging.entries(diaries[p], number, "failed"):
                raise BenchError(f"{self.name}: peer {p + 1} failed in round {number}: {failed.get('reason')}")
        after, cpu_after = self.world.wire(), self._cpu()
        self.late = max(self.late, self.world.wan.counters().late_ms)
        moved = [after[n] - wire[n] for n in self.names]
        times = judging.times_of(diaries, number, self.living)
        kinds = {kind for found in cpu_after.values() for kind in found}
        spent = {kind: mean(cpu_after[p].get(kind, 0.0) - cpu[p].get(kind, 0.0) for p in self.living) for kind in kinds}
        # gloo says what it holds after it has said that it is done, not to be timed with it.
        has_said = time.monotonic() + START_SECONDS
        while not judging.right(self._diaries(), number, self.living) and time.monotonic() < has_said:
            if self._ready(number + 1):
                break
            time.sleep(0.05)
        diaries = self._diaries()
        return Round(
            number, times.held, times.certified, times.applied, times.own,
            int(median(w.up for w in moved)), int(median(w.down for w in moved)), spent,
            judging.taking_part(diaries, number, self.living), judging.right(diaries, number, self.living),
        )  # fmt: skip

    # -- when one dies ---------------------------------------------------------------------------------------

    def _death(self, number: int) -> Death:
        at, _, _ = self._begin(number)
        after = self.system.floor(self.setting) / 2
        time.sleep(max(0.0, at + after - time.monotonic()))
        killed = time.monotonic()
        self._kill(self.names[-1])
        publish(self.world.folder / f"dead-{self.living.pop()}", "")
        most = min(self.end - 20, killed + max(100.0, 3 * self.system.floor(self.setting)))
        while not self._ended(number) and time.monotonic() < most:
            time.sleep(0.05)
        while time.monotonic() < most and not self._settled(number):
            time.sleep(0.05)
        diaries = self._diaries()
        return Death(
            killed - at, judging.last_end(diaries, number, self.living, since=killed),
            judging.right(diaries, number, self.living), judging.words_of_death(diaries, number, self.living),
            self._next(number + 1),
        )  # fmt: skip

    def _settled(self, number: int) -> bool:
        """Return whether the diaries show each living peer's result."""
        diaries = self._diaries()
        return judging.right(diaries, number, self.living) or all(
            judging.entries(diaries[p], number, "failed", "values")
            or any("state" in e or e.get("shares") for e in judging.entries(diaries[p], number, "done"))
            for p in self.living
        )

    def _kill(self, host: str) -> None:
        """SIGKILL for all of a host's processes, its daemon's too."""
        for pid in self.world.wan.pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _next(self, number: int) -> float | None:
        """Run a round of the living peers; None if not all are ready in time, or it does not end."""
        if self.system.module.endswith(".gloo_peer"):
            return None  # its processes have ended
        end = min(self.end - 15, time.monotonic() + 60)
        while not self._ready(number):
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
        time.sleep(SETTLE_SECONDS)
        publish(self.world.folder / f"go-{number}", repr(time.monotonic() + AHEAD))
        end = min(self.end - 10, time.monotonic() + max(60.0, 3 * self.system.floor(self.setting)))
        while not self._ended(number):
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
        return judging.times_of(self._diaries(), number, self.living).applied

    # -- what came out ---------------------------------------------------------------------------------------

    def _row(self, warming: list[Round], rounds: list[Round], death: Death | None) -> Row:
        s, system = self.setting, self.system
        floor, diaries = system.floor(s), self._diaries()
        measured = range(s.warm, s.warm + s.rounds)
        matched = [
            e["seconds"] for d in diaries.values() for e in d if e["what"] == "matched" and e["round"] in measured
        ]
        searches = sum(e["what"] == "unmatched" and e["round"] < measured.stop for e in diaries[0])
        exchange = median(r.held for r in rounds)
        kinds = {kind for r in rounds for kind in r.cpu}
        cpu = {kind: median(r.cpu.get(kind, 0.0) for r in rounds) for kind in sorted(kinds)}
        for key in ("apply_cpu", "digest_cpu"):
            if found := [
                e[key] for d in diaries.values() for e in d if e["what"] == "summed" and e["round"] in measured
            ]:
                cpu[key.replace("_cpu", " (of the trainer's)")] = median(found)
        return Row(
            self.name, system.says, s.layout.numel, s.peers, s.mbit, s.rtt_ms, s.tcp, system.size(s.layout), floor,
            exchange, median(r.certified for r in rounds), median(r.applied for r in rounds),
            median(r.own for r in rounds), exchange / floor, median(r.up for r in rounds),
            median(r.down for r in rounds), cpu, median(matched) if matched else None,
            all(r.right for r in rounds), [r.taking_part for r in rounds], rounds, death, self.late,
            [round(x, 2) for x in os.getloadavg()], s.pause, s.ordinary, [r.held for r in warming], searches,
        )  # fmt: skip
