"""Finalizations: which records are final, and the only place where the owner's key signs that.

The ledger only grows along the chain, and a finalization is published after its rounds are posted. So two finalizations
of this coordinator never contradict each other, whenever it is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from coordinator.errors import OtherFinalizationError
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import SwarmView
from protocol.identity import Identity
from protocol.ids import Digest, Round
from protocol.ledger.credits import RoundCredits
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import Finalization, Signed
from protocol.spec import RunSpec, is_total_reached


class Finalizer:
    """The finalizations of one run."""

    def __init__(
        self, spec: RunSpec, owner: Identity, view: SwarmView, ledger: LedgerThread, chain: IndexedChain, *,
        time: Callable[[], float] = monotonic,
    ):  # fmt: skip
        """`time`: seconds, monotonic."""
        self._spec = spec
        self._time = time
        self.patience = max(1, spec.credit.hold_rounds) * spec.round.max_seconds
        """Seconds for which a record without most of the stake, and all that is built on it, is not final."""
        self._waits_for: Digest | None = None
        self._waits_since = 0.0
        self._signer = KeySigner(owner)
        self._decoder = MessageDecoder(spec.run_id, owner.key, remember=16)
        self._view = view
        self._ledger = ledger
        self._chain = chain
        self._newest: Signed[Finalization] | None = None
        self._published: Digest | None = None
        self.epoch = 0
        """Rollbacks on the branch that is followed: finalizations name it."""

    def switch_epoch(self, epoch: int) -> None:
        """Follow the branch of this number of rollbacks."""
        self.epoch = epoch

    def restore(self, encoded: bytes | None) -> None:
        """Continue from the newest finalization in the ledger (an envelope; None: there is none)."""
        self._newest = self._decoder.decode(encoded, Finalization) if encoded else None
        self._published = None

    def final_count(self, rounds: Sequence[RoundCredits]) -> int:
        """Return how many of these rounds, the first after the newest posted one, are final now."""
        held = self._view.held_state()
        # Depth alone is not enough: alone with a peer that withholds its updates, an owner would bind the swarm to a
        # branch that nobody can have. The state after a final record must be in hand, for everyone.
        count = len(rounds) - (0 if self._ends_run(rounds) else self._spec.checkpoint.final_depth)
        count = max(0, min(count, sum(c.round < held for c in rounds)))
        count = self._count_backed([c.record for c in rounds[:count]])
        theirs = self._view.final
        for i, credits in enumerate(rounds):
            if theirs is not None and credits.record == theirs.body.record:
                count = max(count, i + 1)
        return count

    def _count_backed(self, path: Sequence[Digest]) -> int:
        """Return how many of these records have most of the stake behind them, or had no rival for long enough.

        If most of the stake left at once, no record after it would have it: nothing would be final any more.
        """
        count = self._view.count_backed(path)
        if count == len(path):
            return count
        if self._waits_for != path[count]:
            self._waits_for, self._waits_since = path[count], self._time()
        if self._time() - self._waits_since < self.patience:
            return count
        return next((i for i in range(len(path), count, -1) if self._view.count_backed(path[i - 1 : i])), count)

    def _ends_run(self, rounds: Sequence[RoundCredits]) -> bool:
        """Return whether these rounds end the run, so that nothing is built on them unless the owner resumes it."""
        directive = self._view.directive
        at_head = bool(rounds) and rounds[-1].record == self._view.head
        if directive is not None and directive.body.run_status == "ended":
            return at_head
        progress = self._chain.history.progress + sum(c.progress for c in rounds)
        return at_head and is_total_reached(self._spec.total_tokens, progress)

    def sign(self, round_: Round, record: Digest) -> Signed[Finalization]:
        """Return the finalization of a record: the swarm's if it names this record, else one signed here."""
        theirs = self._view.final
        if theirs is not None and theirs.body.record == record:
            return theirs
        return self._signer.sign(Finalization(self._spec.run_id, round_, record, self.epoch))

    async def of_posted(self, round_: Round, record: Digest) -> Signed[Finalization] | None:
        """Return the finalization of a record that the ledger has posted; None if it has not. Raises LedgerError."""
        if not self._chain.is_final(round_):
            return None
        rows = await self._ledger.read(lambda ledger: ledger.rounds(after=round_ - 1, limit=1))
        is_posted = bool(rows) and (rows[0].round, rows[0].record) == (round_, record)
        return self.sign(round_, record) if is_posted else None

    def adopt(self, finalization: Signed[Finalization]) -> None:
        """Make a finalization, which is in the ledger, the one to publish."""
        self._newest = finalization

    async def publish(self, *, again: bool = False) -> None:
        """Publish the newest finalization, if that was not done yet; `again`: also if it was."""
        newest = self._newest
        if newest is not None and (again or newest.digest != self._published):
            await self._view.publish_final(newest)
            self._published = newest.digest

    async def check_swarm(self) -> None:
        """Raise OtherFinalizationError if the swarm holds a finalization that contradicts the ledger."""
        theirs = self._view.final
        if theirs is None or theirs.body.epoch != self.epoch or not self._chain.is_final(theirs.body.round):
            return
        body = theirs.body
        rows = await self._ledger.run(lambda ledger: ledger.rounds(after=body.round - 1, limit=1))
        # Without a row the ledger has lost its last commits just now: the next pass reads it again.
        if rows and rows[0].record != body.record:
            raise OtherFinalizationError(
                f"another finalization with this run's key: the swarm holds one of round {body.round}, record "
                f"{body.record.short}, and the ledger has posted {rows[0].record.short}. Credits stay as they are. "
                "Stop the other coordinator before going on"
            )
