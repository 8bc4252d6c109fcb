"""An inner step is the same step on one process and over any layout of ranks: gradients, norm, loss, parameters."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from peer.training import layers
from peer.training.frozen_base import read_base
from peer.training.inner_optimizer import InnerOptimizer
from peer.training.layers import LayerOptions, decoder_layers
from peer.training.parallel import model
from peer.training.parallel.model import RankModel, build_rank_model, copy_shard, make_mesh, shard, shard_like
from peer.training.parallel.parallel_dims import ParallelDims
from peer.training.parallel.rank_optimizer import RankOptimizer
from protocol.adapter import base_parameters, build_adapted
from protocol.model import build_model, parameters_of, plain_config
from protocol.spec import AdapterSettings, AdapterSpec, ConversationSpec, InnerSpec, Schedule
from tests.support.long_cases import long_cases
from tests.support.marked import APART, marked_windows
from tests.support.parallel_world import join, run_ranks, write_json
from tests.support.specs import TINY_LLAMA
from tests.support.trainer_world import on_base

LAYOUTS = {
    "two": [
        "dp=2",
        "fsdp=2",
        "fsdp=2,zero=2",
        "tp=2",
        "pp=2",
        "dp=2;muon",
        "pp=2;muon",
        "tp=2;muon",
        "dp=2;recompute",
        "dp=2;marked",
        "fsdp=2;marked",
        "tp=2;marked",
        "pp=2;marked",
        "dp=2;adapter",
        "fsdp=2;adapter",
        "fsdp=2;adapter;bf16",  # the last: see `as_on_a_gpu`
    ],
    "two, quantised": [
        "dp=2;adapter;int8",
        "dp=2;adapter;nf4",
    ],
    "two, compiled": [
        "dp=2;recompute;compile",
        "fsdp=2;recompute;compile",
        "tp=2;recompute;compile",
        "pp=2;recompute;compile",
    ],
    "four": [
        "fsdp=2,tp=2",
        "dp=2,fsdp=2",
        "dp=2,tp=2",
        "fsdp=4",
        "pp=2,fsdp=2",
        "pp=2,dp=2",
        "pp=2,tp=2",
        "fsdp=4;muon",
        "fsdp=2,tp=2;muon",
        "fsdp=2,tp=2;recompute",
        "pp=2,fsdp=2;recompute",
        "dp=2,fsdp=2,zero=2;adapter;muon",
        "fsdp=4;adapter;recompute;compile",
        "fsdp=4;adapter;muon;rank=2",  # two ranks have nothing of A
    ],
}
TIED = {"dp=2", "tp=2", "fsdp=4"}
"""Layouts that are tried with tied embeddings; the others have an output layer of their own."""

MOST = 5e-7
"""How far relative to a tensor's norm (measured for DDP and FSDP2: 0 to 5e-7)."""

FURTHER, BY_MUON, IN_BF16 = 5e-6, 1e-3, 0.1
"""Parameters after a step, and gradients after those; Muon's iterations magnify rounding. All of them in bf16."""

BATCH, STEPS = 5, 3
CLIP_NORM = 0.2
"""Less than the norm of each gradient here: that the clipped ones are the same shows that their norms are."""


def adapter_of(layout: str) -> AdapterSettings:
    dtype = next((d for d in ("int8", "nf4") if d in layout), "bfloat16")
    rank = 2 if "rank=2" in layout else 4
    return AdapterSettings(rank=rank, alpha=8, train=["input_layernorm"], dtype=dtype)


def config(layout: str) -> dict:
    return plain_config(TINY_LLAMA | {"tie_word_embeddings": layout in TIED, "intermediate_size": 66})


def spec(layout: str) -> InnerSpec:
    optimizer = "muon" if "muon" in layout else "adamw"
    return InnerSpec(lr=1e-3, batch=BATCH, clip_norm=CLIP_NORM, optimizer=optimizer, schedule=Schedule(kind="constant"))


def windows(step: int, layout: str) -> Tensor:
    if "marked" in layout:
        return marked_windows(step, BATCH, 16, TINY_LLAMA["vocab_size"])
    made = torch.Generator().manual_seed(step)
    return torch.randint(0, TINY_LLAMA["vocab_size"], (BATCH, 17), generator=made, dtype=torch.int32)


def model_of(layout: str, folder: Path) -> tuple[nn.Module, AdapterSpec | None]:
    """Return a model of one process at its first values, and its adapter, whose base it reads from a file here."""
    plain = build_model(config(layout), seed=3)
    if "adapter" not in layout:
        return plain, None
    values, adapter = on_base(folder, config(layout), adapter_of(layout), parameters_of(plain))
    adapted = build_adapted(config(layout), adapter, device="cpu", quantised=adapter.quantised)
    read_base(adapted, adapter, folder / f"{adapter.base.digest}.safetensors")
    made = torch.Generator().manual_seed(1)
    for name, parameter in parameters_of(adapted).items():
        # B is not zeros here, for the gradient of A is zeros then.
        parameter.copy_(values[name] + 0.1 * torch.randn(parameter.shape, generator=made))
    return adapted, adapter


def conversations(layout: str) -> ConversationSpec | None:
    return APART if "marked" in layout else None


