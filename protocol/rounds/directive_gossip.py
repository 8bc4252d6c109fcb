"""The owner's directives (docs/control.md): accepted from any source, passed on, and stored.

The decisions that all peers share (the banned, the policy of a round, the branch that counts) follow from the chain's
records. In all else each peer follows the newest directive that it knows. It does not train while the run is paused,
stops when the run has ended or it is banned itself, and ignores the messages of banned peers.
"""

from __future__ import annotations

from protocol.bounded import BoundedDict
from protocol.errors import ChainError
from protocol.ids import PeerKey
from protocol.messages import Directive, Heartbeat, Signed
from protocol.rounds.actions import Broadcast, Send, StoreDirective
from protocol.rounds.context import Context

MAX_ALL_REPEAT = 32
"""Number of members up to which everyone passes a newer directive on; among more, about eight of them do."""


class DirectiveGossip:
    """The owner's newest directive at one machine. The machine passes its consequences to the other parts."""

    def __init__(self, context: Context):
        self._context = context
        self._due: BoundedDict[PeerKey, float] = BoundedDict(2 * context.policy.max_members)
        """The time at which we send our directive to a peer that knows another one."""

    def accept(self, directive: Signed[Directive], source: PeerKey | None) -> bool:
        """Accept the owner's directive from anybody. Return whether it is newer than what was known."""
        try:
            return self._context.chain.add_directive(directive)
        except ChainError as e:
            self._context.notify("error", "directive", str(e), source)
            return False

    def publish(self, directive: Signed[Directive]) -> None:
        context = self._context
        context.emit(StoreDirective(directive))
        if len(context.members) <= MAX_ALL_REPEAT or context.members.is_my_turn(directive.digest, 0):
            context.emit(Broadcast(directive))

    def dismiss_banned(self, directive: Directive) -> None:
        """Remove the banned from the members."""
        context = self._context
        for key in [m.key for m in context.members if context.chain.is_banned(m.key)]:
            context.members.dismiss(key)
            context.notify("info", "banned", f"the run's owner has banned {key.short}{because(directive)}", key)

    def notify_pause(self, before: Directive | None, now: Directive) -> None:
        was_running = before is None or before.run_status == "running"
        if was_running and now.run_status == "paused":
            text = f"paused by the run's owner{because(now)}: nothing is trained until the run goes on"
            self._context.notify("warning", "paused", text)
        elif not was_running and now.run_status == "running":
            self._context.notify("info", "resumed", "the run goes on: its owner has resumed it")

    def inform(self, source: PeerKey, beat: Heartbeat) -> None:
        """Send our directive to a peer whose heartbeats show for a while that it does not have it."""
        context, members = self._context, self._context.members
        directive = context.chain.newest_directive
        if not members.is_new(source, beat.sequence):
            return  # a replay: anybody could have the directive sent to its author again and again
        if directive is None or beat.directive_sequence == directive.body.sequence:
            self._due.pop(source, None)
            return
        due = self._due.get(source)
        if due is None:
            self._due.limit = 2 * context.policy.max_members
            self._due[source] = context.now + context.policy.heartbeat_seconds
        elif due <= context.now and (
            len(members) <= MAX_ALL_REPEAT or members.is_my_turn(directive.digest, beat.sequence)
        ):
            self._due[source] = context.now + 4 * context.policy.heartbeat_seconds
            context.emit(Send(source, (directive,)))

    def sizes(self) -> dict[str, tuple[int, int]]:
        policy, base = self._context.policy, self._context.spec_policy
        return {"informed": (len(self._due), 2 * max(policy.max_members, base.max_members))}


def because(directive: Directive) -> str:
    """Return the owner's reason as a suffix for a message; empty where none was given."""
    return f" ({directive.reason})" if directive.reason else ""
