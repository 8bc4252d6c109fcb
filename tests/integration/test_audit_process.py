"""An auditor's process: an answer to each job, whatever is sent and however it ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from peer.auditor import __main__ as auditor
from peer.auditor.__main__ import memory_share
from peer.auditor.job import AuditAnswer, Job, MeasuredScore, ScreenJob, answer_line, job_line, parse_answer, parse_job
from peer.errors import AuditError
from peer.node.audit_process import AuditProcess
from tests.support import audit_world
from tests.support.audit_world import Audited
from tests.support.local_trainer import closed  # noqa: F401 - a fixture
from tests.support.priority import child_pids
from tests.support.waiting import LIMIT, NEVER, ended, until


@pytest.fixture(scope="module")
def audited(tmp_path_factory) -> Audited:
    torch.set_num_threads(1)
    return audit_world.make(tmp_path_factory.mktemp("audited"))


def script(folder: Path, text: str) -> tuple[str, ...]:
    """Return the command of a process that does this instead of audits."""
    path = folder / "auditor.py"
    path.write_text(text)
    return sys.executable, str(path)


def ask(line: bytes, *, parent: int | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "peer.auditor", "--parent", str(parent or os.getpid())]
    return subprocess.run(command, input=line, capture_output=True, timeout=LIMIT, check=False)


async def answer_of(job: Job, seconds: float = NEVER, command: Sequence[str] = ()) -> AuditAnswer:
    """Return the answer of a new process."""
    process = AuditProcess(command)
    try:
        return await ended(process.answer(job, seconds))
    finally:
        await process.close()


async def test_jobs_are_answered_with_scores_and_their_time_or_with_a_reason(audited, tmp_path):
    process = AuditProcess()
    replayed = await ended(process.answer(audited.job(), NEVER))
    assert [(s.name, s.value) for s in replayed.scores] == [("scale", 1.0), ("signs", 1.0)] and not replayed.reason
    assert 10 in (os.getpriority(os.PRIO_PROCESS, int(pid)) for pid in child_pids())
    measured = await ended(process.answer(audited.job("loss", own=True), NEVER))
    assert [s.name for s in measured.as_scores] == ["gain", "quarter"]
    again = await ended(process.answer(audited.job(), NEVER))
    # The same in a process that had other jobs, which has imported torch.
    assert again.scores == replayed.scores and 0 < again.cpu_seconds < replayed.cpu_seconds
    # A reason is one printable line, and says whether another attempt may help.
    gone = await ended(process.answer(audited.job(blob=tmp_path / "gone\x1b[2J\n"), NEVER))
    assert not gone.scores and "No such file" in gone.reason and str(tmp_path / "gone") in gone.reason
    assert gone.reason.isprintable() and not gone.is_uncheckable
    job = audited.job("loss")
    first = job.update.first_window
    short = replace(job, update=replace(job.update, rebase_window=first, end_window=first + 4))
    few = await ended(process.answer(short, NEVER))
    assert not few.scores and "too few" in few.reason and few.is_uncheckable
    await process.close()
    await process.close()


async def test_a_process_that_its_own_child_outlives_is_over_when_it_is_closed(audited, tmp_path):
    """The child holds the pipe of answers, so waiting for the pipe's end would take as long as the child."""
    lines = "import subprocess, sys", "subprocess.Popen(['sleep', '3600'])", "sys.stdin.readline()", "print('nothing')"
    command = script(tmp_path, "\n".join(lines))
    with pytest.raises(AuditError, match="does not parse"):
        await answer_of(audited.job(), command=command)


async def test_a_screen_is_answered_without_a_model(audited):
    blobs = tuple(made.blob_path for made in audited.made.values()) + (audited.loaded_at_once.blob_path,)
    earlier = tuple(u.blob for u in audited.first.updates)
    found = await answer_of(ScreenJob(audited.job().spec_path, blobs, (earlier,)))
    assert [s.name for s in found.scores] == ["agreement", "apart", "fresh"] and not found.reason


