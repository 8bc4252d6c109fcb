"""Checks that this machine has devices: `python -m peer.training.machine_check OPTIONS`. Started by a node.

The node itself loads no CUDA. This finds what the trainer would refuse at its start, before anything is fetched.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from peer.parent_process import exit_with_parent


def main() -> int:
    """Print why the devices cannot be used, and return 1; or return 0."""
    parser = argparse.ArgumentParser(prog="python -m peer.training.machine_check", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of the node")
    parser.add_argument("--spec", type=Path, required=True, help="the run's spec")
    parser.add_argument("--parallel", help="the layout of the trainer, on the first device")
    parser.add_argument("--device", action="append", default=[], help="may be repeated")
    asked = parser.parse_args()
    if not exit_with_parent(asked.parent):
        return 1
    from peer.training.device import choose_device
    from peer.training.parallel.setup import resolve
    from protocol.errors import CairnError
    from protocol.spec import parse_spec

    try:
        for device in asked.device:
            choose_device(device, 1)
        if asked.parallel is not None:
            resolve(asked.parallel, asked.device[0], parse_spec(asked.spec.read_bytes()))
    except (CairnError, OSError) as e:
        print(e)
        return 1
    return 0


if __name__ == "__main__":
    # Not sys.exit: a driver's threads may hold the process.
    code = main()
    sys.stdout.flush()
    os._exit(code)
