"""`cairn peer join`: enters a run, runs the node, shows its progress, and leaves in order on Ctrl-C.

`cairn auditor` does the same with a node that trains nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.commands.options import check_listen, device_name, device_option, home_option, invite_argument, via_option
from cairn.connection import parse_invite
from cairn.files import private_files
from cairn.logs import set_up_logging
from cairn.number_format import parse_volume
from cairn.open_files import allow_many_files
from cairn.stop_signals import stop_on_signals
from cairn.visibility import peer_home, seen_by_others
from protocol.errors import CairnError
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.messages import MAX_NAME
from protocol.plain_text import is_plain
from protocol.quiet_imports import quiet_imports

if TYPE_CHECKING:
    from cairn.peer_screen import PeerScreen
    from cairn.peer_settings import SettingsFile
    from peer.channel import Choice, MomentForm
    from peer.coordinator_client import RunInfo
    from peer.node.enrollment import Enrollment
    from peer.node.node import Node
    from protocol.spec import RunSpec

log = logging.getLogger("cairn.peer")

AGAIN_SECONDS = 60.0
"""Seconds until a peer that was in the run tries to enter it again."""

CREDIT_SECONDS = 15.0
"""Seconds between two requests for this peer's credits; more in a large swarm (see `credit_seconds`)."""

CREDIT_CALLS = 160.0
"""Maximum requests a second that all members together send for their credits."""

SETTINGS = ("hours", "until", "max_upload", "max_download", "max_upload_day", "max_download_day", "gpu_memory",
            "only_when_idle")  # fmt: skip
"""The options that peer.toml may set as well."""

_CHOICE = click.Choice(["auto", "on", "off"])
_auto = partial(click.option, default="auto", show_default=True)


def _disk(_context: click.Context, _parameter: click.Parameter, text: str) -> int:
    """Return the bytes in "50G", "800M" or "1234567". Raises click.BadParameter."""
    try:
        return parse_volume(text)
    except ValueError as e:
        raise click.BadParameter(str(e)) from None


