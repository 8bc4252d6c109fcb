"""The archiver: final states are signed, copied and evaluated, and failures delay nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cairn.checkpoints import verify_checkpoint
from coordinator.checkpoints import archiver as keeping
from coordinator.checkpoints import evaluation_job
from coordinator.checkpoints.archive import read_manifest
from coordinator.checkpoints.archiver import CheckpointArchiver
from coordinator.checkpoints.copies import CopyStore
from coordinator.checkpoints.evaluation import measure
from coordinator.checkpoints.evaluation_job import free_device, plain
from coordinator.checkpoints.evaluations import EvaluationLog
from coordinator.checkpoints.job import JobError, run_job
from coordinator.durable import LineFile
from coordinator.errors import CoordinatorError
from protocol.errors import CairnError
from protocol.ids import Round
from protocol.messages import Rollback
from tests.support.checkpoint_world import CheckpointWorld, Uniform, nan, shards
from tests.support.observer_world import SPEC
from tests.support.priority import session_niceness
from tests.support.specs import digest
from tests.support.waiting import LIMIT, NEVER, until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointWorld:
    monkeypatch.setattr(keeping, "POLL_SECONDS", 0.05)
    return CheckpointWorld(tmp_path, monkeypatch)


class Kept:
    """A keeper at work."""

    def __init__(self, world: CheckpointWorld, **settings: Any):
        self.world = world
        self.keeper = world.keeper(**settings)

    async def __aenter__(self) -> CheckpointArchiver:
        self.keeper.start(self.world.finalization_of)
        return self.keeper

    async def __aexit__(self, *_: object) -> None:
        await self.keeper.stop()


async def gauges_of(keeper: CheckpointArchiver) -> dict[str, float]:
    return {name: value for name, _, value in await keeper.gauges()}


# -- final ------------------------------------------------------------------------------------------------------


async def test_a_state_is_signed_when_the_ledger_has_settled_the_record_that_names_it(world: CheckpointWorld):
    world.rounds(7)
    made = world.add(5)
    world.posted = 4
    async with Kept(world) as keeper:
        await asyncio.sleep(0.3)
        assert world.newest_final() is None
        world.posted = 5
        await until(world.newest_final)
        assert keeper.checkpoints()[0]["final"] is True
    said: list[str] = []
    verify_checkpoint(str(made.folder), world.spec.owner, said.append)
    assert any(str(world.swarm.chain.certificates[5].digest) in line for line in said)


async def test_a_state_that_the_chain_does_not_name_is_never_signed_and_is_said(world: CheckpointWorld):
    world.rounds(7)
    world.state(99)
    world.files[5], world.digests[5] = world.files[99], world.digests[99]
    world.add(5)
    world.posted = 6
    async with Kept(world) as keeper:
        await until(lambda: "is not the one that the chain names" in keeper.problem)
        assert str(world.folder) not in keeper.problem  # anybody reads it
        assert world.newest_final() is None
        assert (await gauges_of(keeper))["cairn_archive_problem"] == 1


async def test_no_gauge_is_read_from_disk_on_the_event_loop(world: CheckpointWorld, monkeypatch: pytest.MonkeyPatch):
    made, read, threads = world.final(5), world.archive.all, list[threading.Thread]()
    monkeypatch.setattr(world.archive, "all", lambda: threads.append(threading.current_thread()) or read())
    keeper = world.keeper(archive={"address": str(world.folder / "copies")})
    values = await gauges_of(keeper)
    assert (values["cairn_archive_bytes"], values["cairn_copies_waiting"]) == (made.size, 1)
    assert threads and threading.current_thread() not in threads


def test_the_newest_final_state_and_an_open_one_outlive_the_policy(world: CheckpointWorld):
    world.archive.policy = replace(world.archive.policy, newest=1)
    opened = world.final(5)
    assert opened in world.archive.all()
    with world.archive.reading(opened):
        for r in range(10, 45, 5):
            world.rounds(5)
            world.add(r)
        assert [a.round for a in world.archive.all()] == [5, 35, 40]
        world.mark_final(world.archive.all()[1])
        world.archive.prune()
        assert [a.round for a in world.archive.all()] == [5, 35, 40]
    world.archive.prune()
    assert [a.round for a in world.archive.all()] == [35, 40]


def test_a_removal_that_was_cut_off_leaves_nothing_that_looks_whole(world: CheckpointWorld, monkeypatch):
    made = world.final(5)
    with monkeypatch.context() as m:
        m.setattr("shutil.rmtree", lambda *a, **k: None)  # killed just before the files go
        world.archive.drop([made])
    assert world.archive.all() == []
    world.final(10)
    assert {p.name for p in world.archive.folder.iterdir()} == {".left.json", "round-000010"}


def test_a_full_disk_takes_what_is_merely_new_and_then_says_so(world: CheckpointWorld, monkeypatch):
    for r in (0, 5, 10, 15):
        world.final(r)
    free = {"bytes": 0}

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free["bytes"] + 100 * (4 - len(list(world.archive.folder.glob("round-*")))))

    monkeypatch.setattr("shutil.disk_usage", usage)
    world.archive.free_space(100)
    assert [a.round for a in world.archive.all()] == [0, 10, 15]
    with pytest.raises(CoordinatorError, match=r"the disk of .* is full.*free some disk space, or keep fewer"):
        world.archive.free_space(10**6)
    assert [a.round for a in world.archive.all()] == [0, 10, 15]  # it would not be enough


# -- copies -----------------------------------------------------------------------------------------------------


async def test_what_is_final_is_copied_and_verifies_there(world: CheckpointWorld):
    address = world.folder / "copies"
    world.rounds(12)
    world.add(0), world.add(5), world.add(10)
    world.posted = 5
    async with Kept(world, archive={"address": str(address)}) as keeper:
        await until(lambda: len(list(address.glob("round-*/cairn.json"))) == 2)
        assert sorted(p.name[:12] for p in address.iterdir()) == ["round-000000", "round-000005"]
        world.posted = 11
        world.swarm.changed()
        await until(lambda: len(list(address.glob("round-*/cairn.json"))) == 3)
        await until(lambda: not keeper.to_copy())
        assert all(c["copied"] for c in keeper.checkpoints()) and keeper.problem == ""
    for folder in address.iterdir():
        verify_checkpoint(str(folder), world.spec.owner)


async def test_an_address_that_fails_is_said_once_tried_again_and_holds_up_nothing(
    world: CheckpointWorld, monkeypatch, caplog
):
    monkeypatch.setattr(keeping, "RETRY_SECONDS", (0.05,))
    blocked = world.folder / "copies"
    blocked.write_text("a file, where a folder should be")
    world.rounds(12)
    world.add(5)
    world.posted = 5
    async with Kept(world, archive={"address": str(blocked / "there")}) as keeper:

        async def have_failed() -> bool:
            return (await gauges_of(keeper))["cairn_copies_failed_total"] >= 2

        await until(have_failed)
        assert "checkpoints are not copied" in keeper.problem and "the local ones are whole" in keeper.problem
        assert sum("are not copied" in r.message for r in caplog.records) == 1
        assert str(blocked) in caplog.text and str(blocked) not in keeper.problem  # anybody reads it
        world.add(10)
        world.posted = 11
        await until(lambda: all(a.final for a in world.archive.all()))  # signing goes on meanwhile
        blocked.unlink()
        await until(lambda: not keeper.to_copy() and keeper.problem == "")
    assert len(list((blocked / "there").glob("round-*/cairn.json"))) == 2


async def test_an_address_that_refuses_to_delete_takes_copies_nonetheless(world: CheckpointWorld, monkeypatch, caplog):
    world.final(5)
    copied = []

    async def refuses(module, job, on_row, **limits):
        on_row({"present": ["0" * 64]})
        for folder in job["folders"]:
            archived = read_manifest(Path(folder))
            assert archived is not None
            copied.append(archived.round)
            on_row({"copied": str(archived.state), "bytes": 1})
        raise JobError("removing from there failed: access denied")

    monkeypatch.setattr(keeping, "run_job", refuses)
    monkeypatch.setattr(keeping, "RETRY_SECONDS", (0.01,))
    async with Kept(world, archive={"address": str(world.folder / "copies")}) as keeper:
        await until(lambda: not keeper.to_copy())
        assert copied == sorted({*copied, 5})
        assert "checkpoints are not copied" in keeper.problem and "access denied" in caplog.text


async def test_a_state_that_the_policy_excluded_is_offered_again_once_it_is_evaluated(
    world: CheckpointWorld, monkeypatch
):
    made, skipped, offered = world.final(5), asyncio.Event(), []

    async def answers(module, job, on_row, **limits):
        if module.endswith("evaluation_job"):
            await skipped.wait()
            on_row({"loss": 3.0, "windows": 4, "seconds": 1.0, "device": "cpu"})
            return
        on_row({"present": []})
        offered.extend(job["folders"])
        if job["folders"]:
            on_row({"copied" if skipped.is_set() else "skipped": str(made.state), "bytes": 1})
            skipped.set()

    monkeypatch.setattr(keeping, "run_job", answers)
    async with Kept(world, archive={"address": str(world.folder / "copies")}, evaluation={"every": 1}) as keeper:
        await until(lambda: keeper.checkpoints()[0]["copied"])
    assert offered == [str(made.folder)] * 2


async def test_an_upload_that_is_killed_names_nothing_whole_and_the_next_one_ends_it(
    world: CheckpointWorld, monkeypatch
):
    made, address = world.final(5), world.folder / "copies"
    jobs: list[dict] = []

    async def takes_time(module, job, on_row, **limits):
        on_row({"present": []})
        jobs.append(job)
        if job["folders"]:
            await asyncio.Event().wait()

    monkeypatch.setattr(keeping, "run_job", takes_time)
    async with Kept(world, archive={"address": str(address), "mbits": 0.2}):
        await until(lambda: len(jobs) == 2)
    assert (jobs[0]["folders"], jobs[0]["waiting"]) == ([], [str(made.state)])
    job = jobs[1]
    assert (job["folders"], job["waiting"]) == ([str(made.folder)], [])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.checkpoints.copies", stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(json.dumps(job).encode())
    process.stdin.close()
    await until(
        lambda: (
            any(p.stat().st_size for p in address.glob("round-*/model.safetensors"))
            or any(address.glob("round-*/model.safetensors"))
        )
    )
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    place = CopyStore(str(address), world.spec.run_id)
    assert place.list() == []
    with pytest.raises(CairnError, match="cairn.json is not there"):
        verify_checkpoint(str(next(address.iterdir())), world.spec.owner)
    place.keep([made.folder], world.archive.policy, {}, set())
    verify_checkpoint(str(next(address.iterdir())), world.spec.owner)


def test_a_process_killed_at_any_step_of_archiving_leaves_whole_states_only(world: CheckpointWorld, monkeypatch):
    """Power goes at each durable step in turn: what has a name is whole and verifies."""
    from coordinator import durable

    world.rounds(7)

    class Power(BaseException):
        pass

    steps = {"sync": durable.sync, "write": durable.write}
    for step in range(1, 12):
        left = [step]

        def cut(name: str, left=left) -> Callable[..., None]:
            def counted(*arguments: Any) -> None:
                left[0] -= 1
                if not left[0]:
                    raise Power
                steps[name](*arguments)

            return counted

        with monkeypatch.context() as m:
            for name in steps:
                m.setattr(durable, name, cut(name))
            try:
                world.mark_final(world.add(5))
            except Power:
                pass
        for found in world.archive.all():
            assert found.state == world.digests[5]
            if found.final:
                verify_checkpoint(str(found.folder), world.spec.owner)
            else:
                with pytest.raises(CairnError, match="not final when"):
                    verify_checkpoint(str(found.folder), world.spec.owner)
        if left[0] > 0:
            break
        world.archive.drop(world.archive.all())
    else:
        raise AssertionError("there are more steps than were tried")
    assert step > 4


# -- evaluation and texts -----------------------------------------------------------------------------------------


async def _here(module: str, job: dict, heard: Callable[[dict], None], **limits: Any) -> None:
    """Evaluate without a process."""
    await asyncio.to_thread(evaluation_job.do_job, job, heard)


@pytest.mark.parametrize(
    ("device", "remedy"),
    [("cpu", r"\(3\.0 GB\) .* allow more \(\[evaluation\] memory\)$"),
     ("cuda:1", r'of cuda:1 .* \[evaluation\] device = "cpu" in coordinator\.toml, or free that GPU$')],
)  # fmt: skip
def test_without_memory_the_remedy_is_the_one_of_that_device(monkeypatch, device, remedy):
    def without_memory(*given: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(evaluation_job, "evaluate", without_memory)
    monkeypatch.setattr(evaluation_job, "bound_memory", lambda size: None)
    spec = SPEC.canonical().decode()
    job = {"spec": spec, "device": device, "threads": torch.get_num_threads(), "memory": 3 * 10**9}
    with pytest.raises(CoordinatorError, match=remedy):
        evaluation_job.do_job(job, print)


async def test_each_archived_state_is_judged_and_writes(world: CheckpointWorld, monkeypatch):
    monkeypatch.setattr(keeping, "run_job", _here)
    monkeypatch.setattr(evaluation_job, "bound_memory", lambda size: None)
    world.rounds(7)
    world.add(0)
    async with Kept(world, evaluation={"threads": 1}, samples={"tokens": 6}) as keeper:
        await until(lambda: keeper.validation)
        world.add(5)
        world.swarm.changed()

        async def are_evaluated() -> bool:  # rows are in memory before they are on disk
            return (await gauges_of(keeper))["cairn_evaluations_total"] == 2

        await until(are_evaluated)
        losses = keeper.newest_losses()
        found = keeper.samples(None, 100)
        assert keeper.samples(5, 100) == [s for s in found if s["round"] == 0]
        assert keeper.checkpoints()[0]["validation_loss"] == losses[0]
        assert [p[0] for p in keeper.validation_points()] == [0, 5]
    assert all(abs(loss - math.log(256)) < 1 for loss in losses)
    assert len(found) == 12 and found[0]["round"] == 5
    assert all(1 <= len(s["prompt"]) <= 16 for s in found)
    again = EvaluationLog(world.folder / "run")
    assert again.rows() == keeper.evaluations.rows()
    assert again.samples(None, 100) == keeper.evaluations.samples(None, 100)
    row = again.rows()[0]
    assert (row["windows"], row["device"]) == (20, free_device("auto", 0))
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    again.mark_left([world.digests[5]])
    assert [r["round"] for r in again.rows()] == [0] and {s["round"] for s in again.samples(None, 100)} == {0}
    assert EvaluationLog(world.folder / "run").newest() == row


async def test_a_state_that_is_not_finite_is_an_alert_and_no_number(world: CheckpointWorld, caplog):
    world.rounds(7)
    world.state(5, nan)
    world.add(5)
    async with Kept(world, evaluation={"threads": 1}, samples={"tokens": 0}) as keeper:
        await until(keeper.newest_losses)
        assert (
            math.isnan(keeper.newest_losses()[0])
            and keeper.validation == (5, None)
            and keeper.validation_points() == []
        )
        assert math.isnan((await gauges_of(keeper))["cairn_validation_loss"])
        await until(lambda: "the run has diverged" in caplog.text)


async def test_rounds_between_are_skipped_and_failures_are_tried_twice(world: CheckpointWorld, monkeypatch, caplog):
    asked: list[str] = []
    most: list[int | None] = []

    async def fails(module, job, heard, **limits):
        asked.append(Path(job["folder"]).name)
        most.append(job["most"])
        if len(asked) <= 2:
            raise JobError("its process was killed: most likely memory ran out")
        heard({"loss": 3.0, "windows": 2 if len(asked) == 4 else 4, "seconds": 1.0, "device": "cpu"})

    monkeypatch.setattr(keeping, "run_job", fails)
    world.rounds(27)
    world.add(0)
    async with Kept(world, evaluation={"every": 10}) as keeper:
        await until(lambda: len(asked) == 2)
        await asyncio.sleep(0.2)
        assert len(asked) == 2 and "was not evaluated (see the log); the next one is tried" in keeper.problem
        assert "memory ran out" in caplog.text and "memory ran out" not in keeper.problem
        for r, many in ((5, 3), (10, 3), (15, 4), (20, 4), (25, 5)):
            world.add(r)
            await until(lambda many=many: len(asked) == many)
            await asyncio.sleep(0.2)  # time for what must be passed over
        assert asked[2:] == ["round-000005", "round-000015", "round-000025"]
        await until(lambda: keeper.problem == "")
    assert most == [None, None, None, 4, 4]  # the same few windows each time, though one had to be shorter


async def test_a_run_s_last_state_is_evaluated_again_until_the_problem_is_solved(world: CheckpointWorld, monkeypatch):
    asked = 0

    async def fails(module, job, heard, **limits):
        nonlocal asked
        asked += 1
        if asked > 4:
            heard({"loss": 3.0, "windows": 4, "seconds": 1.0, "device": "cpu"})
        raise JobError("its process was killed: most likely memory ran out")  # at last only the texts are missing

    monkeypatch.setattr(keeping, "run_job", fails)
    monkeypatch.setattr(keeping, "AGAIN_SECONDS", 0.0)
    world.add(0)
    async with Kept(world, evaluation={"every": 10}) as keeper:
        await until(lambda: keeper.validation == (0, 3.0) and keeper.problem == "")
    assert asked == 5


async def test_a_fault_is_logged_and_shown_until_it_is_gone(world: CheckpointWorld, monkeypatch, caplog):
    shown = asyncio.Event()

    async def faulty(module, job, heard, **limits):
        if not shown.is_set():
            raise KeyError("spam")
        heard({"loss": 3.0, "windows": 4, "seconds": 1.0, "device": "cpu"})

    monkeypatch.setattr(keeping, "run_job", faulty)
    world.add(0)
    async with Kept(world, evaluation={"every": 10}) as keeper:
        await until(lambda: "evaluation: a fault of the coordinator (KeyError)" in keeper.problem)
        assert "spam" not in keeper.problem  # anybody reads it
        assert any(r.exc_info is not None for r in caplog.records)
        shown.set()
        await until(lambda: keeper.problem == "")


async def test_after_a_rollback_no_evaluation_of_a_later_round_counts(world: CheckpointWorld, monkeypatch):
    asked: list[str] = []

    async def measures(module, job, heard, **limits):
        asked.append(Path(job["folder"]).name)
        heard({"loss": float(len(asked)), "windows": 4, "seconds": 1.0, "device": "cpu"})

    monkeypatch.setattr(keeping, "run_job", measures)
    world.rounds(12)
    async with Kept(world, evaluation={"every": 1}) as keeper:
        for round_ in (0, 5, 10):
            world.add(round_)
            world.swarm.changed()
            await until(lambda round_=round_: keeper.validation and keeper.validation[0] == round_)
        assert keeper.newest_losses() == (3.0, 2.0, 1.0)
        back = Rollback(1, world.swarm.chain.certificates[4].digest, Round(5), world.digests[5])
        world.swarm.turn_to(world.swarm.chain.fork(5))
        await keeper.roll_back(back)
        assert keeper.validation == (5, 2.0) and keeper.newest_losses() == (2.0, 1.0)
        world.rounds(6, {3: 2})
        world.state(10, nan)
        world.archive.add(
            world.files[10], world.tokenizer, round=10, state=world.digests[10],
            record=world.swarm.chain.certificates[9].digest, tokens=480,
        )  # fmt: skip
        world.swarm.changed()
        await until(lambda: keeper.validation == (10, 4.0))
    assert asked == ["round-000000", "round-000005", "round-000010", "round-000010"]  # the left state not once more


async def test_an_evaluation_that_ends_after_its_state_was_left_does_not_count(world: CheckpointWorld, monkeypatch):
    began, may_end = asyncio.Event(), asyncio.Event()

    async def measures(module, job, heard, **limits):
        began.set()
        await may_end.wait()
        heard({"loss": 3.0, "windows": 4, "seconds": 1.0, "device": "cpu"})
        heard({"prompt": "a", "text": "b", "temperature": 0.0})

    monkeypatch.setattr(keeping, "run_job", measures)
    world.rounds(12)
    world.add(10)
    async with Kept(world, evaluation={"every": 1}) as keeper:
        await began.wait()
        back = Rollback(1, world.swarm.chain.certificates[4].digest, Round(5), world.digests[5])
        world.swarm.turn_to(world.swarm.chain.fork(5))
        await keeper.roll_back(back)
        added: list[int] = []
        add = keeper.evaluations.add
        monkeypatch.setattr(keeper.evaluations, "add", lambda *row: (add(*row), added.append(row[0].round)))
        may_end.set()
        await until(lambda: added == [10])
        await until(lambda: not keeper.evaluations.done())
        assert keeper.validation is None and keeper.samples(None, 9) == []


def test_a_state_that_took_the_place_of_one_that_was_left_is_not_dropped(world: CheckpointWorld):
    world.rounds(12)
    world.add(10)
    left = replace(world.archive.all()[0], record=digest("a record of the branch that was left"))
    world.archive.drop([left])
    assert [a.round for a in world.archive.all()] == [10] and not world.archive.left()


async def test_a_rollback_drops_the_states_that_the_run_has_left_and_no_others(world: CheckpointWorld):
    for round_ in (5, 10, 15, 20):
        world.final(round_)
    world.rounds(5)
    world.add(25)
    keeper = world.keeper()
    first, second = world.swarm.chain.certificates[9].digest, digest("a record that this chain has not come to")
    await keeper.roll_back(Rollback(1, second, Round(10), world.digests[10]))
    assert [a.round for a in world.archive.all()] == [10, 15, 20, 25], "the chain cannot say which are left"
    await keeper.roll_back(Rollback(0, first, Round(10), world.digests[10]))
    assert [a.round for a in world.archive.all()] == [10, 15, 20], "of this epoch's final ones none"
    world.swarm.held = 20
    await keeper.roll_back(Rollback(1, first, Round(10), world.digests[10]))
    assert [a.round for a in world.archive.all()] == [10, 20]


async def test_an_evaluation_that_a_full_disk_did_not_take_is_written_when_it_has_space(
    world: CheckpointWorld, monkeypatch, caplog
):
    async def measures(module, job, heard, **limits):
        heard({"loss": 3.0, "windows": 4, "seconds": 1.0, "device": "cpu"})

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(keeping, "run_job", measures)
    world.add(0)
    with monkeypatch.context() as m:
        m.setattr(LineFile, "append", full)
        m.setattr(LineFile, "rewrite", full)
        kept = Kept(world, evaluation={"every": 10})
        async with kept as keeper:
            await until(lambda: "evaluation: failed, see the coordinator's log" in keeper.problem)
            assert "no space left" in caplog.text
            m.undo()
            await until(lambda: keeper.problem == "")
    assert EvaluationLog(world.folder / "run").newest() == world.evaluations.newest() is not None


async def test_without_validation_data_a_state_writes_once_from_the_owners_prompts(world: CheckpointWorld, monkeypatch):
    asked: list[dict] = []

    async def writes(module, job, heard, **limits):
        asked.append(job)
        heard({"prompt": "Hello", "text": " world", "temperature": 0.0})

    monkeypatch.setattr(keeping, "run_job", writes)
    world.rounds(7)
    world.add(5)
    world.shards = []
    async with Kept(world, evaluation={}, samples={"prompts": ["Hello"]}) as keeper:
        await until(lambda: keeper.samples(None, 9))
        await asyncio.sleep(0.3)
    assert len(asked) == 1 and asked[0]["prompts"] == ["Hello"] and keeper.validation is None


def test_the_same_few_windows_judge_on_a_slow_machine(tmp_path):
    first, second = Uniform(), Uniform()
    ticks = iter(range(100))
    found = measure(first, SPEC.data, shards(tmp_path, 256), seconds=2.5, clock=lambda: float(next(ticks)))
    assert found.windows == 48 and sorted(first.firsts)[:3] != [0, 1, 2]
    assert max(b - a for a, b in zip(sorted(first.firsts), sorted(first.firsts)[1:], strict=False)) <= 8
    assert measure(second, SPEC.data, shards(tmp_path, 256), most=48).windows == 48
    assert first.firsts == second.firsts


def test_text_of_strangers_is_plain_and_short():
    assert plain("a\x00b\x1b[31m\u202ec\r\n\td\u2028e\ud800") == "ab[31mc\n d e"
    assert plain("x" * 5000) == "x" * 999 + "…"
    assert plain("e" + "\u0301" * 50) == "e" + "\u0301" * 4
    assert plain("<script>") == "<script>"


@pytest.mark.gpu
def test_a_gpu_that_is_free_is_taken_and_a_busy_one_is_left():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    free, total = torch.cuda.mem_get_info(0)
    assert free_device("auto", 10**6).startswith("cuda") == (free >= 0.8 * total)
    assert free_device("auto", total) == "cpu"


# -- jobs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A module that does this work."""

    def write(body: str) -> str:
        text = (
            "from coordinator.checkpoints.job import *\nimport os, time, signal\n" + f"def work(job, say):\n {body}\n"
        )
        (tmp_path / "a_job.py").write_text(text + "serve_job(work)\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", os.getcwd())]))
        return "a_job"

    return write


