"""Processes of a trainer whose disk is slow or full, when a test says so by files in the folder CAIRN_TEST_DISK.

    python -m tests.support.slow_disk peer.training ...          the trainer, or rank 0 of many
    python -m tests.support.slow_disk peer.training.rank ...     another rank

While there is a file "hold" a write waits, and makes "held"; with "full" it fails. Of tensors that are saved, not of
anything else.
"""

from __future__ import annotations

import errno
import os
import runpy
import sys
import time
from pathlib import Path

from peer.training.parallel import sharded_file

write_at = sharded_file.write_at


def write_all(file: int, data: memoryview, offset: int) -> None:
    folder = Path(os.environ["CAIRN_TEST_DISK"])
    if (folder / "full").exists():
        raise OSError(errno.ENOSPC, "No space left on device")
    while (folder / "hold").exists():
        (folder / "held").touch()
        time.sleep(0.005)
    write_at(file, data, offset)


if __name__ == "__main__":
    sharded_file.write_at = write_all
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
