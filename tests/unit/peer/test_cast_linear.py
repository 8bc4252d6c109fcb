"""Weights that are cast for each product give autocast's gradients, and no copy of one waits for the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peer.training import inner_optimizer
from peer.training import layers as layers_module
from peer.training.inner_optimizer import InnerOptimizer
from peer.training.layers import USUAL, LayerOptions
from protocol.model import build_model, plain_config
from protocol.spec import InnerSpec, Schedule
from tests.support.specs import TINY_LLAMA

WINDOWS = torch.arange(3 * 21, dtype=torch.int32).reshape(3, 21)
"""60 tokens: no activation has the shape of a weight."""


def in_bf16(model: nn.Module, layers: LayerOptions = USUAL) -> InnerOptimizer:
    spec = InnerSpec(batch=3, optimizer="adamw", schedule=Schedule(kind="constant"))
    made = InnerOptimizer(spec, model, torch.device("cpu"), layers=layers)
    made.in_bf16 = True
    return made


def llama(**changes) -> nn.Module:
    return build_model(plain_config({**TINY_LLAMA, **changes}), seed=3)


def gradients(of: InnerOptimizer) -> dict[str, Tensor]:
    of.forward_backward(WINDOWS)
    return {n: p.grad.clone() for n, p in of.parameters.items() if p.grad is not None}


def copies(of: InnerOptimizer) -> int:
    """Return how many weights a step keeps in bf16 for its backward pass."""
    shapes = {tuple(s) for p in of.model.parameters() if p.ndim == 2 for s in (p.shape, p.shape[::-1])}
    found = set()

    def pack(t: Tensor) -> Tensor:
        if t.dtype == torch.bfloat16 and tuple(t.shape) in shapes:
            found.add(t.untyped_storage().data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        of.forward_backward(WINDOWS)
    return len(found)


@pytest.mark.parametrize("biased", [False, True])
def test_gradients_are_those_of_autocast_bit_for_bit(monkeypatch, biased):
    ours = gradients(in_bf16(llama(attention_bias=biased, mlp_bias=biased)))
    monkeypatch.setattr(inner_optimizer, "cast_again", lambda _: None)
    kept = in_bf16(llama(attention_bias=biased, mlp_bias=biased))
    theirs = gradients(kept)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert copies(kept) == 2 * 7 + 1, "the test would not see copies"


def test_the_gradient_has_the_layout_of_its_weight_or_torch_would_copy_it():
    made, laid_out = in_bf16(llama()), []
    for parameter in made.parameters.values():
        parameter.register_hook(lambda g, p=parameter: laid_out.append(g.stride() == p.stride()))
    gradients(made)
    assert len(laid_out) == len(made.parameters) and all(laid_out)


def test_recomputed_layers_have_the_same_gradients(monkeypatch):
    again = LayerOptions("on")
    ours = gradients(in_bf16(llama(), again))
    monkeypatch.setattr(inner_optimizer, "cast_again", lambda _: None)
    theirs = gradients(in_bf16(llama(), again))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_a_frozen_weight_passes_gradients_on_and_keeps_no_copy():
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0.self_attn.q_proj" in name)
    made = in_bf16(model)
    assert copies(made) == 0
    assert list(gradients(made)) == ["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize("compiled", [False, True])
def test_no_copy_of_a_weight_is_kept_for_the_backward_pass(monkeypatch, compiled):
    monkeypatch.setattr(layers_module, "BACKEND", "aot_eager")  # torch's own choice of what to keep, without a compiler
    torch.compiler.reset()
    assert copies(in_bf16(llama(), LayerOptions(compiled=compiled))) == 0
    torch.compiler.reset()


def test_in_fp32_nothing_is_cast():
    plain = llama()
    made = in_bf16(llama())
    made.in_bf16 = False
    logits = made.model(input_ids=WINDOWS.long(), use_cache=False).logits
    assert logits.dtype == torch.float32 and torch.equal(logits, plain(input_ids=WINDOWS.long()).logits)
