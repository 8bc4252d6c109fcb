"""`cairn peer doctor`: can this machine take part in a run, what would it earn, and what would it transfer?"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cairn.commands.join import (
    disk_option,
    gpu_memory_option,
    moments_option,
    open_settings,
    parallel_option,
    private_data_option,
)
from cairn.commands.options import device_option, home_option, invite_argument, via_option
from cairn.connection import parse_invite
from cairn.stop_signals import sigterm_as_ctrl_c

if TYPE_CHECKING:
    from peer.channel import MomentForm


@click.command()
@invite_argument
@home_option("Where `cairn peer join` would keep identity, runs and logs. Nothing is written here.")
@disk_option
@private_data_option
@via_option
@device_option()
@parallel_option
@gpu_memory_option
@moments_option
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.pass_context
def doctor(
    context: click.Context, invite: str, home: Path, disk: int, allow_private_data: bool, via: tuple[str, ...],
    device: str, parallel: str, gpu_memory: float | None, moments: MomentForm, as_json: bool,
) -> None:  # fmt: skip
    """Check this machine for the run that INVITE names, before you spend money on it.

    Device, memory, disk, network and clock; the time of a step, measured by training on random tokens for up to a
    minute; credits an hour. Nobody is asked for admission, and no file is kept. The exit code is 1 if a line says no.
    """
    from rich.console import Console
    from rich.text import Text

    from cairn.doctor_view import as_plain, lines
    from cairn.examination import Examined, examine
    from cairn.output import Output

    parsed = parse_invite(invite)
    limit = open_settings(home, {"gpu_memory": gpu_memory}).settings.gpu_bytes
    waiting = Console(stderr=True, highlight=False)
    with waiting.status("asking the coordinator") as status:
        examined = Examined(parsed, home, disk, allow_private_data, device, parallel, limit, moments)
        with sigterm_as_ctrl_c():  # else the trial's folder stays
            report = asyncio.run(examine(examined, via, lambda text: status.update(Text(text))))
    if as_json:
        print(json.dumps(as_plain(report), indent=1))
    else:
        console = Output()
        for line in lines(report, min(console.width, 80)):
            console.print(line, soft_wrap=True)
    context.exit(int(report.verdict == "no"))
