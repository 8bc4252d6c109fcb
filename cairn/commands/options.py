"""Options that many commands share, and the parsing of numbers in options."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from cairn.number_format import parse_size
from protocol.errors import CairnError, MalformedError, os_reason
from protocol.ids import PeerKey
from protocol.invite import MAX_INVITE


class _NamedPath(click.Path):
    """A path that need not exist, but can be looked up: its name is not too long, and its folder not closed to us."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as e:
            self.fail(f"{str(path)[:80]!r}: {os_reason(e)}: name another place", param, ctx)
        return path


class _HomePath(_NamedPath):
    """The folder of --home, whose "~" is expanded before it is looked at: a folder that root made is not readable."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = os.path.expanduser(value)
        if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
            self.fail(
                f"{path} cannot be read by this user: if it was made by sudo or in a container, chown -R it to this "
                "user, else chmod u+rwx it, or name another folder", param, ctx,
            )  # fmt: skip
        return super().convert(path, param, ctx)


FILE = _NamedPath(dir_okay=False, path_type=Path)
FOLDER = _NamedPath(file_okay=False, path_type=Path)
PLACE = _NamedPath(path_type=Path)
"""A file or a folder."""

MEMBER_ADDRESS = re.compile(r"/[a-z0-9]+/[^/ ]+/(tcp/[0-9]+|udp/[0-9]+/quic-v1)/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}")


def home_option(keeps: str):
    """Return the option --home; `keeps` is its help, "Where ...", and names what the command finds there."""
    return click.option(
        "--home",
        type=_HomePath(file_okay=False, path_type=Path),
        default="~/.cairn",
        envvar="CAIRN_HOME",
        show_default=True,
        help=keeps,
    )


def invite_or_stdin(context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    """Return the argument, or for - a line of stdin. Raises CairnError."""
    if text != "-" or context.resilient_parsing:  # the completion of a shell must not read the terminal
        return text
    line = sys.stdin.buffer.readline(2 * MAX_INVITE).decode(errors="replace").strip()
    if not line:
        raise CairnError("INVITE is -, and stdin has no line: write for example `cairn peer join - < invite`")
    return line


invite_argument = click.argument("invite", callback=invite_or_stdin)
"""INVITE, or - for a line of stdin: other users of the machine see the arguments of a process."""


def _members(_context: click.Context, _parameter: click.Parameter, addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        if not MEMBER_ADDRESS.fullmatch(address):
            raise click.BadParameter(
                f"{address[:80]!r} is not a member's address: want /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW..., as one "
                "logs it after 'listening at'",
                param_hint="--via",
            )
    return addresses


def check_listen(addresses: Iterable[str], option: str) -> None:
    """Raise click.BadParameter for what is no address to listen on. Slow: not while options are parsed."""
    from peer.swarm.addresses import bind_of

    for address in addresses:
        try:
            bind_of(address)
        except MalformedError as e:
            raise click.BadParameter(f"{e}; write for example /ip4/0.0.0.0/tcp/0", param_hint=option) from None


via_option = click.option(
    "--via",
    multiple=True,
    callback=_members,
    metavar="MULTIADDR",
    help="A member that knows the coordinator's new address, should it have moved; may be repeated.",
)


def device_name(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    """Return the device. Raises click.BadParameter for a malformed name; whoever uses it checks that it exists."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise click.BadParameter(f"{text[:40]!r} is not a device: write auto, cpu, cuda, or cuda:0 (cuda:1, ...)")
    return text


def device_option(default: str = "auto"):
    """Return the option --device."""
    return click.option(
        "--device", default=default, show_default=True, help="auto, cpu, cuda or cuda:N.", callback=device_name
    )


def peer_key(text: str, option: str) -> PeerKey:
    """Return the key in 64 hexadecimal digits. Raises click.BadParameter."""
    try:
        return PeerKey.parse(text)
    except MalformedError as e:
        raise click.BadParameter(str(e), param_hint=option) from None


def count_option(name: str, help: str):
    """Return an option for a number that may be written 130M, 1B or 7e9."""
    return click.option(
        name,
        metavar="N",
        callback=lambda _c, p, value: None if value is None else parse_count(value, p.opts[0]),
        help=help,
    )


def parse_count(text: str, option: str) -> int:
    """Return 130M, 1B, 7e9 or 1_000_000 as an integer. Raises click.BadParameter."""
    value = parse_size(text)
    if value is None:
        raise click.BadParameter(
            f"{text[:40]!r} is not a number of at least 1: write for example 130M, 1B or 7e9", param_hint=option
        )
    return value
