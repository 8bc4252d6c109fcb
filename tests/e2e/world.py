"""A tiny run with a coordinator and peers as processes on loopback, in a folder of its own, removed at the end."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from benchmarks.convergence.wan_run_file import toml
from cairn.commands.serve import coordinator_folder
from cairn.demo.processes import Process, free_ports, stop_all
from coordinator.authoring.resolve import SPEC
from coordinator.authoring.toml_file import tomllib
from peer.coordinator_client import CoordinatorClient, SwarmStatus
from peer.node.enrollment import ADMISSION, run_folder
from peer.node.snapshot import Snapshot, read_snapshot
from protocol.identity import Identity, parse_key_file
from protocol.ids import PeerKey
from protocol.invite import Invite
from protocol.spec import RunSpec, open_spec
from tests.e2e.chains import Branch, read_branch
from tests.support import waiting

T = TypeVar("T")

LIMIT = 600.0
"""Seconds after which a wait for any event fails. Importing torch takes eight seconds of CPU a process, trainers yield
to whatever else runs, and the cores are shared."""

RUN_FILE = """
[run]
name = "tiny"
seed = 7
total_tokens = {total_tokens}
[model]
model_type = "llama"
hidden_size = 48
intermediate_size = 96
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 64
tie_word_embeddings = {tied}
[data]
source = "text.jsonl"
vocabulary = 300
window = 32
validation_every = 10
[inner]
lr = 2e-3
batch = 8
[inner.schedule]
kind = "constant"
[codec]
kind = "sparse"
k = 256
[round]
target_tokens = {target_tokens}
# Two make a round. Who has done its half waits, instead of taking the cores from all else.
max_update_tokens = {max_update_tokens}
max_seconds = 10
exchange_seconds = 8
propose_seconds = 1
patience_seconds = 8
heartbeat_seconds = 0.3
member_seconds = 6
[credit]
hold_rounds = 2
[checkpoint]
every = 4
keep = 2
final_depth = 3
"""


def write_run(
    folder: Path,
    *,
    total_tokens: int = 0,
    target_tokens: int = 8_192,
    tied: bool = True,
    tables: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Write a run.toml with these fields in its tables, and its text.

    The text is a few hundred kB of made-up sentences, the same each time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(7)
    words = ["".join(draw.choices("aeioubcdlmnrst", k=draw.randint(2, 8))) for _ in range(400)]
    with open(folder / "text.jsonl", "w") as file:
        for _ in range(60):
            text = " ".join(draw.choice(words) for _ in range(800))
            file.write(json.dumps({"text": text}) + "\n")
    path = folder / "run.toml"
    text = RUN_FILE.format(
        total_tokens=total_tokens,
        target_tokens=target_tokens,
        max_update_tokens=target_tokens // 2,
        tied=str(tied).lower(),
    )
    merged = tomllib.loads(text)
    for name, fields in (tables or {}).items():
        merged[name] = {**merged.get(name, {}), **fields}
    path.write_text(toml(merged))
    return path


class World:
    """Use with `with`: at the end no process of it is left, and nothing of its folder."""

    def __init__(
        self,
        *,
        total_tokens: int = 0,
        target_tokens: int = 8_192,
        tied: bool = True,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        self.folder = Path(tempfile.mkdtemp(prefix="cairn-e2e-"))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.run_file = write_run(
            self.folder / "run", total_tokens=total_tokens, target_tokens=target_tokens, tied=tied, tables=tables
        )
        self.grpc, self.page, self.swarm = free_ports(3)
        self.processes: dict[str, Process] = {}
        self.started: list[Process] = []
        self._spec: RunSpec | None = None
        self.left: tuple[list[int], list[str]] = [], []
        """After the end: processes that had to be killed, and what they left in the temporary folder."""
        self._environment = {k: os.environ.get(k) for k in ("TMPDIR", "GRPC_ENABLE_FORK_SUPPORT")}

    def __enter__(self) -> World:
        # All files that the processes put into the temporary folder are found, and are theirs.
        os.environ["TMPDIR"] = str(self.temporary)
        # gRPC in this process would warn when others are started from it; they exec at once, so its fork
        # support is not needed.
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        return self

    def __exit__(self, *_: object) -> None:
        stop_all([p for p in self.started if p.running])
        # Daemons and their watchdogs notice the end of their node, and clean up: that takes a moment.
        with suppress(waiting.NotInTime):
            waiting.wait_until(lambda: not self.left_processes(), seconds=60, every=0.1)
        left = self.left_processes()
        # torch keeps a cache there for whoever runs next; all else must be gone.
        files = sorted(p.name for p in self.temporary.iterdir() if not p.name.startswith("torchinductor_"))
        self.left = left, files
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- processes -------------------------------------------------------------------------------------------

    def start_coordinator(self, *, evaluate_every: int = 0) -> Process:
        """Start the coordinator in the same folder and on the same ports each time, so that the invite stays valid.

        `evaluate_every`: rounds; 0: never. Each evaluation is a new process that imports torch, on the cores that
        peers train on.
        """
        return self._start(
            "coordinator",
            "coordinator", "serve", str(self.run_file), "--home", str(self.folder / "coordinator"),
            "--grpc", f"127.0.0.1:{self.grpc}", "--page", f"127.0.0.1:{self.page}",
            "--swarm", f"/ip4/127.0.0.1/tcp/{self.swarm}", "--evaluate-every", str(evaluate_every),
        )  # fmt: skip

    def start_peer(
        self,
        name: str,
        *,
        device: str = "cpu",
        parallel: str = "auto",
        audits: str = "off",
        module: str = "cairn",
        anonymous: bool = False,
    ) -> Process:
        """Start a peer with the same home each time, so that it stays the same peer.

        `audits`: the device of its audits; each process imports torch on the cores that peers train on. `module`
        replaces the command line. An `anonymous` one shows no name.
        """
        shown = ["--anonymous"] if anonymous else ["--name", name]
        return self._start(
            name,
            "peer", "join", str(self.invite), "--home", str(self.folder / name), *shown, "--threads", "1",
            "--device", device, "--parallel", parallel, "--listen", "/ip4/127.0.0.1/tcp/0", "--plain",
            "--audit-device", audits, module=module,
        )  # fmt: skip

    def start_auditor(self, name: str, owner_key: Path) -> Process:
        """Start an auditor with the file of the owner's key."""
        return self._start(name, "auditor", *self.auditor_arguments(name, owner_key))

    def auditor_arguments(self, name: str, owner_key: Path) -> list[str]:
        """Return the arguments of `cairn auditor`."""
        return [
            str(self.invite), "--home", str(self.folder / name), "--name", name, "--threads", "1", "--device", "cpu",
            "--listen", "/ip4/127.0.0.1/tcp/0", "--plain", "--owner-key", str(owner_key),
        ]  # fmt: skip

    def _start(self, name: str, *arguments: str, module: str = "cairn") -> Process:
        process = Process(name, arguments, self.folder, module=module)
        self.processes[name] = process
        self.started.append(process)
        return process

    def stop(self, *names: str, numbers: Sequence[int] = (signal.SIGTERM,)) -> None:
        """Signal these processes at once, each with the next of the numbers, and wait until all have ended."""
        for name, number in zip(names, itertools.cycle(numbers), strict=False):
            self.processes[name].signal(number)
        try:
            waiting.wait_until(lambda: not any(self.processes[n].running for n in names), "all stop", every=0.02)
        except waiting.NotInTime as e:
            running = [n for n in names if self.processes[n].running]
            raise AssertionError(f"{e}: {running} still run\n{self.logs()}") from None

    def left_processes(self) -> list[int]:
        """Processes of this world that run: trainers and daemons too, by the folder in their environment."""
        mark = f"TMPDIR={self.temporary}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def trainer_of(self, name: str) -> int:
        """Return the process id of a peer's trainer."""
        parent = self.processes[name].pid
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(stat[1]) == parent and b"peer.training" in (entry / "cmdline").read_bytes():
                        return int(entry.name)
        raise AssertionError(f"{name} has no trainer\n{self.logs(name)}")

    # -- what they show --------------------------------------------------------------------------------------

    @property
    def coordinator_home(self) -> Path:
        return coordinator_folder(self.folder / "coordinator", "tiny")

    @property
    def _began(self) -> bool:
        """Return whether the coordinator has written its invite."""
        return (self.coordinator_home / "invite").exists()

    @property
    def invite(self) -> Invite:
        return Invite.parse((self.coordinator_home / "invite").read_text())

    @property
    def spec(self) -> RunSpec:
        if self._spec is None:
            self._spec = open_spec((self.coordinator_home / "run" / SPEC).read_bytes(), self.invite.run)
        return self._spec

    @property
    def owner(self) -> Identity:
        return parse_key_file((self.coordinator_home / "owner.key").read_text())

    def peer_folder(self, name: str) -> Path:
        return run_folder(self.home(name), self.invite.run)

    def home(self, name: str) -> Path:
        """Return the folder with a peer's key: that of an anonymous one is inside of the one that it was given."""
        given = self.folder / name
        own = given / "anonymous" / self.invite.run.hex()[:12]
        return own if own.exists() else given

    def log(self, name: str) -> str:
        """Return the log of a process in all its lives."""
        file = (
            self.coordinator_home / "coordinator.log" if name == "coordinator" else self.peer_folder(name) / "peer.log"
        )
        return file.read_text(errors="replace") if file.exists() else ""

    def logs(self, *names: str, lines: int = 25) -> str:
        """Return the ends of the logs, for a test that failed."""
        parts = []
        for name in names or self.processes:
            p = self.processes[name]
            with suppress(OSError):
                text = (
                    "\n".join(self.log(name).splitlines()[-lines:])
                    if (self.coordinator_home / "invite").exists()
                    else ""
                )
                state = "runs" if p.running else f"ended with code {p.code}"
                parts.append(f"--- {name} ({state}); printed last:\n{p.last_words()}\n--- its log:\n{text}")
        return "\n".join(parts)

    def snapshot(self, name: str) -> Snapshot | None:
        """Return the status of a running peer, or its last one of an earlier life."""
        return read_snapshot(self.peer_folder(name)) if self.processes[name].running else None

    def snapshot_left(self, name: str) -> Snapshot:
        """Return a peer's last status, of any age."""
        snapshot = read_snapshot(self.peer_folder(name))
        assert snapshot is not None, self.logs(name)
        return snapshot

    async def status(self) -> SwarmStatus:
        async with CoordinatorClient(self.invite, timeout=60.0) as client:
            return await client.status()

    def branch(self, name: str) -> Branch:
        """Return the chain on a process's disk."""
        store = self.coordinator_home / "store" if name == "coordinator" else self.peer_folder(name) / "store"
        return read_branch(self.spec, store)

    # -- waiting ---------------------------------------------------------------------------------------------

    async def until(
        self, what: str, look: Callable[[], T | None | Awaitable[T | None]], seconds: float = LIMIT, every: float = 0.1
    ) -> T:
        """Return the first true value of `look`. Fail with the ends of all logs when there is none in time."""
        try:
            return cast(T, await waiting.until(look, what, seconds=seconds, every=every))
        except waiting.NotInTime as e:
            raise AssertionError(f"{e}\n{self.logs()}") from None

    async def coordinator_ready(self) -> None:
        """Wait until it answers."""
        process = self.processes["coordinator"]

        async def answers() -> bool:
            assert process.running, self.logs("coordinator")
            if not self._began:
                return False
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.grpc)
                writer.close()
                return True
            return False

        await self.until("the coordinator answers", answers)

    def rounds_with(self, name: str) -> list[int]:
        """Return the rounds to which a peer has contributed, by the chain on its own disk."""
        key = self.key(name)
        return [c.record.body.round for c in self.branch(name).path if key in c.record.body.contributors]

    def key(self, name: str) -> PeerKey:
        """Return a peer's key, once it has made it."""
        return parse_key_file((self.home(name) / "identity.key").read_text()).key

    async def contributes_after(self, name: str, round: int, seconds: float = LIMIT) -> int:
        """Wait until a peer has contributed to a round after this one, and return that round."""

        def look() -> int:
            assert self.processes[name].running, self.logs(name)
            if not (self.home(name) / "identity.key").exists():
                return 0
            return max((r for r in self.rounds_with(name) if r > round), default=0)

        return await self.until(f"{name} contributes to a round after {round}", look, seconds, every=0.3)

    async def healthy(self, names: list[str]) -> int:
        """Wait until the coordinator and these peers run, started if need be, and one round has them all; return the
        number of the round after it."""
        if not self.processes["coordinator"].running:
            self.start_coordinator()
            await self.coordinator_ready()
        for name in names:
            if not self.processes[name].running:
                self.start_peer(name)
        start = self.branch(names[0]).height

        def look() -> int:
            for name in names:
                assert self.processes[name].running, self.logs(name)
            if not all((self.folder / n / "identity.key").exists() for n in names):
                return 0
            keys = {self.key(n) for n in names}
            path = self.branch(names[0]).path[start:]
            return next((c.record.body.round + 1 for c in path if keys <= set(c.record.body.contributors)), 0)

        return await self.until(f"a round with all of {names}", look, every=0.3)

    async def round_after(self, names: list[str], rounds: int, seconds: float = LIMIT) -> int:
        """Wait until these are `rounds` rounds further than the first of them is now, and return that round."""
        return await self.round_reached(names, self.branch(names[0]).height + rounds, seconds)

    async def round_reached(self, names: list[str], round: int, seconds: float = LIMIT) -> int:
        """Wait until the chain on each of these disks leads up to a round, and return the round."""

        def look() -> bool:
            return all(self.branch(n).height >= round for n in names)

        await self.until(f"{names} reach round {round}", look, seconds, every=0.3)
        return round

    def admission_of(self, name: str) -> bytes:
        """Return the signed admission that a peer has stored."""
        return (self.peer_folder(name) / "store" / "values" / ADMISSION).read_bytes()

    def has_logged(self, name: str, pattern: str) -> bool:
        return re.search(pattern, self.log(name)) is not None

    def assert_logged(self, name: str, pattern: str) -> None:
        assert self.has_logged(name, pattern), f"{name} has not logged {pattern!r}\n{self.logs(name, lines=60)}"
