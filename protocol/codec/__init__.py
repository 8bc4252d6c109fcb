"""How pseudo-gradients become bytes and back: the codecs of a run spec, behind one small interface.

Here live the wire formats of blobs and their strict decoders, on tensors of any device. Nothing here knows of rounds,
signatures, files or networks, and nothing here weighs or averages updates: that is `protocol.outer`.
"""

from __future__ import annotations

from protocol.codec.batches import Batch
from protocol.codec.int8 import Int8Codec
from protocol.codec.interface import Codec, Decoded
from protocol.codec.none import RawCodec
from protocol.codec.sign import SignCodec
from protocol.codec.sparse import SparseCodec
from protocol.codec.sparse8 import Sparse8Codec
from protocol.layout import BLOCK, Layout
from protocol.spec import MEAN_KEEP_FACTOR, CodecSpec

__all__ = ["Codec", "Decoded", "Batch", "make_codec", "make_shard_codec"]


def make_codec(spec: CodecSpec, layout: Layout) -> Codec:
    """Return the run's codec for its model. `layout` is the model's, without the outer optimizer's momentum."""
    if spec.kind == "sparse":
        return SparseCodec(layout, spec.k)
    if spec.kind == "sign":
        return SignCodec(layout)
    if spec.kind == "int8":
        return Int8Codec(layout)
    return RawCodec(layout)


def make_shard_codec(codec: Codec, layout: Layout) -> Codec:
    """Return the codec that encodes a mean of updates of this codec (see `protocol.reduce`).

    Encoding with it gives the same bytes on every machine, whatever the device and the number of threads.
    """
    if isinstance(codec, SparseCodec):
        return Sparse8Codec(layout, min(BLOCK, MEAN_KEEP_FACTOR * codec.kept))
    return RawCodec(layout) if isinstance(codec, RawCodec) else Int8Codec(layout)
