"""Signs that somebody else uses this machine: programs that compute on its GPUs, and people at its keyboards.

The first come from nvidia-smi, the second from systemd-logind, which counts input on terminals and asks desktops. If
one of them does not answer, that fact is not known, and no reason to rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import async_timeout

PROGRAMS = ("nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader")
PEOPLE = ("loginctl", "show-session", "--property=IdleHint")  # without a session: of all together

ANSWER_SECONDS = 10.0
MAX_ANSWER = 64 * 1024
MAX_ANCESTORS = 64

_PROGRAM = re.compile(r"\s*([0-9]{1,10}),\s*(\S.*)")


@dataclass(frozen=True, slots=True)
class IdleFacts:
    """A program of somebody else on a GPU ("": none), and whether people use the machine. None: not known."""

    program: str | None = None
    people: bool | None = None

    @property
    def reason(self) -> str:
        """Why the peer rests by these facts; "" when it may train."""
        if self.program:
            return f"{self.program} uses the GPU"
        return "somebody uses this machine" if self.people else ""

    @property
    def unknown(self) -> str:
        """The facts that are not known here, for people; "" when all are."""
        missing = ["programs on the GPU (nvidia-smi does not answer)"] * (self.program is None)
        missing += ["people at the keyboard (loginctl does not answer)"] * (self.people is None)
        return " and ".join(missing)


NOT_KNOWN = IdleFacts()


async def idle_facts() -> IdleFacts:
    """Return what is known now. Programs that this process started are not somebody else's."""
    programs, people = await asyncio.gather(_output(PROGRAMS), _output(PEOPLE))
    return IdleFacts(
        None if programs is None else others_program(programs, os.getpid()),
        {"IdleHint=yes": False, "IdleHint=no": True}.get((people or "").strip()),
    )


def others_program(listed: str, me: int) -> str | None:
    """Return the first program in nvidia-smi's list that process `me` did not start; None for another text."""
    found = ""
    for line in listed.splitlines():
        if not line.strip():
            continue
        program = _PROGRAM.fullmatch(line)
        if program is None:
            return None
        if not found and not _is_started_by(me, int(program[1])):
            found = Path(program[2].strip()).name[:40]
    return found


def _is_started_by(me: int, pid: int) -> bool:
    for _ in range(MAX_ANCESTORS):
        if pid == me:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


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
