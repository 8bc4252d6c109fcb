"""The checks that the round machine asks for, made one after the other by a process.

A check that cannot be made gives no report: files are unavailable, the process failed, or it took too long. It is
logged, and nobody is accused. The machine receives `AuditNotMade`, since it may ask again. In a run that is not
replayable no replay is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from peer.auditor.job import AuditAnswer, Job
from peer.auditor.score_words import score_words
from peer.errors import AuditError, AuditTimeout, UncheckableUpdate
from peer.node.audit_jobs import AuditJobs
from peer.node.audit_process import AuditProcess
from peer.node.blob_retention import BlobRetention
from peer.node.events import Post
from peer.node.rest import RestWish
from protocol.audits import UpdateCheck
from protocol.bounded import BoundedDict
from protocol.chain import Chain
from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import Signed, UpdateHeader
from protocol.rounds.actions import AuditUpdate
from protocol.rounds.events import AuditNotMade, UpdateAudited
from protocol.spec import RunSpec

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""At most this many screens wait, and as many other checks."""

MAX_ACCUSED = 48
"""Most of these other checks that may be of accused updates: false accusations must not push out what is due."""

ACCUSED_TURNS = 3
"""Replays of accused updates in a row while another check waits: the share of MAX_ACCUSED.

A jury's work comes first, since all its members make it. At the usual rates a peer has less than one due check in four
rounds.
"""

SCREENS_TOGETHER = 4
"""Screens for which a process is started. Fewer wait for another check: a start takes longer than they do."""

LEAST_SECONDS = 900.0
"""Least deadline of a process, which first imports torch on cores that others use."""

DEADLINE_ROUNDS = 4
"""Deadline of a process in rounds of the spec's greatest length: an update is trained in one or two."""


@dataclass
class AuditCounts:
    """The checks of this node since its start: made, those of them that failed an update, and those not made."""

    made: int = 0
    failed: int = 0
    not_made: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A check that waits. `is_new`: the update's author has no stake."""

    action: AuditUpdate
    is_new: bool


