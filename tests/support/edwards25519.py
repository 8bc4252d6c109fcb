"""The arithmetic of edwards25519 (RFC 8032 section 5.1) in plain integers: slow, and independent of any library."""

from __future__ import annotations

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
"""Order of the base point; the group has eight times as many points."""

IDENTITY = (0, 1)
_D = -121665 * pow(121666, -1, P) % P

Point = tuple[int, int]


def add(a: Point, b: Point) -> Point:
    (x1, y1), (x2, y2) = a, b
    k = _D * x1 * x2 * y1 * y2
    return (x1 * y2 + x2 * y1) * pow(1 + k, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - k, -1, P) % P


def multiply(n: int, point: Point) -> Point:
    found = IDENTITY
    while n:
        if n & 1:
            found = add(found, point)
        point, n = add(point, point), n >> 1
    return found


def encode(point: Point) -> bytes:
    x, y = point
    return (y | (x & 1) << 255).to_bytes(32, "little")


def decode(encoding: bytes) -> Point | None:
    """Return the point of an encoding, canonical or not; None if it encodes none."""
    number = int.from_bytes(encoding, "little")
    y, sign = number % 2**255 % P, number >> 255
    square = (y * y - 1) * pow(_D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - square) % P:
        return None
    return (-x % P if x & 1 != sign else x), y


def small_order_points() -> set[Point]:
    """Return the eight points whose order divides 8: the order of the base point times enough other points."""
    points = (decode(y.to_bytes(32, "little")) for y in range(2, 64))
    return {multiply(ORDER, point) for point in points if point is not None}


_base = decode((4 * pow(5, -1, P) % P).to_bytes(32, "little"))
assert _base is not None
BASE = _base
