"""Looks after the archive: adds finalizations, has states copied and evaluated, and reports on that.

Nothing here delays the chain: evaluations and copies are separate processes, which are retried when they fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from coordinator.checkpoints.archive import CERTIFICATE, Archive, ArchivedState
from coordinator.checkpoints.evaluation_job import model_parameters, plain
from coordinator.checkpoints.evaluations import EvaluationLog
from coordinator.checkpoints.job import Row, run_job
from coordinator.checkpoints.settings import CheckpointSettings
from coordinator.checkpoints.verification import ends_with_state, names_state
from coordinator.errors import CoordinatorError
from coordinator.swarm import SwarmView
from coordinator.tasks import wait_at_most
from protocol.errors import CairnError
from protocol.ids import Digest, Round
from protocol.message_codec import MessageDecoder, encode_certificate
from protocol.messages import Certificate, Finalization, Rollback, Signed
from protocol.spec import RunSpec, is_total_reached

log = logging.getLogger(__name__)

POLL_SECONDS = 10.0
COPY_SILENCE_SECONDS = 600.0
"""Seconds without a byte after which a copy is restarted."""

COPY_SECONDS = 7 * 86_400.0
RETRY_SECONDS = (10.0, 30.0, 60.0, 300.0)
"""Seconds before the next attempt to copy, by the number of failures; the last one repeats."""

MAX_TRIES = 2
"""Attempts to evaluate one state at once."""

AGAIN_SECONDS = 3600.0
"""Seconds until a state is tried again after MAX_TRIES failures: no state comes after a run's last one."""

MAX_LOSSES = 20
"""Newest evaluations that `newest_losses` gives."""

FinalizationOf = Callable[[Round, Digest], Awaitable[Signed[Finalization] | None]]
"""Gives the finalization of a record that the ledger has posted, None if it has not."""


