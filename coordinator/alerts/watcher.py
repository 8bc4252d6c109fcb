"""Checks the rules periodically, stores the tracker's state, and delivers events to the webhooks."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from coordinator import durable
from coordinator.alerts.config import AlertConfig, Webhook
from coordinator.alerts.rules import AlertInput
from coordinator.alerts.tracker import Alert, AlertEvent, AlertTracker, back_off
from coordinator.alerts.webhooks import WebhookError, payload, post

log = logging.getLogger(__name__)

FILE = "alerts.json"
CHECK_SECONDS = 5.0
SAVE_SECONDS = 60.0
"""Seconds between two writes of the rules' memory. Events are written before they are delivered."""


class AlertWatcher:
    """The alerts of one run.

    `input` returns the input of the rules. `on_change` is called when other alerts are active than before,
    `on_delivery` after each delivery with "delivered", "failed" or "dropped".
    """

    def __init__(
        self, folder: Path, config: AlertConfig, run: str, page: Callable[[], str], input: Callable[[], AlertInput],
        on_change: Callable[[], None] = lambda: None, on_delivery: Callable[[str], None] = lambda _: None,
    ):  # fmt: skip
        self._path = folder / FILE
        self._config = config
        self._run = run
        self._page = page
        self._input = input
        self._on_change = on_change
        self._on_delivery = on_delivery
        self._tracker = self._tracked(None)
        self._news = {h.name: asyncio.Event() for h in config.hooks}
        self._tasks: list[asyncio.Task[None]] = []
        self._saved_at = 0.0
        # One write after the other, even if a waiting caller is cancelled.
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="alerts")

    @property
    def active(self) -> tuple[Alert, ...]:
        return self._tracker.active

    @property
    def names(self) -> tuple[str, ...]:
        return self._tracker.names

    async def start(self) -> None:
        """Continue from the state on disk."""
        saved = await asyncio.to_thread(self._load)
        try:
            self._tracker = self._tracked(saved)
        except (TypeError, KeyError, AttributeError, ValueError) as e:
            log.error("%s is damaged (%s): active alerts are sent again", self._path, e)
        self._tasks = [asyncio.create_task(self._check_forever(), name="alerts")]
        self._tasks += [asyncio.create_task(self._deliver_forever(h), name=f"webhook {h}") for h in self._config.hooks]

    def _tracked(self, saved: dict | None) -> AlertTracker:
        return AlertTracker(
            [h.name for h in self._config.hooks], saved, repeat=self._config.repeat,
            on_dropped=lambda: self._on_delivery("dropped"),
        )  # fmt: skip

    async def stop(self) -> None:
        """Stop; undelivered events are delivered after the next start."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._save()
        self._disk.shutdown(wait=False)

    async def check(self) -> list[AlertEvent]:
        """Apply the rules once, and return the new events."""
        events = self._tracker.update(self._input())
        for e in events:
            (log.info if e.kind == "resolved" else log.warning)("alert %s %s: %s", e.name, e.kind, e.message)
        if events or time.monotonic() - self._saved_at > SAVE_SECONDS:
            await self._save()
        if events:
            self._on_change()
        for news in self._news.values() if events else ():
            news.set()
        return events

    async def _check_forever(self) -> None:
        while True:
            try:
                await self.check()
            except Exception:  # a fault here must not silence the alerts until the next start
                log.exception("looking for alerts failed")
            await asyncio.sleep(CHECK_SECONDS)

    async def _deliver_forever(self, hook: Webhook) -> None:
        for faults in count(1):
            try:
                await self._deliver(hook)
            except Exception:  # a fault here must not silence a webhook until the next start
                log.exception("webhook %s: a fault of the coordinator; its events are delivered later", hook.name)
            await asyncio.sleep(back_off(faults))

    async def _deliver(self, hook: Webhook) -> None:
        failures = 0
        while True:
            event = self._tracker.next_for(hook.name)
            if event is None:
                self._news[hook.name].clear()
                await self._news[hook.name].wait()
                continue
            try:
                await post(hook, payload(event, self._run, self._page()), self._config.secret)
            except WebhookError as e:
                failures += 1
                self._on_delivery("dropped" if e.final else "failed")
                log.warning("webhook: %s; %s", e, "the event is dropped" if e.final else "it is retried")
                if not e.final:
                    await asyncio.sleep(back_off(failures))
                    continue
                self._tracker.done(hook.name, event)
            else:
                failures = 0
                self._on_delivery("delivered")
                self._tracker.done(hook.name, event)
            await self._save()

    def _load(self) -> dict | None:
        try:
            return json.loads(self._path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            log.error("%s cannot be read (%s): active alerts are sent again", self._path, e)
            return None

    async def _save(self) -> None:
        self._saved_at = time.monotonic()
        data = json.dumps(self._tracker.to_json()).encode()
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, durable.replace, self._path, data, 0o600)
        except OSError as e:
            # The disk may be what is wrong: then delivery matters more than the record.
            log.error("%s cannot be written (%s): after a restart alerts may be sent twice", self._path, e)
