"""Overviews, peers, rounds and charts as JSON values, for the page and for everybody."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.audit_index import AuditCase
from coordinator.credits.leaderboard import CreditSummary
from coordinator.directives import RunMark
from coordinator.history import Charts
from coordinator.ledger import CarriedReport, StatedDecision
from coordinator.non_participation import NonParticipation
from coordinator.overview import Overview, PeerOverview, RoundOverview
from coordinator.round_observations import RoundObservation
from protocol.ids import PeerKey
from protocol.messages import Certificate

FIRST_PEERS, FIRST_ROUNDS = 25, 8
"""In a status: the first page of peers, and the newest rounds."""

SHOWN = 12
"""Names in a row of rounds; the round's own view has all."""

SHOWN_REPORTS = 24
"""Reports of a case: a jury has up to 64 keys."""

NameOf = Callable[[PeerKey], str]


def encode(value: Any) -> bytes:
    """Return compact JSON. A number that is not finite is an error here, never a NaN at the client."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def event(o: Overview, now: float) -> dict[str, Any]:
    """Return the state alone: small, since every viewer gets it every two seconds."""
    return {
        "name": o.name,
        "run": o.run,
        "time": round(now, 3),
        "health": o.health,
        "message": o.message,
        "round": o.round,
        "next_round_seconds": None if o.next_round_seconds is None else round(o.next_round_seconds, 1),
        "head": str(o.head),
        "state": str(o.state),
        "state_round": o.state_round,
        "tokens": o.tokens,
        "total_tokens": o.total_tokens,
        "tokens_per_second": rounded(o.tokens_per_second),
        "loss": rounded(o.loss),
        "validation_loss": rounded(o.validation_loss),
        "validation_round": o.validation_round,
        "training": o.training,
        "final_round": o.final_round,
        "micro_credits_settled": o.settled,
        "micro_credits_pending": o.pending,
        "alerts": [{"name": a.name, "since": round(a.since), "message": a.message} for a in o.alerts],
        "peers_total": len(o.peers),
    }


def status(o: Overview, name_of: NameOf, now: float) -> dict[str, Any]:
    """Return the state, the first peers and the newest rounds."""
    return event(o, now) | {
        "peers": [peer(p, name_of) for p in o.peers[:FIRST_PEERS]],
        "rounds": [round_row(r, name_of) for r in o.rounds[:FIRST_ROUNDS]],
    }


def peer(p: PeerOverview, name_of: NameOf) -> dict[str, Any]:
    h = p.heartbeat
    row = {
        "peer": str(p.peer),
        "name": p.name,
        "phase": p.phase,
        "since": None if p.since is None else round(p.since, 1),
        "micro_credits_settled": p.settled,
        "micro_credits_pending": p.pending,
        "last_round": p.last_round,
        "absence": None if p.absence is None else absence(p.absence),
        "conviction": None if p.conviction is None else conviction(p.conviction, name_of, barred=p.phase == "barred"),
    }
    if h is None:
        return row | dict.fromkeys(_SAID_BY_ITSELF)
    return row | {
        "seconds_since_heartbeat": round(p.seconds_since, 1),
        "round": h.round,
        "loss": rounded(h.loss) or None,
        "tokens_per_second": rounded(h.tokens_per_second),
        "bytes_up": h.bytes_up,
        "bytes_down": h.bytes_down,
        "up_per_second": round(p.up),
        "down_per_second": round(p.down),
        "relayed_peers": len(h.unreachable),
        "device": h.device,
    }


_SAID_BY_ITSELF = (
    "seconds_since_heartbeat", "round", "loss", "tokens_per_second", "bytes_up", "bytes_down", "up_per_second",
    "down_per_second", "relayed_peers", "device",
)  # fmt: skip


def round_row(r: RoundOverview, name_of: NameOf) -> dict[str, Any]:
    credits, observed = r.credits, r.observed
    return {
        "round": credits.round,
        "record": str(credits.record),
        "tokens": credits.tokens,
        "loss": rounded(credits.loss),
        "final": r.final,
        "contributors": [_named(e.peer, name_of) for e in credits.lines[:SHOWN]],
        "contributors_total": len(credits.lines),
        "absent": None if observed is None or observed.absent is None else _absent(observed.absent[:SHOWN], name_of),
        "absent_total": 0 if observed is None else observed.absent_total,
        "observed": None if observed is None else _times(observed),
    }


def round_page(r: RoundOverview, announced: dict[PeerKey, float], name_of: NameOf) -> dict[str, Any]:
    """Return a whole round; `announced` are seconds from the first announcement to each."""
    credits, observed = r.credits, r.observed
    return round_row(r, name_of) | {
        "parent": str(credits.parent),
        "base_state": str(credits.base_state),
        "micro_credits": credits.micro_credits,
        "contributors": [
            _entry(e, name_of) | {"announced_seconds": None if (t := announced.get(e.peer)) is None else round(t, 2)}
            for e in credits.lines
        ],
        "absent": None if observed is None or observed.absent is None else _absent(observed.absent, name_of),
    }


def conviction(c: AuditCase, name_of: NameOf, *, barred: bool) -> dict[str, Any]:
    """Return why a peer was convicted, in short: a row of peers has it."""
    return {"round": c.stated, "update_round": c.round, "barred_until": c.barred_until, "barred": barred,
            "pardoned": c.pardoned_in, "message": c.finding(name_of)}  # fmt: skip


def audit_case(c: AuditCase, final: bool, name_of: NameOf) -> dict[str, Any]:
    """Return a case with its reports, failed ones first; `final`: the record that states the decision is final."""
    ordered = sorted(c.reports, key=lambda r: r.body.passed)
    return {
        "round": c.round,
        "record": str(c.record),
        "update": str(c.update),
        "finding": c.finding(name_of),
        "reports": [_report(r, name_of) for r in ordered[:SHOWN_REPORTS]],
        "reports_total": len(ordered),
        "accusers": len({r.reporter for r in c.reports if not r.body.passed and r.body.check == "replay"}),
        "decision": None if c.outcome is None else _decision(c, c.outcome, final, name_of),
    } | _named(c.author, name_of)


def _report(r: CarriedReport, name_of: NameOf) -> dict[str, Any]:
    scores = [{"name": s.name, "value": rounded(s.value), "threshold": rounded(s.threshold)} for s in r.body.scores]
    about = {"check": r.body.check, "passed": r.body.passed, "carried": r.carried, "scores": scores}
    return _named(r.reporter, name_of) | about


def _decision(c: AuditCase, d: StatedDecision, final: bool, name_of: NameOf) -> dict[str, Any]:
    refuted = d.decision.refuted
    return {
        "round": d.stated,
        "record": str(d.stated_by),
        "final": final,
        "convicted": d.decision.convicted,
        "barred_until": c.barred_until if d.decision.convicted else None,
        "pardoned": c.pardoned_in,
        "micro_credits_voided": d.voided,
        "refuted": [_named(key, name_of) for key in refuted[:SHOWN]],
        "refuted_total": len(refuted),
    }


def certificate(c: Certificate, name_of: NameOf) -> dict[str, Any]:
    """Return a certificate for people, with the signed bytes (base64) for verifiers."""
    body = c.record.body
    return {
        "round": body.round,
        "record": str(c.digest),
        "parent": str(body.parent),
        "base_state": str(body.base_state),
        "attempt": body.attempt,
        "proposer": _named(c.record.author, name_of),
        "updates": [
            _named(u.author, name_of)
            | {
                "update": str(u.digest),
                "blob": str(u.body.blob),
                "first_window": u.body.first_window,
                "rebase_window": u.body.rebase_window,
                "end_window": u.body.end_window,
                "loss": rounded(u.body.loss),
            }
            for u in body.updates
        ],
        "votes": [_named(v.author, name_of) for v in c.votes],
        "shards": [str(p) for p in c.shards],
        "bytes": {"record": base64_text(c.record.encoded), "votes": [base64_text(v.encoded) for v in c.votes]},
    }


def credit_summary(c: CreditSummary) -> dict[str, Any]:
    """Return a row of the leaderboard, which is the answer of /api/accounts too."""
    return {
        "key": c.key,
        "kind": c.kind,
        "name": c.name,
        "team": c.team,
        "account": None if c.account is None else str(c.account),
        "micro_credits_settled": c.settled,
        "micro_credits_pending": c.pending,
        "micro_credits_voided": c.voided,
        "recent": c.recent,
        "tokens": c.tokens,
        "rounds": c.rounds,
        "peers": [str(p) for p in c.peers],
    }


def charts(
    c: Charts, by_round: dict[str, Any], validation: list[dict[str, Any]], marks: Sequence[RunMark] = ()
) -> dict[str, Any]:
    return {
        "rounds": c.rounds,
        "tokens": c.tokens,
        "loss": [rounded(x) for x in c.loss],
        "seen_at": [None if t is None else round(t, 1) for t in c.seen],
        "times": [round(t, 3) for t in c.times],
        "rates": [round(r, 1) for r in c.rates],
        "by_round": by_round,
        "validation": validation,
        "marks": [{"time": round(m.time, 1), "kind": m.kind, "text": m.text} for m in marks],
    }


def round_charts(seen: Sequence[RoundObservation], limit: int = 400) -> dict[str, Any]:
    """Return the course of rounds: columns of at most `limit` entries, oldest first.

    An entry is one round or the mean of several; None where nothing was observed.
    """
    step = max(1, math.ceil(len(seen) / limit))
    groups = [seen[i : i + step] for i in range(0, len(seen), step)]

    def column(name: str, digits: int) -> list[float | None]:
        return [_mean([getattr(s, name) for s in group], digits) for group in groups]

    return {
        "times": [round(group[-1].certified, 1) for group in groups],
        "train": column("train", 2),
        "exchange": column("exchange", 2),
        "commit": column("commit", 2),
        "peers": column("training", 1),
        "sent": column("sent", 0),
        "received": column("received", 0),
    }


def _mean(values: Sequence[float | None], digits: int) -> float | None:
    known = [v for v in values if v is not None]
    return round(sum(known) / len(known), digits) if known else None


def rounded(value: float | None) -> float | None:
    """Return six digits, the precision of a float32; None for non-finite values."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _named(peer: PeerKey, name_of: NameOf) -> dict[str, Any]:
    return {"peer": str(peer), "name": name_of(peer)}


def _entry(e, name_of: NameOf) -> dict[str, Any]:
    return _named(e.peer, name_of) | {"windows": e.windows, "tokens": e.tokens, "micro_credits": e.micro_credits}


def absence(a: NonParticipation) -> dict[str, str]:
    return {"reason": a.reason, "message": a.message}


def _absent(absent: tuple[NonParticipation, ...], name_of: NameOf) -> list[dict[str, Any]]:
    return [_named(a.peer, name_of) | absence(a) for a in absent]


def _times(s: RoundObservation) -> dict[str, Any]:
    seconds = {"train": s.train, "exchange": s.exchange, "commit": s.commit, "whole": s.whole}
    times = {name: None if t is None else round(t, 2) for name, t in seconds.items()}
    return times | {"certified": round(s.certified, 1), "training": s.training, "sent": s.sent, "received": s.received}


def base64_text(data: bytes) -> str:
    """Return bytes as text for JSON."""
    return base64.b64encode(data).decode()
