"""Reading of files in a folder that a stranger made: there may be anything under any name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, limit: int) -> bytes:
    """Return the bytes of a file. Links are followed.

    Raises OSError, also for a file of more than `limit` bytes, and for a pipe or device: reading one may never end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # else a pipe without a writer keeps it waiting
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        with open(fd, "rb", closefd=False) as file:
            data = file.read(limit + 1)
    finally:
        os.close(fd)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit:,} bytes", str(path))
    return data
