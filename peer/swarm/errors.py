"""What can go wrong between peers, worded for a person."""

from __future__ import annotations

import re
from collections.abc import Mapping

from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey


class SwarmError(CairnError):
    """The network side of the peer cannot do what was asked of it."""


class SwarmStartError(SwarmError):
    """libp2p's daemon did not come up: the message has its own words and the remedy."""


class PeerUnreachable(SwarmError):
    """A member could not be dialled, or did not answer in time."""


class PeerRefused(SwarmError):
    """A member answered with an error: it is too busy, or does not take what was sent."""


class PacketTooLarge(SwarmError):
    """More than one unary message carries: split it, or send less."""


class BlobUnavailable(SwarmError):
    """No holder gave the blob in time. `reasons` says what each of them did."""

    def __init__(self, digest: Digest, why: str, reasons: Mapping[PeerKey, str]):
        self.digest = digest
        self.reasons = dict(reasons)
        said = "; ".join(
            f"{peer.short}: {reason.removeprefix(f'peer {peer.short}: ')}"
            for peer, reason in list(self.reasons.items())[:8]
        )
        super().__init__(f"blob {digest.short} could not be fetched ({why})" + (f": {said}" if said else ""))


_DIAL = re.compile(r"failed to dial .*all dials failed.*\] (.+)$")


def libp2p_words(text: str) -> str:
    """What libp2p's daemon, or a stranger, says of an error: one line fit for a log. Of all the dials that failed, with
    an address each, only why the last one did."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:4000]).split())
    found = _DIAL.search(line)
    return (f"cannot be dialled: {found[1]}" if found else line)[:300]
