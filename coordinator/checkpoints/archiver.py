"""Looks after what is archived: signs it when it is final, has it copied and judged, and says how that goes.

Nothing here holds up the chain: judging and copying are processes of their own, tried again when they fail.
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

from coordinator.chain_indexer import wait_at_most
from coordinator.checkpoints.archive import CERTIFICATE, Archive, ArchivedState
from coordinator.checkpoints.evaluation_job import plain, result_of
from coordinator.checkpoints.evaluations import EvaluationLog
from coordinator.checkpoints.job import Row, run_job
from coordinator.checkpoints.settings import CheckpointSettings
from coordinator.checkpoints.verification import ends_with_state, names_state
from coordinator.errors import CoordinatorError
from coordinator.swarm import SwarmView
from protocol.errors import CairnError
from protocol.identity import Identity
from protocol.ids import Digest, Round
from protocol.message_codec import KeySigner, MessageDecoder, encode_certificate
from protocol.messages import Certificate, Finalization
from protocol.spec import RunSpec

log = logging.getLogger(__name__)

POLL = 10.0
SILENCE = 600.0
"""Seconds without a byte after which a copy is begun again."""

COPY_SECONDS = 7 * 86_400.0
WAITS = (10.0, 30.0, 60.0, 300.0)
"""Seconds before another try, by how often it failed; the last from then on."""

TRIES = 2
MAX_JUDGED = 20
"""Of one evaluation."""

IsSettled = Callable[[Round, Digest], Awaitable[bool]]
"""Whether the ledger has settled this record as that of the round."""


class CheckpointArchiver:
    """One run's. `start`, then `stop`; what it knows can be asked at any time, on the event loop."""

    def __init__(
        self, archive: Archive, folder: Path, spec: RunSpec, owner: Identity, view: SwarmView, settings: CheckpointSettings, *,
        shards: Sequence[Path] = (), now: Callable[[], float] = time.time,
    ):  # fmt: skip
        self.archive = archive
        self.evaluations = EvaluationLog(folder, now)
        self.other_problem: Callable[[], str] = str
        """What is in the way of archiving, from whoever archives."""
        self._spec = spec
        self._signer = KeySigner(owner)
        self._decoder = MessageDecoder(spec.run_id, owner.key, remember=16)
        self._view = view
        self._settings = settings
        self._shards = [str(p) for p in shards]
        self._wakes: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._unsubscribe: Callable[[], None] | None = None
        self._problems: dict[str, str] = {}
        self._copied: set[str] | None = None
        self._passed: set[str] = set()
        """Final states that the copies' policy does not want."""
        self._left: set[str] = set()
        self._failed: dict[Digest, int] = {}
        self._counts = {"evaluated": 0, "evaluations_failed": 0, "copied": 0, "copies_failed": 0, "copied_bytes": 0}
        self._seconds = 0.0
        archive.losses = self.evaluations.losses
        archive.on_drop = self._dropped

    # -- life ------------------------------------------------------------------------------------------------

    def start(self, is_settled: IsSettled) -> None:
        """Begin, on the running event loop."""
        self._unsubscribe = self._view.subscribe(self._wake)
        self._begin("the archive", lambda: self._sign(is_settled))
        if self._settings.evaluation.every and (self._shards or self._settings.samples.prompts):
            self._begin("evaluation", self._judge)
        if self._copies:
            self._begin("copies", self._copy)

    async def stop(self) -> None:
        """Ends what is under way."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, about: str, work: Callable[[], Awaitable[None]]) -> None:
        wake = asyncio.Event()
        wake.set()
        self._wakes.append(wake)
        self._tasks.append(asyncio.create_task(self._go_on(about, work, wake), name=about))

    async def _go_on(self, about: str, work: Callable[[], Awaitable[None]], wake: asyncio.Event) -> None:
        """For ever: the work, whenever there may be some."""
        while True:
            await wait_at_most(wake, POLL)
            wake.clear()
            try:
                await work()
            except CairnError as e:
                self._say(about, str(e))
            except Exception:  # said loudly, and tried again
                log.exception("%s: a fault of the coordinator", about)
                await asyncio.sleep(POLL)

    def _wake(self) -> None:
        for wake in self._wakes:
            wake.set()

    # -- final -----------------------------------------------------------------------------------------------

    async def _sign(self, is_settled: IsSettled) -> None:
        """Sign what has become final. What a state is final by is the record that names it, or the run's last."""
        waiting = [a for a in self.archive.all() if a.round and not a.final]
        for about in {a for a in self._problems if a.startswith("state ")} - {f"state {a.round}" for a in waiting}:
            self._solved(about)
        for archived in waiting:
            certificate = await self._certificate(archived)
            if certificate is None or not await is_settled(certificate.record.body.round, certificate.digest):
                continue
            body = certificate.record.body
            final = self._signer.sign(Finalization(self._spec.run_id, body.round, certificate.digest)).sent
            sent = encode_certificate(certificate)
            await asyncio.to_thread(self.archive.mark_final, archived, final, sent)
            log.info("the state of round %d is final: signed in %s", archived.round, archived.folder.name)
            await asyncio.to_thread(self.archive.prune)
            self._wake()
        self._solved("the archive")

    async def _certificate(self, archived: ArchivedState) -> Certificate | None:
        """The record by which this state is known, as far as the chain has come."""
        after = await self._view.certificates_after(archived.record, 1)
        if after:
            if names_state(after[0], archived):
                return after[0]
            if after[0].record.body.base_state != archived.state:
                self._say(
                    f"state {archived.round}",
                    f"the archived state of round {archived.round} ({archived.state.short}) is not the one that the "
                    f"chain names ({after[0].record.body.base_state.short}): it is never signed; remove "
                    f"{archived.folder}",
                )
            return None
        with contextlib.suppress(OSError, CairnError):
            last = self._decoder.certificate((archived.folder / CERTIFICATE).read_bytes())
            return last if ends_with_state(last, archived) else None
        return None

    # -- what it is worth --------------------------------------------------------------------------------------

    def _due(self) -> ArchivedState | None:
        """The newest state that is to be judged now: what came meanwhile is passed over."""
        done = self.evaluations.done()
        archived = [a for a in self.archive.all() if self._failed.get(a.state, 0) < TRIES]
        if not archived or str(archived[-1].state) in done:
            return None
        newest = archived[-1]
        last = max((r for r in done.values() if r < newest.round), default=None)
        far = last is None or newest.round - last >= self._settings.evaluation.every
        ends = 0 < self._spec.total_tokens <= newest.tokens
        return newest if far or ends else None

    async def _judge(self) -> None:
        archived = self._due()
        if archived is None:
            return
        rows: list[Row] = []
        began, why = time.monotonic(), ""
        seconds = self._settings.evaluation.seconds
        with self.archive.reading(archived):
            try:
                await run_job(
                    "coordinator.checkpoints.evaluation_job", self._job(archived), rows.append, deadline=seconds
                )
            except CoordinatorError as e:
                why = str(e)
        self._seconds = time.monotonic() - began
        measured, texts = result_of(rows)
        if measured is None and not texts:
            self._failed[archived.state] = self._failed.get(archived.state, 0) + 1
            self._counts["evaluations_failed"] += 1
            again = "it is tried again" if self._failed[archived.state] < TRIES else "the next one is tried"
            self._say("evaluation", f"the state of round {archived.round} was not evaluated: {why}; {again}")
            return
        await asyncio.to_thread(self.evaluations.add, archived, measured, texts)
        await asyncio.to_thread(self.archive.prune)  # another may be the best now
        self._counts["evaluated"] += 1
        self._tell(archived, measured, texts)
        if why:  # the loss is there, not all of the texts are
            self._say("evaluation", f"the evaluation of round {archived.round} was not finished: {why}")
        else:
            self._solved("evaluation")
        self._wake()

    def _tell(self, archived: ArchivedState, measured: Row | None, texts: Sequence[Row]) -> None:
        if measured is not None:
            of = f"{measured['windows']} windows on {measured['device']}, {measured['seconds']:.0f} s"
            if measured["loss"] is None:
                log.error(
                    "validation of round %d: the loss is not a number: the run has diverged (%s)", archived.round, of
                )
            else:
                log.info("validation of round %d: loss %.4f nats a token (%s)", archived.round, measured["loss"], of)
        if texts:
            drawn = next((t for t in texts if t["temperature"]), texts[0])  # the likeliest text repeats itself
            prompt, text = (" ".join(drawn[k].split()) for k in ("prompt", "text"))
            log.info('round %d goes on from "%s": %s', archived.round, plain(prompt, 60), plain(text, 120))

    def _job(self, archived: ArchivedState) -> Row:
        e, s = self._settings.evaluation, self._settings.samples
        rows = self.evaluations.rows()
        before = rows[-1]["windows"] if rows else None
        size = 4 * self._spec.model.layout.numel
        return {
            "spec": self._spec.canonical().decode(), "folder": str(archived.folder), "shards": self._shards,
            "windows": e.windows, "most": before if before is not None and before < e.windows else None,
            "seconds": e.seconds / 2, "device": e.device, "threads": e.threads or max(1, (os.cpu_count() or 1) // 4),
            "memory": e.memory or 4 * size + 4 * 2**30, "prompts": s.prompts, "sample_tokens": s.tokens,
            "temperature": s.temperature, "seed": s.seed,
        }  # fmt: skip

    # -- copies ------------------------------------------------------------------------------------------------

    def _dropped(self, archived: Sequence[ArchivedState]) -> None:
        """The chain has left these states. Called in any thread."""
        self._left |= {str(a.state) for a in archived}
        try:
            self.evaluations.leave([a.state for a in archived])
        except CairnError as e:
            log.warning("%s", e)

    def to_copy(self) -> list[ArchivedState]:
        """The final states of which no copy is known, oldest first; round 0 too."""
        copied = (self._copied or set()) | self._passed
        return [a for a in self.archive.all() if (a.final or not a.round) and str(a.state) not in copied]

    async def _copy(self) -> None:
        """What is final, to the address. It fails, and is tried again, without anybody waiting for it."""
        failures = 0
        while self._copied is None or self.to_copy() or self._left:
            left = set(self._left)
            try:
                with contextlib.ExitStack() as stack:
                    # One at a time: what waits for a slow address is not held against the policy.
                    held = (
                        []
                        if self._copied is None
                        else [stack.enter_context(self.archive.reading(a)) for a in self.to_copy()[:1]]
                    )
                    await run_job(
                        "coordinator.checkpoints.copies", self._copy_job(held, left), self._heard, deadline=COPY_SECONDS,
                        silence=SILENCE,
                    )  # fmt: skip
                self._left -= left
                self._copied = self._copied or set()
                self._solved("copies")
                failures = 0
            except CoordinatorError as e:
                wait = WAITS[min(failures, len(WAITS) - 1)]
                failures += 1
                self._counts["copies_failed"] += 1
                again = f"tried again in {wait:.0f} s, the local ones are whole"
                self._say("copies", f"checkpoints are not copied to {self._settings.archive.address}: {e} ({again})")
                await asyncio.sleep(wait)

    def _copy_job(self, held: Sequence[ArchivedState], left: set[str]) -> Row:
        a, p = self._settings.archive, self._settings.archive.policy_of_copies
        return {
            "address": a.address, "run": str(self._spec.run_id), "folders": [str(h.folder) for h in held],
            "policy": [p.newest, p.every, p.best, p.bytes, p.waiting], "left": sorted(left), "mbits": a.mbits,
            "losses": {str(k): v for k, v in self.evaluations.losses().items()},
        }  # fmt: skip

    def _heard(self, row: Row) -> None:
        if "there" in row:
            self._copied = (self._copied or set()) | set(row["there"])
        elif "passed" in row:
            self._passed.add(row["passed"])
        elif "removed" in row:  # by the policy: it is not sent again
            self._copied = (self._copied or set()) - {row["removed"]}
            self._passed.add(row["removed"])
        elif "copied" in row:
            self._copied = (self._copied or set()) | {row["copied"]}
            self._counts["copied"] += 1
            self._counts["copied_bytes"] += int(row["bytes"])
            round_ = next((a.round for a in self.archive.all() if str(a.state) == row["copied"]), None)
            log.info(
                "copied the state of round %s to %s (%.1f MB)",
                round_,
                self._settings.archive.address,
                row["bytes"] / 1e6,
            )

    # -- what is told ------------------------------------------------------------------------------------------

    def _say(self, about: str, problem: str) -> None:
        """A problem, in the log once for as long as it is the same."""
        if self._problems.get(about) != problem:
            log.warning("%s", problem)
        self._problems[about] = problem

    def _solved(self, about: str) -> None:
        if self._problems.pop(about, None) is not None:
            log.info("%s: in order again", about)

    @property
    def problem(self) -> str:
        """What is in the way, for people; empty when all is well."""
        return "; ".join(p for p in (self.other_problem(), *self._problems.values()) if p)

    @property
    def validation(self) -> tuple[int, float | None] | None:
        """Round and loss (None: not finite) of the newest state that was judged; None when none was."""
        row = self.evaluations.newest()
        return None if row is None else (row["round"], row["loss"])

    def validation_points(self) -> list[tuple[int, int, float]]:
        """Round, accepted tokens and loss of every evaluation, by round: for a chart."""
        return [(r["round"], r["tokens"], r["loss"]) for r in self.evaluations.rows() if r.get("loss") is not None]

    def judged(self) -> tuple[float, ...]:
        """Validation losses of the newest judged states, newest first; NaN where the output was not finite."""
        rows = sorted(self.evaluations.rows(), key=lambda r: -r["round"])[:MAX_JUDGED]
        return tuple(math.nan if r.get("loss") is None else float(r["loss"]) for r in rows)

    def facts(self) -> list[tuple[str, str, float]]:
        """Name, meaning and value of each gauge (those that end in _total only grow)."""
        archived = self.archive.all()
        final = [a for a in archived if a.final]
        newest, c = self.validation, self._counts
        found = [
            ("cairn_archive_states", "Archived states.", len(archived)),
            ("cairn_archive_bytes", "Bytes of archived states.", sum(a.size for a in archived)),
            ("cairn_archive_final_round", "The newest archived state that is signed.", final[-1].round if final else 0),
            ("cairn_archive_problem", "1 while archiving, copying or judging fails.", bool(self.problem)),
            ("cairn_copies_waiting", "Final states without a copy.", len(self.to_copy()) if self._copies else 0),
            ("cairn_copies_total", "States copied.", c["copied"]),
            ("cairn_copies_bytes_total", "Bytes copied.", c["copied_bytes"]),
            ("cairn_copies_failed_total", "Attempts to copy that failed.", c["copies_failed"]),
            ("cairn_evaluations_total", "States judged.", c["evaluated"]),
            ("cairn_evaluations_failed_total", "Evaluations that failed.", c["evaluations_failed"]),
            ("cairn_evaluation_seconds", "How long the newest evaluation took.", self._seconds),
        ]
        if newest is not None:
            found.append(("cairn_validation_round", "The round of the newest evaluation.", newest[0]))
            loss = float("nan") if newest[1] is None else newest[1]
            found.append(("cairn_validation_loss", "Its validation loss, nats a token; NaN: not finite.", loss))
        return [(name, what, float(value)) for name, what, value in found]

    @property
    def _copies(self) -> bool:
        return bool(self._settings.archive.address)

    def samples(self, before: int | None, limit: int) -> list[Row]:
        """Texts of rounds before `before` (None: of all), the newest first, at most `limit`."""
        return self.evaluations.samples(before, max(0, limit))

    def checkpoints(self) -> list[Row]:
        """The archived states, the newest first."""
        losses, copied = self.evaluations.losses(), self._copied or set()
        return [
            {
                "round": a.round,
                "state": str(a.state),
                "record": str(a.record),
                "tokens": a.tokens,
                "bytes": sum(size for _, size in files),
                "files": [{"name": name, "bytes": size} for name, size in files],
                "final": bool(a.final) or a.round == 0,
                "copied": str(a.state) in copied,
                "validation_loss": losses.get(a.state),
            }
            for a in reversed(self.archive.all())
            if (files := a.files())
        ]