@pytest.mark.parametrize(
    "body, said",
    [
        ("time.sleep(3600)", "longer than 3 s"),
        ("raise CoordinatorError('the disk is full')", "the disk is full"),
        ("raise KeyError('spam')", "code 1.*spam"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "memory ran out"),
        ("print('x' * 10**7); say({'a': 'x' * 2 * 10**6})", "more in a line"),
        ("bound_memory(10**9); bytearray(2 * 10**9)", "memory did not suffice"),
    ],
)
async def test_a_job_that_fails_says_why(make_job, body, said):
    with pytest.raises(JobError, match=said):
        await run_job(make_job(body), {}, lambda row: None, deadline=3 if "sleep" in body else LIMIT)


async def test_a_job_answers_line_by_line_at_low_priority_and_ends_with_the_one_who_asked(make_job):
    rows: list[dict] = []
    work = "print('noise'); say({'pid': os.getpid(), 'nice': os.nice(0), 'got': job['x']}); time.sleep(3600)"
    running = asyncio.create_task(run_job(make_job(work), {"x": 7}, rows.append, deadline=NEVER))
    await until(lambda: rows)
    assert rows[0]["nice"] == 19 and rows[0]["got"] == 7
    assert session_niceness(rows[0]["pid"]) == 19 or session_niceness("self") is None
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: not _runs(rows[0]["pid"]))


async def test_a_job_dies_with_a_coordinator_that_is_killed(make_job, tmp_path):
    work = "open(job['file'], 'w').write(str(os.getpid())); time.sleep(3600)"
    file, module = tmp_path / "pid", make_job(work)
    ask = "import asyncio, sys; from coordinator.checkpoints.job import run_job; "
    ask += "asyncio.run(run_job(sys.argv[1], {'file': sys.argv[2]}, print, deadline=3600))"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", ask, module, str(file))
    await until(lambda: file.exists() and file.read_text())
    parent.kill()
    await parent.wait()
    await until(lambda: not _runs(int(file.read_text())))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_silence_is_taken_for_a_hang(make_job):
    rows: list[dict] = []
    with pytest.raises(JobError, match="nothing came of it for 2 s"):
        await run_job(make_job("say({'a': 1}); time.sleep(3600)"), {}, rows.append, deadline=NEVER, silence=2)
    assert rows == [{"a": 1}]
