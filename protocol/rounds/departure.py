"""The end of a machine's part in the run: its user leaves, the run is over, or the owner has banned this peer."""

from __future__ import annotations

from collections.abc import Callable

from protocol.ids import Digest
from protocol.messages import Goodbye
from protocol.rounds.actions import Broadcast, Finished, RunCompleted
from protocol.rounds.context import Context
from protocol.rounds.directive_gossip import because
from protocol.rounds.policy import LocalStatus
from protocol.spec import is_total_reached

QUIET_SECONDS, QUIET_BYTES = 5.0, 200_000
"""After the run's last round a peer stays until it has sent less than this in that time, and nobody is behind."""

MAX_STAY_SECONDS = 600.0
"""The longest time that it stays for those who are behind, or for a coordinator without the last state."""

BANNED = "banned by the run's owner"
"""The beginning of the reason why a banned peer stops."""


class Departure:
    """The end of one peer's part in the run: it decides when the peer stops, and when its driver may stop."""

    def __init__(self, context: Context):
        self._context = context
        self.is_over = False
        """The run is over for us: no update is made, and no vote cast."""

        self.has_left = False
        """Goodbye is said: the machine is silent."""

        self.is_hurrying = False
        """A leaver announces its last update as soon as possible."""

        self._reached_total = False
        self._leave_at: float | None = None
        """The time at which a leaver goes, whatever is undecided."""

        self._last_round: int | None = None
        """The round of the leaver's last update."""

        self._ordered_from = 0.0
        """The earliest time to stop by a directive: one that was stored before a restart may not be the newest."""

        self._ordered_at: float | None = None
        """The time at which a directive to stop took effect."""

        self._completed: tuple[str, float] | None = None
        """Why the run is over, and since when; None when it is not, or we need not stay."""

        self._check_at = 0.0
        self._sent = 0
        """Bytes that had been sent at the last check."""

    # -- the user leaves -------------------------------------------------------------------------------------

    @property
    def is_leaving(self) -> bool:
        return self._leave_at is not None

    def leave(self, seconds: float) -> None:
        """Note that the user wants to stop, within this time."""
        if self._leave_at is None:
            self._leave_at = self._context.now + seconds

    def is_time_to_go(self, number: int | None, *, busy: bool, announced: bool, has_work: bool) -> bool:
        """Return whether a leaver goes now: the round of its last update is decided, or its time is over.

        `number`: the open round; `busy`: the trainer owes an answer; `announced`: our update of the open round is.
        """
        if self._leave_at is None:
            return False
        is_late = self._context.deadlines.due("leave", self._leave_at)
        if is_late or number is None or self._context.observer or self.is_over:
            return True
        undecided = self._last_round is None or number <= self._last_round
        if busy or (announced and undecided):
            self._last_round = number if self._last_round is None else self._last_round
            return False
        if self._last_round is None and has_work:
            self._last_round = number
            self.is_hurrying = True
            return False
        return True

    def say_goodbye(self, sequence: int) -> None:
        context = self._context
        context.emit(Broadcast(context.signer.sign(Goodbye(context.run, sequence))))
        context.emit(Finished("left the swarm"))
        self.has_left = True

    # -- the run is over, or we are banned --------------------------------------------------------------------

    def begin(self) -> None:
        """Start: a stored directive to stop counts once nobody knew a newer one for `member_seconds`."""
        self._ordered_from = self._context.now + self._context.policy.member_seconds

    def directive_changed(self) -> None:
        """Note a newer directive: it counts at once, and may withdraw an order to stop."""
        self._ordered_from = 0.0
        if not self._context.is_paused:
            self._ordered_at, self.is_over = None, self._reached_total or self._context.chain.is_rolled_back_past_root

    def reached_total(self, weight: int) -> None:
        """Complete the run when this weight is its total."""
        total = self._context.policy.total_windows
        if is_total_reached(total, weight) and not self.is_over:
            self._reached_total = True
            self._complete(f"the run has reached its {total} windows")

    def follow_directive(self, is_occupied: Callable[[], bool], is_behind: Callable[[], bool]) -> None:
        """Stop when a directive says so, but not before the open round that we announced in is decided.

        At the end of the run a peer that is still on the way to the last state goes on: nobody else may have it.
        """
        context, directive = self._context, self._context.directive
        banned = context.chain.is_banned(context.me)
        if (
            self.is_over
            or not (directive.run_status == "ended" or banned)
            or not context.deadlines.due("order", self._ordered_from)
        ):
            return
        self._ordered_at = context.now if self._ordered_at is None else self._ordered_at
        longest = context.policy.exchange_seconds + context.policy.patience_seconds
        if is_occupied() and not context.deadlines.due("order", self._ordered_at + longest):
            return
        if not banned and not context.observer and is_behind():
            if not context.deadlines.due("order", self._ordered_at + MAX_STAY_SECONDS):
                return
        reason = "the run has been ended by its owner" if directive.run_status == "ended" else BANNED
        if banned:
            self._stop(reason + because(directive))
        else:
            self._complete(reason + because(directive))

    def strand(self, reason: str) -> None:
        """Stop because a rollback is further back than is remembered here: a new start from the store follows it."""
        self._stop(reason, again=True)

    def _stop(self, reason: str, *, again: bool = False) -> None:
        """Stop at once: nobody wants to receive our messages any more."""
        self.is_over = True
        self._context.emit(Finished(reason, again) if self._context.is_peer else RunCompleted(reason))

    def _complete(self, reason: str) -> None:
        """Stop training, and stay for those who need the last state. An observer has no state to give."""
        if self._context.observer:
            self._stop(reason)
            return
        self.is_over = True
        self._context.emit(RunCompleted(reason))
        if self._completed is None:
            self._completed = (reason, self._context.now)
            self._check_at, self._sent = self._context.now + QUIET_SECONDS, -QUIET_BYTES

    def stay(
        self, anybody_behind: Callable[[], bool], status: LocalStatus, is_supported: Callable[[Digest], bool]
    ) -> None:
        """Finish once nobody needs the last state any more: nobody is behind, and little was sent lately.

        If the others go on from a record beside our last one, start again. `is_supported`: whether a peer that starts
        follows a record; else it would come to the same end again.
        """
        chain = self._context.chain
        if self._completed is None or self.has_left or not self._context.deadlines.due("stay", self._check_at):
            return
        goes_on = not is_total_reached(self._context.policy.total_windows, chain.weight(chain.head))
        if self._reached_total and goes_on and is_supported(chain.head):
            self._completed = None
            self._context.emit(Finished("another record counts than the last one here: the run goes on", again=True))
            return
        reason, since = self._completed
        busy, self._sent = status.bytes_up - self._sent > QUIET_BYTES, status.bytes_up
        self._check_at = self._context.now + QUIET_SECONDS
        if (busy or status.is_awaited or anybody_behind()) and self._context.now < since + MAX_STAY_SECONDS:
            self._context.deadlines.register("stay", self._check_at)
            return
        self._completed = None
        self._context.emit(Finished(reason))
