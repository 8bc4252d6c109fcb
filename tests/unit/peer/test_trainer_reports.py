"""The figures that a trainer reports (time, MFU, memory), and the one wait of a step for the device."""

from __future__ import annotations

import re
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from peer.channel import Failed, Memory, Note, Progress, TimeShares, TrainerEnd
from peer.channel.messages import from_line, to_line
from peer.node.usage_log import FIRST_LINE_SECONDS, LINE_SECONDS, UsageLog
from peer.training import memory
from peer.training.device import pinned_for
from peer.training.flops import flops_per_token, mfu, peak_flops
from peer.training.inner_optimizer import InnerOptimizer
from peer.training.service import TrainerService
from peer.training.step_loop import StepLoop
from peer.training.time_breakdown import BREAKDOWN_SECONDS, Activity, TimeBreakdown
from peer.training.trainer import Trainer
from protocol import packed_sequences
from protocol.errors import SpecError
from protocol.model import build_model
from protocol.spec import InnerSpec, Schedule
from tests.support.specs import TINY_LLAMA
from tests.support.trainer_world import World
from tests.support.waiting import LIMIT, wait_until

CPU = torch.device("cpu")


def test_a_note_that_quotes_many_servers_is_one_that_the_node_takes(tmp_path):
    world, (ours, theirs) = World.make(tmp_path), socket.socketpair()
    with ours, theirs, theirs.makefile("rb") as node:
        service = TrainerService(TrainerEnd(ours))
        trainer = service.make_trainer(world.start(1))
        trainer.base.feedback_contents.report("warning", "data", "no data from https://a/ (" + "x\n" * 70_000)
        service.process(trainer, world.load())
        note = from_line(node.readline().rstrip(b"\n"))
        trainer.close()
    assert isinstance(note, Note) and note.text.startswith("no data from https://a/ (x x")


def test_an_error_for_people_within_a_step_is_told_with_its_remedy(tmp_path, monkeypatch):
    world, (ours, theirs) = World.make(tmp_path), socket.socketpair()

    def step(*_: object) -> None:
        raise SpecError("this run needs a newer transformers: install it")

    monkeypatch.setattr(StepLoop, "step", step)
    theirs.sendall(to_line(world.start(1)) + to_line(world.load()))
    codes: list[int] = []
    training = in_a_thread(lambda: codes.append(TrainerService(TrainerEnd(ours)).run()))
    with ours, theirs, theirs.makefile("rb") as node:
        while not isinstance(said := from_line(node.readline().rstrip(b"\n")), Failed):
            pass
        training.join(LIMIT)
    assert said == Failed("train", "this run needs a newer transformers: install it", fatal=True) and codes == [1]


# -- where the time goes ---------------------------------------------------------------------------------------


def of(shares: TimeShares) -> list[float]:
    return [getattr(shares, doing.name.lower()) for doing in Activity]


def test_the_time_of_each_thing_is_its_share():
    spent = TimeBreakdown(100.25)
    assert spent.turn(Activity.TRAINING, 101.25) == Activity.WAITING
    with spent.during(Activity.SAVING, iter([103.25, 103.75]).__next__):
        assert spent.activity == Activity.SAVING
    assert spent.activity == Activity.TRAINING
    assert of(spent.shares(104.25)) == pytest.approx([2.5 / 4, 0, 0, 0, 0.5 / 4, 1 / 4])


def test_before_any_time_went_by_what_is_done_is_all():
    assert of(TimeBreakdown(7.0, Activity.DATA).shares(7.0)) == [0, 1, 0, 0, 0, 0]


def test_what_was_before_the_last_minute_is_forgotten_also_after_a_long_silence():
    spent = TimeBreakdown(0.0)
    spent.turn(Activity.TRAINING, 30.0)
    assert spent.shares(60.0).waiting == pytest.approx(29 / 59)
    assert spent.shares(91.0).training == 1.0
    spent.turn(Activity.DATA, 1_000_000.5)
    assert spent.shares(1_000_030.5).data == pytest.approx(30 / (BREAKDOWN_SECONDS - 0.5))
    assert len(spent.rows) <= BREAKDOWN_SECONDS + 1


def test_one_thing_within_another_is_not_counted_twice_and_an_error_ends_it():
    spent, now = TimeBreakdown(0.0, Activity.TRAINING), iter(float(n) for n in range(1, 10)).__next__
    with pytest.raises(ValueError), spent.during(Activity.APPLYING, now), spent.during(Activity.SAVING, now):
        raise ValueError
    assert spent.activity == Activity.TRAINING
    assert of(spent.shares(5.0)) == pytest.approx([2 / 5, 0, 0, 2 / 5, 1 / 5, 0])


@given(st.lists(st.tuples(st.sampled_from(Activity), st.floats(0, 7)), min_size=1, max_size=8))
def test_shares_add_up_to_one_and_are_what_was_told(turns):
    spent, now, want = TimeBreakdown(3.5), 3.5, dict.fromkeys(Activity, 0.0)
    for doing, seconds in turns:
        spent.turn(doing, now)
        want[doing] += seconds
        now += seconds
    shares = of(spent.shares(now))
    assert sum(shares) == pytest.approx(1)
    if now - 3.5 > 1e-3:
        assert shares == pytest.approx([want[doing] / (now - 3.5) for doing in Activity], abs=1e-9)


