"""The encodings of Ed25519 points that Cairn refuses, as keys and as the R of signatures.

Signatures are verified without the cofactor: S*B = R + k*A, k = SHA-512(R, A, message), with S below the group's order.
Libraries agree on that, but not on A and R of small order, nor on encodings that RFC 8032 does not have. With a key of
small order anybody signs anything. So both are refused before a library sees them. Nobody has these points by chance.
"""

from __future__ import annotations

_P = 2**255 - 19
_ORDER_8_Y = (
    0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
    0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,
)
_SMALL_ORDER_Y = (0, 1, _P - 1, *_ORDER_8_Y)
_NOT_REDUCED_Y = range(_P, 2**255)

WEAK_POINTS = frozenset(
    (y | sign << 255).to_bytes(32, "little") for y in (*_SMALL_ORDER_Y, *_NOT_REDUCED_Y) for sign in (0, 1)
)
"""The 8 points of small order, and all 40 encodings that are not canonical: y of 2^255 - 19 or more, or x = -0."""
