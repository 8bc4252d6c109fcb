"""Model FLOPs utilisation (MFU): what the model needs of a device's peak speed, as Chowdhery et al. 2022 (PaLM) count.

An unknown value is None, never a guess. That is the MFU of a GPU outside the table, of a CPU, and of a model whose
tokens do not all pass through the same layers (experts).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from peer.training.inner_optimizer import hidden_matrices

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
"""The vendors' figures for dense bf16 (fp16) matrices, summed in fp32, by torch's name of the device.

GeForce and RTX: the whitepapers of GA102, Ada and Blackwell. All others: the vendor's specification, halved where it
counts structured sparsity.
"""

_MAKER = re.compile(r"^(NVIDIA |Tesla |GeForce )+")


def peak_flops(devices: Sequence[str]) -> float | None:
    """Return the peak FLOP/s of all these devices (torch's names) together; None when one is unknown."""
    speeds = [_peak(name) for name in devices]
    known = [speed for speed in speeds if speed is not None]
    return sum(known) if known and len(known) == len(speeds) else None


def _peak(device: str) -> float | None:
    # The whole name: that of a MIG slice, of a laptop's or of a slower variant is longer.
    name = _MAKER.sub("", device.strip())
    return next((t * 1e12 for pattern, t in _PEAK_TFLOPS.items() if re.fullmatch(pattern, name)), None)


def flops_per_token(model: nn.Module, window: int) -> int | None:
    """Return the model FLOPs to train on one token, forward and backward; None for a model that the count does not fit.

    `window`: tokens of a window. `model` may be on the meta device. The count is PaLM's (appendix B): 6 for each
    parameter that activations are multiplied with, and 12 * layers * heads * head size * window for attention. The
    former are matrices, and the output layer even if it is the embedding, but no look-ups, norms and biases. The latter
    is of the whole window, not of the causal half; a layer with sliding attention has no more than its span. Work that
    is repeated to save memory counts once. A frozen parameter counts 4: it has no gradient of its own.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None or "expert" in str(config.to_dict()):
        return None
    if any(p.ndim > 2 for p in model.parameters()):
        return None  # convolutions, states, stacked experts
    matrices = hidden_matrices(model)
    multiplied: list[Tensor] = [p for n, p in model.named_parameters() if n in matrices]
    output_layer = model.get_output_embeddings()
    if isinstance(output_layer, nn.Linear):
        multiplied.append(output_layer.weight)
    attended = _attended(config, window)
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if attended is None or not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)
    return sum((6 if p.requires_grad else 4) * p.numel() for p in multiplied) + 12 * width * attended


def _attended(config: object, window: int) -> int | None:
    """Return the tokens that attention reads for one, summed over the layers; None when a layer has no attention."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return None
    span = getattr(config, "sliding_window", None)
    everywhere = "sliding_attention" if span else "full_attention"
    kinds = getattr(config, "layer_types", None) or [everywhere] * layers
    each = {"full_attention": window, "sliding_attention": min(window, span or window)}
    return sum(each[kind] for kind in kinds) if set(kinds) <= each.keys() else None


def mfu(tokens_per_second: float, flops: int | None, peak: float | None) -> float | None:
    """Return the used share of `peak` (FLOP/s), at most 1, by `flops` for each token; None when one is unknown."""
    if flops is None or peak is None:
        return None
    return min(1.0, max(0.0, tokens_per_second * flops / peak))
