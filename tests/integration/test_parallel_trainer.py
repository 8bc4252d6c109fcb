"""A trainer with many ranks is a trainer: it agrees on every bit, saves, restarts, and ends with its ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from safetensors.torch import load_file

from cairn.main import main
from peer.channel import Applied, Apply, Failed, MakeUpdate, Note, Progress, Ready, Stop, Stopped, TrainerLink
from peer.channel.messages import from_line, to_line
from peer.errors import TrainingError
from peer.node.options import NodeOptions
from peer.node.trainer_files import start_message
from peer.store import Store
from peer.training.layers import USUAL, LayerOptions
from peer.training.parallel.distributed_backend import DistributedBackend
from peer.training.parallel.group import RankGroup
from peer.training.parallel.micro_batch import NAME, MicroBatchProfile, MicroBatchStore
from peer.training.parallel.parallel_dims import ParallelDims
from peer.training.parallel.setup import resolve
from peer.training.saved_state import STATE_MANIFEST
from peer.training.trainer import Trainer
from protocol.codec import make_codec
from protocol.errors import CodecError, MalformedError
from protocol.merkle import blob_digest
from protocol.spec import AdapterSettings, CodecSpec, OuterSpec
from tests.support import trainer_world
from tests.support.local_trainer import Heard, same, train, update
from tests.support.long_cases import long_cases
from tests.support.parallel_world import run_ranks
from tests.support.trainer_process import Node
from tests.support.trainer_world import BATCH, GENESIS, World, accepted_round, apply, record_digest
from tests.support.waiting import ended, until, wait_until


def born(world: World, n: int, parallel: str) -> tuple[Trainer, Heard]:
    heard = Heard()
    return Trainer(replace(world.start(n), parallel=parallel), heard), heard


def learning_rate(trainer: Trainer) -> float:
    backend = trainer.backend
    return (backend.worker if isinstance(backend, DistributedBackend) else backend).inner.learning_rate


def two_layers(monkeypatch) -> None:
    """Give the model two layers, for two stages."""
    plain = trainer_world.plain_config
    monkeypatch.setattr(trainer_world, "plain_config", lambda config: plain(config | {"num_hidden_layers": 2}))


def learnt(world: World, blob: Path) -> dict[str, torch.Tensor]:
    """Return an update as dense tensors."""
    layout = world.spec.model.layout
    into = {t.name: torch.zeros(t.shape) for t in layout.tensors}
    make_codec(world.spec.codec, layout).add_to(blob.read_bytes(), into)
    return into


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "adapter"),
    [
        ("fsdp=2,tp=2", None),
        ("fsdp=2,pp=2", None),
        ("dp=2,fsdp=2", AdapterSettings(rank=4, alpha=8, train=["input_layernorm"])),
    ],
)
def test_peers_of_one_process_and_of_two_by_two_ranks_agree_on_every_bit_and_a_save_fits_all_layouts(
    parallel, adapter, tmp_path, monkeypatch
):
    two_layers(monkeypatch)
    outer, codec = OuterSpec(optimizer="nesterov", lr=0.7), CodecSpec(kind="none", beta=0.9)
    world = World.make(tmp_path, outer=outer, codec=codec, adapter=adapter)
    one, _ = born(world, 1, "dp=1")
    many, heard = born(world, 2, parallel)
    twin, _ = born(world, 2, "dp=1")  # the second peer, with one process
    twin.folder.folder = tmp_path / "twin"
    assert heard == [("info", "parallel", f"--parallel {ParallelDims.parse(parallel)}, as asked")]
    try:
        assert "4 x CPU" in many.ready().device and str(ParallelDims.parse(parallel)) in many.ready().device
        loads = [t.load(world.load()).state_digest for t in (one, many, twin)]
        assert set(loads) == {world.spec.genesis.name}
        rounds = []
        for r in range(2):
            for trainer in (one, many, twin):
                train(trainer, 3)
            made = [(1, update(one, tmp_path / f"1-{r}")), (2, update(many, tmp_path / f"2-{r}"))]
            other = update(twin, tmp_path / f"twin-{r}")
            same(learnt(world, made[1][1].blob_path), learnt(world, other.blob_path), atol=2e-4)
            assert made[1][1].loss == pytest.approx(other.loss, rel=1e-3)
            for trainer in (one, many, twin):
                train(trainer, 1)  # while the updates travel
            checkpoint = tmp_path / f"state-{r}"
            rounds.append(accepted_round(r, *made))
            end = made[0][1].end_window
            ask = Apply(rounds[r], (), end, 2 * end, checkpoint)
            applied = [apply(t, ask) for t in (many, one, twin)]
            assert len({a.state_digest for a in applied}) == 1
            assert blob_digest(checkpoint.read_bytes()) == applied[0].state_digest
        # Work that missed its round comes back.
        missed = update(many, tmp_path / "missed")
        rounds.append(accepted_round(2))
        apply(many, Apply(rounds[2], (missed.blob_path,), end, 2 * end))
        with pytest.raises(MalformedError, match="fetch it again"):
            many.load(replace(world.load(), base_state=record_digest(0)))
        assert many.steps.may_train
        train(many, 1)
        many.checkpointer.save_now()
        sheet = json.loads((many.folder.folder / STATE_MANIFEST).read_text())
        saved = load_file(many.folder.folder / sheet["file"])
        assert sheet["optimizer_steps"] == 9 and {n.split("/")[0] for n in saved} == {
            "exp_avg", "exp_avg_sq", "feedback", "progress",
        }  # fmt: skip
    finally:
        many.close(in_order=True)
    load = world.load(*rounds, next_window=end)
    # The next one may have another layout, or one process: all take up the same.
    found = []
    for parallel in ("dp=1", "fsdp=2"):
        again, heard = born(world, 2, parallel)
        try:
            digest = again.load(load).state_digest
            assert again.windows.counter == 9 * BATCH and "saved-state" not in heard.kinds()
            assert learning_rate(again) == learning_rate(many)
            again.checkpointer.save_now()
            sheet = json.loads((again.folder.folder / STATE_MANIFEST).read_text())
            found.append((digest, load_file(again.folder.folder / sheet["file"])))
            train(again, 1)
        finally:
            again.close(in_order=True)
    for digest, tensors in found:
        assert digest == found[0][0]
        same({n: t for n, t in tensors.items() if "progress" not in n}, saved, atol=0)
        same({n: t for n, t in tensors.items() if "progress" in n}, saved, atol=1e-6)
    one.close()
    twin.close()


# -- the processes -------------------------------------------------------------------------------------------


@asynccontextmanager
async def node(world: World, parallel: str):
    """Yield a real trainer's process with ranks of its own."""
    link = await TrainerLink.start(threads=1)
    try:
        made = Node(link)
        await made.ask(replace(world.start(1), parallel=parallel), Ready)
        yield made
    finally:
        link.kill()
        await link.stop()


