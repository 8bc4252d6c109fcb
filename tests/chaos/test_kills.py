"""Some kills in every run of the tests (make test-chaos: a thousand), and two ways of doing it wrong that are found."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest

from tests import postgres_world
from tests.chaos import worker
from tests.chaos.kills import kill_often
from tests.chaos.verdict import problems

KILLS = 20


@pytest.fixture
def files(tmp_path):
    made = []

    @contextmanager
    def place():
        made.append(len(made))
        yield str(tmp_path / f"ledger{len(made)}.sqlite")

    return place


def test_no_kill_loses_or_doubles_what_was_acknowledged(files):
    report = kill_often(files, KILLS, seed=1)
    assert report.problems == [] and report.acknowledged > KILLS


def test_nor_with_postgresql(postgres_url):
    report = kill_often(lambda: postgres_world.empty_database(postgres_url), KILLS, seed=2)
    assert report.problems == [] and report.acknowledged > KILLS


@pytest.mark.parametrize("mode", ["honest", "early", "split"])
def test_without_a_kill_all_of_them_are_whole(files, mode):
    """So what is found below is found because of the kills."""
    with files() as where:
        child = os.fork()
        if child == 0:
            try:
                worker.run(where, mode, lambda _: None, rounds=20)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert problems(where, ["round 19", "admitted 0"]) == []


def test_an_acknowledgement_before_the_commit_is_found(files):
    report = kill_often(files, 300, seed=3, mode="early", until_found=True)
    assert any("lost although acknowledged" in p for p in report.problems), report


def test_a_round_in_two_transactions_is_found(files):
    report = kill_often(files, 300, seed=4, mode="split", until_found=True)
    assert any("is damaged" in p or "lost" in p for p in report.problems), report
