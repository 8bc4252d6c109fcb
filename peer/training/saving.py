"""When the trainer's own state is saved, and how: between two steps it is copied, and written while training goes on.

    nothing -> kept -> being written -> being published -> nothing
        keep    begin               end                done

One save at a time: while one is written, a new one is put off; one that has not begun is replaced. What is read from a
disk after a crash, at any moment, is the old state or the new one: `SavedFolder.publish` is one rename. With many ranks
each writes its own part, and `end` is an order to all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from peer.errors import SavedStateError
from peer.training.beside import Beside
from peer.training.memory import available
from peer.training.saved import Saved, SavedFolder
from protocol.ids import Digest

if TYPE_CHECKING:
    from peer.training.trainer import Report

STILL_SHARE = 0.02
"""The most of the time for which training may stand still for saving."""

WRITE_SHARE = 0.05
"""The most of the time in which something is written: disk and processor are others' too."""

SAVE_DELAY = 0.5
"""Seconds for which writing waits for the round of the announced update to be applied: other peers wait for that."""

PROGRESS_SECONDS = 30.0
"""Within a round what was trained is saved no more often: it is what a process that is killed loses."""

RETRY_SECONDS = 60.0
"""After a save that failed."""

MEMORY_SHARE = 0.5
"""The most that a copy may take of the memory that is available."""

CLOSE_SECONDS = 5.0


class Work(Protocol):
    """What saving needs of those who train: `Alone` or `Crew`, which see."""

    @property
    def copy_size(self) -> int: ...
    @property
    def is_written(self) -> bool: ...
    @property
    def written(self) -> float: ...

    def keep(self) -> None: ...
    def begin(self, path: Path) -> None: ...
    def end(self) -> None: ...
    def digest(self) -> Digest: ...
    def give_up(self) -> None: ...
    def write(self, path: Path) -> Digest: ...


@dataclass
class _UnderWay:
    state: Saved
    file: Path
    began: float
    still: float
    """Seconds for which training stood still for it."""
    publishing: Beside[None] | None = None


