"""A liar of the demo: `python -m cairn.demo.liar LIE INVITE HOME NAME`. Started by `cairn demo --liars`, never by hand.

It is `cairn peer join` with a trainer that lies (`cairn.demo.lying_trainer`). The public command line has no option for
that. This one takes part in runs on this machine only: it is to be convicted before an audience, not to do harm.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path

from cairn.commands.join import JoinOptions, join_run
from protocol.errors import CairnError
from protocol.invite import Invite
from protocol.python_command import python_command


def join_and_lie(lie: str, invite: str, home: Path, name: str) -> None:
    """Take part in a run of this machine, and lie. Raises CairnError for a run of another machine."""
    if not all(_is_this_machine(c.host) for c in Invite.parse(invite).coordinators):
        raise CairnError("the run is not on this machine: liars take part in `cairn demo --liars` only")
    join_run(
        JoinOptions(
            invite=invite, home=home, name=name, device="cpu", parallel="auto", recompute="auto", compile="auto",
            overlap="on", threads=1, listen=("/ip4/127.0.0.1/tcp/0",), announce=(), disk=10**10,
            allow_private_data=False, audit_device="off", plain=True, via=(),
            trainer_command=tuple(python_command("cairn.demo.lying_trainer", lie)),
        )
    )  # fmt: skip


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def main(arguments: Sequence[str]) -> int:
    """Run a liar until the run is over, or SIGTERM. Return the exit code."""
    lie, invite, home, name = arguments
    try:
        join_and_lie(lie, invite, Path(home), name)
    except CairnError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
