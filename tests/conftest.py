"""What all tests share: property tests without a stopwatch, since the machines that run them are shared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import postgres_world

# Before torch is imported by anybody: small tensors on shared cores gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "2")

hypothesis.settings.register_profile("cairn", deadline=None, print_blob=True)
hypothesis.settings.load_profile("cairn")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL server of this session's own; skips, with the reason, where there can be none."""
    if reason := postgres_world.missing():
        pytest.skip(reason)
    with postgres_world.server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a new ledger is kept: a file, then a PostgreSQL database that holds nothing else."""
    if request.param == "sqlite":
        yield str(tmp_path / "ledger.sqlite")
    else:
        with postgres_world.empty_database(request.getfixturevalue("postgres_url")) as url:
            yield url