def ranks_of(pid: int) -> list[int]:
    """Return the children of a process."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


needs_proc = pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="no /proc: a process's ranks are not known"
)


@needs_proc
@pytest.mark.long
async def test_a_life_with_ranks_from_start_to_stop_and_after_the_death_of_one(tmp_path):
    world = World.make(tmp_path)
    async with node(world, "fsdp=2") as n:
        assert (await n.ask(world.load(), Applied)).state_digest == world.spec.genesis.name
        await n.trained(3 * BATCH)
        note = next(m for m in n.heard if isinstance(m, Note))
        assert note.text == "--parallel fsdp=2, as asked"
        made = await n.update(0, GENESIS, tmp_path / "u0")
        await n.trained(2 * BATCH)
        checkpoint = tmp_path / "state-1"
        apply = Apply(accepted_round(0, (1, made)), (), made.end_window, made.end_window, checkpoint)
        applied = await n.ask(apply, Applied)
        assert blob_digest(checkpoint.read_bytes()) == applied.state_digest
        await n.trained(4 * BATCH)
        assert (await n.ask(Stop(), Stopped)).saved
        assert (await ended(n.link.wait())).code == 0
    load = world.load(accepted_round(0, (1, made)), next_window=made.end_window)
    async with node(world, "fsdp=2") as n:
        assert (await n.ask(load, Applied)).state_digest == applied.state_digest
        await n.until(Progress, lambda p: p.windows >= 5 * BATCH)  # the saved windows, and more
        ranks = ranks_of(n.link.pid)
        assert len(ranks) == 1
        os.kill(ranks[0], signal.SIGKILL)
        await n.link.send(MakeUpdate(1, record_digest(0), tmp_path / "u1"))
        # The update and the watch over the ranks race to notice it. The trainer ends, and reports why.
        said = await n.failures()
        assert all("rank 1 of 2 ended with code -9" in f.reason for f in said)
        assert [f.what for f in said if f.fatal] == ["train"] and {f.what for f in said} <= {"update", "train"}
        assert (await ended(n.link.wait())).code == 1
    async with node(world, "tp=2") as n:  # the node starts another: here even with another layout
        assert (await n.ask(load, Applied)).state_digest == applied.state_digest
        ranks = ranks_of(n.link.pid)
        n.link.kill()
        await until(lambda: not any(map(alive, [n.link.pid, *ranks])), "its ranks end with it")


async def test_a_layout_that_cannot_be_is_refused_with_those_that_can(tmp_path):
    world = World.make(tmp_path)
    link = await TrainerLink.start(threads=1)
    try:
        n = Node(link)
        await link.send(replace(world.start(1), parallel="tp=4"))
        failed = await n.until(Failed)
        assert failed.what == "start" and failed.fatal
        assert "tp must divide 2; on 4 ranks these work: dp=4; fsdp=4;" in failed.reason
        assert (await ended(link.wait())).code == 1
    finally:
        link.kill()
        await link.stop()


# -- what goes wrong: rank 0 in a process of its own, for torch knows one group of ranks a process -----------------


@contextmanager
def ranks(folder: Path, seconds: float, layers: LayerOptions = USUAL):
    """Two ranks, the run, and the reports of a lost rank."""
    world, said = World.make(folder), []
    dims = ParallelDims.parse("dp=2")
    made = DistributedBackend(
        world.spec, folder / "spec.json", dims, "cpu", 1, yield_hook=lambda: None,
        lost=lambda why, easier: said.append((why, easier)),
        profiles=MicroBatchStore(folder, "dp=2", "this one"), folder=folder / "ranks", seconds=seconds,
        layers=layers,
    )  # fmt: skip
    try:
        yield made, world, said
    finally:
        made.close(in_order=not said)  # one that is lost cannot be left in order
    assert all(r.poll() is not None for r in made.ranks)


def not_started(me: int, world: int, folder: Path) -> None:
    sys.executable = "/bin/false"
    met = RankGroup.join

    def later(*given) -> RankGroup:
        """Meet after the watch over the ranks has reported the end of rank 1."""
        time.sleep(1.0)
        return met(*given)

    RankGroup.join = later
    with pytest.raises(TrainingError, match="rank 1 of 2 ended with code 1"):
        with ranks(folder, 1.5) as (_, _, said):
            pass


def hanging(me: int, world: int, folder: Path) -> None:
    with ranks(folder, 240.0) as (many, run, said):
        many.load_state(run.genesis)
        many.outer.rebase()
        # From here on: to start took as long as it took. torch has no public way to change a group's timeout.
        for group in (dist.group.WORLD, many.group.commands):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
        os.kill(many.ranks[0].pid, signal.SIGSTOP)
        with pytest.raises(TrainingError, match="get no answers from each other"):
            many.store_state(1, None)
        assert len(said) == 1 and not said[0][1]


def spoilt_for_one(me: int, world: int, folder: Path) -> None:
    with ranks(folder, 240.0) as (many, run, said):
        many.load_state(run.genesis)
        many.outer.rebase()
        spoilt = bytearray(many.outer.announce())
        spoilt[-40:] = b"\xff" * 40  # of records that the last rank owns
        with pytest.raises(CodecError, match="block"):
            many.outer.add_back(bytes(spoilt))
        with pytest.raises(OSError, match="nowhere"):
            many.store_state(1, folder / "nowhere" / "state")
        assert many.store_state(1, None) == run.spec.genesis.name
        assert not said


def without_memory(me: int, world: int, folder: Path) -> None:
    with ranks(folder, 240.0) as (many, run, said):
        many.load_state(run.genesis)
        many.outer.rebase()

        def full(number: int) -> None:
            raise torch.OutOfMemoryError("a GPU's")

        many.worker.inner.piece = full
        with pytest.raises(TrainingError, match="memory of .* does not suffice"):
            many.inner.forward_backward(torch.zeros((8, 17), dtype=torch.int32))
        ((why, easier),) = said
        assert why.endswith("after a restart a pass has 2 windows instead of 4") and easier


OUT_OF_MEMORY_ON_RANK_1 = f"""#!{sys.executable}
import runpy, sys, torch
from peer.training.parallel.rank_optimizer import RankOptimizer

