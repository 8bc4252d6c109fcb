"""Rows of small numbers to bytes and back: eight fields of `width` bits become `width` bytes, least significant first.

Eight fields lie in one 64-bit word, one byte each. Three shift-and-mask steps remove the unused bits (the "compress" of
Hacker's Delight, section 7-4, for a regular mask). If fields do not cross bytes, a table of all bytes separates them.
Plain tensor operations on any device.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from protocol.blob_sizes import packed_size


def _lanes(bits: int, lane: int) -> int:
    """`bits` ones at the foot of every lane of `lane` bits of a 64-bit word."""
    return sum(((1 << bits) - 1) << at for at in range(0, 64, lane))


def pack(fields: Tensor, width: int) -> Tensor:
    """uint8 [n, count] of values below 2**width, width 1 to 7, to uint8 [n, packed_size(count, width)]."""
    n, count = fields.shape
    words = -(-count // 8)
    if count % 8:
        padded = torch.zeros((n, words * 8), dtype=torch.uint8, device=fields.device)
        padded[:, :count] = fields
        fields = padded
    x = fields.contiguous().view(torch.int64)
    for step in (1, 2, 4):  # neighbours of 8, 16 and 32 bits move together
        low = _lanes(8 * step, 16 * step)
        x = (x & low) | ((x & ~low) >> ((8 - width) * step))
    out = x.view(torch.uint8).view(n, words, 8)[:, :, :width].reshape(n, words * width)
    return out[:, : packed_size(count, width)]


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """Invert `pack`, padding included: uint8 [n, packed_size] to uint8 [n, c], count <= c < count + 8.

    Fields from `count` on hold the padding bits; a strict reader checks that they are zero (`has_padding_bits`).
    """
    if width in _WORDS:
        return _table(width, packed.device).take(packed.to(torch.int64)).view(torch.uint8)
    n = packed.shape[0]
    words = -(-count // 8)
    spread = torch.zeros((n, words, 8), dtype=torch.uint8, device=packed.device)
    whole = packed.shape[1] // width
    spread[:, :whole, :width] = packed[:, : whole * width].view(n, whole, width)
    if remaining := packed.shape[1] - whole * width:
        spread[:, whole, :remaining] = packed[:, whole * width :]
    x = spread.view(n, words * 8).view(torch.int64)
    for step in (4, 2, 1):
        low = _lanes(width * step, 16 * step)
        x = (x & low) | ((x << ((8 - width) * step)) & (low << (8 * step)))
    return x.view(torch.uint8)


def has_padding_bits(packed: Tensor, count: int, width: int) -> Tensor:
    """Return the rows of uint8 [n, packed_size(count, width)] that have padding bits set: bool [n]."""
    used = count * width % 8
    return (packed[:, -1] >> used != 0) if used else torch.zeros(len(packed), dtype=torch.bool, device=packed.device)


_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
"""By field width: the integer type that holds all fields of one byte, one byte each."""


@lru_cache(maxsize=64)
def _table(width: int, device: torch.device) -> Tensor:
    """Return the fields in each byte, as one word: [256]."""
    packed = torch.arange(256, dtype=torch.uint8)
    fields = [(packed >> at) & ((1 << width) - 1) for at in range(0, 8, width)]
    return torch.stack(fields, 1).view(_WORDS[width]).view(-1).to(device)
