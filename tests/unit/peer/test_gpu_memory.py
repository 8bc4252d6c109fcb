"""The most that a peer may use of a GPU: who gets which part of it, and what follows it. The GPUs are fakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from peer.auditor.__main__ import memory_share
from peer.doctor.device import fits, memory_finding
from peer.doctor.measurements import Device, Sample, Trial
from peer.errors import TrainingError
from peer.node.options import NodeOptions
from peer.training import offload, trial
from peer.training.device import choose_device, out_of_memory
from peer.training.eight_bit import LEAST
from peer.training.offload import Home, note_of
from peer.training.parallel import setup
from peer.training.parallel.micro_batch import MicroBatchProfile, MicroBatchStore
from peer.training.parallel.parallel_dims import ParallelDims
from protocol.training_memory import round_bytes
from tests.support.local_trainer import born, closed, world  # noqa: F401 - fixtures
from tests.support.specs import tiny_spec

GB = 10**9
WHOLE = 80 * GB


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, torch.device]]:
    """Have two GPUs, with 50 GB free; return the shares of them that this process bounds itself to."""
    bounds: list[tuple[float, torch.device]] = []
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device": lambda device: None,
        "get_device_name": lambda device: "NVIDIA H100",
        "get_device_properties": lambda device: type("", (), {"total_memory": WHOLE}),
        "mem_get_info": lambda device: (50 * GB, WHOLE),
        "set_per_process_memory_fraction": lambda share, device: bounds.append((share, device)),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    monkeypatch.setattr(setup, "link", lambda: "nvlink")
    return bounds


@pytest.mark.parametrize(("name", "number"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_device_is_ready_with_its_number_and_the_limit_in_force(gpus, name: str, number: int):
    device = torch.device("cuda", number)
    assert choose_device(name, 1) == device and not gpus
    assert choose_device(name, 1, 6 * GB) == device and gpus == [(6 / 80, device)]
    choose_device(name, 1, 2 * WHOLE)
    assert gpus[-1] == (1.0, device)
    assert torch.get_float32_matmul_precision() == "highest"  # an audit that claims fp32 has it


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "older CUDA .*, or use --device cpu"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "is another program on it"),
    ],
)
def test_a_gpu_that_fails_at_once_is_an_error_with_what_to_do(gpus, monkeypatch, failure: str, says: str):
    def ones(*_: Any, **__: Any):
        raise RuntimeError(failure)

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(TrainingError, match=f"cuda:0 cannot be used .*: .*{says}"):
        choose_device("auto", 1)


def test_a_limit_means_nothing_to_a_cpu(gpus):
    assert choose_device("cpu", 1, GB) == torch.device("cpu") and not gpus


def test_a_trainer_on_a_cpu_says_that_the_limit_does_nothing(world):  # noqa: F811
    _, heard = born(world, gpu_memory=GB)
    assert [(level, text[:31]) for level, _, text in heard] == [("warning", "--gpu-memory does nothing here:")]
    assert not born(world, 2)[1]


@pytest.mark.parametrize(
    ("options", "replayable", "share"),
    [
        ({}, True, 3),
        ({}, False, 6),  # no checks
        ({"audit_device": "off"}, True, 6),
        ({"audit_device": "cpu"}, True, 6),
        ({"audit_device": "cuda:1"}, False, 3),  # the trainer may use all GPUs
        ({"audit_device": "cuda:1", "parallel": "dp=2"}, True, 3),
        ({"audit_device": "cuda:1", "parallel": "dp=1"}, True, 6),
        ({"audit_device": "cuda", "parallel": "dp=1"}, True, 3),
        ({"audit_device": "cuda:1", "device": "cuda:0"}, True, 6),
        ({"audit_device": "cuda:1", "device": "cuda:1"}, True, 3),
        ({"audit_device": "cuda:1", "device": "cpu"}, True, 6),
        ({"auditor": True}, True, 6),
    ],
)
def test_training_and_checks_have_half_each_where_they_may_be_on_one_gpu(options: dict, replayable: bool, share: int):
    some = replace(NodeOptions(Path(), gpu_memory=lambda: 6 * GB), **options)
    assert some.gpu_share(replayable=replayable) == share * GB
    assert replace(some, gpu_memory=lambda: 0).gpu_share(replayable=replayable) == 0


def test_a_check_has_what_is_free_and_its_part_of_the_limit_at_most():
    assert memory_share(30 * GB, WHOLE, 3 * GB) == 3 / 80
    assert memory_share(30 * GB, WHOLE, 70 * GB) == memory_share(30 * GB, WHOLE) == pytest.approx(0.275)


def test_the_layout_is_chosen_by_the_limit(gpus):
    """80% of the limit must hold a rank's share: 445 kB of the whole model for dp=2, 255 kB for fsdp=2."""
    spec = tiny_spec()
    assert setup.resolve("auto", "auto", spec)[0] == ParallelDims(dp=2)
    assert setup.resolve("auto", "auto", spec, 10**6)[0] == ParallelDims(dp=2)
    assert setup.resolve("auto", "auto", spec, 500_000)[0] == ParallelDims(fsdp=2)
    with pytest.raises(TrainingError, match="use more GPUs, or larger ones, or allow more with --gpu-memory"):
        setup.resolve("auto", "auto", spec, 300_000)


