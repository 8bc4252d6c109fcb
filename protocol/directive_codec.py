"""The codec of directives: strict, bounded, whole. See docs/control.md for their effects."""

from __future__ import annotations

from dataclasses import fields

from protocol.checks import ascending, bounded, parsed, text
from protocol.errors import MalformedError
from protocol.ids import MAX_COUNT, MAX_ROUND, Digest, PeerKey, Round, RunId
from protocol.messages import MAX_BANNED, MAX_CONTRIBUTORS, MAX_REASON, RUN_STATUSES, Directive, Rollback, RoundChanges
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
        _decode_changes(m.changes), rollback,
    )  # fmt: skip


def _decode_changes(m: wire.RoundChanges) -> RoundChanges:
    changed = {f.name: getattr(m, f.name) for f in fields(RoundChanges) if m.HasField(f.name)}  # type: ignore[arg-type]
    for name, value in changed.items():
        low, top = CHANGE_BOUNDS[name]
        if not low <= value <= top:
            raise MalformedError(f"a directive sets round.{name} to {value}: {low} to {top} is accepted")
    return RoundChanges(**changed)
