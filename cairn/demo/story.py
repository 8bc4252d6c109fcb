"""The demo from start to end: it starts the processes, kills one peer, lets another join, and checks the result.

With liars nobody is killed: they join instead, and are to be convicted.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from cairn import ROOT
from cairn.commands.serve import coordinator_folder
from cairn.demo.audit_trail import AuditTrail, Conviction
from cairn.demo.audited_run import write_audited_run
from cairn.demo.processes import Process, serve, stop_all, wait_for_file
from cairn.demo.report import Judged, LossPoint, judge, loss_curve, plot
from cairn.demo.screen import DemoScreen
from coordinator.authoring.prepare import load_prepared
from coordinator.authoring.runfile import RunFile, load_run
from coordinator.checkpoints.archive import Archive, ArchivedState
from peer.coordinator_client import CoordinatorClient, CoordinatorUnreachable, SwarmStatus
from peer.keyfile import load_or_make
from peer.node.enrollment import run_folder
from peer.node.snapshot import Snapshot, read_snapshot
from protocol.errors import CairnError, os_reason
from protocol.identity import parse_key_file
from protocol.ids import PeerKey
from protocol.invite import Invite
from protocol.ledger.credit_text import credit_text
from protocol.plain_text import one_line
from protocol.spec import RunSpec
from protocol.units import count

RUN_FILE = ROOT / "examples" / "sotu.toml"
PEERS = ("ada", "alan", "edsger", "grace")
KILLED, KILL_AT = "edsger", 0.30
LATE, LATE_AT = "barbara", 0.45
"""Shares of the run's tokens at which one peer is killed with SIGKILL and a new one joins."""

LIARS = {"mallory": "noise", "trudy": "half"}
"""Names of the liars, and their lies (`cairn.demo.lying_trainer`)."""

LIES = {"noise": "sends random signs and claims a full update", "half": "makes half of its steps and claims all"}
LIARS_AT = 4
"""The round in which the liars join. The honest peers are founders: they have stake, and so can convict."""

MARGIN = 2.0
"""Nats by which the held-out loss must fall."""

READY_SECONDS, ROUND_SECONDS, END_SECONDS = 240.0, 600.0, 60.0
"""Seconds for the coordinator to start, without a new round, and for the last state to be archived."""

PROMPT = "The people of the United States"
MARK = "cairn-demo"


@dataclass
class Demo:
    """The state of a running demo."""

    folder: Path
    screen: DemoScreen
    invite: Invite
    spec: RunSpec
    coordinator: Process
    page: str
    peers: dict[str, Process] = field(default_factory=dict)
    events: list[tuple[int, str]] = field(default_factory=list)
    killed: bool = False
    liars: tuple[str, ...] = ()
    """Names of those that lie. Without any, one peer is killed and another joins late."""
    convicted: set[PeerKey] = field(default_factory=set)
    """Those whose conviction is on the screen already."""
    curve: list[LossPoint] = field(default_factory=list)
    status: SwarmStatus | None = None

    @property
    def living(self) -> list[str]:
        """Names of the honest peers that were not killed."""
        gone = {*self.liars, *([KILLED] if self.killed else [])}
        return [name for name in self.peers if name not in gone]

    def key(self, name: str) -> PeerKey:
        """Return a peer's key, once it has made it."""
        return parse_key_file((self.folder / name / "identity.key").read_text()).key


def run_demo(folder: Path, run_file: Path | None, *, plain: bool, liars: int = 0) -> int:
    """Run the demo; return the exit code. Raises CairnError.

    It is 0 if the loss fell by the margin, all digests agree, and of `liars` liars each was convicted.
    """
    run_file = run_file or RUN_FILE
    run = load_run(run_file)  # says what is wrong with it, before anything starts
    if any(path.resolve().is_relative_to(folder.resolve()) for path in (run_file, run_file.parent)):
        raise CairnError(f"{run_file} is in {folder}, which the demo empties: move it, or name another with --folder")
    _check_run(run, has_end=bool(liars))
    lock = clear_folder(folder)
    screen = DemoScreen(live=not plain and sys.stdout.isatty())
    processes: list[Process] = []
    try:
        if liars:
            founders = [load_or_make(folder / name / "identity.key").key for name in PEERS]
            run_file = write_audited_run(run_file, folder / "run.toml", founders)
        demo = _start(folder, run_file, screen, processes)
        demo.liars = tuple(LIARS)[:liars]
        with screen.showing(demo.page):
            asyncio.run(_watch(demo, processes))
        return _conclude(demo, run.prepared)
    finally:
        stop_all(processes)
        os.close(lock)


