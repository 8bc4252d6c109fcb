"""The limit of open files: each connection and each blob that is read is one, and the usual soft limit is 1024."""

from __future__ import annotations

import resource

MAX_FILES = 65_536


def allow_many_files() -> None:
    """Raise this process's soft limit as far as the hard one allows, up to MAX_FILES. Its children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
