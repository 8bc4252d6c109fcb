"""Errors between peers, worded for a person."""

from __future__ import annotations

import re
from collections.abc import Mapping

from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey
from protocol.plain_text import one_line


class SwarmError(CairnError):
    """The network side of the peer cannot do what was requested."""


class SwarmStartError(SwarmError):
    """The transport did not start. The message has its own report and the remedy."""


class PeerUnreachable(SwarmError):
    """A member could not be dialled, or did not answer in time."""


class PeerRefused(SwarmError):
    """A member answered with an error: it is too busy, or does not accept what was sent."""


class PeerBusy(PeerRefused):
    """A member answered that it is too busy: the same request may be accepted soon."""


class PacketTooLarge(SwarmError):
    """The message exceeds what one unary call carries: split it, or send less."""


class TooBusy(SwarmError):
    """A sender exceeded its limits. The sender receives this class's name with the text, and raises PeerBusy."""


class BlobFetchError(SwarmError):
    """No provider gave the blob in time. `reasons` has what each of them did."""

    def __init__(self, digest: Digest, why: str, reasons: Mapping[PeerKey, str]):
        self.digest = digest
        self.reasons = dict(reasons)
        said = "; ".join(
            f"{peer.short}: {reason.removeprefix(f'peer {peer.short}: ')}"
            for peer, reason in list(self.reasons.items())[:8]
        )
        super().__init__(f"blob {digest.short} could not be fetched ({why})" + (f": {said}" if said else ""))


_DIAL = re.compile(r"failed to dial .*all dials failed.*\] (.+)$")


def short_report(text: str | bytes) -> str:
    """Return an error text of libp2p's daemon, or of a stranger, as one line fit for a log, at most 300 characters.

    The daemon quotes what others sent: if that is no UTF-8, protobuf gives bytes instead of a text. Of a list of
    failed dials with an address each, only the reason of the last one stays.
    """
    text = text[:4000]
    line = one_line(text.decode(errors="replace") if isinstance(text, bytes) else text)
    found = _DIAL.search(line)
    return (f"cannot be dialled: {found[1]}" if found else line)[:300]
