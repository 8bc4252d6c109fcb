"""A rank other than 0: `python -m peer.training.rank OPTIONS`. Started by rank 0, never by hand."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

from peer.parent_process import exit_with_parent
from protocol.quiet_imports import quiet_imports


def main() -> int:
    """Execute rank 0's commands to the last. Return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    a = SimpleNamespace(**json.loads(sys.argv[1]))  # as `DistributedBackend` wrote it
    folder = Path(a.folder)
    if not exit_with_parent(a.parent):
        return 1
    with quiet_imports():
        import torch

        from peer.training.device import choose_device, out_of_memory
        from peer.training.layers import LayerOptions
        from peer.training.offload import Offload
        from peer.training.parallel.group import RankGroup
        from peer.training.parallel.parallel_dims import ParallelDims
        from peer.training.parallel.rank_worker import OUT_OF_MEMORY, STEPPING, Command, RankWorker
        from protocol.errors import CairnError
        from protocol.spec import parse_spec

    def report(level: str, _kind: str, text: str) -> None:
        if level != "info":  # rank 0 reports it for all
            print(f"rank {a.rank}: {text}", file=sys.stderr, flush=True)

    command, code = None, 1
    try:
        device = choose_device(a.device, a.threads, a.gpu_memory)
        spec = parse_spec(Path(a.spec).read_bytes())
        group = RankGroup.join(ParallelDims.parse(a.parallel), a.rank, folder / "meet", device, a.seconds)
        try:
            layers = LayerOptions("on" if a.recompute else "off", a.compile)
            base = None if a.base is None else Path(a.base)
            offload = Offload.to(a.home, device, folder)
            worker = RankWorker(spec, group, offload, a.piece, layers, report, base=base)
            while True:
                name, arguments = group.receive_command()
                command = Command(name)
                try:
                    worker.do(command, *arguments)
                except (CairnError, OSError) as e:
                    if e is not group.agreed:
                        raise
                if command == Command.STOP:
                    return 0
        except torch.OutOfMemoryError:
            code = OUT_OF_MEMORY if command in STEPPING else 1
            raise out_of_memory(device, "hold this rank's share of the training") from None
    except (CairnError, OSError, RuntimeError) as e:
        text = " ".join(str(e).split())[:500]
        print(f"rank {a.rank}: {text}", file=sys.stderr)
        if folder.is_dir():  # rank 0, which reports it to the node, may have ended already
            (folder / f"rank-{a.rank}").write_text(text)
        return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not through torch's exit handlers, which may wait for ranks that are gone
