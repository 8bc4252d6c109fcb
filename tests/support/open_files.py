"""Limits on open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_limit(most: int) -> Iterator[None]:
    """Allow this number of open files, as a soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def few_files(more: int) -> Iterator[None]:
    """Allow only a number of additional open files."""
    with files_limit(len(os.listdir("/proc/self/fd")) + more):
        yield
