"""The order of the parts for a GPU, their limits, and their goals. No part is run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.gpu import SHORTEST, Part, Processes, begun, counted, goals, groups, parts


def test_parts_that_measure_speed_run_alone_and_all_others_at_once():
    found = groups(parts(pretend=False))
    assert [len(some) for some in found] == [4, 1, 1, 1, 1]
    assert all(some[0].alone for some in found[1:]) and not any(p.alone for p in found[0])
    speed = [p for p in parts(pretend=True) if p.alone]
    assert groups(speed) == [[p] for p in speed] and groups([]) == []


def test_a_part_that_fails_hangs_or_has_no_time_is_an_entry_with_the_reason():
    end = time.monotonic() + 600
    good, bad, hanging = (
        Part("p", [sys.executable, "-c", code], limit, file=False)
        for code, limit in (
            ("print('3 passed, 1 skipped in 2s')", 60), ("raise SystemExit('no such device')", 60),
            ("import threading; threading.Event().wait()", 0.2),
        )
    )  # fmt: skip
    done = begun(good, end, Processes())
    assert (done["outcome"], done["result"]) == ("done", {"passed": 3, "failed": 0, "skipped": 1, "errors": 0})
    failed = begun(bad, end, Processes())
    assert failed["outcome"] == "failed" and "exit status 1: no such device" in failed["why"]
    assert begun(hanging, end, Processes())["why"].startswith("not done within 0 s")
    left_out = begun(good, time.monotonic() + SHORTEST / 2, Processes())
    assert (left_out["outcome"], left_out["result"]) == ("left out", None)


def test_an_interrupt_kills_what_runs_and_nothing_begins_after_it():
    processes = Processes()
    begins, begin = threading.Event(), processes.begin

    def noted(command: Sequence[str]) -> subprocess.Popen[str]:
        process = begin(command)
        begins.set()
        return process

    processes.begin = noted  # type: ignore[method-assign]
    hangs = Part("p", [sys.executable, "-c", "import threading; threading.Event().wait()"], 600, file=False)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(begun, hangs, time.monotonic() + 600, processes)
        assert begins.wait(60)
        processes.kill()
        assert job.result(timeout=60)["why"].startswith("exit status -9")
    with pytest.raises(KeyboardInterrupt):
        begun(hangs, time.monotonic() + 600, processes)
    processes.kill()


def entry(part: str, result: object, outcome: str = "done") -> dict[str, object]:
    return {"part": part, "outcome": outcome, "result": result}


def test_goals_are_judged_by_the_parts_that_are_done():
    same = {"passed": 58, "failed": 0, "skipped": 0, "errors": 0}
    memory = {"bfloat16": {"counted": 100, "held": 101}, "nf4": {"counted": 100, "held": 103}}
    found = goals(
        [
            entry("tests", same),
            entry("swarm", {"states": ["a", "a"]}),
            entry("replays", {"verdicts": {"passed": 9, "failed": 0}}),
            entry("adapters", memory),
            entry("trainer 1B", {"sizes": [{"ratio": 0.96}]}),
            entry("trainer 150M", None, "failed"),
        ],
        pretend=False,
    )
    met = {g["goal"]: g["met"] for g in found}
    assert [m for t, m in met.items() if "same bits" in t or "one state" in t or "no honest" in t] == [True] * 3
    assert [m for t, m in met.items() if "base in" in t] == [True, False]
    assert [m for t, m in met.items() if t.startswith("trainer")] == [None, False, None, None]
    assert met["each part that was begun ends in order"] is False and found[-1]["value"] == "failed: trainer 150M"
    nothing = goals([entry("tests", same | {"passed": 0, "skipped": 58})], pretend=False)
    assert nothing[0]["met"] is False, "tests that were skipped show nothing"


def test_pytests_last_line_is_read():
    assert counted("== 1 failed, 2 passed, 3 errors in 1s ==") == {"passed": 2, "failed": 1, "skipped": 0, "errors": 3}
