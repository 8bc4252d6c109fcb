"""Model FLOPs utilisation (MFU): what the model needs of a device's peak speed, as Chowdhery et al. 2022 (PaLM) count.

What is not known is None, never a guess: the MFU of a GPU that is not in the table, of a CPU, or of a model whose
tokens do not all take the same way (experts).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from peer.training.inner import hidden_matrices

_PEAK_TFLOPS = {
    r"B200": 2250.0,
    r"H200": 989.4,
    r"H200 NVL": 835.5,
    r"GH200 \d+GB?( HBM3e)?": 989.4,
    r"H100 80GB HBM3": 989.4,  # SXM
    r"H100 NVL": 835.5,
    r"H100 PCIe": 756.5,
    r"A100-SXM4?-[48]0GB|A100-PCIE-40GB|A100 80GB PCIe": 312.0,
    r"A40": 149.7,
    r"A30": 165.0,
    r"A10": 125.0,
    r"L40S": 362.05,
    r"L40": 181.05,
    r"L4": 121.0,
    r"RTX 6000 Ada Generation": 364.2,
    r"RTX A6000": 154.8,
    r"RTX 5090": 209.5,
    r"RTX 4090": 165.2,
    r"RTX 4080": 97.5,
    r"RTX 3090 Ti": 80.0,
    r"RTX 3090": 71.0,
    r"V100-SXM2-\d\dGB": 125.0,  # fp16, as the T4: no bf16 in hardware
    r"V100-PCIE-\d\dGB": 112.0,
    r"V100S-PCIE-32GB": 130.0,
    r"T4": 65.0,
    r"AMD Instinct MI300X.*": 1307.4,
}
"""The vendors' figures for dense bf16 (fp16) matrices, summed in fp32, by torch's name of the device. GeForce and RTX:
the whitepapers of GA102, Ada and Blackwell; data sheets for the rest, halved where they count structured sparsity."""

_MAKER = re.compile(r"^(NVIDIA |Tesla |GeForce )+")


def peak_flops(devices: Sequence[str]) -> float | None:
    """FLOP/s that all of these devices (torch's names) can do at most; None when one is not known."""
    speeds = [_peak(name) for name in devices]
    known = [speed for speed in speeds if speed is not None]
    return sum(known) if known and len(known) == len(speeds) else None


def _peak(device: str) -> float | None:
    # The whole name: a part of a GPU (MIG), a laptop's or a slower variant has more to it.
    name = _MAKER.sub("", device.strip())
    return next((t * 1e12 for pattern, t in _PEAK_TFLOPS.items() if re.fullmatch(pattern, name)), None)


def flops_per_token(model: nn.Module, window: int) -> int | None:
    """Model FLOPs to train on one token of a window of so many, forth and back; `model` may be on the meta device.

    PaLM, appendix B: 6 for each parameter that activations are multiplied with (matrices, and the output head also
    where it is the embedding; no look-ups, norms and biases), and 12 * layers * heads * head size * window for
    attention, which takes the whole window, not the causal half. What is computed twice to save memory counts once. A
    layer with sliding attention looks at no more than its span. None for a model that this count does not fit.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None or "expert" in str(config.to_dict()):
        return None
    if any(p.ndim > 2 for p in model.parameters()):
        return None  # convolutions, states, stacked experts
    matrices = hidden_matrices(model)
    multiplied = sum(p.numel() for n, p in model.named_parameters() if n in matrices)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        multiplied += head.weight.numel()
    looked_at = _looked_at(config, window)
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if looked_at is None or not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)
    return 6 * multiplied + 12 * width * looked_at


def _looked_at(config: object, window: int) -> int | None:
    """Tokens that attention looks at for one, summed over the layers; None when some layers are no such attention."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return None
    span = getattr(config, "sliding_window", None)
    everywhere = "sliding_attention" if span else "full_attention"
    kinds = getattr(config, "layer_types", None) or [everywhere] * layers
    each = {"full_attention": window, "sliding_attention": min(window, span or window)}
    return sum(each[kind] for kind in kinds) if set(kinds) <= each.keys() else None


def mfu(tokens_per_second: float, flops: int | None, peak: float | None) -> float | None:
    """The share of `peak` (FLOP/s) that so many tokens with so many FLOPs each are, at most 1; None if not known."""
    if flops is None or peak is None:
        return None
    return min(1.0, max(0.0, tokens_per_second * flops / peak))
