"""`cairn coordinator test-alert`: posts a test event to each webhook, and prints the results."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import click

from cairn.commands.options import FILE, home_option
from protocol.errors import CairnError


@click.command("test-alert")
@click.argument("run_file", required=False, type=FILE)
@click.option("--webhook", multiple=True, metavar="URL", help="Post there; may be repeated.")
@home_option("Where the run's folder is.")
def test_alert(run_file: Path | None, webhook: tuple[str, ...], home: Path) -> None:
    """Post a test event to the webhooks of RUN_FILE's coordinator (alerts.toml in its folder), and to --webhook."""
    from cairn.commands.serve import coordinator_folder
    from coordinator.alerts.config import load_config
    from coordinator.authoring.runfile import load_run

    name, folder = "test", None
    if run_file is not None:
        name = load_run(run_file).run.name
        folder = coordinator_folder(home, name)
    config = load_config(folder, webhook)
    if not config.hooks:
        where = f"{folder / 'alerts.toml'} names none" if folder else "no RUN_FILE and no --webhook was given"
        raise CairnError(f'{where}: write [alerts] and webhooks = ["https://..."] there, or give --webhook URL')
    failed = asyncio.run(_post_all(config, name))
    if failed:
        raise CairnError(f"{failed} of {len(config.hooks)} webhooks did not accept the event")


async def _post_all(config, run: str) -> int:
    """Post a test event to all webhooks; return the number of failures."""
    from coordinator.alerts.tracker import AlertEvent
    from coordinator.alerts.webhooks import WebhookError, payload, post

    now, failed = time.time(), 0
    event = AlertEvent(f"test-{now:.0f}", "test", "test", "this is how an alert arrives; nothing is wrong", now, now)
    for hook in config.hooks:
        try:
            await post(hook, payload(event, run, ""), config.secret)
            click.echo(f"{hook}: accepted" + (", signed" if config.secret else ""))
        except WebhookError as e:
            click.echo(f"failed: {e}", err=True)
            failed += 1
    return failed