def piece(self, number):
    if not self.layers.recompute:
        raise torch.OutOfMemoryError("a GPU's")
    whole(self, number)

whole, RankOptimizer.piece = RankOptimizer.piece, piece
sys.argv = sys.argv[2:]  # after -m
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def without_memory_on_rank_1(me: int, world: int, folder: Path) -> None:
    """Start with passes that need more memory than rank 1 has, unless activations are recomputed."""
    script = folder / "python"
    script.write_text(OUT_OF_MEMORY_ON_RANK_1)
    script.chmod(0o700)
    sys.executable = str(script)
    with ranks(folder, 240.0) as (many, run, said):
        many.load_state(run.genesis)
        many.outer.rebase()
        windows = torch.zeros((8, 17), dtype=torch.int32)
        if many.worker.inner.layers.recompute:
            assert many.inner.forward_backward(windows) is not None and many.worker.inner.windows_in_a_pass == 4
            return
        with pytest.raises(TrainingError, match="memory of .* does not suffice|rank 1 of 2 ended with code 3"):
            many.inner.forward_backward(windows)
        # The failed step or the watch over the ranks, which may be late, reports it.
        wait_until(lambda: said, "the end of rank 1 is reported", seconds=60)
        ((why, easier),) = said
        assert why.startswith("rank 1 of 2 ended with code 3") and easier
        assert why.endswith("after a restart activations are computed again in the backward pass (a third more work)")


