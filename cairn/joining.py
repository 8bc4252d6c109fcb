"""`cairn peer join`: enters a run, runs the node, shows how it goes, and leaves in order on Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.logs import set_up_logging
from protocol.errors import CairnError, MalformedError
from protocol.ids import RunId
from protocol.invite import Invite

if TYPE_CHECKING:
    from cairn.view import PeerView
    from peer.channel import Choice
    from peer.node.membership import Membership

log = logging.getLogger("cairn.peer")

MAX_NAME_BYTES = 40
VIA = re.compile(r"/[a-z0-9]+/[^/ ]+/(tcp/[0-9]+|udp/[0-9]+/quic-v1)/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}")
CREDIT_SECONDS = 15.0
"""How often the coordinator is asked what this peer has earned; in a large swarm less often (see `credit_seconds`)."""

CREDIT_CALLS = 160.0


@dataclass(frozen=True)
class JoinOptions:
    """What the command line says."""

    invite: str
    home: Path
    name: str
    device: str
    parallel: str
    recompute: Choice
    compile: Choice
    overlap: bool
    threads: int | None
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    disk_bytes: int
    plain: bool
    via: tuple[str, ...] = ()


def join_run(options: JoinOptions) -> None:
    """Until the run is over, or Ctrl-C. Raises CairnError."""
    if len(options.name.encode()) > MAX_NAME_BYTES or not options.name.isprintable():
        raise CairnError(f"--name: at most {MAX_NAME_BYTES} bytes of printable text")
    try:
        invite = Invite.parse(options.invite)
    except MalformedError as e:
        raise CairnError(str(e)) from None
    check_via(options.via)
    asyncio.run(_join(options, invite))


def check_via(addresses: Iterable[str]) -> None:
    """Raises CairnError unless these could be members' addresses."""
    for address in addresses:
        if not VIA.fullmatch(address):
            raise CairnError(
                f"--via: {address[:80]!r} is not a member's address: want /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW..., as "
                "one logs it after 'listening at'"
            )


async def _join(options: JoinOptions, invite: Invite) -> None:
    # Listen for Ctrl-C before anything slow is imported.
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    from cairn.view import PeerView
    from peer.node.admission_wait import wait_until_admitted
    from peer.node.builder import build_node
    from peer.node.membership import Membership, run_folder
    from peer.node.options import NodeOptions
    from peer.store import Store

    folder = run_folder(options.home, RunId(invite.run))
    view = PeerView(live=not options.plain and sys.stdout.isatty())
    set_up_logging(folder / "peer.log", terminal=view.handler)
    node_options = NodeOptions(
        folder=folder,
        listen=options.listen,
        announce=options.announce,
        device=options.device,
        parallel=options.parallel,
        recompute=options.recompute,
        compile=options.compile,
        overlap=options.overlap,
        threads=options.threads or os.cpu_count() or 1,
    )
    with Store(folder / "store", options.disk_bytes) as store:

        async def enter() -> Membership:
            membership = await Membership.enter(invite, options.home, store, name=options.name, via=options.via)
            if not membership.seconds_left():
                try:
                    await wait_until_admitted(membership, node_options)
                except BaseException:
                    await membership.close()
                    raise
            return membership

        stopping = asyncio.ensure_future(stop.wait())

        async def take_part() -> bool:
            """Until the node ends; whether it must begin again."""
            entering = asyncio.ensure_future(enter())
            await asyncio.wait([entering, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not entering.done():
                entering.cancel()
                await asyncio.gather(entering, return_exceptions=True)
                print("stopped before the run was entered; the same command tries again")
                return False
            membership = entering.result()
            key = membership.identity.key
            log.info("run %s (%s); this peer is %s%s", membership.spec.name, invite.run.short, key.short,
                     f' "{options.name}"' if options.name else "")  # fmt: skip
            node = build_node(membership, node_options)
            running = asyncio.create_task(node.run())
            asking = asyncio.create_task(_ask_for_credits(membership, view, lambda: node.latest.members))
            with view.showing(lambda: node.latest):  # drawn by another thread
                await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
                if not running.done():
                    log.info("leaving: announcing what is done, saving the rest (at most 10 s)")
                    node.leave()
                asking.cancel()
                try:
                    await running
                finally:
                    await membership.close()
            end = node.snapshot()
            print(
                f"{end.finished or 'stopped'}: round {end.round}, state {end.state[:16] or 'none'}, "
                f"{end.own_updates} updates made; the same command resumes"
            )
            return node.again and not stop.is_set()

        while await take_part():
            log.warning("starting again: the run goes on from further back than this peer remembered")
        stopping.cancel()


def credit_seconds(members: int) -> float:
    """So that all members together ask no more than CREDIT_CALLS times a second."""
    return max(CREDIT_SECONDS, members / CREDIT_CALLS)


async def _ask_for_credits(membership: Membership, view: PeerView, members: Callable[[], int]) -> None:
    """For ever: keep the view's account fresh. A coordinator that is away is shown as such, and asked again."""
    from cairn.view import Earned, own_page

    client, key = membership.client, membership.identity.key
    told = False
    while client is not None:
        try:
            if not told and (page := own_page((await client.status()).page, key)):
                log.info("this peer on the run's page: %s", page)
            told = True
            account = await client.account(key)
            view.earned = Earned(account.micro_credits_settled, account.micro_credits_pending, account.rounds)
        except CairnError:
            if view.earned is not None:
                view.earned = replace(view.earned, fresh=False)
        await asyncio.sleep(credit_seconds(members()) * random.uniform(0.9, 1.1))
