"""Bytes that were good once, for fuzzing parsers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st


@st.composite
def mutated(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds with one to four bytes or runs of bytes changed, cut out, put in, or taken from another."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 3)):
            case 0 if data:
                data[at] = draw(st.integers(0, 255))
            case 1:
                del data[at : at + draw(st.integers(1, 40))]
            case 2:
                data[at:at] = draw(st.binary(min_size=1, max_size=20))
            case _:
                other = draw(st.sampled_from(seeds))
                data[at : at + 8] = other[at : at + draw(st.integers(0, 60))]
    return bytes(data)
