"""Quantised weights: what their codes mean, that a layer computes with them, and what is said where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from bitsandbytes import functional
from torch import Tensor, nn

from protocol.errors import SpecError
from protocol.quantised import BLOCK, QuantisedForm, QuantisedLinear, check_kernels, imported

CPU = torch.device("cpu")
# QLoRA (Dettmers et al. 2023), appendix E.
NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
SHAPES = [(128, 96), (64, 64), (33, 50), (7, 9), (1, 2), (1, 1)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_codes_and_scales_are_what_the_file_has_and_mean_what_is_documented(dtype: str, shape: tuple[int, int]):
    weight, form = drawn(*shape), QuantisedForm(dtype, torch.Size(shape))
    codes, absmax = form.quantise(weight)
    stored, scales = form.stored("w")
    assert (stored.name, stored.kind, scales.name, scales.kind) == ("w", "U8", "w.absmax", "F32")
    assert (codes.shape, codes.dtype) == (stored.shape, torch.uint8) and absmax.shape == scales.shape
    if dtype == "nf4":  # the first of two values in the upper half
        units = NF4[torch.stack([codes >> 4, codes & 15], dim=1).flatten()[: weight.numel()].int()]
    else:
        units = (codes.float() - 127) / 127
    scale = absmax.repeat_interleave(BLOCK)[: weight.numel()]
    values = form.values(codes, absmax, torch.float32)
    torch.testing.assert_close(values, (units * scale).view(shape), rtol=1e-6, atol=1e-7)
    assert torch.equal(form.values(codes, absmax, torch.bfloat16), values.bfloat16())
    half_a_step = 0.153 if dtype == "nf4" else 0.5 / 127
    assert ((values - weight).abs().flatten() <= 1.01 * half_a_step * scale).all()
    again = form.quantise(weight)
    assert torch.equal(again[0], codes) and torch.equal(again[1], absmax)


@pytest.mark.parametrize("shape", [*SHAPES, (8, 16), (4, 48)])
def test_a_kernel_that_counts_scales_by_rows_makes_the_same_values(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """As the kernel of bitsandbytes 0.50 for CPUs with AVX-512 does, which this machine may not have."""

    def by_rows(codes: Tensor, state: functional.QuantState) -> Tensor:
        rows, columns = state.shape
        units = NF4[torch.stack([codes >> 4, codes & 15], dim=1).flatten()[: rows * columns].int()]
        at = torch.arange(rows)[:, None] * (columns // BLOCK) + torch.arange(columns) // BLOCK
        return units.view(rows, columns) * state.absmax[at]

    form = QuantisedForm("nf4", torch.Size(shape))
    codes, absmax = form.quantise(drawn(*shape))
    expected = form.values(codes, absmax, torch.float32)
    monkeypatch.setattr(functional, "dequantize_4bit", by_rows)
    torch.testing.assert_close(form.values(codes, absmax, torch.float32), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_a_layer_computes_as_a_linear_one_with_these_values_and_keeps_only_codes(
    dtype: str, autocast: bool, bias: bool
):
    plain = nn.Linear(96, 128, bias=bias).requires_grad_(False)
    layer = QuantisedLinear(plain, dtype, CPU)
    codes, absmax = layer.form.quantise(plain.weight)
    layer.codes.copy_(codes)
    layer.absmax.copy_(absmax)
    plain.weight.copy_(layer.weight)
    found, kept = [], []
    for module in (plain, layer):
        x = drawn(4, 96).requires_grad_()

        def keep(tensor: Tensor) -> Tensor:
            kept.append((module is layer, tensor.nbytes))  # noqa: B023
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = module(x)
        out.float().square().sum().backward()
        found.append((out, x.grad))
    (out, gradient), (own, own_gradient) = found
    assert own.dtype == out.dtype
    torch.testing.assert_close(own, out, rtol=1e-2 if autocast else 1e-5, atol=1e-2 if autocast else 1e-5)
    torch.testing.assert_close(own_gradient, gradient, rtol=1e-2 if autocast else 1e-5, atol=5e-2 if autocast else 1e-5)
    outputs = 2 * out.nbytes + 4 * out.numel()
    assert sum(n for of_layer, n in kept if of_layer) <= codes.nbytes + absmax.nbytes + outputs
    assert sum(n for of_layer, n in kept if not of_layer) >= 2 * plain.weight.numel()


def test_a_layer_runs_in_torch_compile_without_a_break():
    layer = QuantisedLinear(nn.Linear(96, 128), "nf4", CPU)
    layer.absmax.fill_(1.0)
    x = drawn(4, 96)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


def test_missing_kernels_and_a_missing_package_are_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch):
    check_kernels("nf4", CPU)
    check_kernels("int8", CPU)

    def nothing(*_: object):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(functional, "dequantize_4bit", nothing)
    check_kernels("int8", CPU)
    with pytest.raises(SpecError, match=r"has no kernels for cpu \(no kernel for this\): install another version"):
        check_kernels("nf4", CPU)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(SpecError, match="needs one more package: .* -m pip install 'bitsandbytes>="):
        check_kernels("nf4", CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CPU and CUDA cannot be compared")
@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_codes_stand_for_the_same_values_on_a_gpu(dtype: str):
    form = QuantisedForm(dtype, torch.Size([128, 96]))
    codes, absmax = form.quantise(drawn(128, 96))
    for to in (torch.float32, torch.bfloat16):
        found = form.values(codes.cuda(), absmax.cuda(), to).cpu()
        torch.testing.assert_close(
            found, form.values(codes, absmax, to), rtol=1e-2 if to == torch.bfloat16 else 1e-6, atol=0
        )


def test_bitsandbytes_is_imported_without_the_package_that_downloads_kernels(tmp_path, monkeypatch, caplog):
    """A package of its name does what bitsandbytes does on CPUs with AVX512-BF16."""
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "functional.py").write_text(
        "import logging\n"
        "try:\n"
        "    from kernels import get_kernel\n"
        "    found = True\n"
        "except ImportError:\n"
        "    found = False\n"
        "    logging.getLogger('bitsandbytes.backends.cpu.ops').warning('pip install kernels')\n"
    )
    downloads = SimpleNamespace(get_kernel=None)
    monkeypatch.setitem(sys.modules, "kernels", downloads)
    for name in [n for n in sys.modules if n.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert not imported().found and not caplog.records
        assert sys.modules["kernels"] is downloads
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "bitsandbytes"]:
            del sys.modules[name]


def test_peft_which_imports_bitsandbytes_is_imported_in_the_same_way(tmp_path):
    (tmp_path / "kernels.py").write_text("")
    (tmp_path / "peft.py").write_text("try:\n    import kernels\nexcept ImportError:\n    kernels = None\n")
    script = "from protocol import adapter; assert adapter._peft().kernels is None; import kernels"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, timeout=120)
    assert done.returncode == 0
