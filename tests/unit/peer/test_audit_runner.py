"""The node makes the checks that its machine asks for: what it gathers, in which order, and what gives no report."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from peer.auditor.job import AuditAnswer, AuditJob, MeasuredScore, ScreenJob
from peer.errors import AuditError, AuditTimeout, PeerError
from peer.node import audit_runner
from peer.node.audit_disk import AuditDisk
from peer.node.audit_jobs import AuditJobs
from peer.node.audit_runner import SCREENS_TOGETHER, AuditRunner
from peer.node.options import NodeOptions
from peer.node.state_fetcher import StateFetcher
from peer.store import BlobCorrupt
from protocol.audits import UpdateCheck
from protocol.carried_reports import CarriedReports
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import Score
from protocol.rounds.actions import AuditUpdate
from protocol.rounds.events import AuditNotMade, UpdateAudited
from protocol.rounds.policy import RoundPolicy
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.waiting import ended, until

REPLAYABLE: dict[str, Any] = {
    "audit": {"replayable": True}, "codec": {"kind": "sign", "beta": 0.0}, "credit": {"hold_rounds": 6},
    "genesis": {"digest": state(0).hex(), "size": 524_288},
}  # fmt: skip
UPDATE = 1000
"""Bytes of an update."""

PASSED = AuditAnswer((MeasuredScore("scale", 0.99, 0.8), MeasuredScore("signs", 0.994, 0.97)), "", 12.3)
FAILED = AuditAnswer((MeasuredScore("gain", 0.31, 3.0), MeasuredScore("quarter", -0.5, 1.0)), "", 1.0)


class Process:
    """An auditor's process: it answers when it may, and notes what it was asked."""

    def __init__(self):
        self.asked: list[Any] = []
        self.answers: list[AuditAnswer | Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = 0
        self.on_ask: Callable[[], None] = lambda: None

    async def answer(self, job: AuditJob, seconds: float) -> AuditAnswer:
        self.asked.append(job)
        self.on_ask()
        await self.gate.wait()
        answer = self.answers.pop(0) if self.answers else PASSED
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed += 1


def seed_of(round_: int) -> bytes:
    return sha256(b"seed", bytes([round_]))


class World:
    """A chain of rounds by peers 1 and 2, and the auditor of peer 1's node; it stands in for the node's other parts."""

    def __init__(self, folder: Path, rounds: int, fields: dict[str, Any], options: dict[str, Any]):
        self.spec = make_spec(**(REPLAYABLE | fields))
        self.made = ChainMaker(self.spec)
        self.chain = Chain(self.spec.run_id, self.spec.genesis.name, RoundPolicy.of(self.spec).chain_limits)
        self.held: set[Digest] = {self.spec.genesis.name}
        self.gone: set[Digest] = set()
        self.damaged: set[Digest] = set()
        """Updates that nobody gives."""
        self.given: set[Digest] = set()
        """Checkpoints that somebody gives."""
        self.fetched: list[Digest] = []
        self.in_use = frozenset[Digest]()
        """The blobs that the present check reads."""
        self.free_bytes = 10**9
        self.codec = SimpleNamespace(size=UPDATE)
        self.process = Process()
        self.posted: list[UpdateAudited] = []
        self.not_made: list[AuditNotMade] = []
        self.running: asyncio.Task[None] | None = None
        me, this = peer(1).key, cast(Any, self)
        files = StateFetcher(self.spec, me, this, this, this, this)
        disk = AuditDisk(self.spec, this, self.chain, files, self.drop)
        jobs = AuditJobs(self.spec, NodeOptions(folder, **options), this, self.chain, this, files, this, disk)
        self.auditor = AuditRunner(
            self.spec, me, self.chain, jobs, cast(Any, self.post), process=cast(Any, self.process)
        )
        for _ in range(rounds):
            self.grow()

    def grow(self) -> None:
        self.chain.add(self.made.add({1: 8, 2: 8}))

    # -- the store, the network and the fetcher of blobs --------------------------------------------------------

    def has(self, digest: Digest) -> bool:
        return digest in self.held

    def path(self, digest: Digest) -> Path:
        return Path("/blobs") / digest.hex()

    def providers(self, holders=(), *, state=None) -> list[PeerKey]:
        return list(holders)

    async def fetch_blob(self, digest, size, holders, *, deadline_seconds, what="") -> None:
        if digest not in self.given:
            raise PeerError(f"nobody has {digest.short}")
        self._keep(digest, size)

    async def ensure(self, blob, holders, kind=None, author=None) -> Path:
        if blob in self.gone:
            raise PeerError(f"nobody has {blob.short}")
        if blob not in self.held:
            self._keep(blob, self.codec.size)
        return self.path(blob)

    def verify(self, digest: Digest) -> bool:
        if digest in self.damaged:
            self.damaged.discard(digest)
            self.held.discard(digest)
            raise BlobCorrupt(f"blob {digest.short} is corrupt")
        return True

    def _keep(self, digest: Digest, size: int) -> None:
        self.held.add(digest)
        self.fetched.append(digest)
        self.free_bytes -= size

    async def drop(self, blobs) -> None:
        gone = (set(blobs) & self.held) - self.in_use
        self.held -= gone
        self.free_bytes += self.codec.size * len(gone)

    def protect_check(self, blobs: frozenset[Digest]) -> None:
        self.in_use = blobs

    def in_progress(self, digest: Digest) -> None:
        return None

    def post(self, event: UpdateAudited | AuditNotMade) -> None:
        if isinstance(event, AuditNotMade):
            self.not_made.append(event)
        else:
            self.posted.append(event)

    # -- requests ----------------------------------------------------------------------------------------------

    def ask(
        self, round_: int, check: UpdateCheck = "replay", *, author: int = 2, is_accused: bool = False
    ) -> AuditUpdate:
        certificate = self.made.certificates[round_]
        update = next(u for u in certificate.record.body.updates if u.author == peer(author).key)
        action = AuditUpdate(certificate, update.digest, check, seed_of(round_), is_accused=is_accused)
        self.auditor.audit(action)
        return action

    def rounds_asked(self) -> list[tuple[str, int]]:
        rounds = {
            (u.author, u.body.first_window): u.body.round for c in self.made.certificates for u in c.record.body.updates
        }
        return [(job.check, rounds[job.update.author, job.update.first_window]) for job in self.process.asked]

    async def done(self, count: int) -> None:
        counts = self.auditor.counts

        def are_done() -> bool:
            if self.running is not None and self.running.done():
                self.running.result()
            return counts.made + counts.not_made >= count

        await until(are_done, f"{count} checks")


@asynccontextmanager
async def world(folder: Path, rounds: int = 3, *, fields: dict[str, Any] | None = None, **options: Any):
    w = World(folder, rounds, fields or {}, options)
    running = w.running = asyncio.create_task(w.auditor.run())
    try:
        yield w
    finally:
        running.cancel()
        await ended(asyncio.gather(running, return_exceptions=True))
        assert w.process.closed


async def test_a_replay_is_made_with_all_files_up_to_its_state_and_reported(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with world(tmp_path, device="cpu", threads=3) as w:
        action = w.ask(2)
        await w.done(1)
        (job,) = w.process.asked
        header = next(u for u in action.certificate.record.body.updates if u.digest == action.update)
        assert (job.check, job.audit_seed, job.rebase, job.own) == ("replay", action.seed, None, None)
        assert (job.update.author, job.update.first_window, job.update.end_window) == (peer(2).key, 16, 24)
        assert job.update.blob == w.path(header.body.blob)
        assert job.start.checkpoint == w.path(w.spec.genesis.name)
        assert [r.round for r in job.start.rounds] == [0, 1] and len(job.start.rounds[0].updates) == 2
        assert (job.start.state, job.start.accepted_windows) == (state(2), 32)
        assert (job.device, job.threads, job.spec_path) == ("cpu", 3, tmp_path / "spec.json")
        (found,) = w.posted
        assert (found.record, found.update, found.check) == (action.certificate.digest, action.update, "replay")
        assert found.scores == PASSED.as_scores
    short = peer(2).key.short
    assert (
        f"the update of {short} in round 2: replay passed, 99.4% of signs agree (97% needed), "
        "norms within 99% (80% needed); it took 12.3 s of CPU time" in caplog.text
    )


async def test_an_update_that_was_trained_across_two_states_is_replayed_from_the_first(tmp_path):
    async with world(tmp_path) as w:
        w.made.early = 4
        w.grow()
        w.ask(3)
        await w.done(1)
        (job,) = w.process.asked
        assert (job.update.first_window, job.update.rebase_window, job.update.end_window) == (24, 28, 32)
        assert (job.start.state, job.start.accepted_windows) == (state(2), 32)
        assert [r.round for r in job.start.rounds] == [0, 1]
        rebase = job.rebase
        assert rebase is not None and (rebase.round.round, rebase.state, rebase.accepted_windows) == (2, state(3), 48)


async def test_the_newest_checkpoint_that_is_held_is_the_start(tmp_path):
    async with world(tmp_path, 6) as w:
        w.held.add(state(4))
        w.ask(5)
        await w.done(1)
        (job,) = w.process.asked
        assert job.start.checkpoint_digest == state(4) and [r.round for r in job.start.rounds] == [4]


async def test_a_failed_replay_is_a_warning(tmp_path, caplog):
    async with world(tmp_path) as w:
        w.process.answers.append(AuditAnswer((MeasuredScore("signs", 0.5, 0.97),), "", 1.0))
        w.ask(2)
        await w.done(1)
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "in round 2: replay failed, 50.0% of signs agree (97% needed)" in warning.getMessage()


async def test_a_loss_check_has_the_auditors_own_update_beside_it(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with world(tmp_path) as w:
        own = next(u for u in w.made.certificates[2].record.body.updates if u.author == peer(1).key)
        w.held.add(own.body.blob)
        w.process.answers.append(FAILED)
        w.ask(2, "loss")
        await w.done(1)
        (job,) = w.process.asked
        assert job.own is not None and (job.own.author, job.own.blob) == (peer(1).key, w.path(own.body.blob))
        assert w.posted[0].scores == FAILED.as_scores and w.auditor.counts.failed == 1
    assert "loss check failed, its own windows gain 0.31 standard errors more than others (3.00 needed)" in caplog.text


async def test_other_runs_have_no_replays_and_give_no_report_of_them(tmp_path):
    async with world(tmp_path, fields={"audit": {"replayable": False}}) as w:
        w.ask(2)
        w.ask(2, "loss")
        await w.done(1)
        assert w.rounds_asked() == [("loss", 2)] and [p.check for p in w.posted] == ["loss"]
        assert w.auditor.counts.not_made == 0 and w.auditor.waiting == 0


async def test_what_cannot_be_had_and_what_fails_accuses_nobody(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with world(tmp_path) as w:
        blob = w.made.certificates[1].record.body.updates[0].body.blob
        w.gone.add(blob)
        w.ask(2)
        await w.done(1)
        assert not w.process.asked
        w.gone.clear()
        w.process.answers += [AuditTimeout("no answer within 900 s"), AuditAnswer((), "the state here is another", 1.0)]
        w.ask(1)
        w.ask(2)
        await w.done(3)
        assert not w.posted and w.auditor.counts.not_made == 3
        w.ask(0)
        await w.done(4)
        assert len(w.posted) == 1  # it goes on
    for reason in (f"nobody has {blob.short}", "no answer within 900 s", "the state here is another"):
        assert reason in caplog.text


async def test_an_update_that_the_disk_has_spoilt_since_is_fetched_again_and_accuses_nobody(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with world(tmp_path) as w:
        action = w.ask(2)
        await w.done(1)
        w.damaged.add(blob := blob_of(action))
        before = w.fetched.count(blob)
        w.ask(2)
        await w.done(2)
        assert len(w.posted) == len(w.process.asked) == 1 and f"blob {blob.short} is corrupt" in caplog.text
        w.ask(2)
        await w.done(3)
        assert len(w.posted) == 2 and w.fetched.count(blob) == before + 1


async def test_the_machine_is_told_of_what_another_attempt_may_find_out_and_of_nothing_else(tmp_path):
    async with world(tmp_path) as w:
        action = w.ask(2)
        w.process.answers.append(AuditError("the auditor ended with code 1"))
        await w.done(1)
        assert w.not_made == [AuditNotMade(action.certificate.digest, action.update, "replay", action.seed)]
        w.process.answers.append(AuditAnswer((), "the update has too few windows", is_uncheckable=True))
        w.ask(2, "loss")
        await w.done(2)
        for check, attempts in (("replay", 1), ("loss", 2)):
            w.process.answers.append(AuditTimeout("no answer within 900 s"))
            w.ask(1, check)
            await w.done(w.auditor.counts.not_made + 1)
            assert len(w.not_made) == attempts


async def test_checks_that_no_record_would_carry_are_not_made(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with world(tmp_path, 7) as w:
        w.ask(0)
        await w.done(1)
        other = w.made.fork(6)
        branch = other.add({1: 4, 2: 4})
        left = AuditUpdate(branch, branch.record.body.updates[0].digest, "loss", seed_of(6))
        w.auditor.audit(left)
        await w.done(2)
        assert not w.process.asked and not w.posted
    assert "its credit has settled" in caplog.text and "the chain has left its record" in caplog.text


async def test_what_is_accused_comes_first_then_loss_checks_then_replays_and_the_newest_of_each(tmp_path):
    async with world(tmp_path, 5) as w:
        w.process.gate.clear()
        w.ask(4, "loss", author=1)
        await until(lambda: w.process.asked, "the first is being made")
        w.ask(4, "replay")
        w.ask(4, "loss")
        w.ask(3, "replay", is_accused=True)
        w.grow()
        w.ask(5, "replay")
        w.ask(5, "loss")
        w.process.answers += [PASSED, PASSED, FAILED]
        w.process.gate.set()
        await w.done(6)
        assert w.rounds_asked() == [
            ("loss", 4), ("replay", 3), ("loss", 5),
            ("replay", 5),  # its loss check has just failed
            ("loss", 4), ("replay", 4),
        ]  # fmt: skip


async def test_jurors_replay_the_accused_update_on_which_most_stake_has_reported(tmp_path):
    async with world(tmp_path, 7, fields={"credit": {"hold_rounds": 4}}) as w:
        w.process.gate.clear()
        w.ask(6, "loss", author=1)
        await until(lambda: w.process.asked, "the first is being made")
        accused = w.made.certificates[5]
        told = w.made.report(accused, 2, 1, Score("signs", 0.5, 0.97))
        w.chain.add(w.made.add({1: 8, 2: 8}, reports=[told]))
        assert w.chain.reports_after(w.chain.head).replayed_stake(accused.digest, told.body.update) > 0
        for round_ in (6, 5, 4):
            w.ask(round_, is_accused=True)
        w.process.gate.set()
        await w.done(4)
        assert w.rounds_asked()[1:] == [("replay", 5), ("replay", 6), ("replay", 4)]


async def test_replays_of_keys_without_stake_come_after_accused_updates_and_before_all_else(tmp_path):
    async with world(tmp_path, 5, fields={"credit": {"hold_rounds": 4}}) as w:
        w.process.gate.clear()
        w.ask(4, "loss", author=1)
        await until(lambda: w.process.asked, "the first is being made")
        for _ in range(2):
            w.chain.add(w.made.add({1: 8, 2: 8, 3: 8}))
        w.ask(6, "loss", author=3)
        w.ask(6, "loss")
        w.ask(6, "replay", author=3)
        w.chain.add(w.made.add({1: 8, 2: 8, 3: 8}))
        w.ask(7, "replay", author=3)
        w.ask(6, "replay", is_accused=True)
        w.process.gate.set()
        await w.done(6)
        assert w.rounds_asked()[1:] == [("replay", 6), ("replay", 7), ("replay", 6), ("loss", 6), ("loss", 6)]
        assert w.process.asked[1].update.author == peer(2).key


async def test_under_overload_newcomers_are_replayed_while_a_conviction_is_still_possible(tmp_path):
    async with world(tmp_path, 7) as w:
        ages: list[int] = []

        def begin_round() -> None:
            number = len(w.made.certificates)
            newcomers = range(10 * number, 10 * number + 10)
            w.chain.add(w.made.add({1: 8, 2: 8} | dict.fromkeys(newcomers, 8)))
            for author in newcomers:
                w.ask(number, author=author)

        def check_is_made() -> None:  # one in each round
            ages.append(len(w.made.certificates) - 1 - w.rounds_asked()[-1][1])
            if len(ages) < 20:
                begin_round()

        w.process.on_ask = check_is_made
        begin_round()
        await until(lambda: len(ages) >= 20, "twenty rounds")
        assert ages[:20] == [0] * 20


async def test_an_author_cannot_choose_a_key_that_is_replayed_last(tmp_path):
    newcomers = tuple(range(3, 9))
    async with world(tmp_path, 4, fields={"credit": {"hold_rounds": 4}}) as w:
        w.process.gate.clear()
        w.ask(3, "loss", author=1)
        await until(lambda: w.process.asked, "the first is being made")
        numbers = []
        for _ in range(2):
            w.chain.add(w.made.add({1: 8, 2: 8} | dict.fromkeys(newcomers, 8)))
            numbers.append(len(w.made.certificates) - 1)
            for author in newcomers:
                w.ask(numbers[-1], author=author)
        w.process.gate.set()
        await w.done(1 + 2 * len(newcomers))
        assert [round_ for _, round_ in w.rounds_asked()[1:]] == sorted(numbers * len(newcomers), reverse=True)
        authors = [job.update.author for job in w.process.asked[1:]]
        assert authors[: len(newcomers)] != authors[len(newcomers) :]


async def test_what_is_decided_is_not_checked_any_more(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    async with world(tmp_path) as w:
        monkeypatch.setattr(CarriedReports, "is_decided", lambda _reports, _record, _update: True)
        w.ask(2)
        await w.done(1)
        assert not w.process.asked and not w.posted
    assert "a jury has decided about it, or has convicted its author" in caplog.text


async def test_a_juror_replays_what_is_decided_and_may_refute_after_what_is_accused(tmp_path, monkeypatch):
    async with world(tmp_path, 5) as w:
        w.process.gate.clear()
        w.ask(4, "loss", author=1)
        await until(lambda: w.process.asked, "the first is being made")
        decided = w.made.certificates[4].digest
        monkeypatch.setattr(CarriedReports, "is_decided", lambda _reports, record, _update: record == decided)
        monkeypatch.setattr(CarriedReports, "refusal", lambda _reports, *_: None)  # we are of the jury
        w.ask(4, is_accused=True)
        w.ask(4, author=1)  # nobody wants it any more
        w.ask(3, "loss")
        w.ask(2, is_accused=True)
        w.process.gate.set()
        await w.done(5)
        assert w.rounds_asked()[1:] == [("replay", 2), ("replay", 4), ("loss", 3)]


async def test_the_queue_is_bounded_has_each_check_once_and_what_it_drops_is_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_runner, "MAX_WAITING", 4)
    async with world(tmp_path, 5) as w:
        w.process.gate.clear()
        w.ask(4, "loss")
        await until(lambda: w.process.asked, "the first is being made")
        w.ask(4, "loss")
        assert w.auditor.waiting == 0
        for round_ in (4, 4, 4, 3, 2, 1):
            w.ask(round_)
        assert w.auditor.waiting == 4 and not w.auditor.counts.not_made
        dropped = w.ask(0)
        assert w.auditor.waiting == 4 and [e.update for e in w.not_made] == [dropped.update]
        for round_ in (4, 3, 2, 1):
            w.ask(round_, is_accused=True)
        assert len(w.not_made) == 1
        dropped = w.ask(0, is_accused=True)
        assert w.auditor.waiting == 4 and [e.update for e in w.not_made[1:]] == [dropped.update]


async def test_accused_updates_push_out_no_more_due_checks_than_their_part_of_the_queue(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_runner, "MAX_WAITING", 4)
    monkeypatch.setattr(audit_runner, "MAX_ACCUSED", 3)
    async with world(tmp_path, 6) as w:
        w.process.gate.clear()
        w.ask(5, "loss", author=1)
        await until(lambda: w.process.asked, "the first is being made")
        due = [w.ask(round_, author=1) for round_ in (4, 3, 2, 1)]
        told = [w.ask(round_, is_accused=True) for round_ in (4, 3, 2)]
        assert [e.update for e in w.not_made] == [action.update for action in reversed(due[1:])]
        told += [w.ask(round_, is_accused=True) for round_ in (1, 0)]
        assert [e.update for e in w.not_made[3:]] == [action.update for action in told[3:]]
        assert w.auditor.waiting == 4
        w.process.gate.set()
        await w.done(1 + 5 + 4)
        assert ("replay", 4) in w.rounds_asked() and w.process.asked[-1].update.author == peer(1).key


async def test_after_three_accused_updates_another_check_has_its_turn_and_screens_take_nobodys(tmp_path):
    async with world(tmp_path, 0) as w:
        grow_by_three(w, 16)
        hold_all(w)
        w.process.gate.clear()
        w.ask(15, "loss", author=1)
        await until(lambda: bool(w.process.asked), "the first is being made")
        for round_ in range(11, 16):
            w.ask(round_, "replay", is_accused=True)
        for round_ in (14, 15):
            w.ask(round_, "screen", author=1)
        for round_ in (14, 15):
            w.ask(round_, "loss", author=3)
        w.process.gate.set()
        await w.done(1 + 5 + 2 + 2)
        made = ["screen" if isinstance(job, ScreenJob) else job.check for job in w.process.asked[1:]]
        assert made == [*3 * ["replay"], *2 * ["screen"], "loss", *2 * ["replay"], "loss"]


async def test_the_blobs_of_the_present_check_stay_on_the_disk(tmp_path):
    async with world(tmp_path, 4) as w:
        assert not w.in_use
        w.process.gate.clear()
        w.ask(3)
        await until(lambda: w.process.asked, "it is being made")
        kept = w.in_use
        assert {u.body.blob for c in w.made.certificates for u in c.record.body.updates} <= kept
        assert w.spec.genesis.name in kept
        w.process.gate.set()
        await w.done(1)
        await until(lambda: not w.in_use, "they may go")


async def test_the_process_ends_when_nothing_waits(tmp_path):
    async with world(tmp_path) as w:
        w.ask(2, "loss")
        w.ask(2)
        await w.done(2)
        await until(lambda: w.process.closed == 1, "it ends")


async def test_each_audit_has_its_part_of_the_limit_of_a_gpu_as_it_is_then(tmp_path):
    limits = [6]
    async with world(tmp_path, device="cuda:1", gpu_memory=lambda: limits[-1]) as w:
        w.ask(2)
        await w.done(1)
        limits.append(8)
        w.ask(1)
        await w.done(2)
        assert [job.gpu_memory for job in w.process.asked] == [3, 4]


async def test_audits_have_a_device_of_their_own(tmp_path):
    async with world(tmp_path, device="cuda:1", audit_device="cpu") as w:
        w.ask(2)
        await w.done(1)
        assert w.process.asked[0].device == "cpu"
    assert NodeOptions(tmp_path).makes_audits(replayable=True)
    assert not NodeOptions(tmp_path).makes_audits(replayable=False)
    assert NodeOptions(tmp_path, audit_device="cpu").makes_audits(replayable=False)
    assert not NodeOptions(tmp_path, audit_device="off").makes_audits(replayable=True)
    assert not NodeOptions(tmp_path, observer=True).makes_audits(replayable=True)
    assert NodeOptions(tmp_path, auditor=True).makes_audits(replayable=False)


async def test_without_a_trainer_the_store_is_pruned_after_each_check(tmp_path):
    async with world(tmp_path) as w:
        pruned: list[int] = []

        async def prune() -> None:
            assert not w.in_use
            pruned.append(w.auditor.counts.made + w.auditor.counts.not_made)

        w.auditor.retention = cast(Any, SimpleNamespace(prune=prune))
        w.gone.add(w.made.certificates[1].record.body.updates[0].body.blob)
        w.ask(2)
        w.ask(0)
        await until(lambda: pruned == [1, 2], "pruned after each, whether it was made or not")


# -- disk space ------------------------------------------------------------------------------------------------------


def reserved(w: World) -> int:
    """Return the bytes that training keeps: of a checkpoint and two rounds of two updates."""
    return w.auditor.jobs.files.checkpoint_bytes + 4 * UPDATE


async def test_a_check_that_leaves_training_too_little_disk_is_not_made_and_the_log_says_what_to_do(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with world(tmp_path) as w:
        needed = 5 * UPDATE  # of two rounds, and the update
        w.free_bytes = reserved(w) + needed - 1
        w.ask(2)
        await w.done(1)
        assert not w.fetched and not w.process.asked and len(w.not_made) == 1
        w.free_bytes += 1
        w.ask(2)
        await w.done(2)
        assert len(w.fetched) == 5 and len(w.process.asked) == 1
    assert (
        "the replay is not made: a checkpoint to start from is not available (from the state of round 0: it needs "
        "5.0 kB of files that are not here, and 5.0 kB of this peer's disk are left besides what training needs: allow "
        "the peer more of it (--disk), or free some)" in caplog.text
    )


async def test_files_of_earlier_checks_make_room_for_those_of_the_next(tmp_path):
    async with world(tmp_path, 5) as w:
        w.held.add(state(4))
        w.free_bytes = reserved(w) + 3 * UPDATE
        w.ask(2, author=1)
        await w.done(1)
        assert w.auditor.counts.not_made == 1  # two rounds, and the update
        w.ask(1)
        await w.done(2)
        first = set(w.fetched)
        assert len(first) == 3 and len(w.posted) == 1
        w.ask(4)  # from the state on disk: its update alone
        await w.done(3)
        assert len(w.posted) == 2 and not first & w.held


async def test_no_check_takes_more_than_a_checkpoint_and_the_rounds_to_the_next(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rounds = {"max_members": 2, "target_tokens": 64, "max_update_tokens": 256}
    async with world(tmp_path, 9, fields={"checkpoint": {"every": 2}, "round": rounds}) as w:
        w.codec.size = w.auditor.jobs.files.checkpoint_bytes
        w.free_bytes = 100 * w.codec.size
        w.ask(7)  # fifteen updates from the genesis, which is here; a checkpoint and three rounds are as much as seven
        await w.done(1)
        assert not w.fetched and not w.posted
        w.given.add(state(6))
        w.ask(7)
        await w.done(2)
        assert len(w.fetched) == 4 and state(6) in w.fetched and len(w.posted) == 1
    assert "more than a checkpoint and the rounds to the next one" in caplog.text


def grow_by_three(w: World, rounds: int) -> None:
    for _ in range(rounds):
        w.chain.add(w.made.add({1: 8, 2: 8, 3: 8}))


def blob_of(action: AuditUpdate) -> Digest:
    return next(u.body.blob for u in action.certificate.record.body.updates if u.digest == action.update)


def hold_all(w: World) -> None:
    w.held |= {u.body.blob for c in w.made.certificates for u in c.record.body.updates}


async def test_a_screen_has_the_updates_that_the_store_has_and_fetches_none(tmp_path):
    async with world(tmp_path, 0, threads=2) as w:
        grow_by_three(w, 16)
        hold_all(w)
        records = [c.record.body for c in w.made.certificates]
        w.held.discard(records[14].updates[0].body.blob)
        *_, action = [w.ask(15, "screen", author=author) for author in (1, 3)] + [w.ask(n, "screen") for n in (14, 15)]
        await w.done(4)
        (job,) = [job for job in w.process.asked if job.updates[0] == w.path(blob_of(action))]
        assert isinstance(job, ScreenJob)
        audited = next(u for u in records[15].updates if u.digest == action.update)
        others = [w.path(u.body.blob) for u in records[15].updates if u is not audited]
        assert sorted(job.updates[1:]) == sorted(others)
        assert [len(paths) for paths in job.earlier] == [2, 3]
        assert {*job.earlier[1]} == {w.path(u.body.blob) for u in records[11].updates}
        assert (job.threads, w.fetched) == (2, [])


async def test_a_few_screens_alone_start_no_process(tmp_path):
    async with world(tmp_path, 0) as w:
        grow_by_three(w, 12)
        hold_all(w)
        for round_ in range(12 - SCREENS_TOGETHER, 11):
            w.ask(round_, "screen")
        await asyncio.sleep(0)
        assert w.auditor.waiting == SCREENS_TOGETHER - 1 and not w.process.asked
        w.ask(11, "screen")
        await w.done(SCREENS_TOGETHER)
        assert len(w.process.asked) == SCREENS_TOGETHER


async def test_an_update_without_others_beside_it_is_not_screened_and_not_asked_for_again(tmp_path):
    async with world(tmp_path) as w:
        hold_all(w)
        w.ask(1, "loss")
        w.ask(2, "screen")
        await w.done(2)
        assert len(w.process.asked) == 1 and not w.not_made


async def test_updates_by_keys_without_stake_are_no_measure(tmp_path):
    async with world(tmp_path, 0) as w:
        for _ in range(12):
            w.chain.add(w.made.add({1: 8, 2: 8}))
        grow_by_three(w, 1)
        hold_all(w)
        w.ask(12, "loss")
        w.ask(12, "screen")
        await w.done(2)
        assert len(w.process.asked) == 1, "beside the audited update only peer 1 has stake"


async def test_many_screens_push_no_other_check_out(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_runner, "MAX_WAITING", 3)
    async with world(tmp_path, 0) as w:
        grow_by_three(w, 14)
        hold_all(w)
        w.process.gate.clear()
        w.ask(13, "loss")
        await until(lambda: bool(w.process.asked), "the first check is being made")
        for round_ in (12, 13):
            w.ask(round_, "replay")
        for round_ in range(8, 14):
            w.ask(round_, "screen")
        assert w.auditor.waiting == 2 + 3
        w.process.gate.set()
        await w.done(1 + 3 + 2 + 3)
        assert sum(not isinstance(job, ScreenJob) and job.check == "replay" for job in w.process.asked) == 2


async def test_where_updates_cannot_be_replayed_none_is_screened(tmp_path):
    async with world(tmp_path, fields={"audit": {"replayable": False}, "codec": {"kind": "sign"}}) as w:
        w.ask(2, "screen")
        w.ask(2, "loss")
        await w.done(1)
        assert len(w.process.asked) == 1 and not w.auditor.waiting


async def test_a_peer_that_rests_ends_its_check_and_begins_none_until_it_goes_on(tmp_path):
    async with world(tmp_path) as w:
        w.process.gate.clear()
        w.ask(1)
        await until(lambda: len(w.process.asked) == 1, "it makes a check")
        w.process.answers.append(AuditError("the process was ended"))
        closed = w.process.closed
        await w.auditor.release()
        assert w.process.closed == closed + 1
        w.process.gate.set()
        await w.done(1)
        assert len(w.not_made) == 1  # it may be asked for again
        w.ask(2)
        await asyncio.sleep(0.05)
        assert len(w.process.asked) == 1 and w.auditor.waiting == 1
        w.auditor.resume()
        await w.done(2)
        assert len(w.process.asked) == 2 and len(w.posted) == 1


async def test_who_goes_on_at_once_makes_checks_again(tmp_path):
    async with world(tmp_path) as w:
        ended_check = w.auditor.release()
        w.auditor.resume()
        await ended_check
        w.ask(1)
        await w.done(1)
        assert len(w.process.asked) == 1
