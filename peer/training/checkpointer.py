"""The saving of the trainer's own state: copied between two steps, and written while training continues.

    nothing -> copied -> being written -> being published -> nothing
         start     begin               finish            done

One save at a time: while one is written, the next one is put off; a copy that is not being written yet is replaced.
After a crash at any moment the disk has the old state or the new one: `SavedFolder.publish` renames the tensors, then
the manifest, which commits them. With several ranks each writes its own shard, and `finish_write` is a command to all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peer.errors import SavedStateError
from peer.training.backend import TrainingBackend
from peer.training.background import BackgroundTask
from peer.training.exchange_point import ExchangePoint
from peer.training.layers import Report
from peer.training.memory import available
from peer.training.saved_state import SavedFolder, SavedState

STILL_SHARE = 0.02
"""Maximum share of the time for which training pauses to save."""

WRITE_SHARE = 0.05
"""Maximum share of the time in which a state is written: others need the disk and the processor, too."""

SAVE_DELAY = 0.5
"""Seconds for which writing waits for the announced update's round to be applied: peers wait for that round."""

PROGRESS_SECONDS = 30.0
"""Minimum time between two copies within a round: a process that is killed loses its progress since the last one."""

RETRY_SECONDS = 60.0
"""Wait after a save that failed."""

MEMORY_SHARE = 0.5
"""Maximum share of the available memory that a copy may use."""

CLOSE_SECONDS = 5.0
"""Maximum time for which `close` waits for a state that is being published."""


@dataclass
class _Save:
    state: SavedState
    deadline: float
    """When writing begins at the latest (seconds, monotonic)."""
    still: float
    """Seconds for which training paused for it."""
    file: Path = Path()
    began: float = 0.0
    publishing: BackgroundTask[None] | None = None


