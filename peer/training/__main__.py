"""The trainer's process: `python -m peer.training --fd N --parent PID`. Started by a node, never by hand."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from peer.channel.trainer_end import TrainerEnd
from peer.errors import ChannelError
from peer.parent_process import exit_with_parent
from protocol.quiet_imports import quiet_imports

if TYPE_CHECKING:
    from peer.training.service import TrainerService


def main(
    arguments: Sequence[str] | None = None, make_service: Callable[[TrainerEnd], TrainerService] | None = None
) -> int:
    """Serve the node at the other end of the descriptor. Return the exit code.

    `arguments`: None for those of the process. `make_service`: None for `TrainerService`.
    """
    # Ctrl-C, a service's SIGTERM and a closed terminal are for the node: it asks the trainer to save and stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m peer.training", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the channel to the node")
    parser.add_argument("--parent", type=int, required=True, help="process id of the node")
    parsed = parser.parse_args(arguments)
    try:
        end = TrainerEnd.from_fd(parsed.fd)
    except ChannelError as e:
        print(f"trainer: {e}; it is started by cairn peer join, not by hand", file=sys.stderr)
        return 2
    if not exit_with_parent(parsed.parent):
        return 1
    with quiet_imports():
        from peer.training.service import TrainerService  # torch and transformers: seconds

    try:
        return (make_service or TrainerService)(end).run()
    except ChannelError as e:
        print(f"trainer: {e}", file=sys.stderr)
        return 1
    finally:
        end.close()


if __name__ == "__main__":
    # Not sys.exit: threads may wait for a source of data for a while, and would hold the process.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
