"""The replicated state that a peer holds, and what becomes of its own updates: base, anchor, error feedback.

The request handler's thread owns it: it makes updates and advances the base while a step goes on. With a `SwapBase` or
`Load` message it passes the ownership to the thread that trains, which alone may move the model's parameters.
Methods raise CairnError, OSError or torch.OutOfMemoryError. After a failed `load` or `advance` nothing is trained until
the next `load`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from peer.channel import Applied, Apply, Load, MakeUpdate, NothingDone, RoundUpdates, UpdateMade
from peer.durable import link_into
from peer.errors import SavedStateError, TrainingError
from peer.memory_map import mapped_files
from peer.training.backend import TrainingBackend
from peer.training.error_feedback import AcceptedUpdate, FeedbackContents
from peer.training.exchange_point import ExchangePoint
from peer.training.layers import Report
from peer.training.round_files import RoundFiles
from peer.training.saved_state import SavedFolder, SavedState, TrainerManifest
from peer.training.thread_owned import ThreadOwned
from peer.training.windows import UndecidedUpdate, WindowAccounting
from protocol.codec import make_codec
from protocol.errors import CodecError
from protocol.ids import Digest, PeerKey
from protocol.merkle import blob_digest
from protocol.outer import Contribution
from protocol.reduce import Reduction
from protocol.spec import RunSpec

ReducedShards = Callable[[], Sequence[memoryview]]
"""Returns the reduced shards of a round, in order; empty when the round was not reduced."""


@dataclass(frozen=True, slots=True)
class BaseMove:
    """A base that moved to the state after `record`, from which `round` starts, and what `swap_base` owes to it.

    `missed`: blobs of own updates that do not count, None for a blob that is gone. `accepted`: own updates that the
    state holds. `unsaved`: the last accepted update when the error feedback starts empty because no state was saved;
    nothing else then holds what its round left untransmitted. `next_window` and `accepted_windows` are as in the
    messages.
    """

    record: Digest
    round: int
    missed: tuple[bytes | None, ...]
    accepted: Mapping[Digest, AcceptedUpdate]
    next_window: int
    accepted_windows: int
    unsaved: Digest | None = None


class BaseState(ThreadOwned):
    """Base and outer momentum, anchor, error feedback, and the record that they belong to."""

    def __init__(
        self,
        spec: RunSpec,
        me: PeerKey,
        threads: int,
        backend: TrainingBackend,
        exchange: ExchangePoint,
        folder: SavedFolder,
        report: Report,
    ):
        """Hold nothing yet, but read what was saved in `folder`. `threads`: CPU threads that hash a state."""
        super().__init__()
        self.codec = make_codec(spec.codec, spec.model.layout)
        self.feedback_contents = FeedbackContents(
            backend.outer, Reduction(self.codec), spec.codec.beta, folder, backend.device, report
        )
        self.record: Digest | None = None
        """The record whose state is held; None before the first load."""
        self.round = 0
        self._files = RoundFiles.of(spec)
        self._me = me
        self._threads = threads
        self._backend = backend
        self._outer = backend.outer
        self._exchange = exchange
        self._folder = folder
        self._report = report
        self._saved = self._read_saved()
        announced = self._saved and self._saved.windows.announced
        self._last_update = announced.blob if announced else self._saved and self._saved.last_update
        """The last update that was made, decided or not."""
        self.is_begin_due = False
        """True in a replayable run when `begin_again` is due, by the thread that trains: see `replayable_state`."""
        self._is_announcing = False
        """An update left the feedback, and is not on the disk yet: a state saved now would have it nowhere."""

    def _read_saved(self) -> SavedState | None:
        try:
            return self._folder.read()
        except SavedStateError as e:
            text = f"{e}. Its files are renamed unusable-*, and training starts from the run's state: "
            text += "what was not announced is lost"
            self._report("warning", "saved-state", text)
        try:
            self._folder.quarantine()
            return self._folder.read()  # of an undecided update: another one for its parent must never be signed
        except OSError as problem:
            self._report("warning", "saved-state", f"{self._folder.folder} cannot be written to: {problem}")
            return None

    # -- updates -----------------------------------------------------------------------------------------------

    def make_update(self, ask: MakeUpdate, max_windows: int) -> UpdateMade | NothingDone:
        """Compress all progress that was not sent yet into an update that claims at most `max_windows` windows.

        A second request for the same parent gets the same update. A step that is under way is left to the next update.
        """
        self.assert_owner()
        if not self._exchange.holds_state or ask.parent != self.record:
            held = self.record.short if self.record else "nothing"
            raise TrainingError(f"an update after record {ask.parent.short} was asked for; what is held is {held}")
        before = self._exchange.windows.announced
        if before is not None and self._folder.update_file(before.blob).exists():
            link_into(self._folder.update_file(before.blob), ask.out)
            return _made(before, ask.out)
        with self._exchange:
            if before is not None:
                text = f"{self._folder.update_file(before.blob)} is gone: its work is lost"
                self._report("warning", "lost-update", text)
                self._give_up_announced()
            windows, loss = self._exchange.windows, self._exchange.loss
            claim = self._claim(windows, max_windows)
            if claim is None:
                return NothingDone(ask.parent)
            entries = self.feedback_contents.entries
            blob = self.codec.with_author(self._announce(), self._me)
            self._is_announcing = True
        first, end, steps = claim
        rebase = self._rebase_window(windows, first)
        made = UndecidedUpdate(ask.parent, blob_digest(blob), len(blob), first, rebase, end, steps, loss.mean)
        manifest = TrainerManifest(
            ask.parent, self.round, replace(windows, announced=made), dict(self.feedback_contents.entries),
            last_update=made.blob,
        )  # fmt: skip
        try:
            link_into(self._folder.keep_update(made.blob, blob, manifest), ask.out)
        except OSError:
            with self._exchange:
                self._take_back(blob)
                self.feedback_contents.entries = entries
                self._is_announcing = False
            self._folder.discard_update(made.blob)
            raise
        with self._exchange:
            self._exchange.windows = replace(self._exchange.windows, announced=made)
            self._last_update = made.blob
            self._is_announcing = False
        return _made(made, ask.out)

    # A replayable run differs in the next five methods, and in `_missed_blobs`, `_move` and `_take_up`.

    def _give_up_announced(self) -> None:
        """Deal with an announced update whose file disappeared; the lock is held, as for the next three."""
        self._exchange.windows = self._exchange.windows.lost()

    def _claim(self, windows: WindowAccounting, most: int) -> tuple[int, int, int] | None:
        """Return (first, end, inner steps) of an update made now, or None when there is none."""
        return windows.claim(most)

    def _announce(self) -> bytes | bytearray:
        """Return the blob of all progress that was not sent yet."""
        blob = self._outer.announce()
        self._exchange.loss = self._exchange.loss.restarted()
        self.feedback_contents.decay()
        return blob

    def _take_back(self, blob: bytes) -> None:
        """Undo `_announce`, for the update could not be kept."""
        self._outer.take_back(blob)

    def _rebase_window(self, windows: WindowAccounting, first: int) -> int:
        """Return the header's field for an update that claims windows from `first` on."""
        return first

    # -- states ------------------------------------------------------------------------------------------------

    def advance(self, ask: Apply) -> BaseMove:
        """Move the base to the state after the one record that follows. `swap_base` is then due.

        It reads and writes nothing that a step needs, so a step may go on meanwhile. Raises CodecError, after which no
        state is held if the base had begun to change.
        """
        self.assert_owner()
        if not self._exchange.holds_state:
            raise TrainingError("a record was to be applied, and no state is held: load one first")
        if ask.update.round != self.round:
            raise TrainingError(f"a record of round {ask.update.round} was to be applied to the state of {self.round}")
        # Read, or opened, now: once the node has the answer, it may remove the files.
        missed = self._missed_blobs(ask.missed)
        shards = mapped_files(ask.update.parts)
        accepted = self._apply(ask.update, lambda: shards)
        return BaseMove(ask.update.record, self.round + 1, missed, accepted, ask.next_window, ask.accepted_windows)

    def _apply(self, update: RoundUpdates, shards: ReducedShards) -> dict[Digest, AcceptedUpdate]:
        """Move the base by one record. Return the own updates that it accepts, by digest."""
        contributions = self._files.contributions(update)
        try:
            if update.parts:
                self._outer.advance_reduced(update.parts)
            else:
                self._outer.advance(contributions)
        except BaseException:
            self._lose_state()
            raise
        return self._own(contributions, shards)

    def _lose_state(self) -> None:
        with self._exchange:
            self._outer.drop_base()
            self._exchange.holds_state = False

    def applied(self, record: Digest, checkpoint: Path | None) -> Applied:
        """Return the answer for the base, which is the state after `record`. Write its checkpoint where one is wanted.

        A checkpoint that cannot be written is reported, and the answer names none: the state is held all the same.
        """
        self.assert_owner()
        try:
            digest = self._backend.store_state(self._threads, checkpoint)
        except OSError as e:
            if checkpoint is None:
                raise
            self._report("warning", "checkpoint", f"the checkpoint of record {record.short} was not written: {e}")
            checkpoint, digest = None, self._backend.store_state(self._threads, None)
        return Applied(record, digest, checkpoint)

    def write(self, out: Path) -> Applied:
        """Write the checkpoint of the held state. For the thread that trains. Raises TrainingError if none is held."""
        self.assert_owner()
        if self.record is None or not self._exchange.holds_state:
            raise TrainingError("no state is held")
        return Applied(self.record, self._backend.store_state(self._threads, out), out)

    def swap_base(self, move: BaseMove, unsaved: Iterable[TrainerManifest]) -> None:
        """Put the advanced base under the model's parameters, and settle own updates and windows by it.

        For the thread that trains, between two pieces of a step. `unsaved`: states that are about to be saved.
        """
        self.assert_owner()
        with self._exchange:
            self._move(move)
        self._tidy(unsaved)

    def _move(self, move: BaseMove) -> None:
        """Do the part of `swap_base` that needs the lock."""
        self._outer.rebase()
        self._settle(move)

    def begin_again(self, unsaved: Iterable[TrainerManifest]) -> None:
        """Continue from the update that `make_update` announced. Only in a replayable run, where `is_begin_due`."""
        raise TrainingError("training begins again in a replayable run only")

    def load(self, ask: Load, unsaved: Iterable[TrainerManifest]) -> tuple[Applied, BaseMove]:
        """Replace the held state by the one in a checkpoint and the records after it. For the thread that trains.

        Raises MalformedError for a checkpoint that is not the chain's; the held state then stays.
        """
        self.assert_owner()
        self._files.check_checkpoint(ask.checkpoint, ask.base_state)
        self._lose_state()  # there may be no memory for both
        try:
            self._backend.load_state(ask.checkpoint)
            record, number, accepted, last = self._replay(ask)
        except BaseException:
            self._lose_state()
            raise
        missed = self._missed_blobs(ask.restore)
        move = BaseMove(record, number, missed, accepted, ask.next_window, ask.accepted_windows)
        with self._exchange:
            self._exchange.holds_state = True
            self._take_up(move, last)
        self._tidy(unsaved)
        return self.applied(record, ask.write_checkpoint), move

    def _take_up(self, move: BaseMove, last: Digest | None) -> None:
        """Continue on a state that was loaded. `last`: the last own update that it holds, if one is known."""
        resumed = self.record is not None or self._resume_saved(move.next_window)
        self._outer.rebase()
        self._settle(move if resumed else replace(move, unsaved=last))

    def _replay(self, ask: Load) -> tuple[Digest, int, dict[Digest, AcceptedUpdate], Digest | None]:
        """Apply the records after a checkpoint. Return record and round reached, own accepted updates, the last one."""
        record, number = ask.record, ask.round
        accepted = {blob_digest(blob): AcceptedUpdate(blob) for blob in map(self._files.update, ask.withdraw)}
        last: Digest | None = None
        for update in ask.reduced:
            found = self._reduced_before(update)
            accepted, last = accepted | found, next(iter(found), last)
        for update in ask.replay:
            if update.round != number:
                raise TrainingError(f"the records to replay are not in order: {update.round} where {number} was due")
            found = self._apply(update, partial(mapped_files, update.parts))
            accepted, last = accepted | found, next(iter(found), last)
            record, number = update.record, number + 1
        return record, number, accepted, last

    def _settle(self, move: BaseMove) -> None:
        """Bring error feedback and window count to a new state. The parameters are on it already."""
        self._exchange.assert_held()
        windows = self._exchange.windows
        mine = windows.announced
        # Every other update was dealt with when its round was applied.
        undecided = {*self.feedback_contents.entries, move.unsaved, mine and mine.blob}
        for name, update in move.accepted.items():
            if name in undecided:
                self.feedback_contents.accepted(name, update)
        put_back = [blob is not None and self.feedback_contents.missed(blob) for blob in move.missed]
        is_open = False
        if mine is not None and mine.end > move.next_window and not self.feedback_contents.holds_all_of(mine.blob):
            is_open = mine.parent == move.record
            if not is_open:
                blob = self._missed_blob(self._folder.update_file(mine.blob))
                put_back.append(blob is not None and self.feedback_contents.missed(blob))
                if not put_back[-1]:
                    windows = windows.lost()  # no update carries their work, so none may claim them
        kept = bool(put_back) and all(put_back)
        self._exchange.windows = windows.decided(move.next_window, kept=kept, undecided=is_open)
        self.record, self.round = move.record, move.round

    def _tidy(self, unsaved: Iterable[TrainerManifest]) -> None:
        announced = self._exchange.windows.announced
        try:
            self._folder.tidy(announced and announced.blob, self.feedback_contents.entries, unsaved)
        except OSError as e:
            self._report("warning", "saved-state", f"{self._folder.folder} cannot be tidied: {e}")

    # -- files from the node -----------------------------------------------------------------------------------

    def _missed_blobs(self, paths: Sequence[Path]) -> tuple[bytes | None, ...]:
        """Return the blobs of own updates that do not count, as far as the error feedback needs them."""
        return tuple(map(self._missed_blob, paths))

    def _missed_blob(self, path: Path) -> bytes | None:
        """Return the blob of one of our updates that does not count, or None when it is gone, which is reported."""
        try:
            return self._files.update(path)
        except (OSError, CodecError) as e:
            self.feedback_contents.report_lost(e)
            return None

    def _own(self, contributions: Sequence[Contribution], shards: ReducedShards) -> dict[Digest, AcceptedUpdate]:
        """Return the own updates among those accepted, by digest."""
        mine = [bytes(c.blob) for c in contributions if c.author == self._me]
        return {blob_digest(blob): AcceptedUpdate(blob, shards) for blob in mine}

    def _reduced_before(self, update: RoundUpdates) -> dict[Digest, AcceptedUpdate]:
        """Return own updates of a round that the state holds already. Unreadable ones are only reported."""
        try:
            return self._own(self._files.contributions(update), partial(mapped_files, update.parts))
        except (OSError, CodecError) as e:
            self.feedback_contents.report_untransmitted_lost(e)
            return {}

    # -- what survives a restart -------------------------------------------------------------------------------

    def manifest(self) -> SavedState | None:
        """Return all that is to be saved except the tensors; None before the first load, and while an update is kept.

        For any thread that holds the exchange point.
        """
        self._exchange.assert_held()
        if self.record is None or self._is_announcing:
            return None
        entries, steps = dict(self.feedback_contents.entries), self._backend.optimizer_steps
        return SavedState(
            self.record, self.round, self._exchange.windows, entries, steps, {}, {}, {}, last_update=self._last_update
        )

    def _resume_saved(self, next_window: int) -> bool:
        """Continue, at the first load, from the saved state as far as it fits what the chain has accepted.

        Return False when nothing is left of the error feedback.
        """
        saved, self._saved = self._saved, None
        if saved is None:
            return False
        windows, mine = saved.windows, saved.windows.announced
        if next_window > windows.claimed_from and not (mine and next_window == mine.end):
            # Updates made after it was saved were accepted: its feedback is in them already. To send it again would
            # count that work twice.
            text = "the saved state is older than the last accepted update: only its optimizer's moments are used"
            self._report("info", "saved-state", text)
            self._backend.resume(saved, everything=False)
            return False
        self._exchange.windows = windows
        self.feedback_contents.entries = dict(saved.restored)
        self._backend.resume(saved, everything=bool(saved.feedback))
        return True


def _made(a: UndecidedUpdate, out: Path) -> UpdateMade:
    return UpdateMade(a.parent, out, a.size, a.blob, a.first, a.rebase_window, a.end, a.steps, a.loss)