def test_a_job_frees_the_model_of_the_job_before(audited, monkeypatch):
    def models() -> set[int]:
        return {id(found) for found in gc.get_objects() if isinstance(found, LlamaForCausalLM)}

    monkeypatch.setattr(auditor, "CPU_NICENESS", 0)  # of this process
    gc.collect()
    others = models()
    gc.disable()
    try:
        for check in ("replay", "loss"):
            assert auditor.scores_of(audited.job(check))
        assert len(models() - others) == 1
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's choice when memory runs out")
def test_where_memory_runs_out_the_auditor_ends_first():
    command = [sys.executable, "-m", "peer.auditor", "--parent", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"{}\n")
        process.stdin.flush()
        assert process.stdout.readline()
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"


def test_an_audit_leaves_memory_of_a_gpu_to_the_trainer():
    assert memory_share(30, 80) == pytest.approx(0.275)
    with pytest.raises(AuditError, match="--audit-device cpu"):
        memory_share(8, 80)


@pytest.mark.long
async def test_a_device_that_is_not_there_is_the_reason(audited):
    nowhere = await answer_of(replace(audited.job(), device="cuda:99"))
    assert not nowhere.scores and "cuda:99" in nowhere.reason


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"\xff\xfe\n", b"[1, 2]\n", b'{"check": "replay"}\n'])
def test_what_is_no_job_is_answered_in_one_line_without_a_traceback(line):
    done = ask(line)
    answer = parse_answer(done.stdout)
    assert done.returncode == 0 and done.stdout.count(b"\n") == 1 and b"Traceback" not in done.stderr
    assert "an audit's job that does not parse" in answer.reason


def test_a_job_is_read_strictly(audited):
    line = job_line(audited.job())
    assert parse_job(line) == audited.job()
    for old, new in ((b'"check":"replay"', b'"check":"guess"'), (b'"threads":1', b'"threads":"1"'),
                     (b'"threads":1', b'"threads":1,"more":2'), (b'"first_window":', b'"first_window":-'),
                     (b'"threads":1', b'"threads":NaN')):  # fmt: skip
        assert old in line
        with pytest.raises(AuditError, match="does not parse"):
            parse_job(line.replace(old, new))


@pytest.mark.parametrize(
    "scores, reason",
    [((), ""), (("b", "a"), ""), (("a", "a"), ""), (("a",), "and a reason")],
)
def test_an_answer_has_ordered_scores_or_a_reason(scores, reason):
    line = answer_line(AuditAnswer(tuple(MeasuredScore(name, 1.0, 0.5) for name in scores), reason))
    with pytest.raises(AuditError, match="scores, each once and by ascending name, or a reason"):
        parse_answer(line)


@pytest.mark.parametrize("line", [
    b'{"scores":[{"name":"si\\u001bgns","value":1,"threshold":1}]}', b'{"scores":[],"reason":"\\u001b[2J"}',
])  # fmt: skip
def test_what_could_not_be_signed_or_shown_is_no_answer(line):
    with pytest.raises(AuditError, match="not printable"):
        parse_answer(line)


def test_an_error_shows_little_of_what_was_sent_and_nothing_that_a_terminal_obeys():
    with pytest.raises(AuditError, match="does not parse") as e:
        parse_answer(b'{"scores":[],"reason":"x","' + b"9" * 100_000 + b'":1,"\\u001b[2J":2}')
    assert len(str(e.value)) < 2000 and str(e.value).isprintable()


def test_of_many_wrong_items_one_is_reported(audited):
    """Some hundred thousand that were all reported took more memory than a machine has."""
    with pytest.raises(AuditError, match=r"parse: scores.0.name: Field required;") as e:
        parse_answer(b'{"scores":[' + b"{}," * 1000 + b"{}]}")
    assert "scores.1" not in str(e.value)
    line = job_line(audited.job("loss"))
    for old, name in ((b'"rounds":[', "rounds"), (b'"updates":[', "updates")):
        with pytest.raises(AuditError, match=rf"{name}\.0: Input should be an object$"):
            parse_job(line.replace(old, old + b"1,2,3,", 1))