@pytest.mark.parametrize("why", [Activity.COMPRESSING, Activity.APPLYING])
def test_a_step_that_stands_aside_says_what_for(tmp_path, why):
    trainer = loaded(tmp_path)
    with trainer.gate.closed(why):
        stepping = in_a_thread(lambda: one_step(trainer))
        wait_until(lambda: trainer.steps.times.activity == why)
    stepping.join(LIMIT)
    assert trainer.steps.times.activity == Activity.TRAINING and trainer.windows.steps == 1
    assert getattr(trainer.steps.times.shares(time.monotonic()), why.name.lower()) > 0
    trainer.close()


def test_a_step_that_waits_for_an_update_to_be_taken_is_compressing(tmp_path):
    trainer = loaded(tmp_path)
    with trainer.exchange:
        stepping = in_a_thread(lambda: one_step(trainer))
        wait_until(lambda: trainer.steps.times.activity == Activity.COMPRESSING)
        assert trainer.windows.steps == 0
    stepping.join(LIMIT)
    assert trainer.steps.times.activity == Activity.TRAINING and trainer.windows.steps == 1
    trainer.close()


def loaded(folder: Path) -> Trainer:
    world = World.make(folder)
    trainer = Trainer(world.start(1), lambda *said: pytest.fail(str(said)))
    trainer.load(world.load())
    trainer.steps.hand_over()
    return trainer


def one_step(trainer: Trainer) -> None:
    with trainer.steps.owned():
        trainer.steps.times.turn(Activity.TRAINING, time.monotonic())
        trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))


def in_a_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# -- MFU -------------------------------------------------------------------------------------------------------

# Two layers, hidden 32, wide 64: q, k, v, o of 32 x 32 and three of 32 x 64; an output layer of 256 x 32. No norms, no
# look-ups.
LAYER, OUTPUT, WINDOW = 4 * 1024 + 3 * 2048, 8192, 16


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({}, 6 * (2 * LAYER + OUTPUT) + 12 * 2 * 32 * WINDOW),
        ({"tie_word_embeddings": False}, 6 * (2 * LAYER + OUTPUT) + 12 * 2 * 32 * WINDOW),
        ({"num_key_value_heads": 1}, 6 * (2 * (LAYER - 1024) + OUTPUT) + 12 * 2 * 32 * WINDOW),
        # Heads of another size than hidden / heads: q and o of 32 x 64, k and v too.
        ({"model_type": "qwen3", "head_dim": 32}, 6 * (2 * (LAYER + 4 * 1024) + OUTPUT) + 12 * 2 * 64 * WINDOW),
        ({"model_type": "mistral", "sliding_window": 4}, 6 * (2 * LAYER + OUTPUT) + 12 * 2 * 32 * 4),
        ({"model_type": "mistral", "sliding_window": 99}, 6 * (2 * LAYER + OUTPUT) + 12 * 2 * 32 * WINDOW),
        ({"model_type": "mixtral", "num_local_experts": 2}, None),
    ],
    ids=str,
)
def test_the_flops_of_a_token_are_those_counted_by_hand(change, count):
    assert flops_per_token(build_model(TINY_LLAMA | change, device="meta"), WINDOW) == count


def test_gpt2_has_positions_that_are_looked_up_and_names_of_its_own():
    config = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    layer = 32 * 96 + 32 * 32 + 2 * 32 * 128
    want = 6 * (2 * layer + 64 * 32) + 12 * 2 * 32 * WINDOW
    assert flops_per_token(build_model(config, device="meta"), WINDOW) == want


def test_what_is_no_language_model_of_transformers_has_no_count():
    assert flops_per_token(torch.nn.Linear(2, 2), WINDOW) is None
    mamba = {"model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}
    assert flops_per_token(build_model(mamba, device="meta"), WINDOW) is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
    ],
)
def test_the_peak_of_a_gpu_by_the_name_that_torch_gives_it(name, tflops):
    assert peak_flops([name]) == pytest.approx(tflops * 1e12)
    assert peak_flops([name] * 8) == pytest.approx(8 * tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "CPU x86_64",
        "",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A10G",
        "NVIDIA H100",
        "NVIDIA GeForce GTX 1080 Ti",
    ],
)
def test_what_is_not_known_has_no_peak_nor_has_a_crew_with_one(name):
    assert peak_flops([name]) is None and peak_flops(["NVIDIA H200", name]) is None and peak_flops([]) is None


def test_mfu_by_hand_and_none_without_either_side():
    # A model of 6 GFLOP a token at 50,000 tokens/s: 300 of 989.4 TFLOP/s.
    assert mfu(50_000, 6 * 10**9, 989.4e12) == pytest.approx(0.3032, abs=1e-4)
    assert mfu(0.0, 6 * 10**9, 989.4e12) == 0 and mfu(1e9, 6 * 10**9, 1e12) == 1
    assert mfu(1.0, None, 1e12) is None and mfu(1.0, 6, None) is None