def one_process(layout: str, folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients of each step and parameters after it, and each step's loss."""
    whole, _ = model_of(layout, folder)
    inner = InnerOptimizer(spec(layout), whole, torch.device("cpu"), conversations=conversations(layout))
    tensors, steps = {}, []
    for n in range(STEPS):
        step = inner.forward_backward(windows(n, layout))
        assert step is not None
        gradients = {name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None}
        norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
        assert norm == pytest.approx(CLIP_NORM, rel=1e-4)
        tensors |= {f"{n}/gradient/{name}": gradient for name, gradient in gradients.items()}
        inner.optimizer_step(step)
        tensors |= {f"{n}/value/{name}": p.clone() for name, p in parameters_of(whole).items()}
        steps.append(step.loss)
    return tensors, steps


def as_on_a_gpu() -> None:
    """Hold a frozen base in bf16 beside an adapter in fp32, and compute and gather both in bf16, from now on."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.held_dtype = lambda *_: torch.bfloat16
    model.fully_shard = partial(fully_shard, mp_policy=policy)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_enabled("cpu", True)


def calls_of_mlps(built: RankModel) -> list[str]:
    """Return a list that each forward call of a layer's MLP extends."""
    seen: list[str] = []
    for name, layer in decoder_layers(built.body).items():
        layer.get_submodule("mlp").register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    return seen


def rank(me: int, world: int, folder: Path) -> None:
    """Do the same on each layout of the group that the folder names."""
    layers.BACKEND = "aot_eager"  # all of torch.compile but the machine's code, which takes long to make
    for layout in LAYOUTS[(folder / "group").read_text()]:
        if "bf16" in layout:
            as_on_a_gpu()
        join(me, world, folder / f"meet-{layout}")
        degrees = ParallelDims.parse(layout.partition(";")[0])
        mesh = make_mesh(degrees, torch.device("cpu"))
        whole, adapter = model_of(layout, folder)
        start = parameters_of(whole)
        built = build_rank_model(config(layout), degrees, mesh, torch.device("cpu"), adapter)
        if adapter is not None:
            read_base(built.body, adapter, folder / f"{adapter.base.digest}.safetensors", copy_shard)
        for name in built.parameters:
            built.local(name).copy_(built.shard_of(name, start[name]))
        compiled = ";compile" in layout
        options = LayerOptions("on" if ";recompute" in layout else "off", compiled)
        calls = [] if compiled else calls_of_mlps(built)
        inner = RankOptimizer(spec(layout), built, piece=1, layers=options, conversations=conversations(layout))
        tensors, steps = {}, []
        for n in range(STEPS):
            pieces = inner.begin(windows(n, layout))
            for piece in range(pieces):
                inner.piece(piece)
            step = inner.end()
            tensors |= {f"{n}/gradient/{name}": built.whole(name, p.grad).clone() for name, p in inner.shards.items()}
            inner.optimizer_step(step)
            tensors |= {f"{n}/value/{name}": built.whole(name).clone() for name in built.parameters}
            steps.append(step.loss)
            most = [torch.zeros((), dtype=torch.int64) for _ in range(world)]
            dist.all_gather(most, torch.tensor(inner.most_memory))
            assert 10**7 < inner.most_memory < 2**50 and len(set(map(int, most))) == 1
        if adapter is not None:
            frozen, expected = base_parameters(built.body), base_parameters(whole)
            for name in frozen.keys() - start.keys():
                assert torch.equal(shard(frozen[name]).float(), shard_like(frozen[name], expected[name])), name
            assert degrees.fsdp > 1 or not built.outside.will_sync_module_buffers()
            buffers = dict(built.body.named_buffers())
            assert any(name.endswith(".codes") for name in buffers) == adapter.quantised
            for name, buffer in whole.named_buffers():
                assert torch.equal(buffers[name], buffer), name
            held = sum(shard(t).numel() for t in frozen.values())
            assert held * degrees.fsdp < 1.05 * sum(t.numel() for t in expected.values())
        save_file(tensors, folder / f"{layout}.{me}.safetensors")
        write_json(folder / f"{layout}.{me}.json", steps)
        assert inner.layers.compiled == compiled
        if degrees.pp == 1 and not compiled:
            passes = STEPS * pieces * len(decoder_layers(built.body))
            assert len(calls) == passes * (2 if inner.layers.recompute else 1)
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.parametrize("group", ["two", *long_cases("two, quantised", "two, compiled", "four")])
def test_a_step_is_the_same_on_one_process_and_on_many(group, tmp_path):
    world = 4 if group == "four" else 2
    (tmp_path / "group").write_text(group)
    run_ranks(world, f"{__name__}:rank", tmp_path)
    for layout in LAYOUTS[group]:
        expected, steps = one_process(layout, tmp_path)
        held = [load_file(tmp_path / f"{layout}.{me}.safetensors") for me in range(world)]
        assert {name for found in held for name in found} == expected.keys()
        assert "pp" in layout or all(found.keys() == expected.keys() for found in held)
        for me, found in enumerate(held):
            for name, tensor in found.items():
                step = int(name.split("/")[0])
                far = float((tensor - expected[name]).norm() / expected[name].norm())
                # Later steps start from parameters that differ already, and AdamW divides by small numbers.
                later = BY_MUON if "muon" in layout else FURTHER
                most = IN_BF16 if "bf16" in layout else MOST if step == 0 and "gradient" in name else later
                assert far <= most, f"rank {me} of {layout} {name}: {far}"
            losses = json.loads((tmp_path / f"{layout}.{me}.json").read_text())
            assert losses == pytest.approx(steps, rel=1e-3 if "bf16" in layout else 1e-5)
