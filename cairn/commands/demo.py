"""`cairn demo`: a small swarm on this machine (see `cairn.demo`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from cairn.commands.options import FILE, FOLDER


@click.command()
@click.option("--folder", type=FOLDER, default="demo-run", show_default=True, help="Of the demo; it is emptied first.")
@click.option("--run-file", type=FILE, help="Another run, outside that folder.  [default: examples/sotu.toml]")
@click.option(
    "--liars",
    type=click.IntRange(0, 2),
    default=0,
    show_default=True,
    help="Liars that join the four honest peers, and are convicted by audits. Nobody is killed then.",
)
@click.option("--plain", is_flag=True, help="Log lines instead of a live view (the default without a terminal).")
def demo(folder: Path, run_file: Path | None, liars: int, plain: bool) -> None:
    """Train a small Llama with four peers on this machine: one is killed, one joins late.

    With --liars the others train updates of theirs again, and find that the work was not done (docs/audits.md).
    """
    # gRPC reads it when it is imported. It warns about processes that are started after it, but these exec at once.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    from cairn.demo.story import run_demo

    sys.exit(run_demo(folder, run_file, plain=plain, liars=liars))
