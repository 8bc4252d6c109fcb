"""`cairn coordinator serve`: makes or continues the run, and runs its observer and its coordinator in one process."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cairn.logs import set_up_logging
from protocol.errors import CairnError, MalformedError
from protocol.identity import Identity
from protocol.invite import Endpoint
from protocol.spec import RunSpec

if TYPE_CHECKING:
    from coordinator.authoring import ResolvedRun
    from coordinator.service import Coordinator
    from peer.store import Store

log = logging.getLogger("cairn.coordinator")

OBSERVER_BYTES = 200 * 10**9


@dataclass(frozen=True)
class ServeOptions:
    """What the command line says."""

    run_file: Path
    home: Path
    grpc: str
    page: str
    swarm: str
    public: str
    code: str


def coordinator_folder(home: Path, name: str) -> Path:
    """Where a run's owner keeps everything of the run."""
    return home / "coordinated" / name.replace(" ", "_")


def serve_run(options: ServeOptions) -> None:
    """Until SIGINT or SIGTERM. Raises CairnError."""
    from coordinator.authoring import load_run, resolve
    from peer.keyfile import load_or_make

    listen, page = _endpoint(options.grpc, "--grpc"), _endpoint(options.page, "--page")
    run_file = load_run(options.run_file)
    folder = coordinator_folder(options.home, run_file.run.name)
    set_up_logging(folder / "coordinator.log")
    owner = load_or_make(folder / "owner.key")
    resolved = resolve(run_file, folder / "run", owner, report=lambda line: log.info("%s", line))
    asyncio.run(_serve(options, folder, owner, resolved, listen, page))


async def _serve(
    options: ServeOptions,
    folder: Path,
    owner: Identity,
    resolved: ResolvedRun,
    listen: tuple[str, int],
    page: tuple[str, int],
) -> None:
    from cairn.observing import ObserverView
    from coordinator.archive import Archive
    from coordinator.service import Coordinator, CoordinatorConfig
    from peer.keyfile import load_or_make
    from peer.node.membership import Membership
    from peer.node.node import Node, NodeOptions
    from peer.store import Store
    from protocol.chain import genesis_digest
    from protocol.messages import Opener

    spec = resolved.spec
    until = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, until.set)
    with Store(folder / "store", OBSERVER_BYTES) as store:
        for digest, path in resolved.blobs.items():
            if not store.has(digest):
                await asyncio.to_thread(_put, store, path)
        archive = Archive(folder / "checkpoints", spec)
        genesis, tokenizer = store.path(spec.genesis.name), store.path(spec.tokenizer.name)
        begin = genesis_digest(spec.run_id)
        archive.add(genesis, tokenizer, round=0, state=spec.genesis.name, record=begin, tokens=0)
        membership = Membership(
            identity=load_or_make(folder / "observer.key"),
            spec=spec,
            opener=Opener(spec.run_id, spec.owner_key),
            store=store,
            client=None,
            name="coordinator",
            admission=b"",
            addresses=[a for a in (store.read_value("addresses") or b"").decode().splitlines() if a],
        )
        announce = _announced(options)
        node = Node(membership, NodeOptions(folder, (options.swarm,), announce, observer=True))
        view = ObserverView(node, spec, archive)
        running = asyncio.create_task(node.run())
        coordinator = Coordinator(
            CoordinatorConfig(
                folder=folder,
                listen_host=listen[0],
                listen_port=listen[1],
                page_host=page[0],
                page_port=page[1],
                public=(Endpoint(options.public, listen[1]),) if options.public else (),
                codes=_codes(options, folder, spec),
            ),
            spec,
            resolved.spec_envelope,
            owner,
            view,
        )
        stopping = asyncio.create_task(until.wait())
        try:
            await node.started(running)
            await coordinator.start()
            keeping = asyncio.create_task(view.keep_archive())
            try:
                _announce(coordinator, spec, folder, _codes(options, folder, spec))
                await asyncio.wait([running, keeping, stopping], return_when=asyncio.FIRST_COMPLETED)
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
                await coordinator.stop()
        finally:
            stopping.cancel()
            node.leave()
            await running
        final = "none yet" if (f := node.chain.final) is None else str(f.body.round)
        round_ = node.chain.height(node.chain.head)
        click.echo(f"stopped: round {round_}, final up to round {final}; the same command goes on")


def _announce(coordinator: Coordinator, spec: RunSpec, folder: Path, codes: tuple[str, ...]) -> None:
    """What the owner needs to know, in the terminal and (the invite) in a file for scripts."""
    invite = str(coordinator.invite(codes[0] if codes else ""))
    (folder / "invite").write_text(invite + "\n")
    click.echo(f"run      {spec.name} ({spec.run_id.short}), {spec.model.layout.numel:,} parameters")
    click.echo(f"page     {coordinator.page_url}")
    click.echo(f"folder   {folder}  (owner.key in it is the run: keep a copy)")
    click.echo(f"join     cairn peer join {invite}")
    click.echo("Ctrl-C stops the coordinator; peers go on without it, and it catches up when it is back.")


def _codes(options: ServeOptions, folder: Path, spec: RunSpec) -> tuple[str, ...]:
    """The invite codes of a run that admits by invite: the given one, or one made once and kept."""
    if spec.admission.mode != "invite":
        return ()
    if options.code:
        return (options.code,)
    path = folder / "invite-code"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(12) + "\n")
    return (path.read_text().strip(),)


def _announced(options: ServeOptions) -> tuple[str, ...]:
    """The swarm address to tell others, when --public names this machine."""
    if not options.public:
        return ()
    port = options.swarm.rsplit("/", 1)[-1]
    kind = "ip4" if options.public.replace(".", "").isdigit() else "ip6" if ":" in options.public else "dns4"
    return (f"/{kind}/{options.public}/tcp/{port}",)


def _put(store: Store, path: Path) -> None:
    copy = store.scratch / f"import-{path.name}"
    with open(path, "rb") as source, open(copy, "wb") as target:
        while block := source.read(1 << 22):
            target.write(block)
    store.adopt(copy)


def _endpoint(text: str, option: str) -> tuple[str, int]:
    """Host and port; port 0 takes any that is free."""
    try:
        if text.endswith(":0"):
            return Endpoint.parse(text[:-1] + "1").host, 0
        endpoint = Endpoint.parse(text)
    except MalformedError as e:
        raise CairnError(f"{option}: {e}; write for example 0.0.0.0:7410") from None
    return endpoint.host, endpoint.port
