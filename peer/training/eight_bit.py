"""Moments in 8 bits a value, by bitsandbytes: a peer's own choice (`--moments 8bit`), for small GPUs.

A moment is codes of one of the library's dynamic maps, and an fp32 scale of each BLOCK values (Dettmers et al. 2022,
arXiv 2110.02861). AdamW is the library's own; Muon reads and writes its momentum here. Tensors of fewer than LEAST
values stay fp32. Nobody else sees moments, and they are saved in fp32: the next start may choose the other form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from peer.errors import TrainingError
from protocol.extras import install
from protocol.model import one_line
from protocol.quantised import imported
from protocol.spec import InnerSpec, RunSpec
from protocol.training_memory import BLOCK, LEAST

_OF_LIBRARY = {"exp_avg": "1", "exp_avg_sq": "2"}
"""The number of a moment in the names that bitsandbytes' AdamW gives to its state."""


@dataclass(frozen=True, slots=True)
class EightBit:
    """A moment's codes, in its shape, and the scale of each block. `map`: the value of each code."""

    codes: Tensor
    absmax: Tensor
    map: Tensor

    def read(self) -> Tensor:
        """Return the values in fp32."""
        return imported().dequantize_blockwise(self.codes, absmax=self.absmax, code=self.map, blocksize=BLOCK)

    def write(self, values: Tensor) -> None:
        """Replace the values by these, rounded."""
        codes, state = imported().quantize_blockwise(values, code=self.map, blocksize=BLOCK)
        self.codes.copy_(codes)
        self.absmax.copy_(state.absmax)


Moment: TypeAlias = Tensor | EightBit


@cache
def _map(device: torch.device, *, signed: bool) -> Tensor:
    return imported().create_dynamic_map(signed=signed).to(device)


def rounded(values: Tensor, *, signed: bool = True) -> Moment:
    """Return these values in 8 bits; in fp32 if they are few. Only second moments are without a sign."""
    if values.numel() < LEAST:
        return values
    scales = torch.zeros(-(-values.numel() // BLOCK), device=values.device)
    made = EightBit(torch.zeros_like(values, dtype=torch.uint8), scales, _map(values.device, signed=signed))
    made.write(values)
    return made


class Moments(Mapping[str, Tensor]):
    """Moments by MOMENT/parameter. One of 8 bits is made fp32 when it is read, so that never all are."""

    def __init__(self, held: Mapping[str, Moment]):
        self._held = held

    def __getitem__(self, name: str) -> Tensor:
        held = self._held[name]
        return held.read() if isinstance(held, EightBit) else held

    def __contains__(self, name: object) -> bool:
        return name in self._held  # Mapping's own would read the values

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def held_moment(state: Mapping[str, Any], name: str) -> Moment:
    """Return a moment of one parameter from its optimizer's state: torch's, Muon's or bitsandbytes'."""
    if name in state:
        return state[name]
    n = _OF_LIBRARY[name]
    codes = state[f"state{n}"]
    return EightBit(codes, state[f"absmax{n}"], state[f"qmap{n}"]) if codes.dtype == torch.uint8 else codes


def restored_state(steps: int, moments: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state of a parameter with these moments, as Muon or bitsandbytes' AdamW holds it."""
    state: dict[str, Any] = {"step": steps}
    for name, values in moments.items():
        held, n = rounded(values, signed=name != "exp_avg_sq"), _OF_LIBRARY.get(name)
        if n is None:
            state[name] = held
        elif isinstance(held, EightBit):
            state |= {f"state{n}": held.codes, f"absmax{n}": held.absmax, f"qmap{n}": held.map}
        else:
            state[f"state{n}"] = held
    return state


def adamw_8bit(groups: Sequence[dict[str, Any]], spec: InnerSpec, device: torch.device) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with the spec's settings. Raises TrainingError if it makes no steps on this device."""
    imported()
    import bitsandbytes

    library: Any = bitsandbytes.optim  # its types do not name its optimizers
    tried = nn.Parameter(torch.zeros(LEAST, device=device))
    tried.grad = torch.ones_like(tried)
    try:
        library.AdamW8bit([tried]).step()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError) as e:  # AttributeError: a function that its library does not have
        raise TrainingError(
            f"--moments 8bit: bitsandbytes {bitsandbytes.__version__} makes no steps on {device} ({one_line(e)}): "
            "install a newer one (a CPU needs 0.50; `python -m bitsandbytes` tells what it found), or leave it out"
        ) from None
    return library.AdamW8bit(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)


def refusal(spec: RunSpec, ranks: int = 1) -> str:
    """Return why a peer of this run cannot hold moments in 8 bits, and what to do; "" if it can."""
    if spec.audit.replayable:
        return "--moments 8bit is not for a replayable run: audits repeat its steps with moments in fp32; leave it out"
    if ranks > 1:
        return f"--moments 8bit is for one process, and here {ranks} train: add --parallel dp=1, or leave it out"
    if find_spec("bitsandbytes") is None:
        return f"--moments 8bit needs one more package: {install('qlora')}"
    return ""