class Saving:
    """Used by the thread that trains, alone. Its methods raise SavedStateError; the old state is then still there."""

    def __init__(self, folder: SavedFolder, work: Work, state: Callable[[], Saved | None], report: Report):
        """`state` says all that is to be saved but the tensors; None when there is nothing."""
        self._folder = folder
        self._work = work
        self._state = state
        self._report = report
        self._kept: tuple[Saved, float, float] | None = None
        """(state, when it is to be written at the latest, seconds for which training stood still for the copy)."""
        self._under_way: _UnderWay | None = None
        self._due = 0.0
        self._pause = 0.0
        """Seconds from the last save's begin to when the next one was due."""
        self._kept_at = self._update_at = self._round_seconds = 0.0
        """When something was kept last, when an update was last made, and how long after the one before."""
        self._told = False

    @property
    def is_idle(self) -> bool:
        """Nothing is kept, and nothing is being written."""
        return self._kept is None and self._under_way is None

    @property
    def unsaved(self) -> tuple[Saved, ...]:
        """The states that are not saved yet: the files that they refer to must stay."""
        states = (self._kept and self._kept[0], self._under_way and self._under_way.state)
        return tuple(state for state in states if state is not None)

    # -- beside the training ---------------------------------------------------------------------------------

    def keep(self) -> None:
        """To be called when an update was made: copies what is there now, if it is time for that."""
        began = time.monotonic()
        if self._update_at:
            self._round_seconds = began - self._update_at
        self._update_at = began
        if began >= self._due and self._under_way is None:
            self._keep(began)

    @property
    def is_progress_due(self) -> bool:
        """Whether `keep_progress` has something to do."""
        now = time.monotonic()
        if not self.is_idle or not self._update_at or now < max(self._due, self._kept_at + PROGRESS_SECONDS):
            return False
        # What is there right after an update is worth more: the save of that is not put off by this one.
        left = self._update_at + self._round_seconds - now
        return left <= 0 or left >= self._pause

    def keep_progress(self) -> None:
        """To be called between two steps of a long round: copies what is there, if `is_progress_due`."""
        if self.is_progress_due:
            self._keep(time.monotonic())

    def _keep(self, began: float) -> None:
        self._kept_at = began
        state = self._state()
        if state is None:
            return
        need = self._work.copy_size
        room = available()
        if need > MEMORY_SHARE * room:
            self._say_that_it_waits(need, room)
            self._forget_kept()
            self._write(state, began)
            return
        self._work.keep()
        now = time.monotonic()
        self._kept = state, now + SAVE_DELAY, now - began

    def _forget_kept(self) -> None:
        if self._kept is not None:
            self._kept = None
            self._work.give_up()

    def _say_that_it_waits(self, need: int, room: int) -> None:
        if not self._told:
            self._told = True
            self._report(
                "info", "saved-state",
                "training stands still while its state is saved: a copy, to be written beside it, needs "
                f"{need / 2**20:,.0f} MiB of memory, which is more than half of the {room / 2**20:,.0f} that are free",
            )  # fmt: skip

    def go_on(self, *, now: bool = False) -> None:
        """To be called often: begins to write when it is time (or now), and ends what is written."""
        if self._kept is not None and self._under_way is None and (now or time.monotonic() >= self._kept[1]):
            self._begin(*self._kept)
        elif (save := self._under_way) is not None:
            if save.publishing is None and self._work.is_written:
                self._end(save)
            elif save.publishing is not None and save.publishing.is_done:
                self._done(save, save.publishing)

    def _begin(self, state: Saved, _: float, still: float) -> None:
        began = time.monotonic()
        self._kept = None
        try:
            file = self._folder.place()
        except OSError as e:
            self._work.give_up()
            raise self._failed(e) from None
        self._work.begin(file)
        self._under_way = _UnderWay(state, file, began, still + time.monotonic() - began)

    def _end(self, save: _UnderWay) -> None:
        began = time.monotonic()
        try:
            self._work.end()
        except OSError as e:
            raise self._failed(e) from None
        save.still += time.monotonic() - began
        save.publishing = Beside(lambda: self._folder.publish(save.state, save.file, self._work.digest()))

    def _done(self, save: _UnderWay, publishing: Beside[None]) -> None:
        self._under_way = None
        try:
            publishing.result()
        except OSError as e:
            raise self._failed(e) from None
        self._next_after(save.began, save.still, time.monotonic() - save.began)

    def _failed(self, why: OSError) -> SavedStateError:
        self._under_way = None
        self._due = time.monotonic() + RETRY_SECONDS
        return self._folder.not_saved(why)

    def _next_after(self, began: float, still: float, wrote: float) -> None:
        self._pause = max(still / STILL_SHARE, wrote / WRITE_SHARE)
        self._due = began + self._pause

    # -- now ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for what is being written."""
        if (save := self._under_way) is not None:
            if save.publishing is None:
                self._end(save)
            if save.publishing is not None:
                save.publishing.wait()
                self._done(save, save.publishing)

    def now(self, within: float | None = None) -> None:
        """Write what is there now, after what is being written.

        `within`: the seconds that there are for it. When they are enough for the new state alone, the one that is being
        written is given up.
        """
        self._forget_kept()
        if self._under_way is not None and within is not None and self._leaves_no_time(self._under_way, within):
            self._under_way = None
            self._work.give_up()
        with contextlib.suppress(SavedStateError):  # what is written next tells, if that cannot be written either
            self.finish()
        state = self._state()
        if state is not None:
            self._write(state, time.monotonic())

    def _leaves_no_time(self, save: _UnderWay, within: float) -> bool:
        """Whether the new state can be written in this time, but not after the rest of the old one."""
        share, spent = self._work.written, time.monotonic() - save.began
        if save.publishing is not None or share <= 0:
            return False
        whole = spent / min(1.0, share)
        return whole <= within < whole + (whole - spent)

    def _write(self, state: Saved, began: float) -> None:
        try:
            self._folder.write(state, self._work.write)
        except SavedStateError:
            self._due = time.monotonic() + RETRY_SECONDS
            raise
        took = time.monotonic() - began
        self._next_after(began, took, took)

    def close(self) -> None:
        """What is being published is waited for. What is being written ends with those who train."""
        save, self._under_way, self._kept = self._under_way, None, None
        if save is not None and save.publishing is not None:
            save.publishing.wait(CLOSE_SECONDS)