# -- memory, and batches for a device ---------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident sizes are told by Linux")
def test_on_a_cpu_memory_is_what_the_process_has_of_the_machine_s(monkeypatch, tmp_path):
    found = memory.memory_of(CPU)
    assert found is not None and 10**7 < found.used < found.whole
    status = Path("/proc/self/status").read_text()
    resident = int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024
    assert found.used == pytest.approx(resident, rel=0.2)
    whole = int(re.findall(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024
    assert found.whole == pytest.approx(whole, rel=0.01)
    monkeypatch.setattr(memory, "STATM", tmp_path / "none")
    assert memory.memory_of(CPU) is None


def test_on_cuda_memory_is_the_peak_of_what_tensors_took(monkeypatch):
    class Properties:
        total_memory = 80 * 10**9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 12 * 10**9)
    assert memory.memory_of(torch.device("cuda:1")) == Memory(12 * 10**9, 80 * 10**9)


def test_a_batch_is_pinned_for_cuda_only_and_stays_what_it_is_where_that_cannot_be(monkeypatch):
    assert pinned_for(CPU) is None
    pin = pinned_for(torch.device("cuda:0"))
    assert pin is not None

    class On:
        def __init__(self, device):
            asked.append(str(device))

        __enter__ = __exit__ = lambda *_: None

    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t + 1)
    assert pin(torch.tensor([1])).tolist() == [2] and asked == ["cuda:0"]

    def full(_):
        raise RuntimeError("no such memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", full)
    assert pin(torch.tensor([1])).tolist() == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_batch_on_a_real_gpu_is_pinned():
    pin = pinned_for(torch.device("cuda:0"))
    assert pin is not None and pin(torch.zeros(4)).is_pinned()
    found = memory.memory_of(torch.device("cuda:0"))
    assert found is not None and 0 <= found.used < found.whole


# -- no wait for the device that is not needed -------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts where the host reads a number from the device. (`tolist` on a CPU is none: the step's own is not seen.)"""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(func) or "nonzero" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_a_step_reads_nothing_from_the_device_but_its_loss_and_norm(optimizer, kind):
    spec = InnerSpec(lr=1e-3, batch=80, optimizer=optimizer, schedule=Schedule(kind="constant"))
    inner = InnerOptimizer(spec, build_model(TINY_LLAMA | {"model_type": kind}), CPU)
    windows = torch.randint(0, 256, (80, 17))  # three pieces

    def step() -> None:
        made = inner.forward_backward(windows)
        assert made is not None
        inner.optimizer_step(made)

    step()
    with Reads() as reads:
        step()
    assert reads.count == 0


def test_a_model_computes_the_same_without_the_search_for_packed_windows(monkeypatch):
    from transformers import masking_utils

    if not hasattr(masking_utils, "find_packed_sequence_indices"):
        pytest.skip("this transformers does not search")
    model, tokens = build_model(TINY_LLAMA), torch.randint(0, 256, (2, 16))
    looked = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda p: looked.append(p))
    before = model(input_ids=tokens, use_cache=False).logits
    assert looked  # else there is nothing to leave out
    assert packed_sequences.control_detection()
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, before) and len(looked) == 1


# -- for people --------------------------------------------------------------------------------------------------


def progress(**fields) -> Progress:
    spent = TimeShares(0.957, 0.01, 0.02, 0.01, 0.003, 0.0)
    return Progress(**(dict(zip(BASE, (1, 2.5, 1e4, False), strict=True)) | {"spent": spent} | fields))


BASE = ("windows", "loss", "tokens_per_second", "waiting")


def test_the_log_says_it_after_a_minute_and_then_every_five():
    said, memory_used = UsageLog(), Memory(12_300_000_000, 80_000_000_000)
    times = [n / 2 for n in range(1300)]
    lines = {t: line for t in times if (line := said.line(progress(mfu=0.43, memory=memory_used), t))}
    assert list(lines) == [FIRST_LINE_SECONDS, FIRST_LINE_SECONDS + LINE_SECONDS]
    assert set(lines.values()) == {
        "of the last minute: 96% training, 1% waiting for data, 2% compressing, 1% applying; "
        "12.3 of 80.0 GB of memory; MFU 43%"
    }


def test_what_is_not_known_is_said_as_such():
    said = UsageLog()
    assert said.line(progress(spent=None), 0.0) == "" == said.line(progress(spent=None), 1e6)
    rest = progress(spent=TimeShares(0, 0, 0, 0, 0, 1.0))
    line = said.line(rest, 1e6)
    assert line == "of the last minute: 100% waiting for the swarm; MFU not known for this device or model"
    assert said.line(rest, 2e6) == "", "a rest is said once"
    assert "MFU" not in (line := said.line(progress(), 3e6)) and "96% training" in line
    assert said.line(rest, 4e6) == "of the last minute: 100% waiting for the swarm"