@dataclass(eq=False)
class AuditRunner:
    """Answers `AuditUpdate` with `UpdateAudited` or `AuditNotMade`, by `post`. `run` works until it is cancelled.

    `retention` prunes the store after each check; None where a trainer does. `process` answers jobs (tests replace it).
    """

    spec: RunSpec
    me: PeerKey
    chain: Chain
    jobs: AuditJobs
    post: Post
    retention: BlobRetention | None = None
    process: AuditProcess = field(default_factory=AuditProcess)

    def __post_init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._present: tuple[Digest, Digest, UpdateCheck, bytes] | None = None
        """The check that is being made."""
        self._turns = 0
        """Replays of accused updates since the last other check, but screens."""
        self._strange: BoundedDict[Digest, None] = BoundedDict(MAX_WAITING)
        """Updates that failed a loss check here."""
        self._asked = asyncio.Event()
        self._may_work = asyncio.Event()
        self._may_work.set()
        self.counts = AuditCounts()

    def audit(self, action: AuditUpdate) -> None:
        """Queue a check; one that waits already gets the rank of this request."""
        if _key(action) == self._present or (action.check != "loss" and not self.spec.audit.replayable):
            return
        self._waiting = [w for w in self._waiting if _key(w.action) != _key(action)]
        record = action.certificate.digest
        stakes = self.chain.audit_stakes(record) if record in self.chain else {}
        is_new = bool(stakes) and not any(stakes.get(u.author) for u in _updates(action) if u.digest == action.update)
        self._waiting.append(_Waiting(action, is_new))
        alike = [w for w in self._waiting if (w.action.check == "screen") is (action.check == "screen")]
        if len(alike) > MAX_WAITING:
            accused = [w for w in alike if w.action.is_accused]
            others = [w for w in alike if not w.action.is_accused]
            last = max(accused if len(accused) > MAX_ACCUSED or not others else others, key=self._rank)
            self._not_made(self._take(last), "others come first")
        screens = sum(w.action.check == "screen" for w in self._waiting)
        if screens >= SCREENS_TOGETHER or screens < len(self._waiting):
            self._asked.set()

    def release(self) -> Coroutine[Any, Any, None]:
        """Begin no check until `resume`: the user wants the devices. The present one ends once it is awaited."""
        self._may_work.clear()
        return self.process.close()

    def resume(self) -> None:
        """Make checks again."""
        self._may_work.set()

    async def follow(self, rest: RestWish) -> None:
        """Make checks while there is no reason to rest, until cancelled: for a peer without a trainer."""
        try:
            while True:
                works, reason = self._may_work.is_set(), rest.reason
                if works and reason:
                    log.info("resting: %s", reason)
                    await self.release()
                elif not works and not reason:
                    log.info("auditing again")
                    self.resume()
                rest.note_devices(free=bool(reason))
                await rest.wait_for_news()
        finally:
            rest.note_devices(free=True)

    async def run(self) -> None:
        """Make one check after the other. The process of the present one ends when this is cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                while self._waiting:
                    await self._may_work.wait()
                    action = self._take(self._next())
                    self._present = _key(action)
                    await self._audit(action)
                    self._present = None
                    if self.retention is not None:
                        await self.retention.prune()
            finally:
                self._present = None
                await self.process.close()

    def _next(self) -> _Waiting:
        """Return the check to make now: the first in rank, or the first that is not accused after ACCUSED_TURNS."""
        others = [w for w in self._waiting if not w.action.is_accused]
        found = min(others if others and self._turns >= ACCUSED_TURNS else self._waiting, key=self._rank)
        if found.action.is_accused:
            self._turns += 1
        elif found.action.check != "screen":  # those are cheap: the due check that they delay keeps its turn
            self._turns = 0
        return found

    def _take(self, waiting: _Waiting) -> AuditUpdate:
        self._waiting.remove(waiting)
        return waiting.action

    def _rank(self, waiting: _Waiting) -> tuple[int, int, int, bytes]:
        """Return the key by which checks are ordered.

        The order of kinds:

        0. accused updates: many newcomers must not keep a jury from its work (but see `_next`)
        1. replays of keys without stake, whose updates are all replayed, whatever else is found
        2. updates that failed a loss check
        3. screens, which are cheap
        4. accused updates that are decided
        5. loss checks
        6. other replays

        Of accused updates the one comes first on which keys with the most stake have reported. A liar sends a fake in
        each round, and jurors who took the newest would each replay another one, and convict by none.

        Of each kind the newest round comes first. A conviction takes an auditor's replay, then another's, then those of
        a jury, one after the other. If there is more to do than time for it, and the oldest came first, all would begin
        too late for that. In a round the seed of its audits draws the order: an author must not be able to come last.
        """
        action, certificate = waiting.action, waiting.action.certificate
        replayed = 0
        if action.is_accused:
            following = self.chain.reports_after(self.chain.head)
            kind = 4 if following.is_decided(certificate.digest, action.update) else 0
            replayed = following.replayed_stake(certificate.digest, action.update)
        elif waiting.is_new and action.check == "replay":
            kind = 1
        elif action.update in self._strange:
            kind = 2
        else:
            kind = {"screen": 3, "loss": 5, "replay": 6}[action.check]
        return kind, -replayed, -certificate.record.body.round, sha256(action.seed, _author(action))

    @property
    def waiting(self) -> int:
        """The number of checks that wait."""
        return len(self._waiting)

    async def _audit(self, action: AuditUpdate) -> None:
        if (reason := self._obsolete(action)) is not None:
            self._not_made(action, reason)
            return
        seconds = max(LEAST_SECONDS, DEADLINE_ROUNDS * self.spec.round.max_seconds)
        try:
            job = await self._job(action)
            if not self._may_work.is_set():
                raise AuditError("this peer rests")
            answer = await self.process.answer(job, seconds)
            if answer.reason:
                raise UncheckableUpdate(answer.reason) if answer.is_uncheckable else AuditError(answer.reason)
        except (CairnError, asyncio.TimeoutError, OSError) as e:
            # Another replay would take as long.
            is_final = isinstance(e, UncheckableUpdate) or isinstance(e, AuditTimeout) and action.check == "replay"
            self._not_made(action, str(e) or "not in time", may_ask_again=not is_final)
            return
        finally:
            self.jobs.release()
        self._report(action, answer)

    async def _job(self, action: AuditUpdate) -> Job:
        if action.check == "screen":
            return self.jobs.screen(action.certificate, action.update)
        own = self.me if action.check == "loss" else None
        return await self.jobs.job(action.certificate, action.update, action.check, action.seed, own=own)

    def _obsolete(self, action: AuditUpdate) -> str | None:
        """Return why no record would carry a report on an update, or nothing would follow from it."""
        chain, record = self.chain, action.certificate.digest
        if not chain.is_ancestor(record, chain.head):
            return "the chain has left its record"
        if chain.height(chain.head) - chain.height(record) >= self.spec.credit.hold_rounds:
            return "its credit has settled"
        following = chain.reports_after(chain.head)
        # After a decision only a juror's replay is wanted, while it may cost others the stake.
        votes = action.is_accused and following.refusal(record, action.update, self.me, "replay") is None
        if following.is_decided(record, action.update) and not votes:
            return "a jury has decided about it, or has convicted its author"
        return None

    def _report(self, action: AuditUpdate, answer: AuditAnswer) -> None:
        found = UpdateAudited(action.certificate.digest, action.update, action.check, action.seed, answer.as_scores)
        self.counts.made += 1
        passed = all(s.passed for s in found.scores)
        if not passed:
            self.counts.failed += 1
            if action.check == "loss":  # in a record with many fakes, all updates may fail their screens
                self._strange[action.update] = None
        # A failed screen or loss check accuses nobody, and honest updates fail some: it chooses what is replayed.
        level = logging.WARNING if action.check == "replay" and not passed else logging.INFO
        level = logging.DEBUG if action.check == "screen" and passed else level
        log.log(
            level, "%s: %s %s, %s; it took %.1f s of CPU time",
            _name(action), _CHECKS[action.check], "passed" if passed else "failed", score_words(found.scores),
            answer.cpu_seconds,
        )  # fmt: skip
        self.post(found)

    def _not_made(self, action: AuditUpdate, reason: str, *, may_ask_again: bool = True) -> None:
        self.counts.not_made += 1
        log.info("%s: the %s is not made: %s", _name(action), _CHECKS[action.check], reason)
        if may_ask_again:
            self.post(AuditNotMade(action.certificate.digest, action.update, action.check, action.seed))


_CHECKS = {"screen": "screen", "loss": "loss check", "replay": "replay"}


def _key(action: AuditUpdate) -> tuple[Digest, Digest, UpdateCheck, bytes]:
    # The seed draws the windows of a loss check.
    return action.certificate.digest, action.update, action.check, action.seed if action.check == "loss" else b""


def _author(action: AuditUpdate) -> PeerKey:
    return next(u.author for u in _updates(action) if u.digest == action.update)


def _updates(action: AuditUpdate) -> tuple[Signed[UpdateHeader], ...]:
    return action.certificate.record.body.updates


def _name(action: AuditUpdate) -> str:
    body = action.certificate.record.body
    author = next((u.author.short for u in body.updates if u.digest == action.update), "nobody")
    return f"the update of {author} in round {body.round}"
