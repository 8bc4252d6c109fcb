"""A round's exchange on loopback: a coordinator and 4 peers with the demo's model, beside what its bytes and sums cost.

Each of the 4 is a whole peer (node, libp2p daemon, trainer) and goes on training while the round is exchanged; they
share the cores. Times are seconds since a peer's own announcement, over all rounds and peers, once all take part.
The floor is measured before, on the idle machine. 4 plain asyncio TCP processes send each other the same bytes, and 3
times 1 KiB for proposal, vote and certificate. Then the CPU time of the arithmetic alone is measured on one core.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  peers, parameters, blob_bytes: the sizes
  rounds: how many were measured
  missing: times that a peer had no part in one of them
  steps: a list, each with
    name: "blobs held" (the others' updates held and checked), "certificate" (the record is certified), "applied" (the
      new state is held, its digest known)
    median, p90, samples: measured
    floor: bytes, messages and sums that this step cannot do without, and of those before it
  parts: of the floor, seconds: tcp_blobs, tcp_messages (medians of plain TCP); check, apply, digest (CPU time, one
    core); make_update (likewise; it comes before announcing, so it is in no step)
  goals: a list of goal, value (ms), met
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from benchmarks import report
from cairn.demo.processes import Process, free_ports, serve, stop_all, wait_for_file
from peer.node.enrollment import run_folder
from peer.node.snapshot import Snapshot, read_snapshot
from protocol.errors import CairnError
from protocol.invite import Invite

PEERS = ("ada", "alan", "edsger", "grace")
RUN_FILE = Path(__file__).resolve().parents[1] / "examples" / "sotu.toml"
STEPS = {"blobs": "blobs held", "certified": "certificate", "applied": "applied"}
LIMIT = 0.3
"""Maximum seconds that a round may cost beyond its bytes."""

MESSAGE = 1024
HOPS = 3
START_SECONDS, ROUND_SECONDS = 240.0, 30.0


def main(argv: list[str] | None = None) -> int:
    """Measure, print, save. Return 1 when a goal is missed."""
    options = report.command_line(__doc__ or "", "exchange").parse_args(argv)
    rounds, turns = (5, 50) if options.quick else (30, 200)
    from benchmarks.codec import SMALL_CODEC, small_llama, small_model
    from protocol.codec import make_codec

    provenance = report.provenance("exchange", argv)
    layout = small_llama()
    size = make_codec(SMALL_CODEC, layout).size
    sums = small_model(turns=8 if options.quick else 30)
    parts = {
        "tcp_blobs": all_to_all(len(PEERS), size, turns),
        "tcp_messages": HOPS * all_to_all(len(PEERS), MESSAGE, turns),
        "check": sums["check_ms"] / 1e3,
        "apply": sums["apply_ms"] / 1e3,
        "digest": sums["digest_ms"] / 1e3,
        "make_update": sums["announce_ms"] / 1e3,
    }
    with Swarm() as swarm:
        found = swarm.measure(rounds)
    results = provenance | {"peers": len(PEERS), "parameters": layout.numel, "blob_bytes": size}
    results |= judged(found, rounds, parts)
    return report.ended(results, options, show(results))


# -- what is made of the numbers: pure -----------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One round of one peer: seconds since its announcement."""

    peer: str
    round: int
    blobs: float
    certified: float
    applied: float


def percentile(values: Iterable[float], share: float) -> float:
    """Return the least value that at least this share of the values does not exceed (nearest rank)."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def floors(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the floor of each step, with the steps before it."""
    blobs = parts["tcp_blobs"] + parts["check"]
    certified = blobs + parts["tcp_messages"]
    return {"blobs": blobs, "certified": certified, "applied": certified + parts["apply"] + parts["digest"]}


