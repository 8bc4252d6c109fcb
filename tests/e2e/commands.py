"""Commands as separate processes, as a stranger runs them."""

from __future__ import annotations

import asyncio
import sys

from tests.support.waiting import LIMIT, ended


async def cairn(*arguments: str, seconds: float = LIMIT) -> tuple[int, str]:
    """Return a command's exit code and output; with its errors unless the code is 0."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cairn", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await ended(process.communicate(), seconds)
    return process.returncode or 0, out.decode() + (err.decode() if process.returncode else "")
