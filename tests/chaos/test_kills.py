"""Some kills in every run of the tests (make test-chaos: a thousand), and two ways of doing it wrong that are found.

One of the two is for make test-long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.chaos.disk import ROOT
from tests.chaos.kills import Report

KILLS = 20


def killed(where: object, *options: str) -> Report:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.chaos.kills", str(where), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return Report(**json.loads(done.stdout))


def test_no_kill_loses_or_doubles_what_was_acknowledged(tmp_path):
    report = killed(tmp_path, "--kills", str(KILLS), "--seed", "1")
    assert report.problems == [] and report.kills == KILLS and report.acknowledged > 0


@pytest.mark.long
def test_nor_with_postgresql(postgres_url):
    report = killed(postgres_url, "--kills", str(KILLS), "--seed", "2")
    assert report.problems == [] and report.kills == KILLS and report.acknowledged > 0


@pytest.mark.long
@pytest.mark.parametrize("mode", ["honest", "early", "split"])
def test_without_a_kill_all_of_them_are_whole(tmp_path, mode):
    """So what is found below is found because of the kills."""
    assert killed(tmp_path, "--kills", "0", "--mode", mode).problems == []


def test_an_acknowledgement_before_the_commit_is_found(tmp_path):
    report = killed(tmp_path, "--kills", "300", "--seed", "3", "--mode", "early", "--until-found")
    assert any("lost although acknowledged" in p for p in report.problems), report


@pytest.mark.long
def test_a_round_in_two_transactions_is_found(tmp_path):
    report = killed(tmp_path, "--kills", "300", "--seed", "4", "--mode", "split", "--until-found")
    assert report.problems, report
