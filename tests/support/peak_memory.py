"""The memory of tensors that an operation makes, without making them: for models that no test machine could hold."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from peer.training.inner_optimizer import InnerOptimizer
from peer.training.layers import LayerOptions
from protocol.adapter import hold_base, materialise
from protocol.model import build_model
from protocol.spec import AdapterSettings
from tests.support.coordinator_fakes import make_spec

CPU = torch.device("cpu")


class PeakMemory(TorchDispatchMode):
    """Count the bytes of tensors made while it is active: `now` and, since the last `begin`, at `most`.

    Under a FakeTensorMode, tensors have sizes and lives, and no values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = WeakIdKeyDictionary()

    def begin(self) -> None:
        self.most = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for found in tree_leaves(made):
            if isinstance(found, Tensor):
                self._note(found.untyped_storage())
        return made

    def _note(self, storage: UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = True
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._end, size)

    def _end(self, size: int) -> None:
        self.now -= size


def activation_bytes(config: Mapping[str, Any], window: int, adapter: AdapterSettings | None, *, on_cpu: bool) -> int:
    """Return the most bytes that a gradient of one window takes beside weights and gradients, without computing it.

    As a GPU does it, in bf16 and with activations computed again, or as a CPU does.
    """
    model = build_model(config, device="meta")
    held = None if adapter is None else hold_base(model, adapter, CPU, held=torch.bfloat16, quantised=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialise(model, CPU, held or (lambda _: torch.float32))
        inner = InnerOptimizer(make_spec().inner, model, CPU, layers=LayerOptions("off" if on_cpu else "on"))
        inner.in_bf16 = not on_cpu
        tokens = torch.zeros(1, window + 1, dtype=torch.int64)
        with PeakMemory() as memory:
            inner.add_gradient(tokens, 1.0)
            memory.begin()
            before = memory.now
            inner.add_gradient(tokens, 1.0)
            return memory.most - before