class AsyncCheckpointer:
    """Used by the thread that trains. Its methods raise SavedStateError, after which the old state is still there."""

    def __init__(
        self,
        folder: SavedFolder,
        backend: TrainingBackend,
        exchange: ExchangePoint,
        manifest: Callable[[], SavedState | None],
        report: Report,
    ):
        """Save into `folder`. `manifest` returns all that is to be saved but the tensors, or None for nothing yet.

        It is called, and the tensors are copied, under the exchange point's lock.
        """
        self._folder = folder
        self._backend = backend
        self._exchange = exchange
        self._manifest = manifest
        self._report = report
        self._copied: _Save | None = None
        self._writing: _Save | None = None
        self.due = 0.0
        """When the next save may start (seconds, monotonic, as all times here)."""
        self._pause = 0.0
        """Seconds from the last save's start to when the next one was due."""
        self._copied_at = self._update_at = self._round_seconds = 0.0
        """Time of the last copy, time of the last update, and seconds between the last two updates.

        The first load counts as both: a process that is killed in its first round loses no more than in a later one.
        """
        self._has_reported = False

    @property
    def is_idle(self) -> bool:
        """True when nothing is copied and nothing is being written."""
        return self._copied is None and self._writing is None

    @property
    def pending(self) -> tuple[SavedState, ...]:
        """The states that are not saved yet: the files that they refer to must stay."""
        held = (self._copied, self._writing)
        return tuple(save.state for save in held if save is not None)

    # -- beside the training ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have the first round begin, unless one has begun. To be called when a state is held."""
        if not self._update_at:
            self._copied_at = self._update_at = time.monotonic()

    def start(self) -> None:
        """Copy what there is to save, if a save is due. To be called when an update was made."""
        began = time.monotonic()
        if self._update_at:
            self._round_seconds = began - self._update_at
        self._update_at = began
        if began >= self.due and self._writing is None:
            self._copy(began)

    @property
    def is_mid_round_due(self) -> bool:
        """True when `start_mid_round` has something to do."""
        now = time.monotonic()
        if not self.is_idle or not self._update_at or now < max(self.due, self._copied_at + PROGRESS_SECONDS):
            return False
        # The state right after an update is worth more: this save must not put that one off.
        left = self._update_at + self._round_seconds - now
        return left <= 0 or left >= self._pause

    def start_mid_round(self) -> None:
        """Copy what there is to save, if `is_mid_round_due`. To be called between two steps of a long round."""
        if self.is_mid_round_due:
            self._copy(time.monotonic())

    def _copy(self, began: float) -> None:
        self._copied_at = began
        with self._exchange:
            state = self._manifest()
            if state is None:
                return
            need, room = self._backend.copy_size, available()
            if need <= MEMORY_SHARE * room:
                self._backend.copy_state()
                now = time.monotonic()
                self._copied = _Save(state, now + SAVE_DELAY, now - began)
                return
        self._report_pause(need, room)
        self._drop_copy()
        self._write_now(began)

    def _drop_copy(self) -> None:
        if self._copied is not None:
            self._copied = None
            self._backend.cancel_write()

    def _report_pause(self, need: int, room: int) -> None:
        if not self._has_reported:
            self._has_reported = True
            self._report(
                "info", "saved-state",
                "training stands still while its state is saved: a copy, to be written beside it, needs "
                f"{need / 2**20:,.0f} MiB of memory, which is more than half of the {room / 2**20:,.0f} that are free",
            )  # fmt: skip

    def step(self, *, now: bool = False) -> None:
        """Begin to write when it is time (or `now`), and finish what is written. To be called often."""
        if self._copied is not None and self._writing is None and (now or time.monotonic() >= self._copied.deadline):
            self._begin(self._copied)
        elif (save := self._writing) is not None:
            if save.publishing is None and self._backend.is_written:
                self._finish(save)
            elif save.publishing is not None and save.publishing.is_done:
                self._done(save, save.publishing)

    def _begin(self, save: _Save) -> None:
        save.began = time.monotonic()
        try:
            save.file = self._folder.next_file()
        except OSError as e:
            self._drop_copy()
            raise self._failed(e) from None
        self._backend.start_write(save.file)
        save.still += time.monotonic() - save.began
        self._writing, self._copied = save, None

    def _finish(self, save: _Save) -> None:
        began = time.monotonic()
        try:
            self._backend.finish_write()
        except OSError as e:
            raise self._failed(e) from None
        save.still += time.monotonic() - began
        save.publishing = BackgroundTask(lambda: self._folder.publish(save.state, save.file, self._backend.digest()))

    def _done(self, save: _Save, publishing: BackgroundTask[None]) -> None:
        self._writing = None
        try:
            publishing.result()
        except OSError as e:
            raise self._failed(e) from None
        self._schedule_next(save.began, save.still, time.monotonic() - save.began)

    def _failed(self, why: OSError) -> SavedStateError:
        self._writing = None
        self.due = time.monotonic() + RETRY_SECONDS
        return self._folder.not_saved(why)

    def _schedule_next(self, began: float, still: float, wrote: float) -> None:
        self._pause = max(still / STILL_SHARE, wrote / WRITE_SHARE)
        self.due = began + self._pause

    # -- now ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the state that is being written."""
        if (save := self._writing) is not None:
            if save.publishing is None:
                self._finish(save)
            if save.publishing is not None:
                save.publishing.wait()
                self._done(save, save.publishing)

    def save_now(self, within: float | None = None) -> None:
        """Write the present state, after the one that is being written.

        `within`: the seconds that there are for it. If they suffice for the present state alone, the one that is being
        written is dropped.
        """
        self._drop_copy()
        if self._writing is not None and within is not None and self._leaves_no_time(self._writing, within):
            self._writing = None
            self._backend.cancel_write()
        with contextlib.suppress(SavedStateError):  # the next write raises it again if the cause remains
            self.finish()
        self._write_now(time.monotonic())

    def _leaves_no_time(self, save: _Save, within: float) -> bool:
        """Return whether `within` suffices to write the present state, but not after the rest of the old one."""
        share, spent = self._backend.written_share, time.monotonic() - save.began
        if save.publishing is not None or share <= 0:
            return False
        whole = spent / min(1.0, share)
        return whole <= within < whole + (whole - spent)

    def _write_now(self, began: float) -> None:
        with self._exchange:
            state = self._manifest()
            if state is None:
                return
            try:
                file = self._folder.next_file()
                self._backend.write_now(file)
                self._folder.publish(state, file, self._backend.digest())
            except OSError as e:
                raise self._failed(e) from None
        took = time.monotonic() - began
        self._schedule_next(began, took, took)

    def close(self) -> None:
        """Wait for a state that is being published. The backend's end also ends one that is being written."""
        save, self._writing, self._copied = self._writing, None, None
        if save is not None and save.publishing is not None:
            save.publishing.wait(CLOSE_SECONDS)