def _check_run(run: RunFile, *, has_end: bool) -> None:
    """Raise CairnError for a run that ends never, unless it `has_end` by now, or without text to judge it by."""
    if not run.run.total_tokens and not has_end:
        raise CairnError(f"{run.path}: run.total_tokens: the demo waits for the run's end: write more than 0")
    data = run.data
    if run.prepared is not None:
        is_judged = bool(load_prepared(run.prepared).manifest.validation.shards)
    else:
        is_judged = bool(data.validation_every or data.validation)
    if not is_judged:
        raise CairnError(
            f"{run.path}: data: the demo judges the model by held-out documents: write for example validation_every = "
            "12, or prepare the data with --validation-every 12"
        )


def clear_folder(folder: Path) -> int:
    """Return a descriptor that locks an empty folder; only the folder of an earlier demo is emptied.

    Raises CairnError.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise CairnError(f"{folder} is not empty and not of an earlier demo: name another with --folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise CairnError(
                f"another demo is running in {folder}: wait for it, or name another with --folder"
            ) from None
        for old in folder.iterdir():
            if old.name != MARK:
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    except OSError as e:
        raise CairnError(f"{folder} cannot be made or emptied: {os_reason(e)}; name another with --folder") from None
    return lock


def _start(folder: Path, run_file: Path, screen: DemoScreen, processes: list[Process]) -> Demo:
    screen.say(f"coordinator: cairn coordinator serve {run_file.name} (prepares data and draws the first weights)")
    coordinator, url = serve(run_file, folder)
    processes.append(coordinator)
    home = coordinator_folder(folder / "coordinator", load_run(run_file).run.name)
    invite = Invite.parse(wait_for_file(home / "invite", coordinator, READY_SECONDS))
    spec = asyncio.run(_spec(invite))
    screen.say(f"invite: {str(invite)[:48]}...   page: {url}")
    screen.say(f"model: {spec.model.layout.numel:,} parameters; run: {count(spec.total_tokens)} tokens", "dim")
    demo = Demo(folder, screen, invite, spec, coordinator, url)
    for name in PEERS:
        _join(demo, name, processes)
    screen.say(f"peers: {', '.join(PEERS)} join with cairn peer join INVITE")
    return demo


async def _spec(invite: Invite) -> RunSpec:
    async with CoordinatorClient(invite) as client:
        return (await client.get_run()).spec


def _join(demo: Demo, name: str, processes: list[Process]) -> None:
    peer = Process(
        name,
        ["peer", "join", str(demo.invite), "--home", str(demo.folder / name), "--name", name, "--threads", "1",
         "--device", "cpu", "--listen", "/ip4/127.0.0.1/tcp/0", "--plain"],
        demo.folder,
    )  # fmt: skip
    demo.peers[name] = peer
    processes.append(peer)


def _join_liar(demo: Demo, name: str, processes: list[Process]) -> None:
    home = str(demo.folder / name)
    liar = Process(name, [LIARS[name], str(demo.invite), home, name], demo.folder, module="cairn.demo.liar")
    demo.peers[name] = liar
    processes.append(liar)


@dataclass(slots=True)
class Patience:
    """The wait for a run that goes on: it is over `seconds` after the newest round came."""

    seconds: float
    since: float
    round: int = 0

    def is_over(self, round: int, now: float) -> bool:
        """Note the round that is trained now, and return whether it has been for too long."""
        if round != self.round:
            self.round, self.since = round, now
        return now - self.since > self.seconds


async def _watch(demo: Demo, processes: list[Process]) -> None:
    """Watch until every living peer has finished. Raises CairnError if one fails, or no new round comes.

    The run may take as long as it likes: on a busy machine that is hours.
    """
    patience = Patience(ROUND_SECONDS, time.monotonic())
    trail = AuditTrail(demo.spec) if demo.liars else None
    async with CoordinatorClient(demo.invite, timeout=5.0) as client:
        while any(demo.peers[name].running for name in demo.living):
            _check_processes(demo)
            if patience.is_over(demo.status.round if demo.status else 0, time.monotonic()):
                raise CairnError(f"no new round in {ROUND_SECONDS:.0f} s; see the logs in {demo.folder}")
            try:
                demo.status = await client.status()
            except CoordinatorUnreachable as e:
                demo.screen.say(str(e), "yellow")
                await asyncio.sleep(1.0)
                continue
            demo.screen.update(demo.status)
            if trail is None:
                _intervene(demo, demo.status, processes)
            else:
                _let_liars_join(demo, demo.status, processes)
                try:
                    await trail.follow(client)
                except CairnError:
                    trail = AuditTrail(demo.spec)  # another branch has won, or nobody answers: it is read again
                _tell_convictions(demo, demo.status, trail)
            await asyncio.sleep(0.5)
        await _wait_for_archive(demo, time.monotonic() + END_SECONDS)
        demo.status = await client.status()
        demo.curve = loss_curve(demo.page)


def _check_processes(demo: Demo) -> None:
    for p in [demo.coordinator, *demo.peers.values()]:
        if p.code not in (None, 0) and not (demo.killed and p.name == KILLED):
            raise CairnError(f"{p.name} ended with code {p.code} (its log is in {p.home}):\n{p.last_words()}")
    if demo.coordinator.code is not None:
        raise CairnError(f"the coordinator ended before the run did:\n{demo.coordinator.last_words()}")


def _intervene(demo: Demo, status: SwarmStatus, processes: list[Process]) -> None:
    share = status.tokens / demo.spec.total_tokens
    if share >= KILL_AT and not demo.killed:
        demo.peers[KILLED].kill()
        demo.killed = True
        demo.events.append((status.round, f"{KILLED} killed"))
        demo.screen.say(f"{KILLED} is killed with SIGKILL in round {status.round}; the others go on", "red")
    if share >= LATE_AT and LATE not in demo.peers:
        _join(demo, LATE, processes)
        demo.events.append((status.round, f"{LATE} joins"))
        demo.screen.say(f"{LATE} joins late, in round {status.round}: checkpoint and replay, then training", "green")


def _let_liars_join(demo: Demo, status: SwarmStatus, processes: list[Process]) -> None:
    if status.round < LIARS_AT:
        return
    for name in demo.liars:
        if name not in demo.peers:
            _join_liar(demo, name, processes)
            demo.events.append((status.round, f"{name} joins"))
            demo.screen.say(f"{name} joins in round {status.round}: it {LIES[LIARS[name]]}", "yellow")


def _tell_convictions(demo: Demo, status: SwarmStatus, trail: AuditTrail) -> None:
    names = {demo.key(name): name for name in demo.peers if (demo.folder / name / "identity.key").exists()}
    for conviction in trail.convictions():
        if conviction.author not in demo.convicted:
            demo.convicted.add(conviction.author)
            name = names.get(conviction.author, conviction.author.short)
            demo.events.append((status.round, f"{name} convicted"))
            demo.screen.say(f"{name} is convicted in round {conviction.decided_round}: {_reason(conviction)}", "green")


def _reason(conviction: Conviction) -> str:
    return (
        f"{conviction.reporters} peers trained its update of round {conviction.update_round} again "
        f"({conviction.windows} windows): {conviction.measured}"
    )


def _archive(demo: Demo) -> list[ArchivedState]:
    return Archive(coordinator_folder(demo.folder / "coordinator", demo.spec.name) / "checkpoints", demo.spec).all()


async def _wait_for_archive(demo: Demo, end: float) -> None:
    """Wait for the last state: the coordinator fetches it while the peers end the run."""
    while time.monotonic() < end:
        if (archived := _archive(demo)) and archived[-1].tokens >= demo.spec.total_tokens:
            return
        await asyncio.sleep(0.5)


def _conclude(demo: Demo, prepared: Path | None) -> int:
    """Evaluate the model, print the results, and check the demo's promises. `prepared`: the folder of given data."""
    say = demo.screen.say
    say("training is over; evaluating the model on held-out text")
    archived = _archive(demo)
    data = prepared or coordinator_folder(demo.folder / "coordinator", demo.spec.name) / "run" / "data"
    shards = [data / f"{s.digest}.tokens" for s in demo.spec.data.validation]
    judged = judge(demo.spec, shards, archived[0].folder, archived[-1].folder, PROMPT)
    picture = demo.folder / "loss.png"
    no_plot = plot(demo.curve, judged, picture, demo.events)
    snapshots = {n: _snapshot(demo, n) for n in demo.living}
    problems = _problems(demo, snapshots, archived, judged)
    _print(demo, snapshots, archived, judged, no_plot or str(picture))
    if demo.liars:
        trail = AuditTrail(demo.spec)
        trail.read_store(run_folder(demo.folder / PEERS[0], demo.invite.run) / "store")
        demo.screen.print(_audit_table(demo, trail))
        problems += _audit_problems(demo, trail)
    else:
        problems += _late_problems(demo)
    for problem in problems:
        say(f"FAILED: {problem}", "bold red")
    if not problems:
        convicted = ", every liar was convicted and keeps nothing" if demo.liars else ""
        say(
            f"all {len(snapshots)} living peers hold the same bits{convicted}, and the loss fell as promised",
            "bold green",
        )
    return 1 if problems else 0