def test_the_state_between_rounds_lies_in_files_only_if_it_fits_nowhere_else(gpus, monkeypatch):
    spec = tiny_spec()
    size = round_bytes(spec.model.layout, spec.outer)

    def found(parallel: str, limit: int, disk: int = size, device: str = "auto", *, eight_bit: bool = False):
        dims, _, _, home = setup.resolve(parallel, device, spec, limit, disk, eight_bit=eight_bit)
        return f"{dims} {home}"

    assert found("auto", 500_000) == "fsdp=2 memory"
    monkeypatch.setattr(offload, "available", lambda: 0)
    assert found("auto", 0) == "dp=2 device"
    # More GPUs share the state before files take it, though the model alone would fit whole.
    assert [found("auto", n) for n in (780_000, 540_000, 520_000)] == ["dp=2 device", "fsdp=2 device", "fsdp=2 files"]
    with pytest.raises(TrainingError, match="is the least that 28,832 parameters need"):
        found("auto", 520_000, size - 1)
    assert [found("dp=1", n) for n in (920_000, 900_000)] == ["dp=1 device", "dp=1 files"]
    assert found("dp=1", 900_000, eight_bit=True) == found("dp=1", 900_000, size - 1) == "dp=1 device"
    assert found("fsdp=2", 540_000) == "fsdp=2 device" and found("fsdp=2", 520_000) == "fsdp=2 files"
    small = lambda n: type("", (), {"total_memory": (WHOLE, 900_000)[n]})  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", small)
    for device, home in (("cuda", "device"), ("cuda:0", "device"), ("cuda:1", "files"), ("cuda:2", "files")):
        assert found("dp=1", 0, device=device) == f"dp=1 {home}"


def test_the_doctor_counts_files_as_the_trainer_does(gpus):
    spec = tiny_spec()
    size = round_bytes(spec.model.layout, spec.outer)
    device, memory, files = (trial.look(spec, "auto", "cuda", ParallelDims(), home=h) for h in get_args(Home))
    assert device.needed - size == memory.needed == files.needed
    assert (device.offloaded, memory.offloaded, files.offloaded) == (0, size, size)
    assert (device.note, memory.note, files.note) == ("", "", note_of("files", spec))


def test_the_doctor_looks_at_what_is_free_and_the_limit(gpus):
    spec = tiny_spec()
    one = ParallelDims()
    assert trial.look(spec, "auto", "cuda", one).usable == 50 * GB
    assert trial.look(spec, "auto", "cuda", one, 6 * GB).usable == 6 * GB
    assert trial.look(spec, "auto", "cuda", one, 60 * GB).usable == 50 * GB
    assert trial.look(spec, "cpu", "cpu", one, 1).limit == 0


GPU = Device("NVIDIA H100", "cuda", "dp=1", 1, 10 * GB, 50 * GB, WHOLE, "2.9.0", limit=16 * GB)


