"""A second reader of updates and the outer step, from docs/codec.md alone. It imports no Cairn and no torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from tests.vectors.plain import layout_digest

BLOCK = 4096
IDENTIFIERS = {"sparse": 1, "int8": 2, "none": 3, "sign": 4, "sparse8": 5}
Tensors = Sequence[tuple[str, Sequence[int]]]
F32 = np.float32


class Refused(Exception):
    """The bytes break a rule of the format."""


@dataclass
class Values:
    """A decoded tensor: fp32 values (0 where none was sent), the positions listed, and the blocks' energies."""

    values: np.ndarray
    positions: list[int]
    energies: list[float]


def read_bf16(data: bytes) -> float:
    return struct.unpack("<f", b"\0\0" + data)[0]


def read_bits(data: bytes, width: int, count: int) -> list[int]:
    number = int.from_bytes(data, "little")
    if number >> (width * count):
        raise Refused("padding bits")
    return [(number >> (width * i)) & ((1 << width) - 1) for i in range(count)]


def packed(count: int, width: int) -> int:
    return (count * width + 7) // 8


def kept(m: int, k: int) -> int:
    return -(-m * k // BLOCK)


def _low(m: int, k: int) -> int:
    low = 0
    while k << (low + 1) <= m:
        low += 1
    return low


def positions_size(m: int, k: int) -> tuple[str, int, int]:
    """Return the form of positions, and the bytes of its (at most) two parts."""
    if k == m:
        return "none", 0, 0
    low = _low(m, k)
    parts = packed(k, low), packed(k + ((m - 1) >> low), 1)
    return ("bitmap", packed(m, 1), 0) if packed(m, 1) <= sum(parts) else ("elias-fano", *parts)


def block_size(kind: str, m: int, k: int) -> int:
    if kind in ("sparse", "sparse8"):
        k = kept(m, k)
        _, a, b = positions_size(m, k)
        return a + b + (4 + packed(k, 2) if kind == "sparse" else 2 + k)
    return {"sign": 2 + packed(m, 1), "int8": 2 + m, "none": 4 * m}[kind]


def read_positions(data: bytes, m: int, k: int) -> list[int]:
    form, a, _ = positions_size(m, k)
    if form == "none":
        return list(range(m))
    if form == "bitmap":
        found = [i for i, bit in enumerate(read_bits(data, 1, m)) if bit]
    else:
        low = _low(m, k)
        lows = read_bits(data[:a], low, k)
        ones = [i for i, bit in enumerate(read_bits(data[a:], 1, k + ((m - 1) >> low))) if bit]
        if len(ones) != k:
            raise Refused("another number of positions")
        found = [(one - i) << low | lows[i] for i, one in enumerate(ones)]
    if len(found) != k or any(p >= q for p, q in zip(found, found[1:], strict=False)) or found[-1] >= m:
        raise Refused("positions")
    return found


def read_scale(data: bytes, most: float) -> float:
    scale = read_bf16(data)
    if data != b"\0\0" and not 2.0**-60 <= scale <= most:
        raise Refused("a scale")
    return scale


def read_block(kind: str, data: bytes, m: int, k: int) -> tuple[list[int], list[float], float]:
    """Return the positions, values and energy of an encoded block of m coordinates."""
    if kind == "none":
        values = np.frombuffer(data, "<f4")
        if not (np.abs(values) <= 2.0**30).all():
            raise Refused("a value")
        squares = np.zeros(BLOCK)
        squares[:m] = values.astype(np.float64) ** 2
        while len(squares) > 1:
            half = len(squares) // 2
            squares = squares[:half] + squares[half:]
        return list(range(m)), values.tolist(), float(squares[0])
    if kind == "sign":
        scale = read_scale(data[:2], 2.0**30)
        values = [-scale if bit else scale for bit in read_bits(data[2:], 1, m)]
        return list(range(m)), values, m * scale * scale
    kept_here = kept(m, k) if kind != "int8" else m
    size = sum(positions_size(m, kept_here)[1:])
    if kind == "sparse":
        lo, hi = read_scale(data[:2], 2.0**30), read_scale(data[2:4], 2.0**30)
        if lo > hi:
            raise Refused("levels")
        codes = read_bits(data[4 + size :], 2, kept_here)
        positions = read_positions(data[4 : 4 + size], m, kept_here)
        highs = sum(c & 1 for c in codes)
        values = [(-1 if c & 2 else 1) * (hi if c & 1 else lo) for c in codes]
        return positions, values, hi * hi * highs + lo * lo * (kept_here - highs)
    scale = read_scale(data[:2], 2.0**23)
    positions = read_positions(data[2 : 2 + size], m, kept_here)
    codes = struct.unpack(f"{kept_here}b", data[2 + size :])
    if -128 in codes:
        raise Refused("-128")
    return positions, [c * scale for c in codes], sum(c * c for c in codes) * (scale * scale)


def read_blob(blob: bytes, kind: str, k: int, tensors: Tensors) -> list[Values]:
    """Return the decoded tensors of an update. Raise Refused for anything but a valid blob."""
    header = b"CRN1" + bytes([IDENTIFIERS[kind], 2]) + struct.pack("<H", k if kind.startswith("sparse") else 0)
    if blob[:40] != header + layout_digest(tensors):
        raise Refused("header")
    at, out = 72, []  # after the author
    for _, shape in tensors:
        n = math.prod(shape)
        tensor = Values(np.zeros(n, F32), [], [])
        for start in range(0, n, BLOCK):
            m = min(BLOCK, n - start)
            size = block_size(kind, m, k)
            if len(blob) < at + size:
                raise Refused("size")
            positions, values, energy = read_block(kind, blob[at : at + size], m, k)
            at += size
            tensor.values[[start + p for p in positions]] = np.array(values, F32)
            tensor.positions += [start + p for p in positions]
            tensor.energies.append(energy)
        out.append(tensor)
    if at != len(blob):
        raise Refused("size")
    return out


# -- the outer step ----------------------------------------------------------------------------------------------


def shares(windows: Sequence[int], cap: float) -> list[float]:
    """Return the shares of the weight, by trying how many are cut to the common level."""
    most, n = Fraction(cap), len(windows)
    if n * most <= 1:
        return [1 / n] * n
    for cut in range(n):
        rest = sum(sorted(windows)[: n - cut])
        level = most * rest / (1 - cut * most)
        if level >= max(sorted(windows)[: n - cut]):
            kept_weights = [min(Fraction(w), level) for w in windows]
            return [float(w / sum(kept_weights)) for w in kept_weights]
    raise AssertionError("some level keeps the cap")


LARGEST = float(np.finfo(F32).max)


def limit(norms: Sequence[float], weights: Sequence[float], reference: float) -> float:
    """Return the lower median by number, that by weight, or what is between them and nearest to the reference norm."""
    lower: list[float] = []
    for given in ([1] * len(norms), [round(weight * 2**53) for weight in weights]):
        pairs = list(zip(norms, given, strict=True))
        lower.append(min(norm for norm in norms if 2 * sum(g for n, g in pairs if n <= norm) >= sum(given)))
    found = min(lower)
    if reference > 0:
        found = max(found, min(reference, max(lower)))
        found = max(min(found, 2 * reference), reference / 2)
    return min(max(found, 2.0**-24), LARGEST) if found else 0.0


def mean_of(
    updates: Sequence[tuple[int, list[Values]]], kind: str, outer: dict[str, Any], references: Sequence[float]
) -> tuple[list[np.ndarray], list[float]]:
    """Return the mean of updates, fp32 by tensor, and the tensors' limits.

    `updates`: windows and values, by ascending author. `references`: the reference norms; 0 in a reduced round.
    """
    weights = shares([w for w, _ in updates], outer["weight_cap"])
    by_senders = outer["mean"] == "senders" and kind == "sparse"
    means, limits = [], []
    for index, reference in enumerate(references):
        tensors = [values[index] for _, values in updates]
        factors = [1.0] * len(updates)
        if outer["clip"] == "median":
            norms = [math.sqrt(math.fsum(t.energies)) for t in tensors]
            limits.append(limit(norms, weights, reference))
            factors = [min(1.0, limits[-1] / norm) if norm else 1.0 for norm in norms]
        total, weight = np.zeros_like(tensors[0].values), np.zeros_like(tensors[0].values)
        for t, w, c in zip(tensors, weights, factors, strict=True):
            total = total + t.values * F32(w * c)
            weight = weight + np.where(t.values != 0, F32(w), F32(0))
        if by_senders:
            total = np.where(weight > 0, total / np.where(weight > 0, weight, F32(1)), F32(0))
        means.append(total)
    return means, limits


def step(state: dict[str, np.ndarray], tensors: Tensors, mean: Sequence[np.ndarray], outer: dict[str, Any]) -> None:
    """Take the outer step, in place: flat fp32 tensors by name, momentum too."""
    lr, mu = F32(outer["lr"]), F32(outer["momentum"])
    for (name, _), change in zip(tensors, mean, strict=True):
        if outer["optimizer"] == "nesterov":
            momentum = state["outer_momentum/" + name] = state["outer_momentum/" + name] * mu + change
            change = change + momentum * mu
        if lr != 1:
            change = change * lr
        state[name] = state[name] - change


# -- reduced shards ------------------------------------------------------------------------------------------------


def shard_slices(tensors: Tensors, count: int) -> list[list[tuple[int, int, int]]]:
    """Return for each shard the (tensor, first, last + 1) coordinates of its blocks."""
    blocks = [
        (i, start, min(start + BLOCK, math.prod(shape)))
        for i, (_, shape) in enumerate(tensors)
        for start in range(0, math.prod(shape), BLOCK)
    ]
    found = []
    for p in range(count):
        slices: list[tuple[int, int, int]] = []
        for i, start, stop in blocks[len(blocks) * p // count : len(blocks) * (p + 1) // count]:
            if slices and slices[-1][0] == i:
                slices[-1] = (i, slices[-1][1], stop)
            else:
                slices.append((i, start, stop))
        found.append(slices)
    return found


def shard_layout(slices: Sequence[tuple[int, int, int]], shard: int) -> list[tuple[str, list[int]]]:
    return [(f"{shard:04d}/{i:05d}", [stop - start]) for i, (_, start, stop) in enumerate(slices)]


def sliced(values: Values, start: int, stop: int) -> Values:
    first = start // BLOCK
    inside = [p - start for p in values.positions if start <= p < stop]
    return Values(values.values[start:stop], inside, values.energies[first : first + -(-(stop - start) // BLOCK)])


def encode_shard(mean: Sequence[np.ndarray], layout: Tensors, kind: str, k: int) -> bytes:
    """Return the blob of a shard: `int8`, `none` or `sparse8`."""
    header = b"CRN1" + bytes([IDENTIFIERS[kind], 2]) + struct.pack("<H", k if kind == "sparse8" else 0)
    out = header + layout_digest(layout) + bytes(32)
    for values in mean:
        limited = np.clip(values, F32(-(2.0**29)), F32(2.0**29))
        for start in range(0, len(limited), BLOCK):
            out += _encode_block(limited[start : start + BLOCK], kind, k)
    return out


def _encode_block(x: np.ndarray, kind: str, k: int) -> bytes:
    if kind == "none":
        return x.astype("<f4").tobytes()
    m = len(x)
    count = kept(m, k) if kind == "sparse8" else m
    positions = sorted(sorted(range(m), key=lambda i: (-abs(float(x[i])), i))[:count])
    chosen = x[positions]
    scale = np.abs(chosen).max() / F32(127)
    bits = int(scale.view(np.uint32))
    scale = np.array((bits + 0xFFFF) >> 16 << 16 if scale >= F32(2.0**-60) else 0, np.uint32).view(F32)
    codes = np.rint(chosen / (scale if scale > 0 else F32(1))).astype(np.int8)
    return scale.tobytes()[2:] + _encode_positions(positions, m, count) + codes.tobytes()


def _encode_positions(positions: Sequence[int], m: int, k: int) -> bytes:
    form, a, b = positions_size(m, k)
    if form == "none":
        return b""
    if form == "bitmap":
        return sum(1 << p for p in positions).to_bytes(a, "little")
    low = _low(m, k)
    lows = sum((p & ((1 << low) - 1)) << (low * i) for i, p in enumerate(positions))
    highs = sum(1 << ((p >> low) + i) for i, p in enumerate(positions))
    return lows.to_bytes(a, "little") + highs.to_bytes(b, "little")
