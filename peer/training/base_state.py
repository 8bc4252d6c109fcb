"""The replicated state that a peer holds, and what becomes of its own updates: base, anchor, error feedback.

The request handler's thread owns it: it makes updates and advances the base while a step goes on. With a `SwapBase` or
`Load` message it passes the ownership to the thread that trains, which alone may move the model's parameters.
Methods raise CairnError, OSError or torch.OutOfMemoryError. After a failed `load` or `advance` nothing is trained until
the next `load`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from peer.channel import Applied, Apply, Load, MakeUpdate, NothingDone, RoundUpdates, UpdateMade
from peer.durable import link_into
from peer.errors import SavedStateError, TrainingError
from peer.mapped import mapped_files
from peer.training.backend import TrainingBackend
from peer.training.error_feedback import AcceptedUpdate, ErrorFeedbackLedger
from peer.training.exchange_point import ExchangePoint
from peer.training.layers import Report
from peer.training.owner import ThreadOwned
from peer.training.saved_state import SavedFolder, SavedState, TrainerManifest, file_digest
from peer.training.windows import UndecidedUpdate
from protocol.codec import make_codec
from protocol.errors import CodecError, MalformedError
from protocol.ids import Digest, PeerKey
from protocol.merkle import blob_digest
from protocol.outer import Contribution
from protocol.reduce import Reduction
from protocol.spec import RunSpec
from protocol.state import state_layout

ReducedShards = Callable[[], Sequence[memoryview]]
"""Returns the reduced shards of a round, in order; empty when the round was not reduced."""


@dataclass(frozen=True, slots=True)
class BaseMove:
    """A base that moved to the state after `record`, from which `round` starts, and what `swap_base` owes to it.

    `missed`: blobs of own updates that do not count, None for a blob that is gone. `accepted`: own updates that the
    state holds. `own_windows`: windows of the own update in the record, 0 if there is none. `unsaved`: the last
    accepted update when the error feedback starts empty because no state was saved; nothing else then holds what its
    round left untransmitted. `next_window` and `accepted_windows` are as in the messages.
    """

    record: Digest
    round: int
    missed: tuple[bytes | None, ...]
    accepted: Mapping[Digest, AcceptedUpdate]
    next_window: int
    accepted_windows: int
    own_windows: int = 0
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
        self.ledger = ErrorFeedbackLedger(backend.outer, Reduction.of(self.codec), folder, backend.device, report)
        self.record: Digest | None = None
        """The record whose state is held; None before the first load."""
        self.round = 0
        self._beta = spec.codec.beta
        self._state_layout = state_layout(spec.model.layout, spec.outer)
        self._me = me
        self._threads = threads
        self._backend = backend
        self._outer = backend.outer
        self._exchange = exchange
        self._folder = folder
        self._report = report
        self._saved = self._read_saved()

    def _read_saved(self) -> SavedState | None:
        try:
            return self._folder.read()
        except SavedStateError as e:
            try:
                self._folder.quarantine()
            except OSError as problem:
                self._report("warning", "saved-state", f"{self._folder.folder} cannot be written to: {problem}")
            text = f"{e}. It was set aside, and training starts from the run's state: what was not announced is lost"
            self._report("warning", "saved-state", text)
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
                self._exchange.windows = self._exchange.windows.lost()
            windows, loss = self._exchange.windows, self._exchange.loss
            claim = windows.claim(max_windows)
            if claim is None:
                return NothingDone(ask.parent)
            blob = self._outer.announce()
            self._exchange.loss = loss.restarted()
            self.ledger.decay(self._beta)
        first, end, steps = claim
        made = UndecidedUpdate(ask.parent, blob_digest(blob), len(blob), first, end, steps, loss.mean)
        manifest = TrainerManifest(ask.parent, self.round, replace(windows, announced=made), dict(self.ledger.entries))
        try:
            link_into(self._folder.keep_update(made.blob, blob, manifest), ask.out)
        except OSError:
            with self._exchange:
                self._outer.add_back(blob)
            self._folder.discard_update(made.blob)
            raise
        with self._exchange:
            self._exchange.windows = replace(self._exchange.windows, announced=made)
        return _made(made, ask.out)

    # -- states ------------------------------------------------------------------------------------------------

    def advance(self, ask: Apply) -> BaseMove:
        """Move the base to the state after the one record that follows. `swap_base` is then due.

        It reads and writes nothing that a step needs, so a step may go on meanwhile. Raise CodecError, after which no
        state is held if the base had begun to change.
        """
        self.assert_owner()
        if not self._exchange.holds_state:
            raise TrainingError("a record was to be applied, and no state is held: load one first")
        if ask.update.round != self.round:
            raise TrainingError(f"a record of round {ask.update.round} was to be applied to the state of {self.round}")
        # Read, or opened, now: once the node has the answer, it may remove the files.
        missed = tuple(map(self._missed_blob, ask.missed))
        shards = mapped_files(ask.update.parts)
        accepted = self._apply(ask.update, lambda: shards)
        own = sum(u.windows for u in ask.update.updates if u.author == self._me)
        return BaseMove(ask.update.record, self.round + 1, missed, accepted, ask.next_window, ask.accepted_windows, own)

    def _apply(self, update: RoundUpdates, shards: ReducedShards) -> dict[Digest, AcceptedUpdate]:
        """Move the base by one record. Return the own updates that it accepts, by digest."""
        contributions = self._contributions(update)
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

    def applied(self, began: float, record: Digest, checkpoint: Path | None) -> Applied:
        """Return the answer for the base, which is the state after `record`. Write its checkpoint where one is wanted.

        `began`: when the request was received (seconds, monotonic).
        """
        self.assert_owner()
        digest = self._backend.store_state(self._threads, checkpoint)
        return Applied(record, digest, time.monotonic() - began, checkpoint)

    def swap_base(self, move: BaseMove, unsaved: Iterable[TrainerManifest]) -> None:
        """Put the advanced base under the model's parameters, and settle own updates and windows by it.

        For the thread that trains, between two pieces of a step. `unsaved`: states that are about to be saved.
        """
        self.assert_owner()
        with self._exchange:
            self._outer.rebase()
            self._settle(move)
        self._tidy(unsaved)

    def load(self, ask: Load, unsaved: Iterable[TrainerManifest]) -> tuple[Applied, BaseMove]:
        """Replace the held state by the one in a checkpoint and the records after it. For the thread that trains.

        Raise MalformedError for a checkpoint that is not the chain's; the held state then stays.
        """
        self.assert_owner()
        began = time.monotonic()
        self._check(ask.checkpoint, ask.base_state)
        self._lose_state()  # there may be no memory for both
        try:
            self._backend.load_state(ask.checkpoint)
            record, number, accepted, last = self._replay(ask)
        except BaseException:
            self._lose_state()
            raise
        with self._exchange:
            resumed = self.record is not None or self._resume_saved(ask.next_window)
            self._exchange.holds_state = True
            self._outer.rebase()
            missed = tuple(map(self._missed_blob, ask.restore))
            move = BaseMove(
                record, number, missed, accepted, ask.next_window, ask.accepted_windows,
                unsaved=None if resumed else last,
            )  # fmt: skip
            self._settle(move)
        self._tidy(unsaved)
        return self.applied(began, record, ask.write_checkpoint), move

    def _replay(self, ask: Load) -> tuple[Digest, int, dict[Digest, AcceptedUpdate], Digest | None]:
        """Apply the records after a checkpoint. Return record and round reached, own accepted updates, the last one."""
        record, number = ask.record, ask.round
        accepted = {blob_digest(blob): AcceptedUpdate(blob) for blob in map(self._blob, ask.withdraw)}
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
        undecided = {*self.ledger.entries, move.unsaved, mine and mine.blob}
        for name, update in move.accepted.items():
            if name in undecided:
                self.ledger.accepted(name, update)
        put_back = [blob is not None and self.ledger.missed(blob) for blob in move.missed]
        is_open = False
        if mine is not None and mine.end > move.next_window and not self.ledger.holds_all_of(mine.blob):
            is_open = mine.parent == move.record
            if not is_open:
                blob = self._missed_blob(self._folder.update_file(mine.blob))
                put_back.append(blob is not None and self.ledger.missed(blob))
                if not put_back[-1]:
                    windows = windows.lost()  # no update carries their work, so none may claim them
        kept = bool(put_back) and all(put_back)
        self._exchange.windows = windows.decided(move.next_window, kept=kept, undecided=is_open)
        self.record, self.round = move.record, move.round

    def _tidy(self, unsaved: Iterable[TrainerManifest]) -> None:
        announced = self._exchange.windows.announced
        try:
            self._folder.tidy(announced and announced.blob, self.ledger.entries, unsaved)
        except OSError as e:
            self._report("warning", "saved-state", f"{self._folder.folder} cannot be tidied: {e}")

    # -- files from the node -----------------------------------------------------------------------------------

    def _missed_blob(self, path: Path) -> bytes | None:
        """Return the blob of an own update that does not count, or None when it is gone, which is reported."""
        try:
            return self._blob(path)
        except (OSError, CodecError) as e:
            self.ledger.report_lost(e)
            return None

    def _own(self, contributions: Sequence[Contribution], shards: ReducedShards) -> dict[Digest, AcceptedUpdate]:
        """Return the own updates among those accepted, by digest."""
        mine = [bytes(c.blob) for c in contributions if c.author == self._me]
        return {blob_digest(blob): AcceptedUpdate(blob, shards) for blob in mine}

    def _reduced_before(self, update: RoundUpdates) -> dict[Digest, AcceptedUpdate]:
        """Return own updates of a round that the state holds already. Unreadable ones are only reported."""
        try:
            return self._own(self._contributions(update), partial(mapped_files, update.parts))
        except (OSError, CodecError) as e:
            self.ledger.report_untransmitted_lost(e)
            return {}

    def _contributions(self, update: RoundUpdates) -> list[Contribution]:
        return [Contribution(u.author, u.windows, self._blob(u.blob)) for u in update.updates]

    def _blob(self, path: Path) -> bytes:
        """Return an update's bytes. Raise OSError, and CodecError before reading when the size is wrong."""
        if (size := path.stat().st_size) != self.codec.size:
            raise CodecError(f"{path} has {size} bytes: an update of this run has {self.codec.size}")
        return path.read_bytes()

    def _check(self, path: Path, digest: Digest) -> None:
        """Raise MalformedError unless the file is the checkpoint with this digest. Raise OSError."""
        if (size := path.stat().st_size) != self._state_layout.checkpoint_size:
            raise MalformedError(f"{path} is not a checkpoint of this run's model: it has {size} bytes")
        if (found := file_digest(path)) != digest:
            raise MalformedError(
                f"{path} is damaged or another state: its digest is {found.short}, the chain says {digest.short}; "
                "fetch it again"
            )

    # -- what survives a restart -------------------------------------------------------------------------------

    def manifest(self) -> SavedState | None:
        """Return all that is to be saved except the tensors; None before the first load.

        For any thread that holds the exchange point.
        """
        self._exchange.assert_held()
        if self.record is None:
            return None
        entries, steps = dict(self.ledger.entries), self._backend.optimizer_steps
        return SavedState(self.record, self.round, self._exchange.windows, entries, steps, {}, {}, {})

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
        self.ledger.entries = dict(saved.restored)
        self._backend.resume(saved, everything=bool(saved.feedback))
        return True


def _made(a: UndecidedUpdate, out: Path) -> UpdateMade:
    return UpdateMade(a.parent, out, a.size, a.blob, a.first, a.first, a.end, a.steps, a.loss)
