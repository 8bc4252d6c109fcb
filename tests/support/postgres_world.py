"""A PostgreSQL server of the tests' own, on a socket in a temporary folder; or why there can be none."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def missing() -> str:
    """Why no server can be started here; "" when one can."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed: pip install '.[postgres]'"
    if _binary("initdb") is None:
        return "PostgreSQL is not installed: make postgres"
    return ""


def _binary(name: str) -> str | None:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


@contextmanager
def server(*, fsync: bool = False) -> Iterator[str]:
    """Run a server with an empty database `ledger`; return its URL. It refuses to run as root, so root starts it as
    `postgres`."""
    # Not pytest's folder: a socket's path is short, and another user must get there.
    folder = Path(tempfile.mkdtemp(prefix="cairn-pg-", dir="/tmp"))
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    if user:
        shutil.chown(folder, "postgres", "postgres")
    data, log = folder / "data", folder / "log"

    def run(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120, **user)
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stderr}{log.read_text() if log.exists() else ''}")

    initdb, control = _binary("initdb"), _binary("pg_ctl")
    assert initdb and control
    try:
        run(initdb, "-D", str(data), "-U", "cairn", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale", "C")
        options = f"-k {folder} -c listen_addresses='' -c fsync={'on' if fsync else 'off'} -c max_connections=20"
        run(control, "-D", str(data), "-l", str(log), "-w", "-t", "60", "-o", options, "start")
        try:
            yield f"postgresql://cairn@/postgres?host={folder}"
        finally:
            run(control, "-D", str(data), "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_made = itertools.count()


@contextmanager
def empty_database(url: str) -> Iterator[str]:
    """Make a separate database on a running server; return its URL."""
    import psycopg

    name = f"ledger_{next(_made)}"
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield url.replace("/postgres?", f"/{name}?")
        finally:
            db.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
