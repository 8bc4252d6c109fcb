"""`cairn coordinator serve`: makes or continues the run, and runs its observer and its coordinator in one process."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.commands.options import FILE, check_listen, home_option
from cairn.files import private_files, write_whole
from cairn.logs import set_up_logging
from cairn.open_files import allow_many_files
from cairn.stop_signals import stop_on_signals
from protocol.errors import CairnError, IdentityError, MalformedError
from protocol.invite import HostPort, Invite, check_code
from protocol.quiet_imports import quiet_imports

if TYPE_CHECKING:
    from coordinator.authoring.resolve import ResolvedRun
    from coordinator.checkpoints.settings import CheckpointSettings
    from coordinator.service import Coordinator, CoordinatorConfig
    from peer.store import Store
    from protocol.identity import Identity
    from protocol.spec import AdmissionSpec

log = logging.getLogger("cairn.coordinator")

OBSERVER_BYTES = 200 * 10**9
"""Maximum size of the observer's store."""

PRIVATE = 0o600
"""The mode of files that may hold an invite code."""

INVITE_SECONDS = 10.0
"""Seconds between two updates of the invite in the folder."""

RESTORE_OWNER = "restore it from your copy: nobody can go on with the run without it"


def _settings(
    run_file: Path, settings: Path | None, archive: str | None, keep: str | None, evaluate_every: int | None
) -> CheckpointSettings:
    """Return the settings in the options and in the file. Raises CairnError."""
    from coordinator.checkpoints import settings as toml

    file = run_file.with_name(toml.FILE) if settings is None else settings.expanduser()
    if settings is not None and not file.is_file():
        raise click.BadParameter(f"{file}: no such file", param_hint="--settings")
    return toml.load_settings(
        file if file.is_file() else None, address=archive, keep=keep, evaluate_every=evaluate_every
    )


