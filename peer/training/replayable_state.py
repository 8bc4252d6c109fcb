"""The base state of a replayable run: what a peer trains depends on public values alone, so anybody can train it again.

The public values are the peer's key, its windows, certified states, and its own update in the record before. So:

- When an update was announced, training begins again, without moments, from the base less that update as decoded.
  Steps that were made meanwhile are dropped: nobody else has the parameters that they began from.
- When the next record accepts that update, the progress since is moved to the new state, and the moments are kept.
  `rebase_window` marks the place. A step that was under way is dropped, so the place is between two steps.
- On every other state training starts over, without moments, from the state itself. A missed update is not put back:
  its windows are skipped.
- There is no error feedback.

`StepLoop` uses one learning rate for each state. An auditor replays all this by the same methods of a backend:
`begin_again`, the inner steps, `outer.advance`, `outer.rebase` and `outer.announce`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from peer.channel import Applied, Load, MakeUpdate, NothingDone, UpdateMade
from peer.training.base_state import BaseMove, BaseState
from peer.training.saved_state import SavedState, TrainerManifest
from peer.training.step_loop import MAX_SKIPPED
from peer.training.windows import UndecidedUpdate, WindowAccounting
from protocol.errors import CodecError
from protocol.ids import Digest
from protocol.merkle import blob_digest


class ReplayableState(BaseState):
    """A `BaseState` whose updates are functions of public values.

    After `make_update` training begins again where `is_begin_due` says so, before the base moves.
    """

    _state: Digest | None = None
    """The state under the parameters, as this peer computed it: nobody can replay work from a wrong one."""
    _advanced: Digest | None = None
    """The state that the base moved to."""

    # -- updates -----------------------------------------------------------------------------------------------

    def make_update(self, ask: MakeUpdate, max_windows: int) -> UpdateMade | NothingDone:
        before = self._exchange.windows.announced
        answer = super().make_update(ask, max_windows)
        if self._exchange.windows.announced is not before:
            self.is_begin_due = True
        return answer

    def _give_up_announced(self) -> None:
        """Have training start over: the present parameters come from an update that nobody has."""
        self.is_begin_due = True

    def _claim(self, windows: WindowAccounting, most: int) -> tuple[int, int, int] | None:
        """Return what an update claims. Training starts over instead if that were not all, or too much was skipped."""
        claim = windows.claim(most)
        if claim is None:
            return None
        _, end, steps = claim
        if is_idle := windows.skipped > max(steps >= 4, steps * MAX_SKIPPED / 2):  # a replay of 4 may skip one
            text = (
                f"{windows.skipped} of {steps} steps changed nothing: their update would fail an audit, and is not made"
            )
            self._report("warning", "non-finite", text)
        if is_idle or end < windows.counter:
            self.is_begin_due = True
        return None if self.is_begin_due else claim

    def _announce(self) -> bytes | bytearray:
        return self._outer.announce()

    def _take_back(self, blob: bytes) -> None:
        """Do nothing: until training begins again, the progress is still there."""

    def _rebase_window(self, windows: WindowAccounting, first: int) -> int:
        return windows.rebase_window

    # -- the model ---------------------------------------------------------------------------------------------

    def begin_again(self, unsaved: Iterable[TrainerManifest]) -> None:
        """Continue from the announced update; start over when there is none, or its file disappeared."""
        self.assert_owner()
        mine = self._exchange.windows.announced
        is_kept = mine is not None and self._folder.update_file(mine.blob).exists()
        blob = self._announced_blob(mine) if mine is not None and is_kept else None
        with self._exchange:
            self._begin(blob)
            self.is_begin_due = False
        self._tidy(unsaved)

    def _begin(self, blob: bytes | None) -> None:
        """Put the base less the announced update under the parameters; None: the base. The lock is held."""
        self._backend.begin_again(blob)
        windows = self._exchange.windows
        self._exchange.windows = (
            windows.begun_again() if blob is not None else windows.started_over(windows.claimed_from)
        )
        self._exchange.loss = self._exchange.loss.restarted()

    def _start_over(self, next_window: int) -> None:
        self._exchange.windows = self._exchange.windows.started_over(next_window)
        self._begin(None)

    def _announced_blob(self, mine: UndecidedUpdate) -> bytes | None:
        """Return the blob of an announced update, or None when it is gone or damaged, which is reported."""
        path = self._folder.update_file(mine.blob)
        try:
            if blob_digest(blob := self._files.update(path)) == mine.blob:
                return blob
            why = "its bytes have changed"
        except (OSError, CodecError) as e:
            why = str(e)
        self._report("warning", "lost-update", f"{path} cannot be used ({why}): what was trained since is lost")
        return None

    # -- states ------------------------------------------------------------------------------------------------

    def applied(self, record: Digest, checkpoint: Path | None) -> Applied:
        answer = super().applied(record, checkpoint)
        self._advanced = answer.state_digest
        return answer

    def load(self, ask: Load, unsaved: Iterable[TrainerManifest]) -> tuple[Applied, BaseMove]:
        answer, move = super().load(ask, unsaved)
        self._state = answer.state_digest
        return answer, move

    def _is_loaded(self, state: Digest | None) -> bool:
        """Return whether the base is this state."""
        return state is not None and self._backend.store_state(self._threads, None) == state

    def manifest(self) -> SavedState | None:
        saved = super().manifest()
        return saved and replace(saved, state=self._state)

    def _missed_blobs(self, paths: Sequence[Path]) -> tuple[bytes | None, ...]:
        return ()

    def _move(self, move: BaseMove) -> None:
        if self.is_begin_due:
            raise AssertionError("the base moves, and training did not begin again after the update")
        mine = self._exchange.windows.announced
        if mine is not None and mine.blob in move.accepted and mine.end == move.next_window:
            self._outer.rebase()
            self._exchange.windows = self._exchange.windows.rebased()
        else:
            self._start_over(move.next_window)
        self.record, self.round, self._state = move.record, move.round, self._advanced

    def _take_up(self, move: BaseMove, last: Digest | None) -> None:
        """Keep all that was trained on the same state, in this process or the one before; otherwise start over."""
        is_same = self.record == move.record and self._exchange.windows.claimed_from >= move.next_window
        if self.record is None:
            self._resume(move)
        elif not is_same or not self._is_loaded(self._state):
            self._start_over(move.next_window)
        self.record, self.round = move.record, move.round

    def _resume(self, move: BaseMove) -> None:
        """Continue, at the first load, from the saved state if it belongs to the loaded one; otherwise start over."""
        saved, self._saved = self._saved, None
        windows = saved.windows if saved is not None else self._exchange.windows
        self._exchange.windows, mine = windows, windows.announced
        if saved is None or saved.record != move.record or windows.claimed_from < move.next_window:
            self._start_over(move.next_window)
            if windows.counter > self._exchange.windows.counter:
                text = "the saved state is of another round: its windows that were not announced are trained again"
                self._report("info", "saved-state", text)
        elif mine is not None:
            self._begin(self._announced_blob(mine))
        elif not self._is_loaded(saved.state):
            self._start_over(move.next_window)
        else:
            self._backend.resume(saved, everything=True)
