"""Two lines in the log, once in each run: the first update is accepted, and the first credit has settled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Set

from cairn.peer_view import PeerView
from peer.store import Store, StoreError
from protocol.ledger.credit_text import credit_text

ACCEPTED, SETTLED = "accepted", "settled"

TOLD = "milestones"
"""Name of the value in the store: the moments that were logged, one a line."""

LOOK_SECONDS = 1.0

log = logging.getLogger("cairn.peer")


async def log_milestones(view: Callable[[], PeerView], store: Store) -> None:
    """Log each moment when it comes, until both have come, in this life of the peer or an earlier one."""
    try:
        told = set((store.read_value(TOLD) or b"").decode(errors="replace").split())
        while not {ACCEPTED, SETTLED} <= told:
            for name, text in milestones(view(), told):
                told.add(name)
                store.write_value(TOLD, "\n".join(sorted(told)).encode())
                log.info("%s", text, extra={"style": "bold green", "fields": {"milestone": name}})
            await asyncio.sleep(LOOK_SECONDS)
    except StoreError as e:
        log.warning("%s", e)  # a disk that cannot be written stops the node anyway


def milestones(view: PeerView, told: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield the moments that have come and are not among those `told` before, each with its line."""
    fate, earnings = view.node.last_update, view.earnings
    if ACCEPTED not in told and fate is not None and fate.accepted:
        yield (
            ACCEPTED,
            f"★ your first update was accepted, in round {fate.round}: everybody trains on from it. Thank you!",
        )
    if SETTLED not in told and earnings is not None and earnings.micro_credits > 0:
        yield (
            SETTLED,
            f"★ your first credit has settled: {credit_text(earnings.micro_credits)}. Nobody can take it away now",
        )