class CheckpointArchiver:
    """Looks after the archive of one run. `start`, then `stop`; it may be queried at any time, on the event loop."""

    def __init__(
        self, archive: Archive, evaluations: EvaluationLog, spec: RunSpec, view: SwarmView,
        settings: CheckpointSettings, *, shards: Sequence[Path] = (), base: Path | None = None,
        fetch_problem: Callable[[], str] = str,
    ):  # fmt: skip
        """Prepare; `shards` are the validation shards, `base` the file of a frozen base model.

        `fetch_problem` says why no new state is archived.
        """
        self.archive = archive
        self.evaluations = evaluations
        self._fetch_problem = fetch_problem
        self._spec = spec
        self._decoder = MessageDecoder(spec.run_id, spec.owner_key, remember=16)
        self._view = view
        self._settings = settings
        self._shards = [str(p) for p in shards]
        self._base = None if base is None else str(base)
        self._wakes: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._unsubscribe: Callable[[], None] | None = None
        self._problems: dict[str, tuple[str, str]] = {}
        """Problems by topic, each with its reason, which goes to the log only: it may name addresses and keys."""

        self._copied: set[str] = set()
        self._listed = False
        """True once `_copied` has the copies that were there before."""

        self._not_wanted: set[str] = set()
        """Final states that the policy of the copies excludes."""

        self._failed: dict[Digest, int] = {}
        self._failed_at = 0.0
        self._counts = {"evaluated": 0, "evaluations_failed": 0, "copied": 0, "copies_failed": 0, "copied_bytes": 0}
        self._seconds = 0.0

    def start(self, finalization_of: FinalizationOf) -> None:
        """Begin, on the running event loop."""
        self._unsubscribe = self._view.subscribe(self._wake)
        self._begin("the archive", lambda: self._mark_final(finalization_of))
        if self._settings.evaluation.every and (self._shards or self._settings.samples.prompts):
            self._begin("evaluation", self._evaluate)
        if self._settings.archive.address:
            self._begin("copies", self._copy)

    async def stop(self) -> None:
        """End what is in progress."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, topic: str, work: Callable[[], Awaitable[None]]) -> None:
        wake = asyncio.Event()
        wake.set()
        self._wakes.append(wake)
        self._tasks.append(asyncio.create_task(self._repeat(topic, work, wake), name=topic))

    async def _repeat(self, topic: str, work: Callable[[], Awaitable[None]], wake: asyncio.Event) -> None:
        while True:
            await wait_at_most(wake, POLL_SECONDS)
            wake.clear()
            try:
                await work()
            except CairnError as e:
                self._report(topic, f"{topic}: failed, see the coordinator's log", str(e))
            except Exception as e:  # logged, shown on the page and by the alert, and tried again
                log.exception("%s: a fault of the coordinator", topic)
                self._problems[topic] = f"{topic}: a fault of the coordinator ({type(e).__name__}), see its log", ""
                await asyncio.sleep(POLL_SECONDS)

    def _wake(self) -> None:
        for wake in self._wakes:
            wake.set()

    async def _mark_final(self, finalization_of: FinalizationOf) -> None:
        """Add the finalization to each state that has become final.

        A state becomes final with the record that names it as its base, or with the last record of the run.
        """
        waiting = [a for a in self.archive.all() if a.round and not a.final]
        for topic in {t for t in self._problems if t.startswith("state ")} - {f"state {a.round}" for a in waiting}:
            self._solved(topic)
        for archived in waiting:
            certificate = await self._certificate(archived)
            if certificate is None:
                continue
            finalization = await finalization_of(certificate.record.body.round, certificate.digest)
            if finalization is None:
                continue
            encoded = encode_certificate(certificate)
            await asyncio.to_thread(self.archive.mark_final, archived, finalization.encoded, encoded)
            log.info("the state of round %d is final: signed in %s", archived.round, archived.folder.name)
            await asyncio.to_thread(self.archive.prune)
            self._wake()
        self._solved("the archive")

    async def _certificate(self, archived: ArchivedState) -> Certificate | None:
        """Return the record that names this state, as far as the chain has come."""
        after = await self._view.certificates_after(archived.record, 1)
        if after:
            if names_state(after[0], archived):
                return after[0]
            if after[0].record.body.base_state != archived.state:
                self._report(
                    f"state {archived.round}",
                    f"the archived state of round {archived.round} ({archived.state.short}) is not the one that the "
                    f"chain names ({after[0].record.body.base_state.short}): it is never signed",
                    f"remove {archived.folder}",
                )
            return None
        with contextlib.suppress(OSError, CairnError):
            last = self._decoder.decode_certificate((archived.folder / CERTIFICATE).read_bytes())
            return last if ends_with_state(last, archived) else None
        return None

    async def _due(self) -> ArchivedState | None:
        """Return the newest state of the chain, if it is to be evaluated now; older ones are skipped."""
        done = self.evaluations.done()
        again = time.monotonic() - self._failed_at >= AGAIN_SECONDS
        for newest in reversed(self.archive.all()):
            is_tried = again or self._failed.get(newest.state, 0) < MAX_TRIES
            if is_tried and await self._view.certificates_after(newest.record, 1) is not None:
                break
        else:
            return None
        if str(newest.state) in done:
            return None
        last = max((r for r in done.values() if r < newest.round), default=None)
        far = last is None or newest.round - last >= self._settings.evaluation.every
        ends = is_total_reached(self._spec.total_tokens, newest.tokens)
        return newest if far or ends else None

    async def _evaluate(self) -> None:
        archived = await self._due()
        if archived is None:
            await asyncio.to_thread(self.evaluations.save)
            if not any(newest.state in self._failed for newest in self.archive.all()[-1:]):
                self._solved("evaluation")
            return
        rows: list[Row] = []
        began, why = time.monotonic(), ""
        seconds = self._settings.evaluation.seconds
        with self.archive.reading(archived):  # the policy does not delete it, a rollback does
            try:
                job = self._evaluation_job(archived)
                await run_job("coordinator.checkpoints.evaluation_job", job, rows.append, deadline=seconds)
            except CoordinatorError as e:
                why = str(e)
            self._seconds = time.monotonic() - began
            measured = next((r for r in rows if "loss" in r), None)
            texts = [r for r in rows if "text" in r]
            if measured is not None or texts:
                await asyncio.to_thread(self.evaluations.add, archived, measured, texts)
            if not await asyncio.to_thread(self.archive.holds, archived):
                log.info("the run has left the state of round %d: its evaluation does not count", archived.round)
                await asyncio.to_thread(self.evaluations.mark_left, [archived.state])
                return
        if measured is None and not texts:
            self._failed[archived.state] = tries = self._failed.get(archived.state, 0) + 1
            self._failed_at = time.monotonic()
            self._counts["evaluations_failed"] += 1
            again = "it is tried again" if tries < MAX_TRIES else "the next one is tried, or this in an hour"
            self._report(
                "evaluation", f"the state of round {archived.round} was not evaluated (see the log); {again}", why
            )
            return
        self._failed.pop(archived.state, None)
        self._not_wanted.discard(str(archived.state))  # it may be one of the best
        await asyncio.to_thread(self.archive.prune)  # another state may be the best now
        self._counts["evaluated"] += 1
        _log_evaluation(archived, measured, texts)
        if why:  # the loss is complete, not all of the texts are: nothing is tried again
            log.warning("the evaluation of round %d was not finished: %s", archived.round, why)
        self._solved("evaluation")
        self._wake()

    async def roll_back(self, rollback: Rollback) -> None:
        """Drop the states that the run has left, and count the evaluations no more that are of later rounds.

        Nobody may take them for the run's. A chain that has not come as far as the rollback cannot say which they are.
        States that were signed as final since are of the new branch, however far the chain has come.
        """
        if await self._view.certificates_after(rollback.record, 1) is None:
            return
        held = set(self._view.held_states())
        later = [a for a in self.archive.all() if a.round > rollback.round]
        gone = [a for a in later if a.round not in held and a.final_epoch < rollback.epoch]
        kept = {str(a.state) for a in later} - {str(a.state) for a in gone}
        await asyncio.to_thread(self.archive.drop, gone)  # first: an evaluation that ends from now on finds it gone
        done = self.evaluations.done().items()
        left = [Digest.parse(state) for state, r in done if r > rollback.round and state not in kept]
        await asyncio.to_thread(self.evaluations.mark_left, left)

    def _evaluation_job(self, archived: ArchivedState) -> Row:
        e, s = self._settings.evaluation, self._settings.samples
        rows = self.evaluations.rows()
        before = max((row["windows"] for row in rows[-4:]), default=None)  # a busy machine may have cut the last short
        size = 4 * model_parameters(self._spec)
        return {
            "spec": self._spec.canonical().decode(), "folder": str(archived.folder), "shards": self._shards,
            "windows": e.windows, "most": before if before is not None and before < e.windows else None,
            "seconds": e.seconds / 2, "device": e.device, "threads": e.threads or max(1, (os.cpu_count() or 1) // 4),
            "memory": e.memory or 4 * size + 4 * 2**30, "prompts": s.prompts, "sample_tokens": s.tokens,
            "temperature": s.temperature, "seed": s.seed, "base": self._base,
        }  # fmt: skip

    def to_copy(self) -> list[ArchivedState]:
        """Return the final states, and round 0, of which no copy is known: oldest first."""
        done = self._copied | self._not_wanted
        return [a for a in self.archive.all() if (a.final or not a.round) and str(a.state) not in done]

    async def _copy(self) -> None:
        """Copy what is final to the address, with retries; nobody waits for it."""
        failures = 0
        while not self._listed or self.to_copy() or self.archive.left():
            left = self.archive.left()
            try:
                with contextlib.ExitStack() as stack:
                    # One at a time: states that wait for a slow address are not protected from the policy.
                    held = self.to_copy()[:1] if self._listed else []
                    for archived in held:
                        stack.enter_context(self.archive.reading(archived))
                    await run_job(
                        "coordinator.checkpoints.copies", self._copy_job(held, left), self._note_copy,
                        deadline=COPY_SECONDS, silence=COPY_SILENCE_SECONDS,
                    )  # fmt: skip
                await asyncio.to_thread(self.archive.forget_left, left)
                self._listed = True
                self._solved("copies")
                failures = 0
            except CoordinatorError as e:
                wait = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
                failures += 1
                self._counts["copies_failed"] += 1
                again = f"tried again in {wait:.0f} s, the local ones are whole"
                self._report("copies", f"checkpoints are not copied: see the coordinator's log ({again})", str(e))
                await asyncio.sleep(wait)

    def _copy_job(self, held: Sequence[ArchivedState], left: set[Digest]) -> Row:
        archive, p = self._settings.archive, self._settings.archive.policy_of_copies
        return {
            "address": archive.address, "run": str(self._spec.run_id), "folders": [str(h.folder) for h in held],
            "waiting": [str(a.state) for a in self.to_copy() if a not in held],
            "policy": [p.newest, p.every, p.best, p.bytes, p.waiting], "left": sorted(str(s) for s in left),
            "mbits": archive.mbits, "losses": {str(k): v for k, v in self.evaluations.losses().items()},
        }  # fmt: skip

    def _note_copy(self, row: Row) -> None:
        if "present" in row:
            self._copied.update(row["present"])
            self._listed = True  # even if what follows fails: an address may refuse to delete, and take copies
        if not_wanted := row.get("skipped") or row.get("removed"):  # by the policy: it is not sent again
            self._copied.discard(not_wanted)
            self._not_wanted.add(not_wanted)
        if state := row.get("copied"):
            self._copied.add(state)
            self._counts["copied"] += 1
            self._counts["copied_bytes"] += row["bytes"]
            round_ = next((a.round for a in self.archive.all() if str(a.state) == state), None)
            size = row["bytes"] / 1e6
            log.info("copied the state of round %s to %s (%.1f MB)", round_, self._settings.archive.address, size)

    def _report(self, topic: str, problem: str, why: str) -> None:
        """Keep a problem, which anybody may read, and log it with its reason once for as long as both are the same."""
        if self._problems.get(topic) != (problem, why):
            log.warning("%s: %s", problem, why)
        self._problems[topic] = problem, why

    def _solved(self, topic: str) -> None:
        if self._problems.pop(topic, None) is not None:
            log.info("%s: in order again", topic)

    @property
    def problem(self) -> str:
        """The states that are not archived, copied or evaluated, for everybody; empty when all is well."""
        return "; ".join(p for p in (self._fetch_problem(), *(said for said, _ in self._problems.values())) if p)

    @property
    def validation(self) -> tuple[int, float | None] | None:
        """Round and loss (None: not finite) of the newest evaluated state; None if there is none."""
        row = self.evaluations.newest()
        return None if row is None else (row["round"], row["loss"])

    def validation_points(self) -> list[tuple[int, float]]:
        """Return the round and the finite loss of every evaluation, by round: for a chart."""
        return [(r["round"], float(r["loss"])) for r in self.evaluations.rows() if r.get("loss") is not None]

    def newest_losses(self) -> tuple[float, ...]:
        """Return the newest validation losses, newest first; NaN where the output was not finite."""
        rows = self.evaluations.rows()[: -MAX_LOSSES - 1 : -1]
        return tuple(math.nan if r.get("loss") is None else float(r["loss"]) for r in rows)

    async def gauges(self) -> list[tuple[str, str, float]]:
        """Return name, help and value of each metric of the archive; names that end in _total are counters."""

        def read() -> tuple[list[ArchivedState], int, int]:
            archived = self.archive.all()
            waiting = len(self.to_copy()) if self._settings.archive.address else 0
            return archived, sum(a.size for a in archived), waiting

        archived, size, waiting = await asyncio.to_thread(read)
        final = [a for a in archived if a.final]
        newest, c = self.validation, self._counts
        found = [
            ("cairn_archive_states", "Archived states.", len(archived)),
            ("cairn_archive_bytes", "Bytes of archived states.", size),
            ("cairn_archive_final_round", "Round of the newest final archived state.", final[-1].round if final else 0),
            ("cairn_archive_problem", "1 while archiving, copying or evaluating fails.", bool(self.problem)),
            ("cairn_copies_waiting", "Final states without a copy.", waiting),
            ("cairn_copies_total", "States copied.", c["copied"]),
            ("cairn_copies_bytes_total", "Bytes copied.", c["copied_bytes"]),
            ("cairn_copies_failed_total", "Attempts to copy that failed.", c["copies_failed"]),
            ("cairn_evaluations_total", "States evaluated.", c["evaluated"]),
            ("cairn_evaluations_failed_total", "Evaluations that failed.", c["evaluations_failed"]),
            ("cairn_evaluation_seconds", "Duration of the newest evaluation.", self._seconds),
        ]
        if newest is not None:
            found.append(("cairn_validation_round", "Round of the newest evaluation.", newest[0]))
            loss = math.nan if newest[1] is None else newest[1]
            found.append(("cairn_validation_loss", "Its validation loss, nats per token; NaN: not finite.", loss))
        return [(name, what, float(value)) for name, what, value in found]

    def samples(self, before: int | None, limit: int) -> list[Row]:
        """Return at most `limit` texts of rounds before `before` (None: of all), newest first."""
        return self.evaluations.samples(before, max(0, limit))

    def checkpoints(self) -> list[Row]:
        """Return a description of each archived state, newest first."""
        losses = self.evaluations.losses()
        return [
            {
                "round": a.round,
                "state": str(a.state),
                "record": str(a.record),
                "tokens": a.tokens,
                "bytes": sum(size for _, size in files),
                "files": [{"name": name, "bytes": size} for name, size in files],
                "final": bool(a.final) or a.round == 0,
                "copied": str(a.state) in self._copied,
                "validation_loss": losses.get(a.state),
            }
            for a in reversed(self.archive.all())
            if (files := a.files())
        ]


def _log_evaluation(archived: ArchivedState, measured: Row | None, texts: Sequence[Row]) -> None:
    if measured is not None:
        of = f"{measured['windows']} windows on {measured['device']}, {measured['seconds']:.0f} s"
        if measured["loss"] is None:
            log.error("validation of round %d: the loss is not a number: the run has diverged (%s)", archived.round, of)
        else:
            log.info("validation of round %d: loss %.4f nats a token (%s)", archived.round, measured["loss"], of)
    if texts:
        drawn = next((t for t in texts if t["temperature"]), texts[0])  # the greedy text repeats itself
        prompt, text = (" ".join(drawn[k].split()) for k in ("prompt", "text"))
        log.info('round %d continues "%s": %s', archived.round, plain(prompt, 60), plain(text, 120))