@pytest.mark.parametrize("what", [not_started, hanging, *long_cases(spoilt_for_one, without_memory)])
def test_what_goes_wrong_on_one_rank_is_told_on_rank_0_in_time(what, tmp_path):
    run_ranks(1, f"{__name__}:{what.__name__}", tmp_path)
    if what is without_memory:
        assert MicroBatchStore(tmp_path, "dp=2", "this one").profile("auto") == MicroBatchProfile(2, False)


@pytest.mark.long
def test_when_one_window_is_too_much_for_any_rank_the_next_start_recomputes_on_all(tmp_path):
    store = MicroBatchStore(tmp_path, "dp=2", "this one")
    store.make_easier(MicroBatchProfile(2, False), "auto")
    run_ranks(1, f"{__name__}:{without_memory_on_rank_1.__name__}", tmp_path)
    assert store.profile("auto") == MicroBatchProfile(None, True)
    run_ranks(1, f"{__name__}:{without_memory_on_rank_1.__name__}", tmp_path)


def test_what_fits_into_a_pass_is_of_one_layout_and_device_and_never_nothing(tmp_path):
    store = MicroBatchStore(tmp_path / "new", "dp=2", "A")

    def profiles() -> list[tuple[int | None, bool]]:
        return [(p.windows, p.recompute) for p in map(store.profile, ("auto", "off", "on"))]

    assert profiles() == [(None, False), (None, False), (None, True)]
    assert "2 windows instead of 5" in store.make_easier(MicroBatchProfile(5, False), "auto")
    assert profiles() == [(2, False), (2, False), (None, True)]
    assert "--recompute off forbids" in store.make_easier(MicroBatchProfile(1, False), "off")
    assert profiles() == [(2, False), (2, False), (None, True)]
    assert "computed again" in store.make_easier(MicroBatchProfile(1, False), "auto")
    assert profiles() == [(None, True), (1, False), (None, True)]
    assert "1 windows instead of 3" in store.make_easier(MicroBatchProfile(3, True), "auto")
    assert profiles() == [(1, True), (1, False), (1, True)]
    assert store.make_easier(MicroBatchProfile(1, True), "auto") == ""
    assert profiles() == [(1, True), (1, False), (1, True)]
    for other in (("dp=4", "A"), ("dp=2", "B")):
        assert MicroBatchStore(tmp_path / "new", *other).profile("auto") == MicroBatchProfile(None, False)
    nothing = '{"layout": "dp=2", "device": "A", "gpu_memory": 0, "windows": 0, "recompute": 1}'
    for spoilt in ("[rubbish", "[]", nothing):
        (tmp_path / "new" / NAME).write_text(spoilt)
        assert store.profile("auto") == MicroBatchProfile(None, False)