def _snapshot(demo: Demo, name: str) -> Snapshot | None:
    return read_snapshot(run_folder(demo.folder / name, demo.invite.run))


def _problems(
    demo: Demo, snapshots: dict[str, Snapshot | None], archived: list[ArchivedState], judged: Judged
) -> list[str]:
    problems = []
    states = {s.state if s else "" for s in snapshots.values()}
    if len(states) != 1 or "" in states:
        problems.append("the peers' state digests differ")
    if str(archived[-1].state) not in states:
        problems.append("the archived checkpoint is not the state that the peers hold")
    if not judged.before - judged.after >= MARGIN:
        problems.append(f"the held-out loss fell by {judged.before - judged.after:.2f}, less than {MARGIN:.2f}")
    return problems


def _late_problems(demo: Demo) -> list[str]:
    problems = []
    if LATE not in demo.peers:
        problems.append(f"{LATE} took no part: the run was over too soon")
    if not _earned(demo, LATE):
        problems.append(f"{LATE}, who joined late, earned nothing")
    return problems


def _earned(demo: Demo, name: str) -> int:
    """Return the micro-credits of a peer, by its name."""
    found = (p for p in (demo.status.peers if demo.status else ()) if p.name == name)
    return sum(p.micro_credits_settled + p.micro_credits_pending for p in found)


