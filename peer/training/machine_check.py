"""Checks that this machine has devices: `python -m peer.training.machine_check OPTIONS`. Started by a node.

The node itself loads no CUDA. This finds what the trainer would refuse at its start, before anything is fetched. With
--steps, for the doctor, it also measures the memory and some steps. Each report is a JSON object on a line of stdout:

    {"refused": "..."}          why the devices cannot be used; the exit code is 1
    {"device": {...}}           a `peer.doctor.measurements.Device`
    {"built": true}             steps follow
    {"sample": {...}}           a `peer.doctor.measurements.Sample`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.parent_process import exit_with_parent
from protocol.quiet_imports import quiet_imports

if TYPE_CHECKING:
    from protocol.spec import RunSpec


def main() -> int:
    """Print the reports. Return 1 if the devices cannot be used, else 0."""
    parser = argparse.ArgumentParser(prog="python -m peer.training.machine_check", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of the node")
    parser.add_argument("--spec", type=Path, required=True, help="the run's spec")
    parser.add_argument("--parallel", help="the layout of the trainer, on the first device")
    parser.add_argument("--device", action="append", default=[], help="may be repeated")
    parser.add_argument("--steps", type=float, help="seconds of steps to measure, with --parallel")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gpu-memory", type=int, default=0, help="the most bytes of each GPU; 0: all")
    parser.add_argument("--moments", default="fp32", help="form of the optimizers' moments")
    parser.add_argument("--disk", type=int, default=0, help="the most bytes of files")
    asked = parser.parse_args()
    if not exit_with_parent(asked.parent):
        return 1
    with quiet_imports():
        import torch

    from protocol.errors import CairnError
    from protocol.spec import parse_spec

    try:
        for kind, report in _reports(asked, parse_spec(asked.spec.read_bytes())):
            print(json.dumps({kind: report}), flush=True)
    except (CairnError, OSError, torch.OutOfMemoryError) as e:
        print(json.dumps({"refused": " ".join(str(e).split())[:2000]}))
        return 1
    return 0


def _reports(asked: argparse.Namespace, spec: RunSpec) -> Iterator[tuple[str, Any]]:
    """Yield the kind and the content of each report."""
    with quiet_imports():
        from peer.training.device import choose_device
        from peer.training.parallel.setup import resolve

    for device in asked.device:
        choose_device(device, asked.threads)
    if asked.parallel is None:
        return
    device, memory, moments = asked.device[0], asked.gpu_memory, asked.moments
    dims, kind, _, home = resolve(asked.parallel, device, spec, memory, asked.disk, eight_bit=moments == "8bit")
    from peer.doctor.device import fits

    with quiet_imports():
        from peer.training import trial

    found = trial.look(spec, device, kind, dims, memory, moments, home)
    yield "device", asdict(found)
    if asked.steps is not None and fits(found):
        trainer = trial.build(asked.spec, device, dims, asked.threads, memory, moments, asked.disk)
        yield "built", True
        for sample in trial.steps(trainer, dims, asked.steps):
            yield "sample", asdict(sample)


if __name__ == "__main__":
    # Not sys.exit: a driver's threads may hold the process.
    code = main()
    sys.stdout.flush()
    os._exit(code)
