"""Muon is torch's own, but for the precision of its iterations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peer.training.muon import Muon, orthogonal, stacks
from protocol.spec import InnerSpec

SPEC = InnerSpec(optimizer="muon", lr=1e-2, weight_decay=0.1)
SHAPES = ((16, 48), (48, 16), (24, 24))


def stepped(optimizer: torch.optim.Optimizer, matrices: list[Tensor], steps: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=draw)
        optimizer.step()
    return matrices


def matrices() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def test_in_bf16_it_takes_the_steps_of_torchs_own():
    ours, theirs = matrices(), matrices()
    muon = Muon(ours, SPEC)
    muon.dtype = torch.bfloat16
    torchs = torch.optim.Muon(
        theirs, lr=SPEC.lr, weight_decay=SPEC.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for a, b in zip(stepped(muon, ours, 5), stepped(torchs, theirs, 5), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_in_fp32_it_takes_nearly_the_same_steps():
    start, exact, rounded = matrices(), matrices(), matrices()
    other = Muon(rounded, SPEC)
    other.dtype = torch.bfloat16
    stepped(Muon(exact, SPEC), exact, 5)
    stepped(other, rounded, 5)
    for s, a, b in zip(start, exact, rounded, strict=True):
        assert (a - b).norm() < 0.02 * (a - s).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one(shape: tuple[int, int]):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = matrix.clone()
    values = torch.linalg.svdvals(orthogonal(matrix, torch.float32))
    assert 0.4 < float(values.min()) and float(values.max()) < 1.3
    assert torch.equal(matrix, before)


def test_a_matrix_without_a_gradient_stays():
    (matrix,) = matrices()[:1]
    before = matrix.clone()
    Muon([matrix], SPEC).step()
    assert torch.equal(matrix, before)


def test_a_gradient_of_zeros_only_decays():
    matrix = torch.ones(4, 8)
    matrix.grad = torch.zeros(4, 8)
    Muon([matrix], SPEC).step()
    torch.testing.assert_close(matrix, torch.full((4, 8), 1 - SPEC.lr * SPEC.weight_decay))


def test_a_stack_takes_the_steps_of_its_matrices():
    draw = torch.Generator().manual_seed(3)
    start = [torch.randn(shape, generator=draw) for shape in (*SHAPES, *SHAPES)]
    single, stacked = [m.clone() for m in start], [m.clone() for m in start]
    stepped(Muon(single, SPEC), single, 5)
    optimizer = Muon(stacked, SPEC)
    optimizer.stack = 10**6
    stepped(optimizer, stacked, 5)
    for one, other, before in zip(single, stacked, start, strict=True):
        assert not torch.equal(one, before)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_stacks_have_one_shape_and_a_bound():
    some = [torch.empty(shape) for shape in ((4, 8), (8, 4), (4, 8), (4, 8), (4, 8))]
    assert [[tuple(m.shape) for m in s] for s in stacks(some, 70)] == [[(4, 8)] * 2, [(4, 8)] * 2, [(8, 4)]]
    alone = [*some, torch.empty(0, 8), torch.empty(0, 8)]
    assert [[id(m) for m in s] for s in stacks(alone, 0)] == [[id(m)] for m in alone]
    assert {id(m) for s in stacks(some, 70) for m in s} == {id(m) for m in some}
    assert not list(stacks([], 70))
