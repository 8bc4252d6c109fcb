"""Indexes the chain: posts final rounds to the ledger, and knows what is pending beyond them.

The order makes every kill harmless: first the rounds and the finalization are in the ledger, then the finalization is
published.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from statistics import median

from coordinator.credits.plausibility import PlausibilityCheck
from coordinator.directives import DirectiveEffects
from coordinator.finalizer import Finalizer
from coordinator.history import RoundHistory
from coordinator.indexed_chain import MAX_REMEMBERED, IndexedChain
from coordinator.ledger import Ledger
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import TRAINING_PHASES, SwarmView
from coordinator.tasks import wait_at_most
from protocol.chain import genesis_digest
from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.ledger.accounts import AccountBalance as AccountBalance
from protocol.ledger.credits import CreditRule, RoundCredits, credits_of
from protocol.messages import Certificate
from protocol.spec import RunSpec

log = logging.getLogger(__name__)

PAGE = 256
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
        self._wake = asyncio.Event()
        self._moving = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._halted = ""
        self.problem = ""
        """Why the chain cannot be followed, for people; empty when all is well."""

        self.caught_up = False
        """True while the chain is as far as most members."""

    async def start(self) -> None:
        """Read the ledger and begin. Raises LedgerError."""
        await self._read_ledger()
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

    def halt(self, reason: str) -> None:
        """Post nothing from now on, since the ledger is damaged; "" ends that."""
        self._halted = reason

    async def switch_epoch(self, epoch: int) -> None:
        """Follow the branch of this number of rollbacks: what is signed from now on names it."""
        async with self._moving:
            self._finalizer.epoch = epoch
        self._wake.set()

    async def rollback(self, record: Digest, round_: Round, directive: bytes) -> bool:
        """Take the ledger back to a record that it has, by a directive that the owner signed (an envelope).

        Issued credits remain; the next posted round is the child of `record`. A repeated call for the same rollback,
        also by a later directive, changes nothing and returns False. So does a call while the ledger ends at the record
        or before it. Raises LedgerConflictError if the ledger has no such round, or the directive does not say so.
        """

        def take_back(ledger: Ledger) -> bool:
            last = ledger.last()
            ahead = last is not None and (last[0] > round_ or (last[0] == round_ and last[1] != record))
            return ahead and ledger.rollback(record, round_, directive)

        async with self._moving:  # no round may be posted between the check and the change
            if not await self._ledger.run(take_back):
                return False
            await self._read_ledger()
        self._wake.set()
        return True

    async def _read_ledger(self) -> None:
        last, balances, first_seen, finalization = await self._ledger.run(
            lambda ledger: (ledger.last(), ledger.balances(), ledger.first_seen(), ledger.newest_finalization())
        )
        history, after = RoundHistory(), -1
        while page := await self._ledger.run(lambda ledger, after=after: ledger.rounds(after=after)):
            for r in page:
                history.append(r.round, r.tokens, r.loss, r.seen_at)
            after = page[-1].round
        first = (last[0] if last else -1) - MAX_REMEMBERED
        recent = await self._ledger.run(lambda ledger: ledger.accounts(after=first, limit=MAX_REMEMBERED))
        self._finalizer.restore(finalization)
        self._chain.restore(last, recent, history, first_seen, balances)

    async def _index_forever(self) -> None:
        while True:
            await wait_at_most(self._wake, POLL_SECONDS)
            self._wake.clear()
            try:
                async with self._moving:
                    problem = self._halted or await self._pass()
            except CairnError as e:
                problem = str(e)
            except Exception as e:  # logged, shown on the page, and tried again
                log.exception("following the chain failed")
                problem = f"a fault of the coordinator ({type(e).__name__}: {e}); its log has the details"
                await asyncio.sleep(1)
            if problem and problem != self.problem:
                log.error("cannot follow the chain: %s", problem)
            elif self.problem and not problem:
                log.info("following the chain again")
            self.problem = problem
            self._on_pass()

    async def _pass(self) -> str:
        """Index what is new. Return what prevents that, if anything."""
        await self._finalizer.check_swarm()
        self._plausibility.update_rules(self._directives.round_policy)
        known = {a.record for a in self._chain.open}
        accounts: list[RoundCredits] = []
        at = self._chain.posted[1] if self._chain.posted else genesis_digest(self._run)
        while True:
            page = await self._view.certificates_after(at, PAGE)
            if page is None:
                if accounts:
                    self._wake.set()  # the chain switched to another branch meanwhile: start over
                    return ""
                return await self._off_the_chain()
            new = [credits_of(c, self._rule) for c in _linked(page, at)]
            accounts += new
            last_page = len(page) < PAGE
            await self._note_first_seen([a for a in new if a.record not in known], at_head=last_page)
            accounts = await self._post_final(accounts)
            if last_page:
                break
            at = accounts[-1].record if accounts else new[-1].record
            await asyncio.sleep(0)
        self._chain.set_open(accounts)
        self.caught_up = not self._is_behind()
        await self._finalizer.publish()
        return ""

    async def _post_final(self, accounts: list[RoundCredits]) -> list[RoundCredits]:
        """Post the rounds that are final, and return the others."""
        count = self._finalizer.final_count(accounts)
        if not count:
            return accounts
        newest = accounts[count - 1]
        finalization = self._finalizer.sign(newest.round, newest.record)
        for i in range(0, count, ROUNDS_PER_TRANSACTION):
            some = accounts[i : min(count, i + ROUNDS_PER_TRANSACTION)]
            encoded = finalization.encoded if some[-1] is newest else None
            added, balances = await self._ledger.run(lambda ledger, s=some, f=encoded: self._post(ledger, s, f))
            self._chain.post(added, (some[-1].round, some[-1].record), balances, accounts[i + len(some) :])
        self._finalizer.adopt(finalization)
        return accounts[count:]

    def _post(
        self, ledger: Ledger, accounts: Sequence[RoundCredits], finalization: bytes | None
    ) -> tuple[list[RoundCredits], dict[PeerKey, AccountBalance]]:
        """Post rounds, the finalization of the last, and void orders: in the ledger's thread, in one transaction."""
        added = []
        for account in accounts:
            since = ledger.active_since(e.peer for e in account.lines)
            if not ledger.post(account, finalization=finalization if account is accounts[-1] else None):
                continue
            added.append(account)
            seen_at = self._chain.first_seen.get(account.record)
            if seen_at is not None and ledger.holds(account.record):
                for void_order in self._plausibility.void_orders(account, seen_at, since):
                    ledger.void(void_order)
        return added, ledger.current_balances()

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

    async def _note_first_seen(self, new: Sequence[RoundCredits], *, at_head: bool) -> None:
        """Note the time of the newest record, if this coordinator was there when it was made."""
        if not new or not at_head or self._is_behind(new[-1].round):
            return
        newest = new[-1]
        if newest.record in self._chain.first_seen:
            return
        now = self._now()
        self._chain.first_seen[newest.record] = now
        self._on_new_head(newest)
        await self._ledger.run(lambda ledger: ledger.note_first_seen(newest.record, newest.round, now))

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
