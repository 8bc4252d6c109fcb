"""The operations that torch makes, with the types of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SeenOperations(TorchDispatchMode):
    """A mode of torch that notes operations. It sees those of modes that begin after it."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, frozenset[torch.dtype]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note the operation, and make it."""
        self.seen.append((func.overloadpacket.__name__, frozenset(a.dtype for a in args if isinstance(a, Tensor))))
        return func(*args, **(kwargs or {}))

    def types_of(self, name: str) -> set[frozenset[torch.dtype]]:
        """Return the types of the tensors that operations of that name had."""
        return {types for found, types in self.seen if found == name}
