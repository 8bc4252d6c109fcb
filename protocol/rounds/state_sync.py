"""The record whose state our trainer holds, and the moves that lead it to the chain's head.

One thing at a time is requested of the trainer: an update, or a move to another state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from protocol.ids import Digest, PeerKey, Round
from protocol.messages import Certificate, Rollback
from protocol.rounds.actions import ApplyRecord, KeepState, RequestUpdate, SyncState
from protocol.rounds.blobs import BlobRole, applied_blobs
from protocol.rounds.branch_quarantine import BranchQuarantine
from protocol.rounds.context import MAX_SYNC_PATH, Context
from protocol.rounds.events import StateNotKept, SyncFailed, UpdateReady
from protocol.rounds.retention import is_checkpoint, kept_starts

MAX_PAUSE = 60.0
MAX_FAILED_MOVES = 3
"""Failed moves to the same head before another branch is tried."""

UNAVAILABLE_PATIENCES = 10
"""Times the policy's patience: after that, people are notified that nobody gives an update of a finalized record."""

MAX_UNAVAILABLE_SECONDS = 600.0
"""The longest time before that notice."""

REMEMBERED_PATHS = 3
"""Number of goals for which the blobs that a move needs are remembered."""


class StateSync:
    """The trainer's place in the tree of records. `advance` moves it towards the head by one step at a time."""

    def __init__(self, context: Context):
        self._context = context
        self.applied: Digest | None = None
        """The record whose state the trainer holds; of an observer, the chain's head."""

        self.state: Digest | None = None
        """The digest of that state."""

        self.sync_target: Digest | None = None
        """The record to which the trainer is moving."""

        self.joined = False
        """The time in which a newcomer only collects what others have is over."""

        self.reset = False
        """The trainer's next state is one that the run was rolled back to: it must forget what it has learnt since."""

        self._making: Digest | None = None
        """The parent for whose round the trainer makes an update."""

        self._making_round = Round(0)
        self._written: Digest | None = None
        """The last record whose state the trainer was asked to write to the store, unless that failed."""

        self._write_at = 0.0
        """The time before which a failed write is not tried again."""

        self.is_keeping = False
        """The trainer owes us an answer to `KeepState`."""

        self._has_trainer = True
        """False while the peer rests and has released its trainer."""

        self._last_good: Digest | None = None
        """The last record whose state was reached."""

        self._began_at: Digest | None = None
        """The chain's head at the start, until a state is reached: the trainer's saved state may be of its branch."""

        self._failures = 0
        self._retry_at = 0.0
        self.quarantine = BranchQuarantine(context)
        self._waiting: tuple[Digest, float] | None = None
        """The head whose blobs are missing, and the time since which some are."""

        self._reported_unavailable: Digest | None = None
        self._needed: dict[tuple, dict[tuple[Digest, PeerKey], BlobRole]] = {}
        self._missing: tuple[Digest, PeerKey] | None = None
        """One blob that was missing a moment ago, and most often still is."""

    @property
    def is_moving(self) -> bool:
        return self.sync_target is not None

    @property
    def is_making_update(self) -> bool:
        return self._making is not None

    @property
    def is_busy(self) -> bool:
        """True while the trainer owes us an answer."""
        return self.is_moving or self.is_making_update

    @property
    def is_behind(self) -> bool:
        """True when the round after `applied` is decided already."""
        chain, applied = self._context.chain, self.applied
        return (
            applied is None
            or applied not in chain
            or (applied != chain.head and chain.is_ancestor(applied, chain.head))
        )

    @property
    def holds_state(self) -> bool:
        """True when the trainer holds a state of the chain."""
        return self.applied is not None and self.applied in self._context.chain

    @property
    def best_record(self) -> Digest:
        """The record at which this peer is, as heartbeats name it: of the trainer's state, else the chain's head."""
        applied, chain = self.applied, self._context.chain
        return applied if applied is not None and applied in chain else chain.head

    @property
    def retried_tip(self) -> Digest | None:
        """The tip of the quarantined branch whose blobs are requested again."""
        tip = self.quarantine.tip
        return tip if tip in self._context.chain else None

    def begin(self) -> None:
        """Start: until a state is reached, the trainer's saved state may be of the branch of the chain's head."""
        self._began_at = self._context.chain.head

    def join(self) -> None:
        """Note that the time of joining is over: the trainer may be moved."""
        self.joined = True

    # -- a rest ----------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Release the trainer, whatever it owes us. The round of the state that it held stays ours to decide."""
        if self.is_moving:
            self.applied = None
        self._has_trainer = self.is_keeping = False
        self.sync_target = self._making = None

    def start_over(self, *, has_trainer: bool) -> None:
        """Hold no state: from now on we only follow, or there is a trainer again."""
        self._has_trainer = has_trainer
        self.applied = self.state = self._waiting = None
        self._failures, self._retry_at = 0, 0.0
        self._needed.clear()

    # -- what is needed --------------------------------------------------------------------------------------

    def needed(self) -> dict[Digest, BlobRole]:
        """Return the blobs to hold before the trainer moves to the head.

        They are of the records since the trainer's state, or since the newest checkpoint on another branch.
        """
        return _by_digest(self._blobs_to(self._context.chain.head))

    def needed_again(self) -> dict[Digest, BlobRole]:
        """Return the same for the tip of the quarantined branch whose blobs are requested again."""
        return {} if self.retried_tip is None else _by_digest(self._blobs_to(self.retried_tip))

    def _blobs_to(self, head: Digest) -> dict[tuple[Digest, PeerKey], BlobRole]:
        """Return the blobs that a move to a record needs, by digest and by the peer that must have it."""
        key = (self.applied, head, self._failures, self.joined)
        if key not in self._needed:
            if len(self._needed) >= REMEMBERED_PATHS:
                self._needed.clear()
            self._needed[key] = {}
            for certificate in self._sync_path(head):
                self._needed[key] |= {
                    (blob, role.responsible): role for blob, role in applied_blobs(certificate).items()
                }
        return self._needed[key]

    def _is_here(self, head: Digest) -> bool:
        """Return whether all blobs that a move to a record needs are held."""
        needed, holds = self._blobs_to(head), self._context.blobs.holds_as
        if self._missing is not None and self._missing in needed and not holds(self._missing[0], needed[self._missing]):
            return False
        self._missing = next((name for name, role in needed.items() if not holds(name[0], role)), None)
        return self._missing is None

    def _sync_path(self, head: Digest) -> tuple[Certificate, ...]:
        """Return the certificates whose blobs must be held before a move to a record."""
        chain, applied, every = self._context.chain, self.applied, self._context.policy.checkpoint_every
        if self._context.observer or applied == head or head == chain.root:
            return ()
        boundary = max((chain.height(head) - 1) // every * every, chain.height(head) - MAX_SYNC_PATH)
        if applied is None or applied not in chain:
            # Nothing to lose: the driver fetches during the move. After a failure, fetch what is missing first.
            boundary = boundary if (start := self._start(head)) is None else max(boundary, start.round)
            after = chain.ancestor_at(head, max(chain.height(chain.root), boundary))
            return chain.path(after or chain.root, head) if self._failures and self.joined else ()
        if (start := self._start(head)) is not None and chain.height(applied) < start.round:
            return chain.path(start.record, head)
        fork = chain.common_ancestor(applied, head)
        if fork != applied or chain.height(head) - chain.height(applied) > every:
            after = chain.ancestor_at(head, max(chain.height(fork), boundary))
            return chain.path(after or fork, head)
        return chain.path(applied, head)

    def _start(self, head: Digest) -> Rollback | None:
        """Return the owner's last rollback if it is on the way to a record.

        The state there is available, and the rounds before it need not be.
        """
        chain, back = self._context.chain, self._context.chain.rollback
        if back is None or back.record == chain.genesis or not chain.is_ancestor(back.record, head):
            return None
        return back

    def rolled_back(self) -> None:
        """Leave the record of the trainer's state, or the one that it moves to, if the owner has rolled it back."""
        places = (self.applied, self.sync_target, self._making, self._last_good, self._began_at)
        if any(record is not None and record not in self._context.chain for record in places):
            self.reset = True
        if self.sync_target is not None and self.sync_target not in self._context.chain:
            # Not awaited: it may need blobs that nobody keeps any more.
            self.sync_target = self.applied = None
        self._needed.clear()  # a rollback to the head changes no other part of its keys
        self._failures, self._retry_at, self._waiting = 0, 0.0, None

    # -- updates ---------------------------------------------------------------------------------------------

    def request_update(self, number: Round, parent: Digest) -> None:
        self._making, self._making_round = parent, number
        self._context.emit(RequestUpdate(number, parent))

    def update_ready(self, event: UpdateReady) -> Digest | None:
        """Note the trainer's answer. Return the parent for which an update was requested, if one was."""
        requested, self._making = self._making, None
        if event.blob is not None:
            self._context.blobs.hold(event.blob, self._context.me)
            if not self.reset:
                self._context.own.made(event.blob, event.parent, self._making_round)
        return requested

    # -- moves -----------------------------------------------------------------------------------------------

    def advance(self, is_patience_over: Callable[[Digest, float], bool]) -> bool:
        """Take one step towards the head, if one is due and possible. Return whether something changed.

        `is_patience_over` as in `BranchQuarantine.advance`.
        """
        context, chain = self._context, self._context.chain
        self.quarantine.advance(self._is_here, is_patience_over)
        head = chain.head
        if context.observer:
            changed = self.applied != head
            self.applied = head
            return changed
        if self.applied == head:
            self._waiting = None
            return False
        if self.is_busy or not (self.joined and self._has_trainer):
            return False
        if not context.deadlines.due("retry", self._retry_at):
            return False
        if self.applied is not None and self.applied not in chain:
            self.applied = None
        path = self._sync_path(head)
        if not path and self.applied is not None:
            return self._resync(head)
        if self.applied is None:
            if self._is_here(head):
                return self._resync(head)
        elif path[0].record.body.parent == self.applied:
            first = path[0].record.body
            if first.base_state != self.state:
                self.discard_state(first.base_state)
                return True
            if self._holds_all_of(path[0]):
                return self._apply(path[0])
        elif self._is_here(head):
            if chain.is_ancestor(self.applied, head):
                behind = chain.height(head) - chain.height(self.applied)
                context.notify("info", "behind", f"{behind} rounds behind: loading a checkpoint and replaying the rest")
            else:
                text = f"leaving record {self.applied.short} for the better branch of {head.short}"
                context.notify("warning", "fork", text)
            return self._resync(head)
        return self._wait_for_blobs(path, head) or self._step_meanwhile()

    def _apply(self, certificate: Certificate) -> bool:
        context, record = self._context, certificate.digest
        if self.applied is None:
            return False
        missed, regained = context.own.plan_move(context.chain, self.applied, record)
        self.sync_target = record
        next_window, weight = context.chain.next_window(context.me, record), context.chain.weight(record)
        must_write = self._must_write(record)
        context.emit(ApplyRecord(certificate, missed, next_window, weight, regained, must_write))
        return True

    def _resync(self, head: Digest) -> bool:
        context, chain = self._context, self._context.chain
        every, keep = context.policy.checkpoint_every, context.policy.checkpoint_keep
        start = chain.height(chain.root)
        if self._failures == 0:
            start = max(start, ((chain.height(head) - 1) // every - keep + 1) * every)
        back = self._start(head) if self._failures % 2 == 0 else None
        if back is not None and back.round >= start:
            after = back.record
        else:
            after, back = chain.ancestor_at(head, min(start, chain.height(head))) or chain.root, None
        if self.reset:
            context.own.forget_all()
        missed, regained = context.own.plan_move(chain, after, head)
        self.sync_target = head
        path, weight = chain.path(after, head), chain.weight(head)
        context.emit(
            SyncState(
                path, missed, chain.next_window(context.me, head), weight, regained, back, self.reset,
                kept_starts(context.spec_policy, path), self._must_write(head),
            )
        )  # fmt: skip
        return True

    def _must_write(self, record: Digest) -> bool:
        """Return whether the trainer is to write the state after a record to the store, and note that it is asked."""
        context, chain = self._context, self._context.chain
        must = is_checkpoint(context.spec_policy, chain.height(record), chain.weight(record))
        must = must or (context.is_run_stopped and record == chain.head and record != chain.genesis)
        if must:
            self._written = record
        return must

    def keep(self) -> None:
        """Have the trainer write the state that it holds to the store, unless it did: the run is paused or ended."""
        held = self.applied
        if held is None or held in (self._written, self._context.chain.genesis) or self.is_busy or not self.holds_state:
            return
        if self._context.deadlines.due("keep", self._write_at):
            self._written, self.is_keeping = held, True
            self._context.emit(KeepState(held))

    def _write_failed(self, record: Digest) -> None:
        """Note that the state after `record` was not written: it is tried again after a pause."""
        if record == self._written:
            self._written, self.is_keeping = None, False
            self._write_at = self._context.now + MAX_PAUSE

    def _wait_for_blobs(self, path: tuple[Certificate, ...], head: Digest) -> bool:
        """Wait while blobs of the path are fetched; quarantine a branch whose blobs stay unavailable.

        Return whether a branch was quarantined.
        """
        context = self._context
        if self._waiting is None or self._waiting[0] != head:
            self._waiting = (head, context.now if self._waiting is None else self._waiting[1])
        since = self._waiting[1]
        if not self._has_waited_for_blobs(since):
            return False
        applied = ((certificate, *item) for certificate in path for item in applied_blobs(certificate).items())
        missing = ((certificate, role) for certificate, blob, role in applied if not context.blobs.holds_as(blob, role))
        certificate, role = next(missing, (None, None))
        if certificate is None or role is None:
            return False
        # An author that has kept us waiting in vain before gets little time.
        author, number = role.responsible, certificate.record.body.round
        if not context.deadlines.due("missing blobs", since + context.policy.patience_seconds):
            if not context.members.unavailable.applies_to(author, number):
                return False
        record = certificate.digest
        floor = context.chain.required_ancestor
        if floor is not None and context.chain.is_ancestor(record, floor):
            # Links that broke a moment ago need time to carry again: no reason to alarm people yet.
            patience = min(UNAVAILABLE_PATIENCES * context.policy.patience_seconds, MAX_UNAVAILABLE_SECONDS)
            if context.deadlines.due("unavailable", since + patience):
                self._report_unavailable(record)
            return False
        context.members.unavailable.penalise(author, number)
        text = f"no peer provides {role.describe(record)}: ignoring that branch for a while"
        context.notify("warning", "withheld", text, author)
        self.quarantine.add(record)
        self._waiting = None
        return True

    def _has_waited_for_blobs(self, since: float) -> bool:
        """Return whether blobs have been missing for so long that another way is examined."""
        return self._context.deadlines.due("blobs", since + 2 * self._context.policy.heartbeat_seconds)

    def _step_meanwhile(self) -> bool:
        """Apply the next record of our own branch, if it has one, while the head cannot be reached yet."""
        chain, applied = self._context.chain, self.applied
        if applied is None or self._waiting is None:
            return False
        if not self._has_waited_for_blobs(self._waiting[1]):
            return False
        tip = chain.best_descendant(applied)
        if tip == applied:
            return False
        following = chain.path(applied, tip)[0]
        if following.record.body.base_state != self.state:
            return False
        return self._holds_all_of(following) and self._apply(following)

    def _holds_all_of(self, certificate: Certificate) -> bool:
        return all(self._context.blobs.holds_as(blob, role) for blob, role in applied_blobs(certificate).items())

    def _report_unavailable(self, record: Digest) -> None:
        """Report that there is no other branch to go to: a member with the blobs is awaited."""
        if self._reported_unavailable != record:
            self._reported_unavailable = record
            text = (
                f"record {record.short} is final, and no peer provides the updates that it lists: waiting for one that "
            )
            self._context.notify("error", "unavailable", text + "has them. Tell the run's owner")

    def discard_state(self, vouched: Digest) -> None:
        """Discard the trainer's state: the chain names another digest for the same record."""
        mine = "none" if self.state is None else self.state.short
        text = f"our state {mine} differs from the state {vouched.short} that the chain records: reloading it. "
        remedy = "If this repeats, the device computes wrongly or the software differs from the others'"
        self._context.notify("error", "drift", text + remedy)
        self.applied = None

    # -- the trainer's answers -------------------------------------------------------------------------------

    def reached(self, record: Digest, state: Digest) -> bool:
        """Note that the trainer holds the state after `record`. Return False when no move to it was requested."""
        if record == self._written:
            self.is_keeping = False
        if record != self.sync_target:
            return False
        self.sync_target = None
        self._failures = 0
        if record not in self._context.chain or self._context.chain.is_ancestor(record, self._context.chain.head):
            self._waiting = None  # otherwise it was a step on our own branch, and the head is still awaited
        self.reset = self.reset and record not in self._context.chain
        self.applied = self._last_good = record
        self._began_at = None
        self.state = state
        self._context.own.moved()
        return True

    def failed(self, event: SyncFailed | StateNotKept) -> None:
        """Note that a move failed, or the writing of a state.

        After a move, unless the trainer `kept` its state, it holds nothing that can be relied on.
        """
        if isinstance(event, StateNotKept):
            self._write_failed(event.record)
            return
        context, chain = self._context, self._context.chain
        record, reason, kept = event.record, event.reason, event.kept
        self.is_keeping = False
        if kept and record != self.sync_target:
            return  # another move has been requested meanwhile
        head = self.sync_target or chain.head
        self.sync_target = None
        if not kept or self.reset:
            self._making = self.applied = None
        self._failures += 1
        pause = min(MAX_PAUSE, context.policy.heartbeat_seconds * 2 ** (self._failures - 1))
        self._retry_at = context.now + pause
        if self._failures & (self._failures - 1) == 0:  # the first, second, fourth, ... in a row
            tries = "" if self._failures == 1 else f" ({self._failures} times)"
            text = f"the state after record {head.short} was not reached{tries}: {reason}; again in {pause:.0f} s"
            context.notify("warning", "apply-failed", text)
        if head not in chain or head == chain.root:
            return
        # Without a place to return to, the fault may be anywhere on the branch: the head before it would fail as well.
        culprit, tries, good = chain.branch_start(head), MAX_FAILED_MOVES, self._last_good
        if good is not None and good in chain and good != head:
            # There is a place to return to: at once when that is another branch, which may be a liar's.
            fork = chain.common_ancestor(good, head)
            culprit = chain.ancestor_at(head, min(chain.height(head), chain.height(fork) + 1)) or head
            tries = MAX_FAILED_MOVES if fork == good else 1
        if self._failures % tries == 0 and self.quarantine.add(culprit, failed=True):
            self._waiting = None
            if self.applied is not None:
                self._retry_at = context.now  # there is a branch to continue on at once

    # -- branches that are not followed for a while ----------------------------------------------------------

    def hold_back(self, record: Digest) -> None:
        """Quarantine a record without support, until it has some or patience is over."""
        self.quarantine.hold_back(record)
        self._waiting = None

    def sizes(self) -> dict[str, tuple[int, int]]:
        top = self._context.policy.max_members * self._context.policy.checkpoint_every
        needed = max((len(blobs) for blobs in self._needed.values()), default=0)
        return {
            "needed": (needed, top),
            "paths": (len(self._needed), REMEMBERED_PATHS),
            **self.quarantine.sizes(),
        }


def _by_digest(needed: Mapping[tuple[Digest, PeerKey], BlobRole]) -> dict[Digest, BlobRole]:
    return {blob: role for (blob, _), role in needed.items()}
