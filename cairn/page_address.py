"""Addresses of a run's page. A coordinator names them, and terminals show them: only plain ones count."""

from __future__ import annotations

import re

from protocol.ids import PeerKey

_PAGE = re.compile(r"https?://[A-Za-z0-9._~:\[\]-]+(/[A-Za-z0-9._~/-]*)?")


def page_address(page: str) -> str:
    """Return the address of the run's page with a slash at its end; "" when the coordinator's word is no address."""
    if not _PAGE.fullmatch(page):
        return ""
    return page if page.endswith("/") else f"{page}/"


def own_page(page: str, key: PeerKey) -> str:
    """Return the address of a peer on the run's page; "" when the coordinator's page is no valid address."""
    address = page_address(page)
    return f"{address}#peer/{key}" if address else ""
