"""Indexes the chain: posts final rounds to the ledger, and knows what is pending beyond them.

The order makes every kill harmless: first the rounds and the finalization are in the ledger, then the finalization is
published.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from coordinator.audit_index import MAX_DECIDED
from coordinator.credits.plausibility import PlausibilityCheck
from coordinator.directives import DirectiveEffects
from coordinator.errors import LedgerConflictError, OtherFinalizationError
from coordinator.finalizer import Finalizer
from coordinator.history import RoundHistory
from coordinator.indexed_chain import MAX_REMEMBERED, IndexedChain
from coordinator.ledger import CarriedReport, Ledger, StatedDecision, StatedPardon
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import SwarmView
from coordinator.tasks import wait_at_most
from protocol.chain import genesis_digest
from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.ledger.credits import CreditRule, PeerBalances, RoundCredits, credits_of
from protocol.message_codec import MessageDecoder
from protocol.messages import MAX_VERDICTS, TRAINING_PHASES, Certificate, Rollback, Signed, UpdateHeader, Verdict
from protocol.spec import RunSpec

log = logging.getLogger(__name__)

PAGE = 64
"""Certificates requested from the view at once."""

POLL_SECONDS = 5.0
"""Longest time between two passes: a lost callback costs seconds, not the run."""

ROUNDS_PER_TRANSACTION = 16


class ChainIndexer:
    """Follows the chain of one run and keeps an `IndexedChain` up to date."""

    def __init__(
        self, spec: RunSpec, view: SwarmView, ledger: LedgerThread, chain: IndexedChain, finalizer: Finalizer,
        plausibility: PlausibilityCheck, directives: DirectiveEffects, now: Callable[[], float], *,
        on_pass: Callable[[], None] = lambda: None, on_new_head: Callable[[RoundCredits], object] = lambda _: None,
    ):  # fmt: skip
        """Prepare; `on_pass` is called after each pass.

        `on_new_head` is called with each record that becomes the newest while this coordinator is there to see it.
        """
        self._run: RunId = spec.run_id
        self._rule = CreditRule.of(spec)
        self._view = view
        self._ledger = ledger
        self._chain = chain
        self._finalizer = finalizer
        self._plausibility = plausibility
        self._directives = directives
        self._now = now
        self._on_pass = on_pass
        self._on_new_head = on_new_head
        self._decoder = MessageDecoder(spec.run_id, spec.owner_key, remember=16)
        self.lacks_rollback = False
        """The database has lost a rollback that was followed: its directive is to be followed again."""

        self._wake = asyncio.Event()
        self._moving = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._newest_seen: tuple[Digest, float] | None = None
        """The record that was the newest last, and when it was first seen (unix seconds)."""
        self.verdicts: tuple[Verdict, ...] = ()
        """Verdicts that the chain should carry and does not yet, at most MAX_VERDICTS, the oldest ones."""
        self.problem = ""
        """Why the chain cannot be followed, for everybody; empty when all is well. The log has the details."""

        self.caught_up = False
        """True while the chain is as far as most members."""

    def start(self) -> None:
        """Begin, on the running event loop; `read_ledger` comes first."""
        self._unsubscribe = self._view.subscribe(self._wake.set)
        self._wake.set()
        self._task = asyncio.create_task(self._index_forever(), name="chain indexer")

    async def stop(self) -> None:
        """End the passes; a transaction in progress is completed."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def switch_epoch(self, epoch: int) -> None:
        """Follow the branch of this number of rollbacks: what is signed from now on names it."""
        async with self._moving:
            self._finalizer.switch_epoch(epoch)
        self._wake.set()

    async def rollback(self, rollback: Rollback) -> bool:
        """Take the credited branch back by a rollback that the owner signed.

        Issued credits remain; the next posted round is the child of the rollback's record. A repeated call for the same
        rollback changes nothing and returns False. So does a call while the branch ends at the record or before it.
        Raises LedgerConflictError if the branch has no such round.
        """
        last_kept = rollback.round - 1

        def take_back(ledger: Ledger) -> tuple[bool, tuple[Round, Digest] | None]:
            last = ledger.last()
            ahead = last is not None and (last[0] > last_kept or (last[0] == last_kept and last[1] != rollback.record))
            return ahead and ledger.rollback(rollback), ledger.last()

        async with self._moving:  # no round may be posted between the check and the change
            taken_back, last = await self._ledger.run(take_back)
            if last != self._chain.posted:  # also after a call whose commit was not acknowledged
                await self.read_ledger()
                self._wake.set()
        return taken_back

    async def post_abandoned(self, tip: Digest, rollback: Rollback) -> None:
        """Count the final rounds that a rollback left, up to `tip`, from their certificates, if the database was lost.

        Nothing is done if the index has followed the rollback.
        """
        async with self._moving:
            last, followed = await self._ledger.run(lambda ledger: (ledger.last(), ledger.epoch()))
            if followed >= rollback.epoch:
                return
            path: list[RoundCredits] = []
            at, base = tip, last[1] if last else genesis_digest(self._run)
            while at != base and (certificate := self._view.certificate(at)) is not None:
                path.append(credits_of(certificate, self._rule))
                at = path[-1].parent
                await asyncio.sleep(0)  # each is read and decoded, and there may be thousands
            if at != base:
                log.error("rounds that rollback %d left are not credited: no certificates of them here", rollback.epoch)
                path = []
                if last is None or last[0] < rollback.round:
                    return
            path.reverse()
            for i in range(0, len(path), ROUNDS_PER_TRANSACTION):
                some = path[i : i + ROUNDS_PER_TRANSACTION]
                await self._ledger.run(lambda ledger, s=some: self._post(ledger, s, None))
            await self._ledger.run(lambda ledger: ledger.rollback(rollback))
            await self.read_ledger()

    async def note_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Note a directive's verdicts: later directives repeat them until a final record carries them."""
        rounds = {  # the chain may be read up to an earlier round, as after the loss of the ledger
            v: Round(self._chain.training_round if (c := self._view.certificate(v.record)) is None
                     else c.record.body.round)
            for v in verdicts
        }  # fmt: skip

        def note(ledger: Ledger) -> None:
            for verdict, round_ in rounds.items():
                ledger.add_verdicts(round_, [verdict])

        if verdicts:
            await self._ledger.run(note)
            self.verdicts = await self._ledger.read(lambda ledger: ledger.verdicts(MAX_VERDICTS))
            self._wake.set()

    async def read_ledger(self) -> None:
        """Take over what the ledger holds; directives are followed only from there. Raises LedgerError."""
        last, balances, first_seen, finalization = await self._ledger.run(
            lambda ledger: (ledger.last(), ledger.balances(), ledger.first_seen(), ledger.newest_finalization())
        )
        history, after = RoundHistory(), -1
        while page := await self._ledger.run(lambda ledger, after=after: ledger.rounds(after=after)):
            for r in page:
                history.append(r.round, r.tokens, r.voided_tokens, r.loss, r.seen_at)
            after = page[-1].round
        first = (last[0] if last else -1) - MAX_REMEMBERED
        recent = await self._ledger.run(lambda ledger: ledger.round_credits(after=first, limit=MAX_REMEMBERED))
        self._finalizer.restore(finalization)
        audits = await self._ledger.run(self._read_audits)
        self._chain.restore(last, recent, history, first_seen, balances, *audits)

    def _read_audits(self, ledger: Ledger) -> tuple[list[StatedDecision], list[StatedPardon], list[CarriedReport]]:
        """Return all decisions and pardons, and the reports on pending updates and on those of the newest decisions."""
        decisions = ledger.decisions()
        since = min((d.round for d in decisions[-MAX_DECIDED:]), default=None)
        last = ledger.last()
        pending = Round(max(0, last[0] - self._rule.hold_rounds) if last else 0)
        reports = ledger.work_reports(self._run, pending if since is None else min(since, pending))
        return decisions, ledger.pardons(), reports

    async def _index_forever(self) -> None:
        logged = ""
        while True:
            await wait_at_most(self._wake, POLL_SECONDS)
            self._wake.clear()
            try:
                async with self._moving:
                    why = problem = await self._pass()
            except CairnError as e:
                # Anybody reads the page, and a ledger's error may name folders, hosts and users.
                why, problem = str(e), "the coordinator's log says why"
                if isinstance(e, OtherFinalizationError):
                    problem = why
                elif isinstance(e, LedgerConflictError):
                    problem = f"it contradicts the ledger, and credits stand as they are: {problem}"
            except Exception as e:  # logged, shown on the page, and tried again
                log.exception("following the chain failed")
                why = problem = f"a fault of the coordinator ({type(e).__name__}): its log has the details"
                await asyncio.sleep(1)
            if why and why != logged:
                log.error("cannot follow the chain: %s", why)
            elif logged and not why:
                log.info("following the chain again")
            self.problem, logged = problem, why
            self._on_pass()

    async def _pass(self) -> str:
        """Index what is new. Return what prevents that, if anything."""
        # A database may lose its last commits: a replica takes over, or an older copy is restored.
        if await self._ledger.run(lambda ledger: ledger.last()) != self._chain.posted:
            self.lacks_rollback = await self._ledger.run(lambda ledger: ledger.epoch()) < self._finalizer.epoch
            await self.read_ledger()
        await self._finalizer.check_swarm()
        self._plausibility.update_rules(self._directives.round_policy)
        known = {c.record: c for c in self._chain.open}
        rounds: list[RoundCredits] = []
        at = self._chain.posted[1] if self._chain.posted else genesis_digest(self._run)
        while True:
            page = await self._view.certificates_after(at, PAGE)
            if page is None:
                if rounds:
                    self._wake.set()  # the chain switched to another branch meanwhile: start over
                    return ""
                return await self._off_the_chain()
            new = [known.get(c.digest) or credits_of(c, self._rule) for c in _linked(page, at)]
            rounds += new
            last_page = len(page) < PAGE
            if last_page and new and new[-1].record not in known:
                await self._note_first_seen(page[-1], new[-1], rounds)
            rounds = await self._post_final(rounds)
            if last_page:
                break
            at = rounds[-1].record if rounds else new[-1].record
            await asyncio.sleep(0)
        self._chain.set_open(rounds)
        # In the writing thread: a finalization waits for no reader.
        self.verdicts = await self._ledger.run(lambda ledger: ledger.verdicts(MAX_VERDICTS, rounds))
        self.caught_up = not self._is_behind()
        await self._finalizer.publish()
        return ""

    async def _post_final(self, rounds: list[RoundCredits]) -> list[RoundCredits]:
        """Post the rounds that are final, and return the others."""
        count = self._finalizer.final_count(rounds)
        if not count:
            return rounds
        newest = rounds[count - 1]
        finalization = self._finalizer.sign(newest.round, newest.record)
        for i in range(0, count, ROUNDS_PER_TRANSACTION):
            some = rounds[i : min(count, i + ROUNDS_PER_TRANSACTION)]
            encoded = finalization.encoded if some[-1] is newest else None
            balances = await self._ledger.run(lambda ledger, s=some, f=encoded: self._post(ledger, s, f))
            # Only now the credit that decisions void is known.
            decided = any(c.decisions or c.pardons for c in some)
            audits = await self._ledger.run(self._read_audits) if decided else None
            # All of them, also those that the ledger has from a pass that failed after its commit.
            self._chain.post(some, (some[-1].round, some[-1].record), balances, rounds[i + len(some) :])
            if audits is not None:
                self._chain.restore_audits(*audits)
        self._finalizer.adopt(finalization)
        return rounds[count:]

    def _post(
        self, ledger: Ledger, rounds: Sequence[RoundCredits], finalization: bytes | None
    ) -> dict[PeerKey, PeerBalances]:
        """Post rounds, and the finalization of the last: in the ledger's thread, in one transaction."""
        for credits in rounds:
            ledger.post(credits, finalization=finalization if credits is rounds[-1] else None)
        return ledger.current_balances()

    async def _off_the_chain(self) -> str:
        """Return why the swarm's chain does not continue where the ledger ends."""
        self.caught_up = False
        await self._finalizer.publish(again=True)  # peers that missed it are on a branch that it rules out
        posted = self._chain.posted
        if posted is None:
            return "waiting for the chain from its beginning: no peer that has it was found yet"
        return (
            f"waiting for the chain after round {posted[0]}: the peers found so far do not lead on from record "
            f"{posted[1].short}, with which the ledger ends"
        )

    async def _note_first_seen(
        self, certificate: Certificate, newest: RoundCredits, chain: Sequence[RoundCredits]
    ) -> None:
        """Note the time of the newest record, if this coordinator was there when it was made, and judge its updates.

        `chain`: the rounds that are not posted, up to this one.
        """
        if self._is_behind(newest.round) or newest.record in self._chain.first_seen:
            return
        if self._newest_seen is None or self._newest_seen[0] != newest.record:  # else the note of before failed
            self._newest_seen = newest.record, self._now()
            self._on_new_head(newest)
        now = self._newest_seen[1]
        updates = certificate.record.body.updates

        def note(ledger: Ledger) -> None:
            since = ledger.active_since({u.author: partial(self._admitted_at, u) for u in updates})
            for credits in chain:
                if credits is not newest:
                    seen_at = self._chain.first_seen.get(credits.record)
                    for line in credits.lines:
                        since.pop(line.peer, None)
                        if seen_at is not None:
                            since[line.peer] = seen_at
            ledger.note_first_seen(newest.record, newest.round, now)
            ledger.add_verdicts(newest.round, self._plausibility.verdicts(certificate, now, since))

        await self._ledger.run(note)
        self._chain.first_seen[newest.record] = now  # only now: a pass after a failed write judges the updates again

    def _admitted_at(self, update: Signed[UpdateHeader]) -> float:
        """Return when the admission in a header begins (unix seconds). Called in the ledger's thread only."""
        return self._decoder.decode_admission(update.body.admission, update.author).not_before

    def _is_behind(self, head_round: int | None = None) -> bool:
        """Return whether most of the members are further than this chain; a single liar changes nothing."""
        if head_round is None:
            head_round = self._chain.training_round - 1
        rounds = [
            h.heartbeat.round
            for h in self._view.heartbeats().values()
            if h.heartbeat.phase in TRAINING_PHASES and h.seconds_since <= self._directives.round_policy.member_seconds
        ]
        return bool(rounds) and median(rounds) > head_round + 1


def _linked(page: Sequence[Certificate], after: Digest) -> Sequence[Certificate]:
    for certificate in page:
        if certificate.record.body.parent != after:
            raise CairnError("the observer gave certificates that are not a chain: a fault in it; nothing was posted")
        after = certificate.digest
    return page
