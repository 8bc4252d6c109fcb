"""Execution of the owner's directives on this machine (docs/control.md): the round policy, and the trainer's orders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from peer.channel import Orders
from peer.node.trainer_client import TrainerClient
from protocol.ids import PeerKey
from protocol.messages import Directive
from protocol.rounds.actions import DirectivesChanged
from protocol.rounds.policy import RoundPolicy


class PolicyUser(Protocol):
    """A part of the node that follows the policy of the open round."""

    def apply_policy(self, policy: RoundPolicy) -> None: ...


@dataclass(eq=False)
class DirectiveHandler:
    """Passes changes of the directives in force to the trainer and to all users of the policy.

    `window_tokens`: what a window counts as. `trainer` is None for a node without one.
    """

    me: PeerKey
    window_tokens: int
    trainer: TrainerClient | None
    users: Sequence[PolicyUser]
    _present: DirectivesChanged | None = field(default=None, init=False)

    def handle(self, change: DirectivesChanged) -> None:
        before, self._present = self._present, change
        if before is None or change.policy != before.policy:
            for user in self.users:
                user.apply_policy(change.policy)
        orders = self._orders(change)
        if self.trainer is not None and (before is None or orders != self._orders(before)):
            self.trainer.order(orders)

    def _orders(self, change: DirectivesChanged) -> Orders:
        policy = change.policy
        return Orders(change.paused, policy.max_update_windows, policy.target_windows * self.window_tokens)

    @property
    def target_tokens(self) -> int:
        """The tokens that the swarm aims at in the open round; 0 before the start."""
        return 0 if self._present is None else self._orders(self._present).target_tokens

    @property
    def description(self) -> str:
        """The reasons why this peer may not train, for people; empty when there are none."""
        present = self._present
        if present is None:
            return ""
        said = describe(present.directive, self.me)
        if not present.barred_until:
            return said
        barred = f"convicted by an audit, barred until round {present.barred_until} (the log and the run page say why)"
        return f"{said}; {barred}" if said else barred


def describe(directive: Directive, me: PeerKey) -> str:
    """Return, for people, what a directive orders that concerns a peer."""
    why = f" ({directive.reason})" if directive.reason else ""
    since = f" since {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(directive.since))}" if directive.since else ""
    if me in directive.banned:
        return f"banned by the run's owner{why}"
    return "" if directive.run_status == "running" else f"{directive.run_status} by the run's owner{since}{why}"
