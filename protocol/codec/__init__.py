"""How pseudo-gradients become bytes and back: the codecs of a run spec, behind one small interface.

Here live the wire formats of blobs and their strict decoders, on tensors of any device. Nothing here knows of rounds,
signatures, files or networks, and nothing here weighs or averages updates: that is `protocol.outer`.
"""

from __future__ import annotations

from protocol.codec.int8 import Int8Codec
from protocol.codec.interface import Codec, Decoded
from protocol.codec.none import RawCodec
from protocol.codec.runs import Run
from protocol.codec.sign import SignCodec
from protocol.codec.sparse import SparseCodec
from protocol.layout import Layout
from protocol.spec import CodecSpec

__all__ = ["Codec", "Decoded", "Run", "make_codec"]


def make_codec(spec: CodecSpec, layout: Layout) -> Codec:
    """The run's codec for its model. `layout` is the model's, without the outer optimiser's momentum."""
    if spec.kind == "sparse":
        return SparseCodec(layout, spec.k)
    if spec.kind == "sign":
        return SignCodec(layout)
    if spec.kind == "int8":
        return Int8Codec(layout)
    return RawCodec(layout)
