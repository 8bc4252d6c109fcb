"""Scales on the wire: bfloat16, little endian, 0 or between 2^-60 and 2^30. Exact in fp32 by a shift of 16 bits.

The bounds keep every decoded value finite, and products with it far from overflow and (but for absurd clip factors)
from the subnormal numbers. Encoders work within MAX_INPUT, so that rounding up never leaves the bounds.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from protocol.codec.interface import reject_rows

MAX_INPUT = 2.0**29
"""The largest magnitude that an encoder takes. A pseudo-gradient beyond it is a training that has diverged."""
MAX_VALUE = 2.0**30
"""No decoded value is larger in magnitude."""
MIN_SCALE = 2.0**-60


def encode_scales(scales: Tensor) -> Tensor:
    """fp32 [n] or [n, c], each exactly a bfloat16, to uint8 [n, 2c]."""
    bits = scales.reshape(scales.shape[0], -1).contiguous().view(torch.int32) >> 16
    return torch.stack([bits & 0xFF, bits >> 8], 2).to(torch.uint8).view(scales.shape[0], -1)


def decode_scales(packed: Tensor, most: float = MAX_VALUE) -> Tensor:
    """uint8 [n, 2c] from untrusted bytes to fp32 [n, c]: 0 or from MIN_SCALE to `most`. Raises BlockError otherwise.

    Negative numbers (negative zero too), infinities and NaNs all lie outside of the bounds.
    """
    # As integers: positive floats are ordered as their bits are, and -0.0 is not 0.
    # A copy, always: a single row may be contiguous and still lie where no int16 may.
    bits = packed.clone(memory_format=torch.contiguous_format).view(torch.int16).to(torch.int32) << 16
    reject_rows(
        (bits != 0) & ((bits < _bits(MIN_SCALE)) | (bits > _bits(most))),
        "a scale is negative, not finite or out of bounds",
    )
    return bits.view(torch.float32)


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def round_to_scale(scales: Tensor) -> Tensor:
    """fp32 to the nearest scale (ties to even), what is below MIN_SCALE to 0."""
    rounded = scales.to(torch.bfloat16).to(torch.float32)
    return torch.where(rounded < MIN_SCALE, torch.zeros_like(rounded), rounded)


def round_up_to_scale(scales: Tensor) -> Tensor:
    """fp32 to the smallest scale that is not below; what is below MIN_SCALE to 0."""
    bits = scales.contiguous().view(torch.int32)
    rounded = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)
    return torch.where(scales < MIN_SCALE, torch.zeros_like(rounded), rounded)
