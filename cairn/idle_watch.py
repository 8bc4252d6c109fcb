"""Signs that somebody else uses this machine: programs that compute or draw on its GPUs, and people at its keyboards.

The first come from nvidia-smi, the second from systemd-logind, which counts input on terminals and asks desktops. If
one of them does not answer, that fact is not known, and no reason to rest.

nvidia-smi has two lists. That of compute programs has all GPUs, but no game. Its monitor of processes has those that
draw, too. But it refuses under WSL and on old cards, and older drivers show four GPUs there at most.

In a container nvidia-smi may list the host's process ids, which tell nothing of whose they are: our own trainer has
another one there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import async_timeout

PROGRAMS = ("nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader")
MONITOR = ("nvidia-smi", "pmon", "-c", "1", "-s", "u")
PEOPLE = ("loginctl", "show-session", "--property=IdleHint")  # without a session: of all together

DRAWING_PERCENT = 10
"""Least share of a GPU's time with which a program that draws counts: a desktop takes a few percent, a game most."""

ANSWER_SECONDS = 10.0
MAX_ANSWER = 64 * 1024
MAX_ANCESTORS = 64

HOST_PROCESSES = "pid:[4026531836]"
"""Name of Linux's first namespace of processes (PROC_PID_INIT_INO), which a container does not have."""

_PROGRAM = re.compile(r"\s*([0-9]{1,10}),\s*(\S.*)")
_PERCENT = re.compile(r"[0-9]{1,3}")


@dataclass(frozen=True, slots=True)
class IdleFacts:
    """A program of somebody else on a GPU ("": none), and whether people use the machine. None: not known.

    `sees_games`: programs that draw were among those that were looked at.
    """

    program: str | None = None
    people: bool | None = None
    sees_games: bool = False

    @property
    def reason(self) -> str:
        """Why the peer rests by these facts; "" when it may train."""
        if self.program:
            return f"{self.program} uses the GPU"
        return "somebody uses this machine" if self.people else ""

    @property
    def unknown(self) -> str:
        """The facts that are not known here, for people; "" when all are."""
        missing = []
        if self.program is None:
            missing = [
                "programs on the GPU (nvidia-smi does not answer, or lists processes from outside of a container)"
            ]
        elif not self.sees_games:
            missing = ["programs that draw, as games do (`nvidia-smi pmon` does not work)"]
        missing += ["people at the keyboard (loginctl does not answer)"] * (self.people is None)
        return " and ".join(missing)


NOT_KNOWN = IdleFacts()


async def idle_facts() -> IdleFacts:
    """Return what is known now. Programs that this process started are not somebody else's."""
    programs, monitored, people = await asyncio.gather(_output(PROGRAMS), _output(MONITOR), _output(PEOPLE))
    drawing = drawing_programs(monitored or "")
    listed = None if programs is None else f"{programs}\n{drawing or ''}"
    return IdleFacts(
        None if listed is None else others_program(listed, os.getpid(), sees_all=_sees_all_processes()),
        {"IdleHint=yes": False, "IdleHint=no": True}.get((people or "").strip()),
        drawing is not None,
    )


def drawing_programs(monitored: str) -> str | None:
    """Return the programs that draw in the table of nvidia-smi's monitor, as PROGRAMS lists them; None without a table.

    The table's heading names its columns, which are not the same in all drivers. An unknown share is "-" there.
    """
    columns: list[str] = []
    found = ""
    for line in monitored.splitlines():
        if line.startswith("#"):
            columns = columns or line[1:].split()  # the heading's second line has units
        elif columns:
            row = dict(zip(columns, line.split(maxsplit=len(columns) - 1), strict=False))
            share = row.get("sm", "")
            if "G" in row.get("type", "") and _PERCENT.fullmatch(share) and int(share) >= DRAWING_PERCENT:
                found += f"{row['pid']}, {row.get('command', 'a game')}\n"
    return found if {"pid", "type", "sm"} <= set(columns) else None


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def others_program(
    listed: str, me: int, *, sees_all: bool = True, parent: Callable[[int], int | None] = _parent
) -> str | None:
    """Return the first program in nvidia-smi's list that process `me` did not start; None when that is not known.

    `parent` gives the parent of a process, None for one that is not seen here. With `sees_all`, that is no process of
    ours. Otherwise it may be.
    """
    found, is_known = "", True
    for line in listed.splitlines():
        if not line.strip():
            continue
        program = _PROGRAM.fullmatch(line)
        if program is None:
            return None
        pid = int(program[1])
        if not sees_all and parent(pid) is None:
            is_known = False
        elif not found and not _is_started_by(me, pid, parent):
            found = Path(program[2].strip()).name[:40]
    return found if found or is_known else None


def _is_started_by(me: int, pid: int, parent: Callable[[int], int | None]) -> bool:
    for _ in range(MAX_ANCESTORS):
        if pid == me:
            return True
        if (above := parent(pid)) is None:
            return False
        pid = above
    return False


def _sees_all_processes() -> bool:
    """Return whether the process ids here are the host's."""
    try:
        return os.readlink("/proc/self/ns/pid") == HOST_PROCESSES
    except OSError:
        return True  # not Linux


async def _output(command: Sequence[str]) -> str | None:
    """Return what a program prints; None when there is none, when it fails, or when it takes too long."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError:
        return None
    assert process.stdout is not None
    data = bytearray()
    try:
        async with async_timeout.timeout(ANSWER_SECONDS):
            while (piece := await process.stdout.read(MAX_ANSWER)) and len(data) <= MAX_ANSWER:
                data += piece
            code = await process.wait() if len(data) <= MAX_ANSWER else 1
    except asyncio.TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return data.decode(errors="replace") if code == 0 else None
