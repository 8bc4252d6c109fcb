"""One rank's shard of the model: built without memory, split over tp, sharded over fsdp, and only then given memory.

The order is torchtitan's (parallelize_llama): tensor parallelism, then FSDP2 (`fully_shard`: Zhao et al. 2023,
arXiv 2304.11277), each decoder layer by itself. dp is a second axis of FSDP's mesh, or DDP when it is the only one. No
rank ever holds more than its own shard and one layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from peer.training.inner_optimizer import hidden_matrices
from peer.training.layers import decoder_layers
from peer.training.parallel.parallel_dims import AXES, ParallelDims
from peer.training.parallel.pipeline import StageModule
from peer.training.parallel.plans import COLUMNS, ROWS
from protocol.adapter import held_dtype, hold_base, materialise
from protocol.model import build_model
from protocol.spec import AdapterSpec

# It warns, once a rank, that a gather over fsdp and tp is two gathers, which is intended.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

DtypeOf = Callable[[nn.Parameter], torch.dtype]


@dataclass(frozen=True)
class RankModel:
    """The module that this rank runs, and its own shard of each parameter that is on this rank.

    `body` is the `transformers` model; `outside` is the module to call (DDP or a stage around it, or itself). `hidden`:
    the names of the matrices that Muon would step. `dims`, `mesh`: the layout, with the axes `AXES`.
    """

    body: nn.Module
    outside: nn.Module
    parameters: Mapping[str, nn.Parameter]
    hidden: frozenset[str]
    dims: ParallelDims
    mesh: DeviceMesh
    device: torch.device

    def local(self, name: str) -> Tensor:
        """Return this rank's shard of a parameter: a plain tensor in the parameter's own memory.

        FSDP may move that memory in the first pass, so do not keep the result.
        """
        return shard(self.parameters[name].detach())

    def whole(self, name: str, part: Tensor | None = None) -> Tensor:
        """Gather a parameter, or another tensor with the same split, of which this rank has `part`.

        Return a fresh tensor if it is split, otherwise the same one. Collective over the ranks of the stage.
        """
        like = self.parameters[name].detach()
        part = shard(like) if part is None else part
        if not isinstance(like, DTensor):
            return part
        made = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return made.full_tensor()

    def shard_of(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor, split like the parameter: as `shard_like` does."""
        return shard_like(self.parameters[name], whole)

    def shard_count(self, name: str) -> int:
        """Return the number of distinct shards of a parameter over the ranks of its stage."""
        like = self.parameters[name]
        if not isinstance(like, DTensor):
            return 1
        sizes = zip(like.device_mesh.shape, like.placements, strict=True)
        return prod(n for n, placed in sizes if isinstance(placed, (Shard, _StridedShard)))


def shard(tensor: Tensor) -> Tensor:
    """Return the plain tensor that a rank holds of a tensor that may be a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copy_shard(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's shard of a whole tensor into a parameter. Not collective."""
    shard(parameter).copy_(shard_like(parameter, whole))


def shard_like(like: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor, split like another one. It may share memory. Not collective."""
    if not isinstance(like, DTensor):
        return whole
    return shard(distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None))


def make_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks, with every axis, including those of size 1."""
    return init_device_mesh(device.type, tuple(getattr(dims, a) for a in AXES), mesh_dim_names=AXES)


def build_rank_model(
    config: Mapping[str, Any],
    dims: ParallelDims,
    mesh: DeviceMesh,
    device: torch.device,
    adapter: AdapterSpec | None = None,
) -> RankModel:
    """Return this rank's shard of the model, all zeros until the first `OuterOperations.rebase`. Raises SpecError.

    `adapter`: train one; the model is its frozen base, which is zeros until `load_base`.
    """
    with _parameters_without_memory():
        body = build_model(config)
    if adapter is None:
        dtype_of: DtypeOf = _in_fp32
    else:
        held = held_dtype(adapter, device.type)
        dtype_of = hold_base(body, adapter, device, held=held, quantised=adapter.quantised)
    hidden = hidden_matrices(body)
    if dims.tp > 1:
        parallelize_module(body, mesh["tp"], _tp_plan(body))
    outside = StageModule(body, mesh["pp"].get_local_rank(), dims.pp) if dims.pp > 1 else body
    if dims.fsdp > 1 or 1 < dims.dp < dims.world:
        _shard(outside, dims, mesh, device, dtype_of)
    else:
        materialise(body, device, dtype_of)
        if dims.dp > 1:  # nothing to agree on: all ranks have the same zeros and buffers, and read the same base
            outside = DistributedDataParallel(
                body, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True, init_sync=False
            )
            # The option of this name is deprecated from torch 2.13 on. Each pass would send a quantised base's codes.
            outside.broadcast_buffers = False
    body.to(device)  # buffers
    parameters = {n: p for n, p in body.named_parameters() if p.requires_grad}
    return RankModel(body, outside, parameters, hidden, dims, mesh, device)


def _in_fp32(parameter: nn.Parameter) -> torch.dtype:
    return torch.float32


def _tp_plan(body: nn.Module) -> dict[str, Any]:
    """Return the split of each linear layer: by outputs before a layer with split inputs, by inputs in that layer."""
    plan: dict[str, Any] = {}
    for name, module in body.named_modules():
        if isinstance(module, nn.Linear):
            kind = name.rpartition(".")[2]
            if kind in COLUMNS:
                plan[name] = ColwiseParallel()
            elif kind in ROWS:
                plan[name] = RowwiseParallel()
    return plan


def _shard(
    root: nn.Module,
    dims: ParallelDims,
    mesh: DeviceMesh,
    device: torch.device,
    dtype_of: DtypeOf,
) -> None:
    over = mesh["dp", "fsdp"] if dims.dp > 1 else mesh["fsdp"]
    options: dict[str, Any] = {"mesh": over, "reshard_after_forward": dims.zero == 3}
    if device.type == "cuda":
        # Gathered in the type that autocast computes in: half the bytes. Sums of gradients stay fp32. A frozen base may
        # be held in bf16 beside an adapter in fp32: only the trained parameters must be of one type for FSDP.
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in decoder_layers(root).values():  # each is sharded, and gathered, by itself
        materialise(layer, device, dtype_of)
        fully_shard(layer, **options)
    materialise(root, device, dtype_of)
    fully_shard(root, **options)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Create parameters on the meta device within the block, while buffers (rotary embeddings) get their values."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":  # a tied parameter is on it already
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
