"""`cairn runs`: the runs of some coordinators, for somebody who looks for one to join."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import click

from cairn.commands.options import invite_or_stdin
from protocol.errors import CairnError


def _places(context: click.Context, parameter: click.Parameter, places: tuple[str, ...]) -> list[str | None]:
    return [invite_or_stdin(context, parameter, place) for place in places]


@click.command()
@click.argument("coordinators", metavar="COORDINATOR...", nargs=-1, required=True, callback=_places)
@click.option("--json", "as_json", is_flag=True, help="For scripts: a list of objects.")
@click.pass_context
def runs(context: click.Context, coordinators: Sequence[str], as_json: bool) -> None:
    """Show the run of each COORDINATOR: model, data, progress, peers, and which hardware is enough.

    COORDINATOR is the address of a run's page, HOST[:PORT] of it, or an invite.
    """
    from cairn import listed_run

    async def ask_all() -> list[listed_run.ListedRun | BaseException]:
        return await asyncio.gather(*map(listed_run.ask, coordinators), return_exceptions=True)

    answers = asyncio.run(ask_all())
    found = [a for a in answers if isinstance(a, listed_run.ListedRun)]
    if as_json:
        click.echo(json.dumps([listed_run.as_json(run) for run in found], indent=1))
    else:
        click.echo("\n\n".join("\n".join(listed_run.lines(run)) for run in found), nl=bool(found))
    for place, answer in zip(coordinators, answers, strict=True):
        if isinstance(answer, CairnError):
            click.echo(f"error: {place[:60]}: {answer}", err=True)
        elif isinstance(answer, BaseException):
            raise answer
    if len(found) < len(coordinators):
        context.exit(1)
