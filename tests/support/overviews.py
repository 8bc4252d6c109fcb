"""Shared by several tests: overviews."""

from __future__ import annotations

from coordinator.overview import Overview, PeerOverview
from protocol.ids import Digest, Round
from protocol.messages import Heartbeat
from tests.support.coordinator_fakes import make_spec, peer

SPEC = make_spec()


def overview(round_: int, peers: dict[int, tuple[str, int]]) -> Overview:
    """Peers by number: phase, and bytes that they say they have sent."""
    run = SPEC.run_id
    views = tuple(
        PeerOverview(
            peer(n).key, str(n), phase,
            Heartbeat(run, 1, Round(round_), Digest(bytes(32)), 0, 0, phase, 1.0, 1.0, up, 2 * up, (), (), b"", ""),
            0.0, 0, 0,
        ) for n, (phase, up) in peers.items()
    )  # fmt: skip
    nothing = Digest(bytes(32))
    return Overview(
        "", "", "healthy", "", round_, nothing, nothing, 0, 0, 0, 0.0, None, len(views), views, (), 0, 0, None, "", None
    )  # fmt: skip
