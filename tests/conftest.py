"""Settings and fixtures of all tests, and their order with pytest-xdist.

Property tests have no deadline, since the machines that run them are shared. Workers finish soonest when the long
files begin first and the short ones fill the rest. A file stays on one worker, so that its fixtures are made once.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

from tests.support import postgres_world

# Before torch is imported by anybody: small tensors on shared cores gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would the commands that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # So does nohup with SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

hypothesis.settings.register_profile("cairn", deadline=None, print_blob=True)
# The same examples each time, so that a change shows no failure of something else. By hand, others are tried.
hypothesis.settings.register_profile("same", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("CAIRN_EXAMPLES", "cairn"))


@pytest.fixture(autouse=True)
def room_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep coordinators in this process from alerting that the machine that runs the tests is short of disk."""
    usage = SimpleNamespace(free=10**12, used=10**12, total=2 * 10**12)
    monkeypatch.setattr("coordinator.service.disk_usage", lambda _: usage)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Yield the URL of a PostgreSQL server of this session, or skip with the reason why there is none."""
    if reason := postgres_world.missing():
        pytest.skip(reason)
    with postgres_world.server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the place of a new ledger: a file, then an empty PostgreSQL database."""
    if request.param == "sqlite":
        yield str(tmp_path / "ledger.sqlite")
    else:
        with postgres_world.empty_database(request.getfixturevalue("postgres_url")) as url:
            yield url


TOGETHER = {
    # One swarm is shared; and the names of network namespaces are the machine's.
    "tests/e2e/test_audit_e2e.py": "tests/e2e",
    "tests/e2e/test_device_e2e.py": "tests/e2e",
    "tests/e2e/test_liars_e2e.py": "tests/e2e",
    "tests/e2e/test_rest_e2e.py": "tests/e2e",
    "tests/e2e/test_swarm_e2e.py": "tests/e2e",
    "tests/e2e/test_the_owner_e2e.py": "tests/e2e",
    "tests/wan/test_wan.py": "wan",
    "tests/scenarios/test_scenarios.py": "wan",
}
"""Files that are run one after the other, by one worker, and their common name."""

FIRST = (
    # The swarm that tests of this folder share trains until a test of another folder comes: those with their own go
    # before, on all cores.
    "tests/e2e/test_convictions",
    "tests/e2e/test_moved",
    "tests/e2e/test_parallel",
    "tests/e2e/test_reduce",
    "tests/e2e/test_end",
    "tests/e2e/",
    # Mostly waiting: beside a swarm that takes what the cores have left.
    "tests/page/",
    "tests/hostile/test_grpc",
    "tests/integration/test_blobs",
    "tests/integration/test_co",
    "tests/integration/test_swarm",
    "tests/unit/coordinator/test_alerts.py",
    "tests/unit/coordinator/test_page_api.py",
    "tests/integration/test_parallel_trainer.py",
    "tests/scenarios/",
    "tests/wan/",
    "tests/integration/test_trainer_process.py",
    "tests/integration/test_trainer_saving_process.py",
    "tests/integration/test_parallel_",
    "tests/unit/peer/test_layers.py",
    "tests/unit/peer/test_node_reduced_rounds.py",
)
"""Files, or beginnings of their paths, that take longest; the longest first."""


def lane(nodeid: str) -> str:
    """Return the lane of a test: tests of one lane run one after the other."""
    file = nodeid.split("::")[0]
    return TOGETHER.get(file, file)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector.

    Imports make a million objects that live as long as the process. A third of the time went into visiting them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: next((i for i, f in enumerate(FIRST) if item.nodeid.startswith(f)), len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Lanes, in the order of the items."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)

    config.option.loadscopereorder = False
    return Lanes(config, log)
