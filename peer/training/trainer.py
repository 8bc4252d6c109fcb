"""What a trainer holds and does: one method for each thing that the node asks, and one for an inner step.

No channel and no loop here (that is `service`): a test drives this object directly. Methods raise CairnError, OSError
or torch.OutOfMemoryError; after a failed `load` or `apply` nothing is trained until the next `load`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peer.channel import (
    Applied,
    Apply,
    Load,
    MakeUpdate,
    NothingDone,
    Orders,
    Ready,
    RoundUpdates,
    Start,
    UpdateMade,
)
from peer.errors import SavedStateError, TrainingError
from peer.training.alone import Alone
from peer.training.claims import Announced, Claims
from peer.training.data import Batches, WindowReader
from peer.training.device import choose_device, device_name, out_of_memory, pinned_for
from peer.training.durable import give
from peer.training.flops import flops_per_token, peak_flops
from peer.training.gate import Gate
from peer.training.inner import Step
from peer.training.layers import LayerOptions, Report, compiles, keep_compiled
from peer.training.mapped import mapped
from peer.training.own import Accepted, OwnUpdates
from peer.training.pace import Pace
from peer.training.parallel.degrees import Degrees
from peer.training.parallel.setup import resolve
from peer.training.saved import Known, Saved, SavedFolder
from peer.training.saving import Saving
from peer.training.schedule import step_factor
from peer.training.spent import Doing, Spent
from protocol.assignment import windows_of
from protocol.codec import make_codec
from protocol.errors import CodecError, MalformedError
from protocol.ids import Digest
from protocol.merkle import CHUNK, blob_digest, leaf_hash, tree_hash
from protocol.model import build_model, model_layout
from protocol.outer import Contribution
from protocol.reduce import Reduction
from protocol.spec import MAX_SPEC, RunSpec, parse_spec
from protocol.state import state_layout

if TYPE_CHECKING:
    from peer.training.parallel.crew import Crew

NON_FINITE_MOST = 10
"""So many steps in a row without a finite loss and gradient, and training stops."""

Lost = Callable[[str], None]
Sums = Callable[[], Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class Move:
    """What the base's move to another state leaves for `settle`: the state after `record`, from which `round` starts.

    `back`: blobs of own updates that do not count, None for one that is gone; `accepted`: own updates that the state
    holds; `anew`: the last of them, when the feedback is empty as none was saved: what its round dropped is nowhere
    else. The rest is as in the messages.
    """

    record: Digest
    round: int
    back: tuple[bytes | None, ...]
    accepted: Mapping[Digest, Accepted]
    next_window: int
    accepted_windows: int
    anew: Digest | None = None


class Trainer:
    """A peer's training. `work` does what touches the model, by one process or by many ranks."""

    def __init__(self, start: Start, report: Report, lost: Lost | None = None):
        """`lost(why)` is called, by any thread, when one of many ranks has ended: nothing can go on."""
        if start.spec_path.stat().st_size > MAX_SPEC:
            raise TrainingError(f"{start.spec_path} is too large for a run spec")
        self.spec: RunSpec = parse_spec(start.spec_path.read_bytes())
        self.me = start.identity_key
        self.threads = start.threads
        self.overlap = start.overlap
        self.report = report
        degrees, kind, why = resolve(start.parallel, start.device, self.spec)
        model = build_model(self.spec.model.config, device="meta")
        self.layout = model_layout(model)
        if self.layout != self.spec.model.layout:
            raise TrainingError(
                "the installed transformers builds another model from this run's config than its owner's did: "
                "install a newer one (pip install --upgrade transformers), or ask the owner for the version"
            )
        self.state_layout = state_layout(self.layout, self.spec.outer)
        self.codec = make_codec(self.spec.codec, self.layout)
        self.gate = Gate()
        self.spent = Spent(time.monotonic())
        self.stepping = threading.Lock()
        """Held while the parameters make a step and its windows are counted, and while an update is taken of them."""
        self.work = self._work(start, degrees, kind, lost or _no_more)
        self.inner, self.outer, self.device = self.work.inner, self.work.outer, self.work.device
        if degrees.world > 1:
            self.report("info", "parallel", why)
        self.flops_per_token = flops_per_token(model, self.spec.data.window)
        self.peak_flops = peak_flops(self.work.devices)
        self.claims = Claims()
        self.orders = Orders(False, self.spec.max_update_windows, self.spec.round.target_tokens)
        self.record: Digest | None = None
        """The record whose state is held: None before the first load."""
        self.round = 0
        self.accepted_windows = 0
        """The swarm's, in that state."""
        self.usual_windows = 0
        """Own windows in the last applied record with an own update: how long a round is for this peer."""
        self.trained = 0  # windows of all steps of this process, each time
        self.non_finite = 0
        self.pace = Pace(time.monotonic())
        self.batches = self._batches(start)
        self.folder = SavedFolder(start.state_folder, self.spec.run_id, self.me, self.layout)
        self.own = OwnUpdates(self.outer, Reduction.of(self.codec), self.folder, self.device, report)
        self._saved = self._read_saved()
        self.saving = Saving(self.folder, self.work, self._state, report)

    def ready(self) -> Ready:
        return Ready(self.work.device_name, self.layout.numel, self.threads, self.codec.size)

    def close(self, *, in_order: bool = False) -> None:
        """Stop reading ahead, and end other ranks: in order when all is well."""
        self.batches.close()
        self.saving.close()
        self.work.close(in_order=in_order)

    def _work(self, start: Start, degrees: Degrees, kind: str, lost: Lost) -> Alone | Crew:
        layers = LayerOptions(start.recompute, compiles(start.compile, kind))
        if layers.compiled:
            keep_compiled(start.state_folder / "compiled")
        if degrees.world == 1:
            device = choose_device(start.device, start.threads)
            return Alone(self.spec, device, self._stand_aside, layers, self.report, self.gate.wait)
        from peer.training.parallel.crew import Crew  # torch.distributed and its like: only where it is needed
        from peer.training.parallel.passes import Passes

        passes = Passes(start.state_folder, str(degrees), device_name(torch.device(kind)))
        return Crew(
            self.spec, start.spec_path, degrees, kind, start.threads, aside=self._stand_aside, beside=self.gate.wait,
            lost=lost, passes=passes, folder=start.state_folder / "ranks", layers=layers, report=self.report,
        )  # fmt: skip

    def _batches(self, start: Start) -> Batches:
        vocabulary = self.spec.model.config.get("vocab_size")
        reader = WindowReader(
            self.spec.data,
            {Digest.parse(d): Path(p) for d, p in start.shards.items() if p},
            vocabulary=vocabulary if isinstance(vocabulary, int) else None,
            report=lambda text: self.report("warning", "data", text),
        )
        assigned = partial(windows_of, self.spec.seed, self.me, total=reader.total)
        # Many ranks get their windows as bytes, and see to it themselves.
        pinned = None if self.work.many else pinned_for(self.device)
        return Batches(reader, lambda first, count: assigned(first, count), batch=self.spec.inner.batch, prepare=pinned)

    def _read_saved(self) -> Saved | None:
        try:
            return self.folder.read()
        except SavedStateError as e:
            try:
                self.folder.set_aside()
            except OSError as problem:
                self.report("warning", "saved-state", f"{self.folder.folder} cannot be written to: {problem}")
            text = f"{e}. It was set aside, and training starts from the run's state: what was not announced is lost"
            self.report("warning", "saved-state", text)
            return None

    # -- inner steps -----------------------------------------------------------------------------------------

    @property
    def may_train(self) -> bool:
        """A state is held, and the next update may claim another step. Without overlap: and none is undecided."""
        if self.orders.rests or (not self.overlap and self.claims.announced is not None):
            return False
        return self.outer.base is not None and self.claims.room(self.orders.max_update_windows) >= self.spec.inner.batch

    def step(self, windows: Tensor, between: Callable[[], None] = lambda: None) -> Step | None:
        """One inner step on the batch at `claims.counter`. Raises TrainingError after too many that are not finite.

        `between` is called within the step, between pieces, and may call any other method. When that takes the state
        away or moves the counter, the step is given up (None).
        """
        first = self.claims.counter

        def go_on() -> bool:
            between()
            return self.outer.base is not None and self.claims.counter == first and not self.orders.rests

        step = self.inner.look(windows, go_on)
        if step is None:
            return None
        self._set_rate()
        self._stand_aside()
        with self._when_it_may_step():
            try:
                self.inner.take(step)
            except torch.OutOfMemoryError:
                raise out_of_memory(self.device, "hold the optimiser's moments") from None
            self.claims.trained(len(windows))
            self.trained += len(windows)
            if step.taken:
                self.pace.step(time.monotonic(), len(windows) * self.spec.data.window, step.loss)
        if step.taken:
            self.non_finite = 0
            return step
        self.non_finite += 1
        if self.non_finite >= NON_FINITE_MOST:
            raise TrainingError(
                f"{self.non_finite} steps in a row gave a loss or gradient that is not finite. If other peers train "
                "well, this GPU is at fault (memory, overclocking): test it or use another. If not, the run has "
                "diverged: its owner must lower inner.lr and start again from an earlier checkpoint"
            )
        if self.non_finite == 1:
            self.report("warning", "non-finite", "a step's loss or gradient was not finite: it is skipped")
        return step

    def _stand_aside(self) -> None:
        """Called often within a step, by the thread that trains and by no other: `spent` is told by one."""
        if self.gate.is_closed:
            with self.spent.during(self.gate.why, time.monotonic):
                self.gate.wait()

    @contextlib.contextmanager
    def _when_it_may_step(self) -> Iterator[None]:
        """With `stepping`, which another thread holds while it takes an update."""
        if not self.stepping.acquire(blocking=False):
            with self.spent.during(Doing.COMPRESSING, time.monotonic):
                self.stepping.acquire()
        try:
            yield
        finally:
            self.stepping.release()

    # -- updates ---------------------------------------------------------------------------------------------

    def make_update(self, ask: MakeUpdate) -> UpdateMade | NothingDone:
        """Compress all that was learnt and not sent. Asked again for the same parent, it gives the same update.

        It may run beside `step` (a step that is not taken yet is left to the next update), and beside nothing else.
        """
        if self.outer.base is None or ask.parent != self.record:
            held = self.record.short if self.record else "nothing"
            raise TrainingError(f"an update after record {ask.parent.short} was asked for; what is held is {held}")
        before = self.claims.announced
        if before is not None and not self.folder.update_file(before.blob).exists():
            self.report("warning", "lost-update", f"{self.folder.update_file(before.blob)} is gone: its work is lost")
            self.claims.lost()
        elif before is not None:
            give(self.folder.update_file(before.blob), ask.out)
            return _made(before, ask.out)
        with self.stepping:
            claim, loss = self.claims.claim(self.orders.max_update_windows), self.pace.span_loss
            if claim is None:
                return NothingDone(ask.parent)
            blob = self.outer.announce()
            self.pace.new_span()
            claims = replace(self.claims)
        self.own.decay(self.spec.codec.beta)
        first, end, steps = claim
        made = Announced(ask.parent, blob_digest(blob), len(blob), first, end, steps, loss)
        known = Known(ask.parent, self.round, replace(claims, announced=made), dict(self.own.back))
        try:
            give(self.folder.keep_update(blob, known), ask.out)
        except OSError:
            self.outer.restore(blob)
            with contextlib.suppress(OSError):
                self.folder.tidy(None, self.own.back, self.saving.unsaved)
            raise
        self.claims.announced = made
        return _made(made, ask.out)

    # -- states ----------------------------------------------------------------------------------------------

    def advance(self, ask: Apply) -> Move:
        """The base goes on to the state after the one record that follows. `settle` is then due.

        Touches nothing that `step` looks at: it may run beside it, and beside nothing else. Raises CodecError; when it
        did so half way no base is held.
        """
        if self.outer.base is None:
            raise TrainingError("a record was to be applied, and no state is held: load one first")
        if ask.update.round != self.round:
            raise TrainingError(f"a record of round {ask.update.round} was to be applied to the state of {self.round}")
        # Read, or opened, now: once the node knows that the round is applied, it may drop the files.
        back = tuple(map(self._missed, ask.missed))
        sums = mapped(ask.update.parts)
        mine = self._apply(ask.update, lambda: sums)
        self.usual_windows = sum(u.windows for u in ask.update.updates if u.author == self.me) or self.usual_windows
        return Move(ask.update.record, self.round + 1, back, mine, ask.next_window, ask.accepted_windows)

    def _apply(self, update: RoundUpdates, sums: Sums) -> dict[Digest, Accepted]:
        """The base goes on by one record. Own updates that it accepts, by digest. `sums` gives its reduced parts."""
        contributions = self._contributions(update)
        if update.parts:
            self.outer.advance_reduced(update.parts)
        else:
            self.outer.advance(contributions)
        return self._own(contributions, sums)

    def applied(self, began: float, record: Digest, checkpoint: Path | None) -> Applied:
        """The answer: the base, which is the state after `record`, has this digest. Writes its checkpoint, if asked."""
        if self.outer.base is None:
            raise TrainingError("no state is held")
        digest = self.work.store(self.threads, checkpoint)
        return Applied(record, digest, time.monotonic() - began, checkpoint)

    def settle(self, move: Move) -> None:
        """Training goes on from the base that `advance` moved."""
        self.outer.rebase()
        self._settle(move)

    def load(self, ask: Load) -> Applied:
        """The state in a checkpoint, and the records after it, instead of what is held."""
        began = time.monotonic()
        self._check(ask.checkpoint, ask.base_state)
        record, number = ask.record, ask.round
        try:
            self.work.open(ask.checkpoint)
            mine = {blob_digest(blob): Accepted(blob) for blob in map(self._blob, ask.withdraw)}
            last: Digest | None = None
            for update in ask.reduced:
                found = self._reduced_before(update)
                mine, last = mine | found, next(iter(found), last)
            for update in ask.replay:
                if update.round != number:
                    raise TrainingError(
                        f"the records to replay are not in order: {update.round} where {number} was due"
                    )
                found = self._apply(update, partial(mapped, update.parts))
                mine, last = mine | found, next(iter(found), last)
                record, number = update.record, number + 1
        except BaseException:
            self.outer.base = None
            raise
        taken_up = self.record is not None or self._take_up_saved(ask.next_window)
        self.outer.rebase()
        back = tuple(map(self._missed, ask.restore))
        anew = None if taken_up else last
        self._settle(Move(record, number, back, mine, ask.next_window, ask.accepted_windows, anew))
        return self.applied(began, record, ask.write_checkpoint)

    def _settle(self, move: Move) -> None:
        """What a new state means for own updates, windows and the learning rate. The model is on it already."""
        mine = self.claims.announced
        # What became of all others was settled before.
        open_ones = {*self.own.back, move.anew, mine and mine.blob}
        for name, update in move.accepted.items():
            if name in open_ones:
                self.own.accepted(name, update)
        put_back = [blob is not None and self.own.missed(blob) for blob in move.back]
        open_still = False
        if mine is not None and mine.end > move.next_window and not self.own.is_back(mine.blob):
            open_still = mine.parent == move.record
            if not open_still:
                blob = self._missed(self.folder.update_file(mine.blob))
                put_back.append(blob is not None and self.own.missed(blob))
                if not put_back[-1]:
                    self.claims.lost()  # its windows are claimed by nobody: their work is in nothing that is sent
        self.claims.decided(move.next_window, kept=bool(put_back) and all(put_back), undecided=open_still)
        self.record, self.round = move.record, move.round
        self.accepted_windows = move.accepted_windows
        self._set_rate()
        try:
            undecided = mine.blob if mine is not None and open_still else None
            self.folder.tidy(undecided, self.own.back, self.saving.unsaved)
        except OSError as e:
            self.report("warning", "saved-state", f"{self.folder.folder} cannot be tidied: {e}")

    def _set_rate(self) -> None:
        """The learning rate of a step taken now: by what the swarm has trained, as far as this peer can tell."""
        since = self.claims.counter - self.claims.claimed_from + self.spec.inner.batch / 2
        accepted = self.accepted_windows * self.spec.data.window
        target = self.orders.target_tokens
        self.inner.set_rate(step_factor(self.spec.inner.schedule, accepted, target, since, self.usual_windows))

    def _missed(self, path: Path) -> bytes | None:
        """The blob of an own update that does not count. None when it is gone, which is reported."""
        try:
            return self._blob(path)
        except (OSError, CodecError) as e:
            self.own.lost(e)
            return None

    def _own(self, contributions: Sequence[Contribution], sums: Sums) -> dict[Digest, Accepted]:
        """Own updates among those accepted, by digest."""
        mine = [bytes(c.blob) for c in contributions if c.author == self.me]
        return {blob_digest(blob): Accepted(blob, sums) for blob in mine}

    def _reduced_before(self, update: RoundUpdates) -> dict[Digest, Accepted]:
        """Own updates of a round that the state holds already. What cannot be read is told: the state needs it not."""
        try:
            return self._own(self._contributions(update), partial(mapped, update.parts))
        except (OSError, CodecError) as e:
            self.own.not_put_back(e)
            return {}

    def _contributions(self, update: RoundUpdates) -> list[Contribution]:
        return [Contribution(u.author, u.windows, self._blob(u.blob)) for u in update.updates]

    def _blob(self, path: Path) -> bytes:
        """An update's bytes. Raises CodecError before reading when they are too many or too few, OSError."""
        if (size := path.stat().st_size) != self.codec.size:
            raise CodecError(f"{path} has {size} bytes: an update of this run has {self.codec.size}")
        return path.read_bytes()

    def _check(self, path: Path, digest: Digest) -> None:
        """Raises MalformedError unless the file is the checkpoint with this digest, OSError."""
        with open(path, "rb") as file:
            if file.seek(0, 2) != self.state_layout.checkpoint_size:
                raise MalformedError(f"{path} is not a checkpoint of this run's model: it has {file.tell()} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                found = tree_hash([leaf_hash(data[i : i + CHUNK]) for i in range(0, len(data), CHUNK)])
                if found != digest:
                    raise MalformedError(
                        f"{path} is damaged or another state: its digest is {found.short}, the chain says "
                        f"{digest.short}; fetch it again"
                    )

    # -- what survives a restart -----------------------------------------------------------------------------

    def save(self) -> None:
        """Write what no other peer has, now. Raises SavedStateError. Before the first load nothing is new."""
        self.saving.now()

    def _state(self) -> Saved | None:
        """What is to be saved beside the tensors."""
        if self.record is None:
            return None
        steps = self.work.steps_taken
        return Saved(self.record, self.round, replace(self.claims), dict(self.own.back), steps, {}, {}, {})

    def _take_up_saved(self, next_window: int) -> bool:
        """At the first load: go on from what was saved, as far as it still fits what the chain has accepted.

        False when of the feedback nothing is left.
        """
        saved, self._saved = self._saved, None
        if saved is None:
            return False
        claims, mine = saved.claims, saved.claims.announced
        if next_window > claims.claimed_from and not (mine and next_window == mine.end):
            # Updates made after it was saved were accepted: its feedback is in them already. To send it again would
            # count that work twice.
            text = "the saved state is older than the last accepted update: only its optimiser's moments are used"
            self.report("info", "saved-state", text)
            self.work.set_moments(saved)
            return False
        self.claims = claims
        self.own.take_up(saved.restored)
        if saved.feedback:
            self.work.resume(saved)
        else:
            self.work.set_moments(saved)
        return True


def _no_more(why: str) -> None:
    """One of many ranks has ended, and nobody else deals with it."""
    print(f"trainer: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _made(a: Announced, out: Path) -> UpdateMade:
    return UpdateMade(a.parent, out, a.size, a.blob, a.first, a.end, a.steps, a.loss)
