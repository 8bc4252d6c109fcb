"""The receivers of alerts: `alerts.toml` in the run's folder, and `--webhook`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.authoring.toml_file import problems, read_tables
from coordinator.errors import CoordinatorError

FILE = "alerts.toml"
SECRET_VARIABLE = "CAIRN_WEBHOOK_SECRET"
MAX_HOOKS = 8


class AlertConfigError(CoordinatorError):
    """A wrong configuration of alerts."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """A webhook's address. Anybody who knows the path may post, so people are shown only the host."""

    url: str
    host: str

    @property
    def name(self) -> str:
        """An identifier for the tracker's state, which reveals nothing of the address."""
        return sha256(self.url.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.host

    @classmethod
    def parse(cls, url: str) -> Webhook:
        """Parse an http or https address. Raises AlertConfigError."""
        try:
            parts = urlsplit(url)
            _ = parts.port  # raises for one that is no port
        except ValueError:
            parts = urlsplit("")
        fine = url.isascii() and url.isprintable() and " " not in url and len(url) <= 2000
        if not fine or parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise AlertConfigError(
                f"webhook {url[:30]!r}... is no http or https address without a user: write it as the service gives it"
            )
        return cls(url, parts.hostname)


@dataclass(frozen=True, slots=True)
class AlertConfig:
    """The webhooks, the secret to sign with ("": none), and the seconds after which a lasting alert is sent again."""

    hooks: tuple[Webhook, ...] = ()
    secret: str = ""
    repeat: float = 6 * 3600.0


class AlertsTable(BaseModel):
    """[alerts]."""

    model_config = ConfigDict(extra="forbid", strict=True)

    webhooks: list[str] = []
    secret: str | None = None
    repeat_hours: Annotated[float, Field(ge=0.1, le=1000, allow_inf_nan=False)] = 6.0


class AlertsFile(BaseModel):
    """`alerts.toml`."""

    alerts: AlertsTable


def load_config(folder: Path | None, urls: Sequence[str] = ()) -> AlertConfig:
    """Read the file in the folder, if there is one, and add `urls` from the command line. Raises AlertConfigError."""
    path, table = None if folder is None else folder / FILE, AlertsTable()
    if path is not None and path.exists():
        remedy = 'write [alerts] and webhooks = ["https://..."]'
        tables, text = read_tables(path, AlertConfigError, remedy)
        try:
            table = AlertsFile.model_validate(tables).alerts
        except ValidationError as e:
            found = problems(e, path, text, AlertsFile, missing=f"is missing: {remedy}", shows_values=False)
            raise AlertConfigError("\n".join(found)) from None
    hooks = tuple(dict.fromkeys(Webhook.parse(u) for u in (*urls, *table.webhooks)))
    if len(hooks) > MAX_HOOKS:
        raise AlertConfigError(f"{len(hooks)} webhooks are too many: at most {MAX_HOOKS}")
    secret = os.environ.get(SECRET_VARIABLE, "") if table.secret is None else table.secret
    return AlertConfig(hooks, secret, table.repeat_hours * 3600.0)
