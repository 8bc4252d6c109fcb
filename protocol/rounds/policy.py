"""The inputs of the round machine besides events: the run's policy, in windows and seconds, and the peer's status."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from protocol.audits import AuditRule
from protocol.chain import ChainLimits
from protocol.ids import PeerKey
from protocol.messages import RoundChanges
from protocol.reduce_plan import GATHER, ReducePlan
from protocol.spec import RunSpec
from protocol.stake import StakeRule


@dataclass(frozen=True, slots=True)
class RoundPolicy:
    """The parts of a run spec that the round machine needs: fields as in `spec.RoundSpec`, tokens as windows."""

    target_windows: int
    max_update_windows: int
    max_seconds: float = 600
    exchange_seconds: float = 60
    propose_seconds: float = 10
    patience_seconds: float = 120
    heartbeat_seconds: float = 2
    member_seconds: float = 20
    max_members: int = 256
    total_windows: int = 0
    """The run ends when the chain has accepted this number of windows; 0: never."""

    checkpoint_every: int = 10
    checkpoint_keep: int = 2
    exchange: ReducePlan = GATHER
    window_tokens: int = 1
    """Tokens that one window counts as: the owner's changes are in tokens."""

    stake: StakeRule = StakeRule()
    audit: AuditRule = AuditRule()
    replay_batch: int | None = None
    """Windows of one inner step, in a run whose updates are replayable; None in others."""

    @classmethod
    def of(cls, spec: RunSpec) -> RoundPolicy:
        """Return the policy of a run spec. Targets in tokens are rounded up to windows."""
        rounds, window = spec.round, spec.data.window_tokens
        return cls(
            target_windows=-(-rounds.target_tokens // window),
            max_update_windows=spec.max_update_windows,
            max_seconds=rounds.max_seconds,
            exchange_seconds=rounds.exchange_seconds,
            propose_seconds=rounds.propose_seconds,
            patience_seconds=rounds.patience_seconds,
            heartbeat_seconds=rounds.heartbeat_seconds,
            member_seconds=rounds.member_seconds,
            max_members=rounds.max_members,
            total_windows=-(-spec.total_tokens // window),
            checkpoint_every=spec.checkpoint.every,
            checkpoint_keep=spec.checkpoint.keep,
            exchange=ReducePlan.of(spec),
            window_tokens=window,
            stake=stake_rule(spec),
            audit=AuditRule.of(spec),
            replay_batch=spec.inner.batch if spec.audit.replayable else None,
        )

    def under(self, changes: RoundChanges) -> RoundPolicy:
        """Return the policy with the owner's changes.

        A target in tokens is rounded up to windows, `max_update_tokens` down, to at least 1.
        """
        names = ("max_seconds", "exchange_seconds", "propose_seconds", "patience_seconds", "member_seconds")
        new: dict[str, Any] = {name: getattr(changes, name) for name in (*names, "max_members")}
        if changes.target_tokens is not None:
            new["target_windows"] = -(-changes.target_tokens // self.window_tokens)
        if changes.max_update_tokens is not None:
            new["max_update_windows"] = max(1, changes.max_update_tokens // self.window_tokens)
        return replace(self, **{name: value for name, value in new.items() if value is not None})

    @property
    def chain_limits(self) -> ChainLimits:
        return ChainLimits(
            max_update_windows=self.max_update_windows,
            max_members=self.max_members,
            reduce_plan=self.exchange,
            window_tokens=self.window_tokens,
            total_windows=self.total_windows,
            stake=self.stake,
            audit=self.audit,
            replay_batch=self.replay_batch,
        )


def stake_rule(spec: RunSpec) -> StakeRule:
    """Return the stake rule of a run: founders begin with the windows of one round, in equal parts."""
    founders = tuple(PeerKey.parse(key) for key in spec.admission.founders)
    target = -(-spec.round.target_tokens // spec.data.window_tokens)
    return StakeRule(spec.credit.hold_rounds, founders, max(1, target // max(1, len(founders))))


@dataclass(frozen=True, slots=True)
class LocalStatus:
    """The driver's knowledge of this peer: given with each step, published in heartbeats."""

    sequence: int = 0
    """Unix milliseconds, or more, and more than in the last goodbye. The next message carries at least this number."""

    bytes_up: int = 0
    bytes_down: int = 0
    addresses: tuple[str, ...] = ()
    admission: bytes = b""
    device: str = ""
    unreachable: tuple[int, ...] = ()
    is_awaited: bool = False
    """The coordinator is not known to have the last state of a run that is over for us."""