@pytest.mark.parametrize(
    ("device", "used", "verdict"),
    [
        (GPU, 0, "ok"),
        (replace(GPU, needed=14 * GB), 0, "warning"),
        (replace(GPU, needed=17 * GB), 0, "no"),
        (GPU, 12, "ok"),
        (GPU, 15, "warning"),
        (GPU, 16, "no"),
    ],
)
def test_the_doctor_judges_by_the_limit_and_says_how_to_have_more(device: Device, used: int, verdict: str):
    samples = [Sample(1, 0.1, memory=used * GB)] if used else []
    finding = memory_finding(Trial(device, samples), GB // 2)
    assert finding is not None and finding.verdict == verdict
    assert "50.0 GB of a GPU's 80.0 GB are free, and --gpu-memory lets training take 16.0 GB" in finding.found
    assert verdict == "ok" or "--gpu-memory" in finding.remedy or "to this run alone" in finding.remedy
    assert fits(device) is (used > 0 or verdict != "no")


@pytest.mark.parametrize(
    ("device", "used", "remedy"),
    [
        (replace(GPU, needed=17 * GB, savable=6 * GB), 0, "8bit, which needs bitsandbytes and 11.0 GB; or"),
        (replace(GPU, needed=14 * GB, savable=5 * GB), 0, "8bit, which needs bitsandbytes and 9.0 GB; or"),
        (replace(GPU, savable=4 * GB), 17, "8bit, which needs bitsandbytes and 13.0 GB; or"),
        (replace(GPU, savable=GB), 16, "8bit, which needs bitsandbytes and 15.0 GB; or leave it"),
        (replace(GPU, free=9 * GB, savable=4 * GB), 0, "8bit, which needs bitsandbytes and 6.0 GB; or stop"),
        (replace(GPU, needed=17 * GB, savable=4 * GB), 0, "allow more"),
        (replace(GPU, savable=GB), 17, "allow more"),
    ],
)  # fmt: skip
def test_moments_in_8_bits_are_a_remedy_where_training_fits_with_them(device: Device, used: int, remedy: str):
    samples = [Sample(1, 0.1, memory=used * GB)] if used else []
    finding = memory_finding(Trial(device, samples), 0)
    assert finding is not None, device
    said = finding.remedy.removeprefix("it may not suffice: ").removeprefix("add --moments ")
    assert said.startswith(remedy), finding


def test_a_smaller_base_is_the_owner_s_remedy_where_training_fits_with_it():
    short = replace(GPU, needed=17 * GB, base_savable=9 * GB)
    finding = memory_finding(Trial(short), 0)
    assert finding is not None and finding.remedy.endswith('owner for model.adapter.dtype = "nf4", which needs 8.0 GB')
    for device in (replace(short, base_savable=GB), replace(short, base_savable=0)):
        finding = memory_finding(Trial(device), 0)
        assert finding is not None and "nf4" not in finding.remedy and "--parallel" in finding.remedy
    finding = memory_finding(Trial(replace(short, base_savable=GB, holds_whole=True)), 0)
    assert finding is not None and finding.remedy == "allow more with --gpu-memory, or a larger --disk"
    finding = memory_finding(Trial(replace(short, limit=0, needed=90 * GB, holds_whole=True)), 0)
    assert (
        finding is not None and finding.remedy.startswith("take a GPU with more memory") and "--p" not in finding.remedy
    )


def test_the_doctor_knows_what_moments_in_8_bits_save(gpus):
    one, values = ParallelDims(), sum(t.numel for t in tiny_spec().model.layout.tensors if t.numel >= LEAST)
    found = trial.look(tiny_spec(), "auto", "cuda", one)
    assert 0 < found.savable <= 6 * values
    rounded = trial.look(tiny_spec(), "auto", "cuda", one, moments="8bit")
    assert rounded.savable == 0 and rounded.needed == found.needed - found.savable
    replayable = tiny_spec(audit={"replayable": True}, codec={"kind": "sign", "beta": 0})
    assert trial.look(replayable, "auto", "cuda", one).savable == 0
    assert trial.look(tiny_spec(), "cuda", "cuda", ParallelDims(fsdp=2)).savable == 0


def test_what_fills_a_gpu_below_the_limit_is_another_program():
    finding = memory_finding(Trial(replace(GPU, free=9 * GB)), 0)
    assert finding is not None and finding.verdict == "no" and "stop other programs" in finding.remedy


def test_a_pass_that_fits_is_found_anew_under_another_limit(tmp_path: Path):
    MicroBatchStore(tmp_path, "dp=2", "A", 6 * GB).make_easier(MicroBatchProfile(8, False), "auto")
    assert MicroBatchStore(tmp_path, "dp=2", "A", 6 * GB).profile("auto").windows == 4
    for other in (0, 12 * GB):
        assert MicroBatchStore(tmp_path, "dp=2", "A", other).profile("auto").windows is None


def test_memory_that_runs_out_names_the_limit(gpus):
    assert "allow more with --gpu-memory if that is set" in str(out_of_memory(torch.device("cuda:0"), "load a state"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_real_gpu_gives_no_more_than_the_limit():
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(0)
    try:
        device = choose_device("cuda:0", 1, held + 2**28)
        fine = torch.empty(2**27, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**28, dtype=torch.uint8, device=device)
        del fine
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
