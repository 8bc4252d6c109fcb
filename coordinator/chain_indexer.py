"""Follows the chain: signs finals, posts final rounds in the ledger, and knows what is pending beyond them.

The order makes every kill harmless: first the rounds and the final are in the ledger, then the final is published. The
ledger only grows along the chain, so two finals of this coordinator never contradict each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from coordinator.credits.plausibility import PlausibilityCheck
from coordinator.directives import EffectiveRoundPolicy
from coordinator.errors import LedgerConflictError
from coordinator.history import RoundHistory, RoundPoint
from coordinator.ledger import Ledger
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import SwarmView
from protocol.chain import genesis_digest
from protocol.errors import CairnError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.ledger.accounts import Standing
from protocol.ledger.credits import Balance, CreditRule, RoundAccount, account_for, pending
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import Certificate, Finalization, Signed
from protocol.spec import RoundSpec, RunSpec

log = logging.getLogger(__name__)

PAGE = 256
"""Certificates asked of the view at once."""

POLL = 5.0
"""The chain is looked at so often even when nobody called: a lost callback costs seconds, not the run."""

AT_ONCE = 16
"""Rounds posted in one transaction."""

MAX_REMEMBERED = 64
_WORKING = ("training", "exchanging")


class ChainIndexer:
    """The chain as the coordinator has followed it. Read on the event loop; changed by its own task only."""

    def __init__(self, spec: RunSpec, owner: Identity, view: SwarmView, ledger: LedgerThread, now: Callable[[], float]):
        self._spec = spec
        self._run: RunId = spec.run_id
        self._rule = CreditRule.of(spec)
        self._signer = KeySigner(owner)
        self._plausibility = PlausibilityCheck(spec, owner)
        self._decoder = MessageDecoder(self._run, owner.key, remember=16)
        self._view = view
        self._ledger = ledger
        self._now = now
        self._wake = asyncio.Event()
        self._moving = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._seen: dict[Digest, float] = {}
        self._final: Signed[Finalization] | None = None
        self._published: Digest | None = None
        self._settled: tuple[Round, Digest] | None = None
        self._standings: dict[PeerKey, Standing] = {}
        self.history = RoundHistory()
        self.recent: deque[RoundAccount] = deque(maxlen=MAX_REMEMBERED)
        """The newest final rounds, oldest first."""
        self.open: tuple[RoundAccount, ...] = ()
        """The chain beyond the newest final round, oldest first."""
        self.settled_balances: Mapping[PeerKey, Balance] = {}
        """What each peer has for good."""
        self.pending: Mapping[PeerKey, Balance] = {}
        """What each peer has in rounds that are not final, or final and not settled."""
        self.voided: Mapping[PeerKey, Balance] = {}
        """What each peer had, and lost by a verdict of the owner."""
        self.epoch = 0
        """Rollbacks on the branch that is followed: finals name it."""
        self.ordered: tuple[str, str] | None = None
        """The run is paused or ended by its owner, and that in a sentence."""
        self.banned: frozenset[PeerKey] = frozenset()
        """Whom the owner has banned."""
        self.ruling = EffectiveRoundPolicy(spec.round)
        self.problem = ""
        """Why the chain cannot be followed, for people; empty when all is well."""
        self.damage = ""
        """What a check of the ledger found, for people: nothing is posted on top of it."""
        self.caught_up = False
        self.changed: Callable[[], None] = lambda: None
        self.noted: Callable[[RoundAccount], object] = lambda _: None
        """Called with each record that becomes the newest while this coordinator is there to see it."""

    # -- what is known ---------------------------------------------------------------------------------------

    @property
    def settled(self) -> tuple[Round, Digest] | None:
        """The newest final round and its record."""
        return self._settled

    @property
    def head(self) -> tuple[Round, Digest] | None:
        """The newest round of the chain and its record."""
        return (self.open[-1].round, self.open[-1].record) if self.open else self._settled

    @property
    def rules(self) -> RoundSpec:
        """The round policy that holds in the round that is being trained."""
        return self.ruling.at(self.training)

    @property
    def training(self) -> int:
        """The round that is being trained."""
        return self.head[0] + 1 if self.head else 0

    def newest(self, count: int) -> list[RoundAccount]:
        """The newest rounds, final or not, newest first."""
        return [*self.recent, *self.open][: -count - 1 : -1]

    def open_points(self) -> list[RoundPoint]:
        """The rounds beyond the final ones, as `History.points`."""
        points, tokens = [], self.history.tokens
        for account in self.open:
            tokens += account.tokens
            points.append(RoundPoint(account.round, tokens, account.loss, self._seen.get(account.record)))
        return points

    # -- following -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the ledger and begin. Raises LedgerError."""
        await self._read_ledger()
        self._unsubscribe = self._view.subscribe(self._wake.set)
        self._wake.set()
        self._task = asyncio.create_task(self._follow_on(), name="follower")

    async def _read_ledger(self) -> None:
        last, standings, seen, final = await self._ledger.run(
            lambda ledger: (ledger.last(), ledger.standings(), ledger.sightings(), ledger.newest_finalization())
        )
        history, after = RoundHistory(), -1
        while page := await self._ledger.run(lambda ledger, after=after: ledger.rounds(after=after)):
            for r in page:
                history.append(r.round, r.tokens, r.loss, r.seen_at)
            after = page[-1].round
        first = (last[0] if last else -1) - MAX_REMEMBERED
        recent = await self._ledger.run(lambda ledger: ledger.accounts(after=first, limit=MAX_REMEMBERED))
        self._settled, self._seen, self.history = last, seen, history
        self._final = self._decoder.open(final, Finalization) if final else None
        self.recent.clear()
        self.recent.extend(recent)
        self._stand(standings, ())

    def _stand(self, standings: dict[PeerKey, Standing], beyond: Sequence[RoundAccount]) -> None:
        """All balances at once: a reader between two awaits must not see a round both settled and pending."""
        self._standings, self.open = standings, tuple(beyond)
        self.settled_balances = {p: s.settled for p, s in standings.items() if s.settled.rounds}
        self.voided = {p: s.voided for p, s in standings.items() if s.voided.rounds}
        held = {p: s.pending for p, s in standings.items() if s.pending.rounds}
        for peer, balance in pending(self.open).items():
            held[peer] = held[peer].and_(balance) if peer in held else balance
        self.pending = held

    async def turn(self, epoch: int) -> None:
        """The chain has turned to the branch of so many rollbacks: what is signed from now on is of that."""
        async with self._moving:
            self.epoch = epoch
        self._wake.set()

    async def rollback(self, record: Digest, round_: Round, directive: bytes) -> bool:
        """Take the ledger back to a record that it has, by a directive that the owner signed (an envelope).

        What was issued stays; the next round that is posted is the child of `record`. Asked again for the same
        rollback, also by a later word, or while the ledger ends at the record or before it (then the chain alone
        turns), it does nothing and returns False. Raises LedgerConflictError when the ledger has no such round, or the
        owner's directive does not say so.
        """

        def take_back(ledger: Ledger) -> bool:
            last = ledger.last()
            ahead = last is not None and (last[0] > round_ or (last[0] == round_ and last[1] != record))
            return ahead and ledger.rollback(record, round_, directive)

        async with self._moving:  # no round may be posted between the look and the deed
            if not await self._ledger.run(take_back):
                return False
            await self._read_ledger()
            self._published = None
        self._wake.set()
        return True

    async def stop(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow_on(self) -> None:
        while True:
            await wait_at_most(self._wake, POLL)
            self._wake.clear()
            try:
                async with self._moving:
                    problem = self.damage or await self._follow()
            except CairnError as e:
                problem = str(e)
            except Exception as e:  # said loudly, shown on the page, and tried again
                log.exception("following the chain failed")
                problem = f"a fault of the coordinator ({type(e).__name__}: {e}); its log has the details"
                await asyncio.sleep(1)
            if problem and problem != self.problem:
                log.error("cannot follow the chain: %s", problem)
            elif self.problem and not problem:
                log.info("following the chain again")
            self.problem = problem
            self.changed()

    async def _follow(self) -> str:
        """One pass over what is new. Returns what is in the way, if anything."""
        await self._check_final()
        self._plausibility.allow(self.rules)
        known = {a.record for a in self.open}
        accounts: list[RoundAccount] = []
        at = self._settled[1] if self._settled else genesis_digest(self._run)
        while True:
            page = await self._view.certificates_after(at, PAGE)
            if page is None:
                if accounts:
                    self._wake.set()  # the chain turned to another branch meanwhile: begin again
                    return ""
                return await self._off_the_chain()
            new = [account_for(c, self._rule) for c in _linked(page, at)]
            accounts += new
            last_page = len(page) < PAGE
            await self._note_sightings([a for a in new if a.record not in known], at_head=last_page)
            accounts = await self._settle(accounts)
            if last_page:
                break
            at = accounts[-1].record if accounts else new[-1].record
            await asyncio.sleep(0)
        self._stand(self._standings, accounts)
        self.caught_up = not self._behind()
        await self._publish()
        return ""

    async def _settle(self, accounts: list[RoundAccount]) -> list[RoundAccount]:
        """Post those that are deep enough, or final by the owner's word already; the rest is given back."""
        held = self._view.held_state()
        # Depth alone is not enough: alone with a peer that withholds its updates, an owner would bind the swarm to a
        # branch that nobody can have. The state after a final record must be in hand, for everyone.
        deep = len(accounts) - self._spec.checkpoint.final_depth
        count = len(accounts) if self._is_over(accounts) else deep
        count = min(count, sum(a.round < held for a in accounts))
        theirs = self._view.final
        for i, account in enumerate(accounts):
            if theirs is not None and account.record == theirs.body.record:
                count = max(count, i + 1)
        if count <= 0:
            return accounts
        newest = accounts[count - 1]
        if theirs is not None and theirs.body.record == newest.record:
            final = theirs
        else:
            final = self._signer.sign(Finalization(self._run, newest.round, newest.record, self.epoch))
        for i in range(0, count, AT_ONCE):
            some = accounts[i : min(count, i + AT_ONCE)]
            sent = final.sent if some[-1] is newest else None
            added, standings = await self._ledger.run(lambda ledger, s=some, f=sent: self._post(ledger, s, f))
            for account in added:
                self.recent.append(account)
                self.history.append(account.round, account.tokens, account.loss, self._seen.pop(account.record, None))
            self._settled = (some[-1].round, some[-1].record)
            self._stand(standings, accounts[i + len(some) :])
        self._final = final
        return accounts[count:]

    def _post(
        self, ledger: Ledger, accounts: Sequence[RoundAccount], final: bytes | None
    ) -> tuple[list[RoundAccount], dict[PeerKey, Standing]]:
        """In the ledger's thread and one transaction: rounds, the final for the last of them, verdicts."""
        added = []
        for account in accounts:
            since = ledger.active_since(e.peer for e in account.entries)
            if not ledger.post(account, final=final if account is accounts[-1] else None):
                continue
            added.append(account)
            seen_at = self._seen.get(account.record)
            if seen_at is not None and ledger.holds(account.record):
                for verdict in self._plausibility.verdicts(account, seen_at, since):
                    ledger.void(verdict)
        return added, ledger.current()

    def _is_over(self, accounts: list[RoundAccount]) -> bool:
        """Whether these rounds end the run: none will be built on them."""
        total = self._spec.total_tokens
        at_head = bool(accounts) and accounts[-1].record == self._view.head
        return at_head and 0 < total <= self.history.tokens + sum(a.tokens for a in accounts)

    async def _publish(self) -> None:
        final = self._final
        if final is not None and final.digest != self._published:
            await self._view.publish_final(final)
            self._published = final.digest

    async def _off_the_chain(self) -> str:
        """The swarm's chain does not lead on from where the ledger ends (yet)."""
        self.caught_up = False
        if self._final is not None:
            self._published = None  # tell it again: those who missed it are on a branch that it rules out
            await self._publish()
        if self._settled is None:
            return "waiting for the chain from its beginning: no peer that has it was found yet"
        return (
            f"waiting for the chain after round {self._settled[0]}: the peers found so far do not lead on from "
            f"record {self._settled[1].short}, with which the ledger ends"
        )

    async def _check_final(self) -> None:
        """Raises LedgerConflictError when the swarm holds a final that contradicts the ledger."""
        final = self._view.final
        if (
            final is None
            or final.body.epoch != self.epoch
            or self._settled is None
            or final.body.round > self._settled[0]
        ):
            return
        rows = await self._ledger.run(lambda ledger: ledger.rounds(after=final.body.round - 1, limit=1))
        if not rows or rows[0].record != final.body.record:
            ours = rows[0].record.short if rows else "none"
            raise LedgerConflictError(
                f"the swarm holds a final for round {final.body.round}, record {final.body.record.short}, signed with "
                f"this run's key, but the ledger has settled {ours}: is the key used by another coordinator? Credits "
                "stand as settled; stop the other one before going on"
            )

    # -- what was seen at first hand -------------------------------------------------------------------------

    async def _note_sightings(self, new: Sequence[RoundAccount], *, at_head: bool) -> None:
        """Only the newest record of a coordinator that was there when it was made has a time that means something."""
        if not new or not at_head or self._behind(new[-1].round):
            return
        newest = new[-1]
        if newest.record in self._seen:
            return
        now = self._now()
        self._seen[newest.record] = now
        self.noted(newest)
        await self._ledger.run(lambda ledger: ledger.saw(newest.record, newest.round, now))

    def _behind(self, head_round: int | None = None) -> bool:
        """Whether most of the members are further than this chain. One that lies about its round changes nothing."""
        if head_round is None:
            head_round = self.head[0] if self.head else -1
        rounds = [
            h.heartbeat.round
            for h in self._view.heartbeats().values()
            if h.heartbeat.phase in _WORKING and h.seconds_since <= self.rules.member_seconds
        ]
        return bool(rounds) and median(rounds) > head_round + 1


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set; sets it itself when the time is over. Unlike `asyncio.wait_for` before Python 3.12, this
    never swallows a cancellation that comes at the very moment when the event is set."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


def _linked(page: Sequence[Certificate], after: Digest) -> Sequence[Certificate]:
    for certificate in page:
        if certificate.record.body.parent != after:
            raise CairnError("the observer gave certificates that are not a chain: a fault in it; nothing was settled")
        after = certificate.digest
    return page
