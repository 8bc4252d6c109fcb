"""The memory that training takes is what is said before it begins, and lies where it was said to lie."""

from __future__ import annotations

import pytest
import torch

from peer.training import offload
from peer.training.offload import Offload, can_offload
from peer.training.outer_state import OuterState
from peer.training.parallel.parallel_dims import ParallelDims, memory
from peer.training.parallel.plans import limits
from peer.training.single_process import SingleProcessBackend
from protocol.codec import make_codec
from protocol.ids import PeerKey
from protocol.outer import Contribution
from protocol.spec import RunSpec
from protocol.state import state_digest, state_layout
from protocol.training_memory import model_bytes, round_bytes
from tests.support.specs import tiny_spec

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
    side.base = {t.name: torch.zeros(t.shape) for t in state_layout(layout, spec.outer).tensors}
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


def test_beside_a_gpu_the_state_between_rounds_lies_in_the_machine_s_memory_if_that_has_room(monkeypatch):
    spec, said = spec_of("muon", "nesterov"), []

    def report(level: str, kind: str, text: str) -> None:
        said.append(text)

    needed = (4 * 4 + offload.SAVED_BYTES) * spec.model.layout.numel
    for free, room in ((needed * 10, True), (needed, False)):
        monkeypatch.setattr("peer.training.offload.available", lambda free=free: free)
        assert can_offload("cuda", spec) is room and not can_offload("cpu", spec)
        made = Offload.choose(torch.device("cuda:0"), spec, report)
        assert made == Offload(torch.device("cuda:0"), room)
        assert made.home.type == ("cpu" if room else "cuda")
        on_gpu = memory(ParallelDims(), limits(spec, "cuda", offloads=room))
        more = 0 if room else round_bytes(spec.model.layout, spec.outer)
        assert on_gpu == model_bytes(spec.model.layout, spec.model.config, spec.inner) + more
    assert len(said) == 1 and "stays on the GPU" in said[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_beside_a_gpu_offloaded_tensors_are_pinned_and_give_the_bits_of_a_cpu(monkeypatch):
    monkeypatch.setattr("peer.training.offload.PIECE", 4096)
    spec = spec_of("muon", "nesterov")
    layout, codec = spec.model.layout, make_codec(spec.codec, spec.model.layout)
    blobs, digests = [], []
    for device, enabled in ((CPU, False), (torch.device("cuda:0"), True)):
        made = torch.Generator().manual_seed(1)
        place = Offload(device, enabled)
        local = {t.name: torch.zeros(t.shape, device=device) for t in layout.tensors}
        side = OuterState(local, codec, 0.5, spec.outer, place)
        side.base = {t.name: place.zeros(t.shape) for t in state_layout(layout, spec.outer).tensors}
        side.rebase()
        assert all(t.device.type == "cpu" and t.is_pinned() == enabled for t in side.anchor.values())
        for tensor in local.values():
            tensor.sub_(torch.randn(tensor.shape, generator=made).to(device))
        blobs.append(side.announce())
        side.advance([Contribution(PeerKey(bytes(32)), 1, blobs[-1])])
        side.rebase()
        assert side.base is not None
        digests.append(state_digest(state_layout(layout, spec.outer), side.base))
    assert blobs[0] == blobs[1] and digests[0] == digests[1]
