"""`cairn peer upgrade`: brings an installed Cairn up to date, by the program that installed it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click

from cairn import ROOT
from cairn.installation import find_facts, installed_commit, plan, processes_of, running_processes
from protocol.errors import CairnError, os_reason

VERSION_SECONDS = 120.0
"""Maximum seconds in which a new process tells its version."""


@click.command()
def upgrade() -> None:
    """Install Cairn again from where this one was installed: a folder (first `git pull` there) or a git repository.

    It ends with 1 where it does not know how this Cairn was installed, and names the command to run instead. It does so
    as well while a peer or a coordinator runs from the same environment.
    """
    todo = plan(find_facts())
    if running := processes_of(Path(sys.prefix), running_processes()):
        listed = ", ".join(f"{pid} ({command})" for pid, command in sorted(running.items()))
        raise CairnError(
            f"Cairn runs from this environment: {listed}. Trainers that it starts later would be of the new version, "
            f"and it of the old. Stop it first (`kill {' '.join(map(str, sorted(running)))}`; a peer leaves in order), "
            "upgrade, then start it again with the same command"
        )
    before = installed_version()
    click.echo(f"now      {before}")
    click.echo(f"from     {todo.source}")
    for command in todo.commands:
        click.echo(f"running  {shlex.join(command)}")
        try:
            code = subprocess.run(command, cwd=sys.prefix, env=_environment(), check=False).returncode
        except OSError as e:
            raise CairnError(f"{command[0]} cannot be started: {os_reason(e)}") from None
        if code:
            raise CairnError(f"{Path(command[0]).name} ended with code {code}: its lines above say why")
    after = installed_version()
    if after != before:
        click.echo(f"upgraded {before} -> {after}")
    elif todo.is_folder:  # the code may be newer all the same: of a folder no commit is known
        pull = f"`git -C {shlex.quote(todo.source)} pull`"
        click.echo(f"installed again from {todo.source}: {after}. Newer sources come only by {pull} before")
    else:
        click.echo(f"nothing newer is there: {after}")


def installed_version() -> str:
    """Return the version of the installed Cairn, with the protocol that it speaks, as a new process tells it.

    Raises CairnError.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cairn", "--version"], cwd=sys.prefix, env=_environment(), capture_output=True,
            text=True, timeout=VERSION_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise CairnError(
            f"the installed Cairn did not tell its version within {VERSION_SECONDS:.0f} s: is this machine very busy? "
            "Look with `cairn --version`, then try again"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CairnError(f"the installed Cairn does not start ({last[:200]}): install it again by hand")
    commit = installed_commit()
    return done.stdout.strip() + (f" of commit {commit}" if commit else "")


def _environment() -> dict[str, str]:
    """Return the variables of this process without what `cairn/__init__.py` added for processes of ours."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(ROOT)]
    return kept | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})
