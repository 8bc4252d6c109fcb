"""Overviews, rounds and charts as JSON: what the page draws, and what anybody may fetch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from coordinator.credits import RoundAccount
from coordinator.history import Charts
from coordinator.overview import Overview, PeerView
from protocol.ids import PeerKey

MAX_SHOWN = 200
"""Peers in a status: those who train and those with most credits come first."""


def encode(value: Any) -> bytes:
    """Compact JSON; a number that is not finite is a fault here, never a NaN there."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def status(o: Overview) -> dict[str, Any]:
    """The whole overview."""
    return {
        "name": o.name,
        "run": o.run,
        "health": o.health,
        "words": o.words,
        "round": o.round,
        "head": str(o.head),
        "state": str(o.state),
        "state_round": o.state_round,
        "tokens": o.tokens,
        "total_tokens": o.total_tokens,
        "tokens_per_second": _rounded(o.tokens_per_second),
        "loss": _rounded(o.loss),
        "training": o.working,
        "final_round": o.final_round,
        "micro_credits_settled": o.settled,
        "micro_credits_pending": o.pending,
        "alerts": [{"name": a.name, "since": round(a.since), "words": a.words} for a in o.alerts],
        "peers_in_all": len(o.peers),
        "peers": [_peer(p) for p in o.peers[:MAX_SHOWN]],
        "rounds": [
            {
                "round": r.round,
                "record": str(r.record),
                "tokens": r.tokens,
                "loss": _rounded(r.loss),
                "contributors": [name for name, _ in r.contributors[:MAX_SHOWN]],
                "contributors_in_all": len(r.contributors),
                "absent": None if r.absent is None else list(r.absent[:MAX_SHOWN]),
                "final": r.final,
            }
            for r in o.rounds
        ],
    }


def _peer(p: PeerView) -> dict[str, Any]:
    h = p.heartbeat
    return {
        "peer": str(p.peer),
        "name": p.name,
        "phase": p.phase,
        "micro_credits_settled": p.settled,
        "micro_credits_pending": p.pending,
        "seconds_since_heard": None if h is None else round(p.seconds_since, 1),
        "round": None if h is None else h.round,
        "loss": None if h is None else _rounded(h.loss),
        "tokens_per_second": None if h is None else _rounded(h.tokens_per_second),
        "bytes_up": None if h is None else h.bytes_up,
        "bytes_down": None if h is None else h.bytes_down,
        "device": None if h is None else h.device,
    }


def account(a: RoundAccount, final: bool, name_of: Callable[[PeerKey], str]) -> dict[str, Any]:
    """One round with all its entries: enough to check the ledger against the chain."""
    return {
        "round": a.round,
        "record": str(a.record),
        "parent": str(a.parent),
        "base_state": str(a.base_state),
        "loss": _rounded(a.loss),
        "tokens": a.tokens,
        "final": final,
        "entries": [
            {
                "peer": str(e.peer),
                "name": name_of(e.peer),
                "windows": e.windows,
                "tokens": e.tokens,
                "micro_credits": e.micro_credits,
            }
            for e in a.entries
        ],
    }


def charts(c: Charts) -> dict[str, Any]:
    """The columns of both charts."""
    return {
        "tokens": c.tokens,
        "loss": [_rounded(x) for x in c.loss],
        "times": [round(t, 3) for t in c.times],
        "rates": [round(r, 1) for r in c.rates],
    }


def _rounded(value: float | None) -> float | None:
    """Six digits: what a float32 holds. None for what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
