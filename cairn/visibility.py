"""The lines that say what others see of a volunteer's peer, and the home of an anonymous peer."""

from __future__ import annotations

import os
from pathlib import Path

from protocol.errors import CairnError
from protocol.ids import RunId


def seen_by_others(name: str, *, anonymous: bool, home: Path) -> list[str]:
    """Return what others see of a peer and who they are, in lines for its volunteer. `home`: where its key is."""
    shown = f'"{name}": on the run\'s page' if name else "none: the run's page shows digits of the key"
    rows = [
        ("key", "on the run's page with all that it does; the same in all your runs"),
        ("name", shown),
        ("device", "its kind (such as NVIDIA H200), speed, traffic: on the run's page"),
        ("address", "its IP address: the coordinator, members, and whoever has an invite"),
    ]
    last = "--anonymous: no name, no kind of device, and a key for this run alone"
    if anonymous:
        rows[0] = ("key", "on the run's page with all that it does; made for this run alone")
        rows[2] = ("device", "not its kind; speed and traffic: on the run's page")
        last = f"other commands about this peer need --home {home}"
    return ["what others see of this peer", *(f"  {what:<8} {text}" for what, text in rows), f"  {last}"]


def seen_in_a_line() -> str:
    """Return the same in one line, for `cairn peer doctor`."""
    return (
        "key, name, kind of device, speed and traffic (the run's page); IP address (whoever has an invite); "
        "--anonymous leaves out name and device"
    )


def anonymous_home(home: Path, run: RunId) -> Path:
    """Return the home of the anonymous peer that a home has, or would have, in a run."""
    return home / "anonymous" / run.hex()[:12]


def anonymous_hint(home: Path, run: RunId) -> str:
    """Return the end of a sentence, which names the home of an anonymous peer in this run; "" without one."""
    own = anonymous_home(home, run)
    return f"; your anonymous peer in this run has --home {own}" if os.path.exists(own) else ""


def peer_home(home: Path, run: RunId, *, anonymous: bool) -> Path:
    """Return the home of a peer: an anonymous one has a home for each run, and so a key that no other run sees.

    Raises CairnError before a peer that was anonymous in this run is openly.
    """
    own = anonymous_home(home, run)
    if not anonymous and os.path.exists(own):
        raise CairnError(
            f"this home has been in this run anonymously: add --anonymous. To join openly from now on, move {own} away"
        )
    return own if anonymous else home
