"""Certificates of records with given updates, unsigned: for tests of what is drawn from their digests."""

from __future__ import annotations

from collections.abc import Mapping

from protocol.ids import Digest, PeerKey, Round, RunId, sha256
from protocol.messages import Certificate, RoundRecord, Signed, UpdateHeader

RUN = RunId(sha256(b"run"))
STATE = Digest(sha256(b"state"))


def key(name: object) -> PeerKey:
    return PeerKey(sha256(f"key {name}".encode()))


def header(author: PeerKey, windows: int, first: int = 0) -> Signed[UpdateHeader]:
    body = UpdateHeader(
        RUN, Round(3), STATE, STATE, first, first, first + windows, 1, Digest(sha256(b"blob", author)), 1, 1.0, b""
    )
    return Signed(body, author, Digest(sha256(b"header", author, repr((first, windows)).encode())), b"")


def certificate(name: object, windows: Mapping[PeerKey, int]) -> Certificate:
    """Return the certificate of a record of round 3 whose digest is that of `name`."""
    updates = tuple(header(author, windows[author]) for author in sorted(windows))
    record = RoundRecord(RUN, Round(3), STATE, STATE, 0, updates)
    return Certificate(Signed(record, updates[0].author, Digest(sha256(f"record {name}".encode())), b""), ())
