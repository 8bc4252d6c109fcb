"""The addresses of data that a spec may name.

They are written by a run's owner, whom a volunteer need not trust: fsspec's chained and code-loading file systems
stay out.
"""

from __future__ import annotations

from protocol.errors import SpecError

ALLOWED = ("file", "http", "https", "s3", "gs", "gcs", "az", "abfs", "hf")
"""Permitted protocols of an address; one without `://` is a folder on the reader's own disk."""


def check_address(address: str) -> str:
    """Return the address's protocol. Raises SpecError for what a peer would not open."""
    protocol, sep, rest = address.partition("://")
    if not sep:
        protocol, rest = "file", address
    if "::" in address or protocol not in ALLOWED or not rest or not address.isprintable():
        raise SpecError(
            f"{address[:100]!r} is no address of data: it begins with one of {', '.join(ALLOWED)}, then ://"
        )
    return protocol
