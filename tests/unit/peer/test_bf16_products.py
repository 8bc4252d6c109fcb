"""Products of bf16 matrices on a CPU: those of fp32 products, rounded once, in the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from peer.auditor.bf16_products import Bf16Products
from tests.support.seen_operations import SeenOperations

BF16, FP32 = torch.bfloat16, torch.float32


def _made(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16).requires_grad_()


def _gradients(function: Callable[..., Tensor], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the result and the gradients of its sum by a fixed weight."""
    result = function(*given)
    weight = torch.linspace(-1, 1, result.numel()).view(result.shape).to(BF16).to(result.dtype)
    return result.detach(), *torch.autograd.grad(result, given, weight)


CASES = {
    "mm": (torch.mm, ((48, 64), (64, 32))),
    "addmm": (torch.addmm, ((32,), (48, 64), (64, 32))),
    "linear": (linear, ((2, 24, 64), (32, 64), (32,))),
    "bmm": (torch.bmm, ((3, 24, 64), (3, 64, 32))),
    "baddbmm": (torch.baddbmm, ((3, 24, 32), (3, 24, 64), (3, 64, 32))),
    "attention": (lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), ((1, 2, 16, 32),) * 3),
    "masked attention": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(16, 16).tril().bool()),
        ((1, 2, 16, 32),) * 3,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_product_is_that_of_fp32_rounded_once(case: str):
    function, shapes = CASES[case]
    given = tuple(_made(shape, seed) for seed, shape in enumerate(shapes))
    with Bf16Products():
        found = _gradients(function, given)
    expected = _gradients(function, tuple(t.detach().float().requires_grad_() for t in given))
    assert all(t.dtype == BF16 for t in found)
    for one, other in zip(found, expected, strict=True):
        # The backward pass of attention reads the rounded result; all else is the very rounding of the fp32 value.
        rounded = other.to(BF16)
        if case.endswith("attention"):
            torch.testing.assert_close(one, rounded, rtol=0.02, atol=0.02)
        else:
            differ = one != rounded
            assert differ.float().mean() < 0.02, "sums in another order round alike, nearly always"
            torch.testing.assert_close(one, rounded)


def test_no_product_is_left_to_bf16_arithmetic_and_all_else_is_as_it_was():
    left, right = _made((8, 8), 0), _made((8, 8), 1)
    with SeenOperations() as inside, Bf16Products():
        (left @ right + left).sum().backward()
    assert inside.types_of("mm") == {frozenset({FP32})} and inside.types_of("add") == {frozenset({BF16})}
    with SeenOperations() as outside:
        left @ right
    assert outside.types_of("mm") == {frozenset({BF16})}
