"""The receivers of alerts: `alerts.toml` in the run's folder, and `--webhook`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from coordinator.errors import CoordinatorError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

FILE = "alerts.toml"
SECRET_VARIABLE = "CAIRN_WEBHOOK_SECRET"
MAX_HOOKS = 8


class AlertConfigError(CoordinatorError):
    """A wrong configuration of alerts."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """A webhook's address, parsed. Anybody who knows the path may post, so people are shown only the host."""

    url: str
    host: str
    port: int
    secure: bool
    target: str

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
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        fine = url.isascii() and url.isprintable() and " " not in url and len(url) <= 2000
        if not fine or parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise AlertConfigError(
                f"webhook {url[:30]!r}... is no http or https address without a user: write it as the service gives it"
            )
        secure = parts.scheme == "https"
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(url, parts.hostname, port or (443 if secure else 80), secure, target)


@dataclass(frozen=True, slots=True)
class AlertConfig:
    """The webhooks, the secret to sign with ("": none), and the seconds after which a lasting alert is sent again."""

    hooks: tuple[Webhook, ...] = ()
    secret: str = ""
    repeat: float = 6 * 3600.0


def load_config(folder: Path | None, urls: Sequence[str] = ()) -> AlertConfig:
    """Read the file in the folder, if there is one, and add `urls` from the command line. Raises AlertConfigError."""
    secret, repeat = os.environ.get(SECRET_VARIABLE, ""), 6.0
    path = None if folder is None else folder / FILE
    if path is not None and path.exists():
        try:
            table = tomllib.loads(path.read_text())["alerts"]
            unknown = set(table) - {"webhooks", "secret", "repeat_hours"}
            own, secret, repeat = table.get("webhooks", []), table.get("secret", secret), table.get("repeat_hours", 6)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as e:
            raise AlertConfigError(f'{path} cannot be read ({e}): write [alerts] and webhooks = ["https://..."]') from e
        if unknown:
            raise AlertConfigError(f"{path} names {sorted(unknown)[0]!r}: webhooks, secret, repeat_hours may be there")
        if not isinstance(own, list) or not all(isinstance(u, str) for u in own) or not isinstance(secret, str):
            raise AlertConfigError(f"{path}: webhooks is a list of addresses in quotes, secret is text in quotes")
        if not isinstance(repeat, int | float) or not 0.1 <= repeat <= 1000:
            raise AlertConfigError(f"{path}: repeat_hours is a number from 0.1 to 1000")
        urls = [*urls, *own]
    hooks = tuple(dict.fromkeys(Webhook.parse(u) for u in urls))
    if len(hooks) > MAX_HOOKS:
        raise AlertConfigError(f"{len(hooks)} webhooks are too many: at most {MAX_HOOKS}")
    return AlertConfig(hooks, secret, repeat * 3600.0)