def _keep(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    """Return the policy. Raises click.BadParameter."""
    if text is not None:
        from coordinator.checkpoints.settings import SettingsError, parse_keep

        try:
            parse_keep(text)
        except SettingsError as e:
            raise click.BadParameter(str(e)) from None
    return text


@click.command()
@click.argument("run_file", type=FILE)
@home_option("Where identity, runs and logs are kept.")
@click.option("--grpc", default="0.0.0.0:7410", show_default=True, metavar="HOST:PORT", help="For peers.")
@click.option("--page", default="0.0.0.0:7411", show_default=True, metavar="HOST:PORT", help="For people.")
@click.option("--swarm", default="/ip4/0.0.0.0/tcp/7412", show_default=True, metavar="MULTIADDR", help="For the swarm.")
@click.option("--public", default="", metavar="HOST", help="Name or address by which strangers reach this machine.")
@click.option("--page-url", default="", metavar="URL", help="The page's address, if a reverse proxy serves it.")
@click.option("--code", default="", help='The invite code, for a run whose admission.mode is "invite".')
@click.option(
    "--ledger", default="", envvar="CAIRN_LEDGER", metavar="URL", show_envvar=True, help="postgresql://..., not a file."
)
@click.option("--webhook", multiple=True, metavar="URL", help="Send alerts there; may be repeated (or alerts.toml).")
@click.option(
    "--settings",
    type=FILE,
    help="About, archive, evaluation, samples: TOML.  [default: coordinator.toml beside RUN_FILE]",
)
@click.option("--archive", metavar="ADDRESS", help="Copy finalized checkpoints there (fsspec).")
@click.option("--keep", metavar="POLICY", callback=_keep, help="E.g. newest=5,every=100,best=3,bytes=200G.")
@click.option(
    "--evaluate-every",
    type=click.IntRange(0),
    metavar="N",
    help="Evaluate a checkpoint each N rounds; 0: never.  [default: each]",
)
def serve(run_file: Path, settings, archive, keep, evaluate_every, **options: Any) -> None:
    """Serve the run that RUN_FILE (a run.toml) describes, and print its invite."""
    serve_run(ServeOptions(run_file, _settings(run_file, settings, archive, keep, evaluate_every), **options))


@dataclass(frozen=True)
class ServeOptions:
    """The options of the command line."""

    run_file: Path
    settings: CheckpointSettings
    home: Path
    grpc: str
    page: str
    swarm: str
    public: str
    code: str
    ledger: str
    webhook: tuple[str, ...]
    page_url: str = ""


def coordinator_folder(home: Path, name: str) -> Path:
    """Return the folder in which a run's owner keeps everything of the run."""
    return home / "coordinated" / name.replace(" ", "_")


@private_files()
def serve_run(options: ServeOptions) -> None:
    """Serve a run until a signal stops it. Raises CairnError."""
    with quiet_imports():
        from coordinator.alerts.config import load_config
        from coordinator.authoring.resolve import resolve
        from coordinator.authoring.runfile import load_run
        from coordinator.checkpoints.copies import file_system
        from coordinator.checkpoints.settings import check_address
        from coordinator.service import CoordinatorConfig
        from peer.store import Store

    allow_many_files()
    listen, page = _endpoint(options.grpc, "--grpc"), _endpoint(options.page, "--page")
    public, _ = public_addresses(options, listen[1])
    check_listen([options.swarm], "--swarm")
    page_url, archive = published_page(options), options.settings.archive.address
    run_file = load_run(options.run_file)
    folder = coordinator_folder(options.home, run_file.run.name)
    check_address(archive, folder)
    if archive:
        file_system(archive)  # a missing package is an error now, not each five minutes
    alerts = load_config(folder, options.webhook)
    set_up_logging(folder / "coordinator.log")
    # The store's lock comes first: its holder is the one coordinator of this folder.
    with Store(folder / "store", OBSERVER_BYTES) as store:
        owner = _owner(folder)
        codes = invite_codes(options.code, folder, run_file.admission)
        # Last: it prepares data, which may take hours, and begins the run.
        resolved = resolve(run_file, folder / "run", owner, report=lambda line: log.info("%s", line), held=store.has)
        config = CoordinatorConfig(
            folder=folder,
            listen_host=listen[0],
            listen_port=listen[1],
            page_host=page[0],
            page_port=page[1],
            public=public,
            page_url=page_url,
            codes=codes,
            ledger=options.ledger,
            alerts=alerts,
            about=options.settings.about,
            begins=resolved.begins,
        )
        asyncio.run(_serve(options, config, store, owner, resolved))


def _owner(folder: Path) -> Identity:
    """Return the owner's key; it is made only for a run that has not begun. Raises IdentityError."""
    from coordinator.authoring.resolve import SPEC
    from peer.keyfile import load, load_or_make

    path = folder / "owner.key"
    if not (folder / "run" / SPEC).exists():
        return load_or_make(path)
    try:
        return load(path, RESTORE_OWNER)
    except FileNotFoundError:
        raise IdentityError(f"{path} is missing, the key of the run that began here: {RESTORE_OWNER}") from None


async def _serve(
    options: ServeOptions, config: CoordinatorConfig, store: Store, owner: Identity, resolved: ResolvedRun
) -> None:
    with quiet_imports():
        from cairn.kept_updates import KeptUpdates
        from cairn.swarm_view import ObserverView, put_blob
        from coordinator.checkpoints.archive import Archive
        from coordinator.checkpoints.archiver import CheckpointArchiver
        from coordinator.checkpoints.evaluations import EvaluationLog
        from coordinator.service import Coordinator
        from peer.keyfile import load_or_make
        from peer.node.builder import build_node, load_chain
        from peer.node.coordinator_discovery import SPEC
        from peer.node.enrollment import Enrollment, known_addresses
        from peer.node.options import NodeOptions
        from peer.node.trainer_files import base_file
        from protocol.chain import genesis_digest

    spec, folder, settings = resolved.spec, config.folder, options.settings
    _, announce = public_addresses(options, config.listen_port)
    until = asyncio.Event()
    stop_on_signals(until)
    frozen = () if spec.model.adapter is None else (spec.model.adapter.base.name,)  # large, and not written to again
    for digest, path in resolved.blobs.items():
        if until.is_set():
            return
        if not store.has(digest):
            await asyncio.to_thread(put_blob, store, digest, path, link=digest in frozen)
    store.write_value(SPEC, resolved.spec_envelope)  # members ask the observer for it
    evaluations = EvaluationLog(folder)
    archive = Archive(
        folder / "checkpoints", spec, policy=settings.archive.policy, spec_envelope=resolved.spec_envelope,
        reserve=settings.archive.reserve, losses=evaluations.losses, on_left=evaluations.mark_left,
    )  # fmt: skip
    genesis, tokenizer = store.path(spec.genesis.name), store.path(spec.tokenizer.name)
    begin = genesis_digest(spec.run_id)
    archive.add(genesis, tokenizer, round=0, state=spec.genesis.name, record=begin, tokens=0)
    membership = Enrollment(
        identity=load_or_make(folder / "observer.key"),
        spec=spec,
        store=store,
        client=None,
        name="coordinator",
        admission=b"",
        addresses=known_addresses(store),
    )
    node_options = NodeOptions(folder, (options.swarm,), announce, observer=True)
    loading = asyncio.create_task(asyncio.to_thread(load_chain, membership, node_options))
    stopping = asyncio.create_task(until.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        store.close()  # this ends it
        click.echo("stopped before the run's records were read; the same command goes on")
        return
    node = build_node(membership, node_options, loading.result())
    view = ObserverView(node, spec, archive)
    shards = [store.path(s.name) for s in spec.data.validation]
    archiver = CheckpointArchiver(
        archive,
        evaluations,
        spec,
        view,
        settings,
        shards=shards,
        base=base_file(spec, store),
        fetch_problem=lambda: view.problem,
    )
    coordinator = Coordinator(config, spec, resolved.spec_envelope, owner, view, archiver)
    kept = KeptUpdates(node, view, settings.archive, coordinator.admitter.name_of)
    running = asyncio.create_task(node.run())
    starting = asyncio.create_task(node.started(running))
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await _coordinate(coordinator, config, resolved, [view.keep_archive, kept.run], [running, stopping])
    finally:
        for task in (stopping, starting):
            task.cancel()
        node.leave()
        await running
    final = node.chain.finalization
    click.echo(last_line(node.chain.height(node.chain.head), None if final is None else final.body.round))


def last_line(round_: int, final_round: int | None) -> str:
    """Return the line that a stopped coordinator leaves."""
    final = "nothing is final yet" if final_round is None else f"final up to round {final_round}"
    return f"stopped: round {round_}, {final}; the same command goes on"


async def _coordinate(
    coordinator: Coordinator,
    config: CoordinatorConfig,
    resolved: ResolvedRun,
    work: Sequence[Callable[[], Coroutine[Any, Any, None]]],
    ends: list[asyncio.Task[Any]],
) -> None:
    """Serve, and do the observer's work, until one of these tasks ends. Raises CairnError when it cannot start."""
    await coordinator.start()
    tasks = [asyncio.create_task(each()) for each in (*work, partial(keep_invite, coordinator, config))]
    try:
        _announce(coordinator, resolved, config)
        await asyncio.wait([*tasks, *ends], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await coordinator.stop()


def _invite(coordinator: Coordinator, config: CoordinatorConfig) -> Invite:
    return coordinator.invite(config.codes[0] if config.codes else "")


async def keep_invite(coordinator: Coordinator, config: CoordinatorConfig) -> None:
    """Keep the present members in the invite's file, for ever; a full disk only delays that.

    A newcomer enters by them when the coordinator has moved since.
    """
    written: set[str] = set()
    while True:
        await asyncio.sleep(INVITE_SECONDS)
        try:
            invite = _invite(coordinator, config)
            if set(invite.addresses) != written:  # their order is no news
                write_whole(config.folder / "invite", f"{invite}\n", mode=PRIVATE)
                written = set(invite.addresses)
        except CairnError as e:
            log.warning("the newest members were not written to the invite's file: %s", e)


def _announce(coordinator: Coordinator, resolved: ResolvedRun, config: CoordinatorConfig) -> None:
    """Print the run's addresses for the owner, and write the invite to a file for scripts."""
    invite = _invite(coordinator, config)
    write_whole(config.folder / "invite", f"{invite}\n", mode=PRIVATE)
    for line in announcement(resolved, config.folder, coordinator.page_url, invite):
        click.echo(line)


def announcement(resolved: ResolvedRun, folder: Path, page: str, invite: Invite) -> list[str]:
    """Return the lines that tell the owner of a run that is served now."""
    from coordinator.admission import cost_to_attackers

    spec = resolved.spec
    return [
        f"run      {spec.name} ({spec.run_id.short}), {spec.model.layout.numel:,} parameters",
        *(["begins   here and now: if it was served before, stop, and give that --home"] if resolved.begins else []),
        f"admits   {cost_to_attackers(spec.admission)}",
        f"page     {page}",
        f"folder   {folder}  (owner.key in it is the run: keep a copy)",
        f"join     cairn peer join {invite}",
        f"         ({folder / 'invite'} always has the newest, with members to enter by)",
        "Ctrl-C stops the coordinator; peers go on without it, and it catches up when it is back.",
    ]


def invite_codes(given: str, folder: Path, admission: AdmissionSpec) -> tuple[str, ...]:
    """Return the invite codes of a run that admits by invite: the given one, or one made once and kept.

    Raises CairnError for a code that would admit nobody, and click.BadParameter for one that no invite can have.
    """
    if admission.mode != "invite":
        if given:
            raise CairnError(
                f'this run\'s admission.mode is {admission.mode!r}, and a code is for "invite": leave out --code'
            )
        return ()
    if given:
        try:
            check_code(given)
        except MalformedError as e:
            raise click.BadParameter(str(e), param_hint="--code") from None
        return (given,)
    path = folder / "invite-code"
    if not path.exists():
        write_whole(path, secrets.token_urlsafe(12) + "\n", mode=PRIVATE)
    return (path.read_text().strip(),)


def public_addresses(options: ServeOptions, port: int) -> tuple[tuple[HostPort, ...], tuple[str, ...]]:
    """Return the endpoint for invites and the swarm address to announce, both from --public."""
    if not options.public:
        return (), ()
    swarm_port = options.swarm.rsplit("/", 1)[-1]
    if port == 0 or swarm_port == "0":
        raise click.UsageError("--public needs ports that stay the same: give --grpc and --swarm one each, not 0")
    try:
        endpoint = HostPort(options.public.strip("[]"), port)
    except MalformedError as e:
        raise click.BadParameter(
            f"{e}; write a name like run.example.org, or an address", param_hint="--public"
        ) from None
    try:
        kind = f"ip{ipaddress.ip_address(endpoint.host).version}"
    except ValueError:
        kind = "dns4"
    return (endpoint,), (f"/{kind}/{endpoint.host}/tcp/{swarm_port}",)


def published_page(options: ServeOptions) -> str:
    """Return the address that --page-url gives, as clients accept it; "" for none. Raises click.BadParameter."""
    from cairn.peer_screen import page_address

    address = page_address(options.page_url)
    if options.page_url and not address:
        raise click.BadParameter("write an address like https://run.example.org/", param_hint="--page-url")
    return address


def _endpoint(text: str, option: str) -> tuple[str, int]:
    """Return host and port; port 0 means any free port."""
    try:
        if text.endswith(":0"):
            return HostPort.parse(text[:-1] + "1").host, 0
        endpoint = HostPort.parse(text)
    except MalformedError as e:
        raise click.BadParameter(f"{e}; write for example 0.0.0.0:7410", param_hint=option) from None
    return endpoint.host, endpoint.port
