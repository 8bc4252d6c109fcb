"""`cairn peer pause`, `resume` and `leave`: for the peers that run under a home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import click

from cairn.commands.options import home_option, invite_or_stdin
from cairn.connection import parse_invite
from protocol.errors import CairnError

_RUN = click.argument("run", required=False, metavar="[INVITE]", callback=invite_or_stdin)


def _run_command(name: str, help: str) -> click.Command:
    """Return the command that asks running peers for something."""

    def command(run: str | None, home: Path) -> None:
        ask_running(name, home, run, click.echo)

    command.__doc__ = help
    command = home_option("Where identity, runs and logs are kept.")(command)
    return click.command(name)(_RUN(command))


pause = _run_command(
    "pause",
    """Have the devices back within seconds: the peers under this --home rest until `cairn peer resume`.

    The peers announce what they have trained, and save the remaining work. Logs and the run's page then call them
    "resting"; "paused" is an order of the run's owner. Name one run by INVITE, or by the start of its id; otherwise all
    of this home rest. A pause ends with the peer's process.
    """,
)
resume = _run_command("resume", """Train again after `cairn peer pause`, under the same --home. INVITE as there.""")
leave = _run_command(
    "leave", """End the peers under this --home in order, as Ctrl-C does. INVITE as in `cairn peer pause`."""
)


def ask_running(ask: str, home: Path, run: str | None, say: Callable[[str], None]) -> None:
    """Ask the running peers under a home, and `say` what each answers.

    Raises CairnError when none runs, and after all were asked if some did not do it.
    """
    from cairn.peer_control import ask_peer

    answers: dict[Path, str | CairnError | None] = {}

    def ask_one(folder: Path) -> None:
        try:
            answers[folder] = ask_peer(folder, ask)
        except CairnError as e:
            answers[folder] = e

    # Together, for each may take its time; as daemons, so that Ctrl-C ends the wait.
    asking = {folder: Thread(target=ask_one, args=(folder,), daemon=True) for folder in _folders(home, run)}
    for thread in asking.values():
        thread.start()
    asked, failed = 0, list[str]()
    for folder, thread in asking.items():
        thread.join()
        said = answers[folder]
        if isinstance(said, CairnError):
            failed.append(f"{_name(folder)}: {said}")
        elif said is not None:
            asked += 1
            say(f"{_name(folder)}: {said}" if ask != "leave" else f"{_name(folder)}: has left")
    if failed:
        raise CairnError("\n".join(failed))
    if not asked:
        which = "no peer" if run is None else "no peer of this run"
        raise CairnError(
            f"{which} is running under {home}: `cairn peer join INVITE` starts one, and --home names the folder of "
            "another (a system service's is /var/lib/cairn). One that is still loading does not receive this: try again"
        )


def _folders(home: Path, run: str | None) -> list[Path]:
    """Return the folders of the runs that are meant. Raises CairnError for a text that names no run."""
    from peer.node.enrollment import run_folder

    runs = sorted(p for pattern in ("runs/*", "anonymous/*/runs/*") for p in home.glob(pattern) if p.is_dir())
    if run is None:
        return runs
    if 4 <= len(run) <= 64 and set(run) <= set("0123456789abcdef"):
        return [p for p in runs if p.name.startswith(run[:12])]
    return [p for p in runs if p.name == run_folder(home, parse_invite(run).run).name]


def _name(folder: Path) -> str:
    """Return the name of a run for people: its own, if the peer has written it, and its id."""
    from peer.node.snapshot import read_snapshot

    snapshot = read_snapshot(folder)
    return folder.name if snapshot is None else f"{snapshot.run} ({folder.name})"