# -- from the command line to the trainer ------------------------------------------------------------------------


def test_the_command_line_s_layout_and_what_is_done_to_layers_reach_the_trainer(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("cairn.commands.join.join_run", asked.append)
    done = CliRunner().invoke(main, ["peer", "join", "cairn1x", "--parallel", "tp=2, fsdp=4"])
    assert done.exit_code == 0, done.output
    assert asked[0].parallel == "fsdp=4,tp=2"
    assert asked[0].recompute == asked[0].compile == "auto" and asked[0].moments == "fp32"
    words = ["--recompute", "on", "--compile", "off", "--moments", "8bit"]
    done = CliRunner().invoke(main, ["peer", "join", "cairn1x", *words])
    assert done.exit_code == 0 and (asked[1].recompute, asked[1].compile, asked[1].moments) == ("on", "off", "8bit")
    assert not asked[1].allow_private_data
    done = CliRunner().invoke(main, ["peer", "join", "cairn1x", "--allow-private-data"])
    assert done.exit_code == 0 and asked[2].allow_private_data
    done = CliRunner().invoke(main, ["peer", "join", "cairn1x", "--compile", "always"])
    assert done.exit_code == 2 and "'auto', 'on', 'off'" in done.output
    done = CliRunner().invoke(main, ["peer", "join", "cairn1x", "--parallel", "fsdp=4,ep=2"])
    assert done.exit_code == 2 and "'ep=2' is no degree" in done.output
    world = World.make(tmp_path)
    with Store(tmp_path / "store", 2**30) as store:
        options = NodeOptions(tmp_path, parallel=asked[0].parallel, recompute="on", compile="off", moments="8bit")
        start = start_message(world.spec, store, world.start(1).identity_key, options)
    assert start.parallel == "fsdp=4,tp=2" and from_line(to_line(start)[:-1]) == start
    assert (start.recompute, start.compile, start.moments) == ("on", "off", "8bit")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_gpus_that_are_not_there_and_one_gpu_for_many_ranks_are_refused(tmp_path):
    spec = World.make(tmp_path).spec
    assert resolve("auto", "auto", spec)[0].world == resolve("dp=1", "cpu", spec)[0].world == 1
    with pytest.raises(TrainingError, match=r"makes 2 ranks, and there are 1; on 1 ranks these work: dp=1$"):
        resolve("dp=2", "cuda", spec)
    with pytest.raises(TrainingError, match=r"--device cuda:0 is one GPU and --parallel dp=2 asks for 2"):
        resolve("dp=2", "cuda:0", spec)
