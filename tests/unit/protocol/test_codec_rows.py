"""Selection and order within rows: what NumPy gives on a CPU is what torch gives, and the choice is exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec.rows import nonzero, sort_descending, topk

# Few different numbers, so that there are ties of every kind.
numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.5, 1e-45, -1e-40, 2.0**29, -(2.0**29)])


@st.composite
def rows_and_k(draw) -> tuple[torch.Tensor, int]:
    n, m = draw(st.integers(1, 4)), draw(st.integers(2, 40))
    values = draw(st.lists(st.one_of(numbers, st.floats(-10, 10, width=32)), min_size=n * m, max_size=n * m))
    return torch.tensor(values, dtype=torch.float32).view(n, m), draw(st.integers(1, m - 1))


@settings(deadline=None)
@given(rows_and_k())
def test_the_largest_are_k_distinct_coordinates_in_order_and_none_left_out_is_larger(case):
    x, k = case
    chosen = topk(x, k)
    assert chosen.shape == (len(x), k) and chosen.dtype == torch.int64
    assert (chosen[:, 1:] > chosen[:, :-1]).all() and chosen.min() >= 0 and chosen.max() < x.shape[1]
    magnitudes = x.abs()
    assert torch.equal(magnitudes.gather(1, chosen).sort(1).values, magnitudes.topk(k, 1).values.flip(1))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_among_the_largest(bad):
    x = torch.full((2, 100), 2.0**29)
    x[1, 70] = bad
    assert 70 in topk(x, 3)[1].tolist()


@settings(deadline=None)
@given(rows_and_k())
def test_rows_fall(case):
    magnitudes = case[0].abs()
    assert torch.equal(sort_descending(magnitudes), magnitudes.sort(1, descending=True).values)


@given(st.lists(st.integers(0, 1), max_size=60))
def test_ones_are_where_ones_are(bits):
    found = nonzero(torch.tensor(bits, dtype=torch.uint8))
    assert found.dtype == torch.int64 and found.tolist() == [i for i, bit in enumerate(bits) if bit]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CPU and CUDA cannot be compared")
def test_a_gpu_chooses_and_sorts_as_a_cpu():
    generator = torch.Generator().manual_seed(0)
    # Different magnitudes within each row: of equal ones either may choose any.
    x = torch.stack([torch.randperm(4096, generator=generator) - 2048.25 for _ in range(50)])
    for k in (1, 64, 1500):
        assert torch.equal(topk(x.cuda(), k).cpu(), topk(x, k))
    assert torch.equal(sort_descending(x.abs().cuda()).cpu(), sort_descending(x.abs()))
    bits = torch.randint(0, 2, (1000,), dtype=torch.uint8)
    assert torch.equal(nonzero(bits.cuda()).cpu(), nonzero(bits))