def test_it_ends_with_its_input():
    done = ask(b"")
    assert (done.returncode, done.stdout) == (0, b"")


def test_it_does_nothing_without_its_node():
    done = ask(b"{}", parent=2**22 + 1)
    assert (done.returncode, done.stdout) == (1, b"")


async def test_a_process_that_answers_garbage_accuses_nobody(audited, tmp_path):
    for said, reason in (("{}", "does not parse"), ("\\n" * 3, "does not parse"), ("", "no answer: last words")):
        command = script(tmp_path, f"import sys; print('{said}', end=''); print('last words', file=sys.stderr)")
        with pytest.raises(AuditError, match=reason):
            await answer_of(audited.job(), NEVER, command)
    endless = script(tmp_path, "while True: print('x' * 65536, end='')")
    with pytest.raises(AuditError, match="more than"):
        await answer_of(audited.job(), NEVER, endless)


async def test_a_process_that_dies_is_reported_with_its_last_words(audited, tmp_path):
    command = script(tmp_path, f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    with pytest.raises(AuditError, match=r"code -9 and no answer"):
        await answer_of(audited.job(), NEVER, command)
    with pytest.raises(AuditError, match="cannot start an auditor"):
        await answer_of(audited.job(), NEVER, (str(tmp_path / "nothing"),))


SLEEPER = "import os, pathlib, time; pathlib.Path('{note}').write_text(str(os.getpid())); time.sleep(3600)"


async def test_a_process_that_hangs_is_killed_at_the_deadline(audited, tmp_path):
    note = tmp_path / "pid"
    with pytest.raises(AuditError, match="no answer within 0 s"):
        await answer_of(audited.job(), 0.3, script(tmp_path, SLEEPER.format(note=note)))
    if note.exists():  # a slow machine kills it before it has begun
        with pytest.raises(ProcessLookupError):
            os.kill(int(note.read_text()), 0)


async def test_a_check_that_is_cancelled_leaves_no_process(audited, tmp_path):
    note = tmp_path / "pid"
    process = AuditProcess(script(tmp_path, SLEEPER.format(note=note)))
    task = asyncio.create_task(process.answer(audited.job(), NEVER))
    await until(lambda: note.exists() and note.read_text(), "the process runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(task)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


async def test_a_process_ends_with_its_node(tmp_path):
    """The node is killed while its auditor waits for the job."""
    text = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'peer.auditor', '--parent', str(os.getpid())],"
        " stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    node = await asyncio.create_subprocess_exec(
        *script(tmp_path, text), stdout=asyncio.subprocess.PIPE, cwd=os.getcwd(),
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert node.stdout is not None
    auditor = int(await ended(node.stdout.readline()))
    # It has asked the kernel once it ignores SIGTERM.
    mask = 1 << (signal.SIGTERM - 1)

    def is_ready() -> bool:
        status = Path(f"/proc/{auditor}/status").read_text()
        ignored = next(line for line in status.splitlines() if line.startswith("SigIgn"))
        command = Path(f"/proc/{auditor}/cmdline").read_text()
        return bool(int(ignored.split()[1], 16) & mask) and "peer.auditor" in command

    await until(is_ready, "the auditor waits for its job")
    node.kill()
    await ended(node.wait())
    await until(lambda: not _runs(auditor), "the auditor ends")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("is_ready", [False, True], ids=["starting", "at work"])
async def test_a_check_that_is_being_made_can_be_ended(audited, tmp_path, is_ready):
    pid = tmp_path / "pid"
    text = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(3600)"
    process = AuditProcess(script(tmp_path, text))
    asked = asyncio.ensure_future(process.answer(audited.job(), NEVER))
    if is_ready:
        await until(lambda: pid.exists() and pid.read_text(), "the process is at work")
    else:
        await asyncio.sleep(0)  # it is being started
    await ended(process.close())
    with pytest.raises(AuditError, match="ended before its answer"):
        await ended(asked)
    if is_ready:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