def _audit_problems(demo: Demo, trail: AuditTrail) -> list[str]:
    problems = []
    convicted, replays = {c.author for c in trail.convictions()}, trail.replays()
    for name in demo.liars:
        if name not in demo.peers:
            problems.append(f"{name} took no part: the run was over too soon")
        elif demo.key(name) not in convicted:
            problems.append(f"{name} lied and was not convicted")
        elif _earned(demo, name):
            problems.append(f"{name} was convicted and keeps {credit_text(_earned(demo, name))} credits")
    for name in demo.living:
        if demo.key(name) in convicted:
            problems.append(f"{name} is honest and was convicted")
        elif failed := replays.get(demo.key(name), (0, 0))[1]:
            problems.append(f"{name} is honest and was accused by {failed} reports")
    return problems


def _audit_table(demo: Demo, trail: AuditTrail) -> Table:
    """Return what the chain says of each peer: the reports about its replayed updates, and the verdict."""
    found, replays = {c.author: c for c in reversed(trail.convictions())}, trail.replays()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("peer", "replays of its updates", "verdict"):
        table.add_column(title)
    table.add_column("credits kept", justify="right")
    for name in (n for n in demo.peers if (demo.folder / n / "identity.key").exists()):
        passed, failed = replays.get(demo.key(name), (0, 0))
        conviction = found.get(demo.key(name))
        verdict = f"convicted in round {conviction.decided_round}: {conviction.measured}" if conviction else "-"
        table.add_row(name, f"{passed} passed, {failed} failed", verdict, credit_text(_earned(demo, name)))
    return table


def _print(
    demo: Demo, snapshots: dict[str, Snapshot | None], archived: list[ArchivedState], judged: Judged, picture: str
) -> None:
    say, status = demo.screen.say, demo.status
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("peer")
    table.add_column("state digest", no_wrap=True)
    for title in ("round", "settled", "pending", "credits"):
        table.add_column(title, justify="right")
    for p in sorted(status.peers if status else (), key=lambda p: p.name):
        if p.name in demo.peers:
            snapshot = snapshots.get(p.name)
            table.add_row(
                p.name,
                snapshot.state[:32] if snapshot else "killed" if p.name == KILLED else p.phase,
                str(snapshot.round if snapshot else p.round),
                credit_text(p.micro_credits_settled),
                credit_text(p.micro_credits_pending),
                credit_text(p.micro_credits_settled + p.micro_credits_pending),
            )
    demo.screen.print(table)
    say(f"held-out loss: {judged.before:.3f} before, {judged.after:.3f} after (must fall by {MARGIN:.2f})")
    say(f"text before: {one_line(judged.text_before, 300)}", "dim")
    say(f"text after:  {one_line(judged.text_after, 300)}")
    say(f"plot:        {picture}")
    say(f"checkpoint:  {archived[-1].folder} (round {archived[-1].round}, {count(archived[-1].tokens)} tokens)")
    say(f'try:         cairn generate {archived[-1].folder} --prompt "{PROMPT}"')
