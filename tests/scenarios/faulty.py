"""A peer that serves bad chunks: `python -m tests.scenarios.faulty peer join ...` is `cairn` with one bit flipped.

Every full chunk that it gives to others (of a state; an update of the scenarios is less than one) has a bit that is not
the blob's. Its own store is whole, and it does not notice: as with bad memory beside a good disk, or a liar.
"""

from __future__ import annotations

import sys

from cairn.main import main
from peer.swarm.transfer.blob_server import BlobServer
from peer.swarm.transfer.frames import BlobOp, BlobReply, BlobRequest, ReplyStatus
from protocol.merkle import CHUNK


class Faulty(BlobServer):
    """Serves what is wrong."""

    def look_up(self, request: BlobRequest) -> BlobReply:
        reply = super().look_up(request)
        if request.op is not BlobOp.CHUNK or reply.status is not ReplyStatus.OK or len(reply.data) < CHUNK:
            return reply
        wrong = bytearray(reply.data)
        wrong[len(wrong) // 2] ^= 1
        return BlobReply(ReplyStatus.OK, bytes(wrong))


if __name__ == "__main__":
    import peer.swarm.swarm

    peer.swarm.swarm.BlobServer = Faulty
    sys.exit(main())