def judged(samples: Sequence[Sample], rounds: int, parts: Mapping[str, float]) -> dict[str, Any]:
    """Return the results' keys that follow from the samples."""
    floor = floors(parts)
    steps = []
    for key, name in STEPS.items():
        values = [getattr(s, key) for s in samples]
        steps.append(
            {"name": name, "median": median(values), "p90": percentile(values, 0.9), "samples": len(values)}
            | {"floor": floor[key]}
        )
    beyond = steps[-1]["median"] - parts["tcp_blobs"]
    return {
        "rounds": rounds,
        "missing": rounds * len(PEERS) - len(samples),
        "steps": steps,
        "parts": dict(parts),
        "goals": [
            report.goal(f"a round, beyond its bytes: under {1e3 * LIMIT:.0f} ms", 1e3 * beyond, beyond < LIMIT),
        ],
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the steps, in milliseconds."""
    rows = [[s["name"], *(round(1e3 * s[key], 1) for key in ("median", "p90", "floor"))] for s in results["steps"]]
    return report.table(["ms since the own announcement", "median", "90%", "floor"], rows)


def show(results: Mapping[str, Any]) -> str:
    """Return the results as tables."""
    m = results["machine"]
    sizes = (
        f"{results['peers']} peers of {results['parameters']:,} parameters, {results['blob_bytes']:,} bytes an update, "
        f"{results['rounds']} rounds ({results['missing']} times a peer had no part), {m['cores']} cores, "
        f"load {m['load']} before"
    )
    names = {
        "tcp_blobs": f"updates, {results['peers']} plain TCP processes, all to all",
        "tcp_messages": f"{HOPS} x {MESSAGE} bytes, likewise",
        "check": f"check {results['peers'] - 1} updates, alone",
        "apply": f"apply {results['peers']} updates, alone",
        "digest": "digest of the state, alone",
        "make_update": "make an update, alone (before announcing)",
    }
    parts = report.table(["floor", "ms"], [[names[k], round(1e3 * v, 2)] for k, v in results["parts"].items()])
    return "\n\n".join([sizes, table(results), parts])


# -- the floor: plain TCP ------------------------------------------------------------------------------------


def all_to_all(peers: int, size: int, turns: int) -> float:
    """Return the median seconds in which each process sends `size` bytes to all others, and has theirs."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(peers)
    ports = free_ports(peers)
    pipes = [context.Pipe(duplex=False) for _ in range(peers)]
    processes = [
        context.Process(target=_plain_peer, args=(i, ports, size, turns, barrier, pipes[i][1]), daemon=True)
        for i in range(peers)
    ]
    try:
        for p in processes:
            p.start()
        found: list[float] = []
        for (mine, _), p in zip(pipes, processes, strict=True):
            while not mine.poll(0.2):
                if not p.is_alive():
                    raise CairnError(f"a process of the floor's ended with code {p.exitcode}")
            found += mine.recv()
        return median(found)
    finally:
        for p in processes:
            p.terminate()
            p.join()


def _plain_peer(me: int, ports: Sequence[int], size: int, turns: int, barrier: Any, out: Connection) -> None:
    out.send(asyncio.run(_plain_turns(me, ports, size, turns, barrier)))


async def _plain_turns(me: int, ports: Sequence[int], size: int, turns: int, barrier: Any) -> list[float]:
    """Seconds of each turn. Connections are made once."""
    came: dict[int, asyncio.StreamReader] = {}
    all_here = asyncio.Event()

    async def take(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        came[(await reader.readexactly(1))[0]] = reader
        if len(came) == len(ports) - 1:
            all_here.set()

    server = await asyncio.start_server(take, "127.0.0.1", ports[me], limit=max(1 << 16, size))
    barrier.wait(60)
    writers = []
    for other, port in enumerate(ports):
        if other != me:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(bytes([me]))
            writers.append(writer)
    await asyncio.wait_for(all_here.wait(), 60)
    blob, times = bytes(size), []
    for _ in range(turns):
        barrier.wait(60)
        began = time.perf_counter()
        for writer in writers:
            writer.write(blob)
        await asyncio.gather(*(reader.readexactly(size) for reader in came.values()), *(w.drain() for w in writers))
        times.append(time.perf_counter() - began)
    barrier.wait(60)
    server.close()
    return times[len(times) // 10 :]


# -- the swarm -----------------------------------------------------------------------------------------------


class Swarm:
    """A coordinator and peers of one device, in a folder that is gone at the end."""

    def __init__(self, names: Sequence[str] = PEERS, device: str = "cpu"):
        self._names, self._device = names, device

    def __enter__(self) -> Swarm:
        self._folder = tempfile.TemporaryDirectory(prefix="cairn-exchange-", ignore_cleanup_errors=True)
        self._processes: list[Process] = []
        try:
            self._start(Path(self._folder.name))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_all(self._processes)
        self._folder.cleanup()

    def _start(self, folder: Path) -> None:
        from cairn.commands.serve import coordinator_folder

        run_file = folder / "run.toml"
        run_file.write_text(endless(RUN_FILE.read_text(), RUN_FILE.parent))
        coordinator, _ = serve(run_file, folder)
        self._processes.append(coordinator)
        home = coordinator_folder(folder / "coordinator", "sotu")
        invite = Invite.parse(wait_for_file(home / "invite", coordinator, START_SECONDS))
        for name in self._names:
            self._processes.append(
                Process(
                    name,
                    ["peer", "join", str(invite), "--home", str(folder / name), "--name", name, "--threads", "1",
                     "--device", self._device, "--listen", "/ip4/127.0.0.1/tcp/0", "--plain"],
                    folder,
                )
            )  # fmt: skip
        self._homes = {name: run_folder(folder / name, invite.run) for name in self._names}

    def measure(self, rounds: int) -> list[Sample]:
        """Watch a number of rounds, from the first one to which all peers contributed. Raises CairnError."""
        seen: dict[tuple[str, int], Sample] = {}
        first = None
        end = time.monotonic() + START_SECONDS
        while True:
            self._look(seen)
            last = {name: max((r for n, r in seen if n == name), default=-1) for name in self._names}
            if first is None and min(last.values()) >= 0:
                first = max(last.values()) + 1
                end = time.monotonic() + ROUND_SECONDS * rounds
            if first is not None and min(last.values()) >= first + rounds - 1:
                return [s for s in seen.values() if first <= s.round < first + rounds]
            if time.monotonic() > end:
                raise CairnError(f"not in time: the peers' last rounds are {last}, the first to measure is {first}")
            time.sleep(0.25)

    def states(self) -> list[Snapshot]:
        """Return what the peers show when they hold the state of the same round. Raises CairnError."""
        end = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < end:
            shown = [s for home in self._homes.values() if (s := read_snapshot(home)) is not None]
            held = {s.state_round for s in shown if s.state}
            if len(shown) == len(self._names) and len(held) == 1 and all(s.state for s in shown):
                return shown
            time.sleep(0.05)
        raise CairnError("the peers were never seen with states of one round")

    def _look(self, seen: dict[tuple[str, int], Sample]) -> None:
        for p in self._processes:
            if not p.running:
                raise CairnError(f"{p.name} ended (code {p.code}):\n{p.last_words()}")
        for name, home in self._homes.items():
            snapshot = read_snapshot(home)
            for r in snapshot.exchange_rounds if snapshot is not None else ():
                number = int(r["round"])
                seen[name, number] = Sample(name, number, r["blobs"], r["certified"], r["applied"])


def endless(run_file: str, folder: Path) -> str:
    """Return a run file without an end, for any folder: its source is in `folder`."""
    text = re.sub(r"^total_tokens\s*=.*$", "total_tokens = 1_000_000_000", run_file, flags=re.MULTILINE)
    return re.sub(r'^source\s*=\s*"([^"]+)"', lambda m: f'source = "{folder / m[1]}"', text, flags=re.MULTILINE)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CairnError as e:
        sys.exit(f"benchmarks.exchange: {e}")