def _parallel(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    """Return the normalized layout. Raises click.BadParameter; the trainer checks it against model and machine."""
    from peer.errors import TrainingError
    from peer.training.parallel.parallel_dims import ParallelDims

    try:
        return text if text == "auto" else str(ParallelDims.parse(text))
    except TrainingError as e:
        raise click.BadParameter(str(e).removeprefix("--parallel ")) from None


def _audit_device(context: click.Context, parameter: click.Parameter, text: str) -> str:
    """Return the device of audits, or "off". Raises click.BadParameter for a malformed name."""
    return text if text == "off" else device_name(context, parameter, text)


disk_option = click.option(
    "--disk", default="50G", show_default=True, metavar="SIZE", help="The most disk space to use.", callback=_disk
)
private_data_option = click.option(
    "--allow-private-data",
    is_flag=True,
    help="Let the run's owner name data on this disk, in private networks and behind your cloud accounts.",
)
parallel_option = _auto(
    "--parallel",
    help="How to use many GPUs: auto, or some of dp=N, fsdp=N, tp=N, pp=N with commas, such as fsdp=4,tp=2.",
    callback=_parallel,
)

gpu_memory_option = click.option(
    "--gpu-memory", type=float, metavar="GB", help="Most memory to take on each GPU, for example 6.  [default: all]"
)
moments_option = click.option(
    "--moments",
    type=click.Choice(["fp32", "8bit"]),
    default="fp32",
    show_default=True,
    help="The optimizer's moments. 8bit: a quarter of their memory, by bitsandbytes; not in a replayable run.",
)

_MEMBER_OPTIONS = (
    invite_argument,
    home_option("Where identity, runs and logs are kept."),
    click.option("--name", default="", help=f"Your name on the run's page (at most {MAX_NAME} bytes)."),
    click.option(
        "--anonymous", is_flag=True, help="Show no name and no kind of device, and use a key for this run alone."
    ),
    click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads.  [default: all]"),
    click.option(
        "--listen", multiple=True, metavar="MULTIADDR", help="Where to listen.  [default: any free port, TCP and UDP]"
    ),
    click.option("--announce", multiple=True, metavar="MULTIADDR", help="Addresses to announce, if not those found."),
    disk_option,
    private_data_option,
    click.option("--plain", is_flag=True, help="Log lines instead of a live view (the default without a terminal)."),
    click.option("--json", "as_json", is_flag=True, help="Log lines as JSON objects, for scripts."),
    via_option,
)


def member_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument and the options of every member, whether it trains or only audits."""
    for option in reversed(_MEMBER_OPTIONS):
        command = option(command)
    return command


@click.command()
@member_options
@device_option()
@parallel_option
@gpu_memory_option
@moments_option
@_auto(
    "--recompute",
    type=_CHOICE,
    help="Compute activations again in the backward pass: much less memory, a third more work. auto: if needed.",
)
@_auto("--compile", type=_CHOICE, help="Compile the model's layers with torch.compile. auto: on a GPU.")
@click.option("--overlap", type=click.Choice(["on", "off"]), default="on", hidden=True)  # to measure what it saves
@click.option("--hours", metavar="FROM-TO", help="Train at these hours of this machine's clock, for example 22-7.")
@click.option("--until", metavar="TIME", help="Leave in order at this time, for example 7:30.")
@click.option(
    "--only-when-idle/--always", default=None, help="Rest while other programs use the GPU, or people the keyboard."
)
@click.option(
    "--max-upload",
    metavar="RATE",
    help="Most bytes a second of updates, states and data to send, for example 2M (16 Mbit/s).",
)
@click.option("--max-download", metavar="RATE", help="The same to receive, for example 5M.")
@click.option("--max-upload-day", metavar="SIZE", help="Most bytes to send a day, for example 20G.")
@click.option("--max-download-day", metavar="SIZE", help="Most bytes to receive a day.")
@_auto(
    "--audit-device",
    help="Where to check others' updates: cpu, cuda:N, off, or auto: the trainer's device if checks can convict.",
    callback=_audit_device,
)
def join(**options: Any) -> None:
    """Join the run that INVITE names, and train until Ctrl-C.

    Ctrl-C announces what is done, saves the remaining work and leaves; the same command resumes. `cairn peer pause`
    gives you the devices back for a while.
    """
    join_run(JoinOptions(**options))


@dataclass(frozen=True)
class JoinOptions:
    """The options of the command line, and `trainer_command`, which replaces the trainer's (see `NodeOptions`).

    With the run's `owner` the node trains nothing: it makes checks, and reports by the owner's key.
    """

    invite: str
    home: Path
    name: str
    device: str
    threads: int | None
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    disk: int
    allow_private_data: bool
    plain: bool
    via: tuple[str, ...]
    as_json: bool = False
    parallel: str = "auto"
    recompute: Choice = "auto"
    compile: Choice = "auto"
    moments: MomentForm = "fp32"
    overlap: str = "on"
    audit_device: str = "auto"
    hours: str | None = None
    until: str | None = None
    max_upload: str | None = None
    max_download: str | None = None
    max_upload_day: str | None = None
    max_download_day: str | None = None
    gpu_memory: float | None = None
    only_when_idle: bool | None = None
    trainer_command: tuple[str, ...] = ()
    owner: Identity | None = None
    anonymous: bool = False


@private_files()
def join_run(options: JoinOptions) -> None:
    """Take part in a run until it is over, or Ctrl-C. Raises CairnError."""
    allow_many_files()
    if not is_plain(options.name) or len(options.name.encode()) > MAX_NAME:
        raise click.BadParameter(f"at most {MAX_NAME} bytes of printable text", param_hint="--name")
    if options.anonymous and options.name:
        raise click.UsageError("--anonymous: a peer that is anonymous has no name: leave out --name")
    invite = parse_invite(options.invite)
    settings = open_settings(options.home, {name: getattr(options, name) for name in SETTINGS})
    home = peer_home(options.home, invite.run, anonymous=options.anonymous)
    asyncio.run(_join(replace(options, home=home), invite, settings))


def open_settings(home: Path, options: Mapping[str, Any]) -> SettingsFile:
    """Return the settings in peer.toml, which options override. Raises CairnError, click.UsageError for an option."""
    from cairn.peer_settings import FILE, PeerOptionError, SettingsFile

    try:
        return SettingsFile(home / FILE, options)
    except PeerOptionError as e:
        raise click.UsageError(str(e)) from None


async def _join(options: JoinOptions, invite: Invite, settings: SettingsFile) -> None:
    # Listen for Ctrl-C before anything slow is imported.
    stop = asyncio.Event()
    stop_on_signals(stop)

    from cairn.peer_screen import PeerScreen
    from peer.node.enrollment import Enrollment, RunIsOver, run_folder

    folder = run_folder(options.home, invite.run)
    is_first_time = not folder.exists()
    screen = PeerScreen(plain=options.plain, as_json=options.as_json)
    set_up_logging(folder / "peer.log", terminal=screen.handler)
    if is_first_time:  # before the peer enters the run: nothing is published yet
        for line in seen_by_others(options.name, anonymous=options.anonymous, home=options.home):
            screen.say(line)
    log.info("loading libraries: on a busy machine this takes half a minute")
    with quiet_imports():
        from cairn.day_traffic import DayTraffic
        from cairn.peer_control import PeerControl, listening
        from cairn.peer_schedule import PeerSchedule
        from peer.node.admission_wait import wait_until_admitted
        from peer.node.builder import build_node, load_chain
        from peer.node.machine_check import check_machine
        from peer.node.options import NodeOptions
        from peer.node.rest import RestWish
        from peer.store import Store
        from peer.swarm.pace import Paces

    check_listen(options.listen, "--listen")
    node_options = NodeOptions(
        folder=folder,
        listen=options.listen,
        announce=options.announce,
        device=options.device,
        parallel=options.parallel,
        recompute=options.recompute,
        compile=options.compile,
        moments=options.moments,
        overlap=options.overlap == "on",
        threads=options.threads or os.cpu_count() or 1,
        private_data=options.allow_private_data,
        audit_device=options.audit_device,
        auditor=options.owner is not None,
        shows_device=not options.anonymous,
        gpu_memory=lambda: settings.settings.gpu_bytes,
        trainer_command=options.trainer_command,
    )
    rest, paces = RestWish(), Paces()
    control = PeerControl(rest, stop)
    with Store(folder / "store", options.disk) as store:
        schedule = PeerSchedule(settings, rest, paces, DayTraffic(folder), stop.set)
        await schedule.learn()
        schedule.look()

        async def enter() -> Enrollment:
            membership = await Enrollment.enter(
                invite, options.home, store, name=options.name, via=options.via,
                check=lambda spec: check_machine(spec, node_options, store),
            )  # fmt: skip
            if not membership.seconds_left():
                try:
                    await wait_until_admitted(membership, node_options, paces)
                except BaseException:
                    await membership.close()
                    raise
            return membership

        stopping = asyncio.ensure_future(stop.wait())

        async def offer(info: RunInfo) -> None:
            """Tell of the model of a run that is over."""
            from cairn.finished_run import offer_model  # not imported by those who train

            if options.owner is None:
                await offer_model(info, folder, store, options.disk, stopping, screen)

        was_in = False

        async def take_part() -> bool:
            """Run the node until it ends; return whether it must start again."""
            nonlocal was_in
            try:
                membership = await entered(enter, stopping, again=was_in)
            except RunIsOver as e:
                screen.say(str(e))
                await offer(e.info)
                return False
            if membership is None:
                screen.say("stopped before the run was entered; the same command tries again")
                return False
            was_in = True
            key = membership.identity.key
            log.info("run %s (%s); this peer is %s%s", membership.spec.name, invite.run.short, key.short,
                     f' "{options.name}"' if options.name else "")  # fmt: skip
            try:
                if options.owner is not None:
                    _begin_audits(membership.spec, options.owner)
                loading = asyncio.ensure_future(asyncio.to_thread(load_chain, membership, node_options))
                await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
                if not loading.done():  # it ends when the store is closed
                    screen.say("stopped before the run's records were read; the same command tries again")
                    return False
                chain = loading.result()
                node = build_node(membership, node_options, chain, owner=options.owner, rest=rest, paces=paces)
                await run_node(node, screen, stopping, schedule.away)
            finally:
                await membership.close()
            if node.must_restart:
                log.warning("starting again: the run goes on")
            elif node.end_of_run.info is not None:
                await offer(node.end_of_run.info)
            return (node.must_restart or schedule.away.is_set()) and not stop.is_set()

        watching = asyncio.create_task(schedule.keep())
        watching.add_done_callback(lambda _: stop.set())
        try:
            async with listening(folder, control.answer):
                while await schedule.until_back(stopping) and await take_part():
                    pass
        finally:
            if not watching.cancel():
                watching.result()
        stopping.cancel()


async def entered(
    enter: Callable[[], Awaitable[Enrollment]], stopping: asyncio.Future[Any], *, again: bool
) -> Enrollment | None:
    """Enter the run; return None once `stopping` is done. Raises CairnError.

    `again`: this process was in the run before. While nobody answers it tries again: a machine that slept may be
    without its network for minutes.
    """
    from peer.node.enrollment import COORDINATOR_ABSENT

    while not stopping.done():
        entering = asyncio.ensure_future(enter())
        await asyncio.wait([entering, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not entering.done():
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)
            break
        try:
            return entering.result()
        except COORDINATOR_ABSENT as e:
            if not again:
                raise
            log.warning("%s. This peer was in the run: it tries again in %.0f s", e, AGAIN_SECONDS)
        await asyncio.wait([stopping], timeout=AGAIN_SECONDS)
    return None


async def run_node(node: Node, screen: PeerScreen, stopping: asyncio.Future[Any], away: asyncio.Event) -> None:
    """Run a node until it ends, or `stopping` or `away` says so. Raises CairnError."""
    from cairn.milestones import log_milestones

    leaving = asyncio.ensure_future(away.wait())
    running = asyncio.create_task(node.run())
    milestones = asyncio.create_task(log_milestones(lambda: screen.view(node.reporter.latest), node.store))
    is_auditor, beside = node.work.trainer is None, [milestones]
    if not is_auditor:
        asking = ask_for_credits(node.membership, screen, lambda: node.reporter.latest.members)
        beside.append(asyncio.create_task(asking))
    with screen.showing(lambda: node.reporter.latest):  # drawn by another thread
        await asyncio.wait([running, stopping, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not running.done():
            node.leave()
            log.info(
                "leaving%s (mostly 10 s, at most a minute)",
                "" if is_auditor else ": announcing what is done, saving the remaining work",
            )
        for task in beside:
            task.cancel()
        await running
    from protocol.rounds.departure import BANNED

    end = node.snapshot()
    made = f"{end.audits['made']} checks" if is_auditor else f"{end.own_updates} updates"
    over = node.end_of_run
    after = "; the same command resumes" if over.info is None and not end.finished.startswith(BANNED) else ""
    if over.is_awaited:
        after = "; the coordinator does not have the last state: run the same command again later"
    screen.say(f"{end.finished or 'stopped'}: round {end.round}, state {end.state[:16] or 'none'}, {made} made{after}")


def _begin_audits(spec: RunSpec, owner: Identity) -> None:
    """Tell the user what an auditor's reports can do here. Raises CairnError if `owner` is not the run's."""
    if owner.key != spec.owner_key:
        raise CairnError(
            f"--owner-key: {owner.key.short} is not the key of this run's owner ({spec.owner_key.short}). The key is "
            "owner.key in the run's folder, which `cairn coordinator serve` prints"
        )
    log.info("auditing without training; reports are signed by the owner's key")
    if not spec.audit.replayable:
        log.warning("this run has no replays (audit.replayable is false): its loss checks convict nobody")


def credit_seconds(members: int) -> float:
    """Return the seconds between two requests, so that all members together send at most CREDIT_CALLS a second."""
    return max(CREDIT_SECONDS, members / CREDIT_CALLS)


async def ask_for_credits(membership: Enrollment, screen: PeerScreen, members: Callable[[], int]) -> None:
    """Keep what the screen has of the coordinator fresh, for ever. A silent one is shown as such, and asked again."""
    from cairn.peer_screen import own_page
    from cairn.peer_view import PeerEarnings

    client, key = membership.client, membership.identity.key
    asked = False
    while client is not None:
        try:
            if not asked and (page := own_page((await client.status()).page, key)):
                screen.page = page
                log.info("this peer on the run's page: %s", page)
            asked = True
            totals = await client.totals(key)
            screen.earnings = PeerEarnings(totals.micro_credits_settled, totals.micro_credits_pending, totals.rounds)
        except CairnError:
            if screen.earnings is not None:
                screen.earnings = replace(screen.earnings, fresh=False)
        await asyncio.sleep(credit_seconds(members()) * random.uniform(0.9, 1.1))
