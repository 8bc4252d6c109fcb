"""The memory that training takes is what is said before it begins, and lies where it was said to lie."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pytest
import torch

from peer.errors import TrainingError
from peer.training import offload
from peer.training.offload import Offload, home_of, note_of, written_bytes
from peer.training.outer_state import OuterState
from peer.training.parallel.parallel_dims import ParallelDims, memory
from peer.training.parallel.plans import limits
from peer.training.single_process import SingleProcessBackend
from peer.training.trainer import Trainer
from protocol.codec import make_codec
from protocol.ids import PeerKey
from protocol.layout import REFERENCE_NORMS
from protocol.outer import Contribution
from protocol.spec import RunSpec
from protocol.state import state_digest, state_layout
from protocol.training_memory import SAVED_BYTES, model_bytes, round_bytes
from protocol.units import byte_size
from tests.support.mapped import is_in_a_file_of
from tests.support.specs import tiny_spec
from tests.support.trainer_world import World

CPU = torch.device("cpu")


def size(*groups: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for group in groups for t in group.values())


def spec_of(optimizer: str, outer: str) -> RunSpec:
    inner = {"batch": 4, "lr": 0.001, "optimizer": optimizer, "schedule": {"kind": "constant"}}
    return tiny_spec(inner=inner, outer={"optimizer": outer})


@pytest.mark.parametrize(("optimizer", "outer"), [("muon", "nesterov"), ("adamw", "plain")])
def test_what_training_holds_is_what_was_estimated(optimizer, outer):
    spec = spec_of(optimizer, outer)
    backend = SingleProcessBackend(spec, CPU, lambda: None)
    layout, side = spec.model.layout, backend.outer
    drawn = torch.Generator().manual_seed(1)  # of zeros the gradient is 0, and such a step is skipped
    side.base = {t.name: 0.1 * torch.randn(t.shape, generator=drawn) for t in state_layout(layout, spec.outer).tensors}
    side.rebase()
    step = backend.inner.forward_backward(torch.zeros((4, 17), dtype=torch.int32))
    assert step is not None
    gradients = {n: p.grad for n, p in backend.inner.parameters.items() if p.grad is not None}
    backend.inner.optimizer_step(step)
    held = size(side.local, gradients, backend.inner.moments()[1])
    assert held == model_bytes(layout, spec.model.config, spec.inner)
    assert side.base is not None
    assert size({n: t for n, t in side.base.items() if "reference" not in n}, side.anchor, side.feedback) == (
        round_bytes(layout, spec.outer)
    )


def test_files_come_last_of_the_places_of_the_state_between_rounds(monkeypatch, tmp_path):
    spec, gpu = spec_of("muon", "nesterov"), torch.device("cuda:0")
    size = round_bytes(spec.model.layout, spec.outer)
    needed = size + SAVED_BYTES * spec.model.layout.numel
    for free, fits, room, home, made in (
        (10 * needed, False, size, "memory", Offload(gpu, True)),
        (needed, True, size, "device", Offload(gpu)),
        (needed, False, size, "memory", Offload(gpu, True)),  # without a copy of what is saved
        (size, False, size, "files", Offload(gpu, True, tmp_path)),
        (size, False, size - 1, "device", Offload(gpu)),
    ):
        monkeypatch.setattr("peer.training.offload.available", lambda free=free: free)
        assert home_of("cuda", spec, fits=fits, room=room) == home
        assert home_of("cpu", spec, fits=fits, room=room) == "device"
        assert Offload.to(home, gpu, tmp_path) == made
        assert made.home.type == ("cuda" if home == "device" else "cpu")
        on_gpu = memory(ParallelDims(), limits(spec, "cuda", offloads=made.enabled))
        more = size if home == "device" else 0
        assert on_gpu == model_bytes(spec.model.layout, spec.model.config, spec.inner) + more


@pytest.mark.parametrize("outer", ["plain", "nesterov"])
def test_what_a_round_writes_to_files_is_what_it_changes(outer, monkeypatch):
    spec = spec_of("muon", outer)
    local = {t.name: torch.randn(t.shape) for t in spec.model.layout.tensors}
    side = OuterState(local, make_codec(spec.codec, spec.model.layout), 0.5, spec.outer, Offload(CPU, True))
    side.base = base = {t.name: torch.zeros(t.shape) for t in state_layout(spec.model.layout, spec.outer).tensors}
    held = [*(base[name] for name in base if name != REFERENCE_NORMS), *side.anchor.values(), *side.feedback.values()]
    before, changed, encode = [t.clone() for t in held], 0, side.codec.encode

    def count() -> None:
        nonlocal before, changed
        changed += sum(t.nbytes for t, old in zip(held, before, strict=True) if not torch.equal(t, old))
        before = [t.clone() for t in held]

    def encode_counted(*given: Any) -> bytes:
        count()  # the gathered values may be on the disk before they are encoded
        return bytes(encode(*given))

    monkeypatch.setattr(side.codec, "encode", encode_counted)
    side.rebase()
    for _ in range(2):
        count()
        changed = 0
        for tensor in local.values():
            tensor.add_(torch.randn(tensor.shape))
        blob = side.announce()
        count()
        side.advance([Contribution(PeerKey(bytes([n]) * 32), 1, blob) for n in (1, 2)])
        count()
        side.rebase()
    count()
    assert changed == written_bytes(spec)


def test_a_trainer_whose_state_lies_in_files_says_how_large_they_are_and_what_is_written(monkeypatch, tmp_path):
    world, said = World.make(tmp_path), []
    monkeypatch.setattr("peer.training.parallel.setup.home_of", lambda *_, room, **__: "files" if room else "device")
    size = round_bytes(world.spec.model.layout, world.spec.outer)
    for room in (0, size):
        assert not said
        trainer = Trainer(replace(world.start(1), disk=room), lambda *words: said.append(words))
        try:
            trainer.load(world.load())
            outer = cast(SingleProcessBackend, trainer.backend).outer
            assert trainer.ready().disk == room and outer.base is not None
            folder = world.start(1).state_folder
            for held in (outer.base, outer.anchor, outer.feedback):
                assert all(is_in_a_file_of(folder, tensor) == bool(room) for tensor in held.values())
        finally:
            trainer.close(in_order=True)
    (level, _, text), *others = said
    assert level == "warning" and not others
    least, copied = (byte_size(n / offload.SHARE) for n in (size, size + SAVED_BYTES * world.spec.model.layout.numel))
    sizes = [byte_size(size), byte_size(written_bytes(world.spec)), f"({least} must be free)"]
    says = ["wears an SSD", "training waits", "add memory", "larger GPU", "smaller --disk"]
    assert all(words in text for words in sizes + says)
    on_gpu = note_of("device", world.spec)
    assert f"stays on the GPU ({byte_size(size)})" in on_gpu and f"would need {copied} of free memory" in on_gpu
    assert f"({least}, or a larger --disk, if the GPU is too small)" in on_gpu


def test_files_have_all_their_space_from_the_start(monkeypatch, tmp_path):
    seen, mapped = [], np.memmap

    def memmap(file: IO[bytes], *how: Any, **shape: Any) -> np.memmap:
        seen.append(512 * os.fstat(file.fileno()).st_blocks)
        return mapped(file, *how, **shape)

    monkeypatch.setattr(np, "memmap", memmap)
    place = Offload(CPU, True, tmp_path)
    tensor = place.zeros((3, 1 << 20))
    assert tensor.shape == (3, 1 << 20) and not tensor.any() and seen[0] >= 4 * tensor.numel()
    assert place.zeros((0, 5)).shape == (0, 5) and len(seen) == 1
    assert place.copy(torch.tensor(2.0)) == 2 and len(seen) == 2
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TrainingError, match=r"12.6 MB more in files of .*No space left on device.*free some"):
        place.zeros((3, 1 << 20))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_when_a_state_is_loaded_is_told(monkeypatch, tmp_path):
    world = World.make(tmp_path)
    backend = SingleProcessBackend(world.spec, CPU, lambda: None, offload=Offload(CPU, True, tmp_path / "files"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TrainingError, match="No space left on device"):
        backend.load_state(world.load().checkpoint)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


HOLDER = """
import sys
from pathlib import Path
import torch
from peer.training.offload import Offload
held = Offload(torch.device("cpu"), True, Path(sys.argv[1])).zeros((1 << 20,)).fill_(1.0)
print("held", flush=True)
sys.stdin.read()  # until it is killed, or the test is gone
"""


def test_nothing_is_left_on_the_disk_of_a_process_that_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"held\n"
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert f"{tmp_path}/" in maps and not list(tmp_path.iterdir())
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL and not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_beside_a_gpu_offloaded_tensors_are_pinned_or_in_files_and_give_the_bits_of_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr("peer.training.offload.PIECE", 4096)
    spec = spec_of("muon", "nesterov")
    layout, codec = spec.model.layout, make_codec(spec.codec, spec.model.layout)
    blobs, digests = [], []
    gpu = torch.device("cuda:0")
    for place in (Offload(CPU), Offload(gpu, True), Offload(gpu, True, tmp_path)):
        made, device, pinned = torch.Generator().manual_seed(1), place.device, place == Offload(gpu, True)
        local = {t.name: torch.zeros(t.shape, device=device) for t in layout.tensors}
        side = OuterState(local, codec, 0.5, spec.outer, place)
        side.base = {t.name: place.zeros(t.shape) for t in state_layout(layout, spec.outer).tensors}
        side.rebase()
        assert all(t.device.type == "cpu" and t.is_pinned() == pinned for t in side.anchor.values())
        for tensor in local.values():
            tensor.sub_(torch.randn(tensor.shape, generator=made).to(device))
        blobs.append(side.announce())
        side.advance([Contribution(PeerKey(bytes(32)), 1, blobs[-1])])
        side.rebase()
        assert side.base is not None
        digests.append(state_digest(state_layout(layout, spec.outer), side.base))
    assert len(set(blobs)) == len(set(digests)) == 1
