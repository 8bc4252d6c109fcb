"""The protocol's version: one number for all that peers must agree on, and the remedy where two numbers meet.

A spec states its run's version, so the run id binds it, and a run never changes it. A reader of a spec compares that
first. Calls between peers have the number in their names, and a request for admission states that of its sender.
"""

from __future__ import annotations

from protocol.errors import SpecError

RELEASE = "0.1.0"
"""The version of this package."""

PROTOCOL = 1
"""It grows with each change that keeps an older Cairn out of a run: of bytes on the wire, of what is accepted, or of
the bits of a state. A field that readers pass over is no such change. With it the last release of the old number
enters `LAST_RELEASES`, and the vectors are made again."""

MAX_PROTOCOL = 2**31 - 1

LAST_RELEASES: dict[int, str] = {}
"""The last release that spoke each earlier protocol. The tag of release X is vX."""

UPGRADE = "run `cairn peer upgrade` (in a clone first `git pull`)"
"""The remedy for a Cairn that is too old."""


class VersionError(SpecError):
    """The run speaks another version of the protocol than this Cairn."""


def mismatch(run: int, spoken: int, who: str, release: str) -> str:
    """Return why `who`, who speaks the protocol `spoken`, cannot take part in a run, and what to do; "" if it can.

    `release` is one that speaks the run's protocol ("": none is known).
    """
    if run == spoken:
        return ""
    older = (
        f"in your clone `git checkout v{release}`, then `pipx install --force .`" if release
        else f"install an older Cairn, which speaks {run}"
    )  # fmt: skip
    remedy = UPGRADE if spoken < run else f"{older}, or ask the run's owner"
    return f"this run speaks protocol {run}, and {who} speaks {spoken}: {remedy}"


def check_spoken(run: int) -> None:
    """Raise VersionError unless this Cairn speaks the run's protocol."""
    if why := mismatch(run, PROTOCOL, f"this Cairn {RELEASE}", LAST_RELEASES.get(run, "")):
        raise VersionError(why)
