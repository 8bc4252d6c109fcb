"""The codec of directives: strict, bounded, whole. See docs/control.md for their effects."""

from __future__ import annotations

from dataclasses import fields

from protocol.checks import ascending, bounded, parsed, text
from protocol.errors import MalformedError
from protocol.ids import MAX_COUNT, MAX_ROUND, Digest, PeerKey, Round, RunId
from protocol.messages import (
    MAX_BANNED,
    MAX_CONTRIBUTORS,
    MAX_PARDONS,
    MAX_REASON,
    MAX_VERDICT_REASON,
    MAX_VERDICTS,
    RUN_STATUSES,
    Directive,
    Pardon,
    Rollback,
    RoundChanges,
    Verdict,
)
from protocol.wire import swarm_pb2 as wire

MAX_DIRECTIVE_ENVELOPE = 48 * 1024
"""No envelope of this kind is larger, in bytes."""

MAX_EPOCH = 2**20

CHANGE_BOUNDS: dict[str, tuple[float, float]] = {
    "target_tokens": (1, MAX_COUNT - 1), "max_update_tokens": (1, MAX_COUNT - 1), "max_members": (1, MAX_CONTRIBUTORS),
    **dict.fromkeys(
        ("max_seconds", "exchange_seconds", "propose_seconds", "patience_seconds", "member_seconds"),
        (1e-3, 86_400 * 7),
    ),
}  # fmt: skip
"""The fields of the round policy that a directive may change, with their bounds, as in `spec.RoundSpec`."""


def encode_directive(b: Directive) -> wire.Directive:
    changed = {f.name: value for f in fields(RoundChanges) if (value := getattr(b.changes, f.name)) is not None}
    m = wire.Directive(
        run=b.run, sequence=b.sequence, run_status=b.run_status, since=b.since, reason=b.reason, banned=b.banned,
        from_round=b.from_round, changes=wire.RoundChanges(**changed) if changed else None,
        verdicts=[wire.Verdict(record=v.record, peer=v.peer, reason=v.reason) for v in b.verdicts],
        pardons=[wire.Pardon(peer=p.peer, round=p.round) for p in b.pardons],
    )  # fmt: skip
    if (back := b.rollback) is not None:
        m.rollback.CopyFrom(wire.Rollback(epoch=back.epoch, record=back.record, round=back.round, state=back.state))
    return m


def decode_directive(payload: bytes, _: object = None) -> Directive:
    m = parsed(wire.Directive(), payload)
    if m.run_status not in RUN_STATUSES:
        raise MalformedError(f"{m.run_status[:20]!r} is not a run status")
    if len(m.banned) > MAX_BANNED:
        raise MalformedError(f"a directive bans at most {MAX_BANNED} peers, not {len(m.banned)}")
    banned = tuple(PeerKey(key) for key in m.banned)
    if not ascending(banned):
        raise MalformedError("a directive lists each banned peer once, by ascending key")
    rollback = None
    if m.HasField("rollback"):
        back = m.rollback
        epoch, number = bounded("epoch", back.epoch, MAX_EPOCH), Round(bounded("round", back.round, MAX_ROUND))
        rollback = Rollback(epoch, Digest(back.record), number, Digest(back.state))
        if not epoch:
            raise MalformedError("the first rollback has epoch 1")
    return Directive(
        RunId(m.run), bounded("sequence", m.sequence), m.run_status, bounded("since", m.since),
        text("reason", m.reason, MAX_REASON), banned, Round(bounded("from_round", m.from_round, MAX_ROUND)),
        _decode_changes(m.changes), rollback, _decode_verdicts(m), _decode_pardons(m),
    )  # fmt: skip


def _decode_verdicts(m: wire.Directive) -> tuple[Verdict, ...]:
    if len(m.verdicts) > MAX_VERDICTS:
        raise MalformedError(f"a directive has at most {MAX_VERDICTS} verdicts, not {len(m.verdicts)}")
    verdicts = tuple(
        Verdict(Digest(v.record), PeerKey(v.peer), text("reason", v.reason, MAX_VERDICT_REASON)) for v in m.verdicts
    )
    if not all(v.reason for v in verdicts):
        raise MalformedError("a verdict gives its reason")
    if not ascending([(v.record, v.peer) for v in verdicts]):
        raise MalformedError("a directive has each verdict once, by ascending record and peer")
    return verdicts


def _decode_pardons(m: wire.Directive) -> tuple[Pardon, ...]:
    if len(m.pardons) > MAX_PARDONS:
        raise MalformedError(f"a directive has at most {MAX_PARDONS} pardons, not {len(m.pardons)}")
    pardons = tuple(Pardon(PeerKey(p.peer), Round(bounded("round", p.round, MAX_ROUND))) for p in m.pardons)
    if not ascending([(p.peer, p.round) for p in pardons]):
        raise MalformedError("a directive has each pardon once, by ascending peer and round")
    return pardons


def _decode_changes(m: wire.RoundChanges) -> RoundChanges:
    changed = {f.name: getattr(m, f.name) for f in fields(RoundChanges) if m.HasField(f.name)}  # type: ignore[arg-type]
    for name, value in changed.items():
        low, top = CHANGE_BOUNDS[name]
        if not low <= value <= top:
            raise MalformedError(f"a directive sets round.{name} to {value}: {low} to {top} is accepted")
    return RoundChanges(**changed)
