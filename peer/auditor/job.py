"""The messages between a node and an auditor's process: one job, one answer, each a line of JSON.

Parsing is strict (pydantic), as on the trainer's channel. Tensors and blobs are files that the job names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, FailFast, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from peer.channel.messages import MAX_LINE, Count, DigestField, PeerKeyField, RoundUpdates
from peer.errors import AuditError
from protocol.audits import SCREENED_UPDATES
from protocol.checks import text
from protocol.errors import MalformedError
from protocol.messages import MAX_SCORE, MAX_SCORE_NAME, MAX_SCORES, AuditCheck, Score
from protocol.plain_text import printable

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

MAX_ANSWER = 64 * 1024
"""Maximum bytes of an answer: scores or a reason. A megabyte of wrong fields would take 140 MB to report."""

MAX_REASON = 8000
"""Maximum bytes of the reason why a check could not be made."""

MAX_SCREENED = 16
"""Updates of a record that a screen compares: more change little, and each has to be decoded."""

SCREENED_BACK = (1, 4)
"""The earlier records that a screen compares with, in rounds before the update's own."""

MAX_PROBLEM = 200
"""Characters that an error shows of one wrong field: its name may be whatever was sent."""

ScoreName = Annotated[str, Field(min_length=1), AfterValidator(lambda name: text("a name", name, MAX_SCORE_NAME))]
Reason = Annotated[str, AfterValidator(lambda reason: text("a reason", reason, MAX_REASON))]


@dataclass(frozen=True, slots=True)
class ClaimedUpdate:
    """An update of the record that is audited: author, windows as in its header, and the file of its blob."""

    author: PeerKeyField
    first_window: Count
    rebase_window: Count
    end_window: Count
    blob: Path
    __pydantic_config__ = STRICT

    @property
    def windows(self) -> int:
        return self.end_window - self.first_window


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The files of a state: a checkpoint with its digest, and the rounds after it, in order.

    `state`: the state digest that they lead to, by the chain. `accepted_windows`: those of all peers up to it.
    """

    checkpoint: Path
    checkpoint_digest: DigestField
    rounds: Annotated[tuple[RoundUpdates, ...], FailFast()]
    state: DigestField
    accepted_windows: Count
    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True)
class Rebase:
    """The record that the author applied while it trained, the digest of the state after it, and its windows."""

    round: RoundUpdates
    state: DigestField
    accepted_windows: Count
    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True)
class AuditJob:
    """One check of one update. `audit_seed`: draws the windows of a loss check (`Chain.audit_seed`).

    `start`: the state that a loss check measures from, or that a replay begins with. `rebase`: for a replay, the record
    between the author's first step and its last; None when it trained on one state. `own`: for a loss check, the
    auditor's update of the same record, which measures what an honest one gains. `spec_path`, `device`, `threads`,
    `shards`, `private_data`, `gpu_memory`, `base`: as in `peer.channel.Start`.
    """

    check: AuditCheck
    spec_path: Path
    audit_seed: DigestField | None
    update: ClaimedUpdate
    start: StateFiles
    rebase: Rebase | None = None
    own: ClaimedUpdate | None = None
    device: Annotated[str, Field(max_length=40)] = "auto"
    threads: Annotated[int, Field(ge=1, le=4096)] = 1
    shards: Annotated[dict[str, str], Field(max_length=65_536)] = field(default_factory=dict)
    private_data: bool = False
    gpu_memory: Count = 0
    base: Path | None = None
    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True)
class ScreenJob:
    """The screen of one update: the blobs of its record's updates, its own first, and those of earlier records.

    `spec_path`, `threads`: as in `AuditJob`.
    """

    spec_path: Path
    updates: Annotated[tuple[Path, ...], FailFast(), Field(min_length=SCREENED_UPDATES, max_length=MAX_SCREENED)]
    earlier: Annotated[
        tuple[Annotated[tuple[Path, ...], FailFast(), Field(max_length=MAX_SCREENED)], ...],
        FailFast(),
        Field(max_length=len(SCREENED_BACK)),
    ]
    threads: Annotated[int, Field(ge=1, le=4096)] = 1
    check: Literal["screen"] = "screen"
    __pydantic_config__ = STRICT


Job = Annotated[AuditJob | ScreenJob, Field(discriminator="check")]


@dataclass(frozen=True, slots=True)
class MeasuredScore:
    """A score as in a work report (`protocol.messages.Score`)."""

    name: ScoreName
    value: Annotated[float, Field(ge=-MAX_SCORE, le=MAX_SCORE)]
    threshold: Annotated[float, Field(ge=-MAX_SCORE, le=MAX_SCORE)]
    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True)
class AuditAnswer:
    """The outcome of a job: scores by ascending name; none, with a reason, when the check could not be made.

    `cpu_seconds`: CPU time of the job, with imports if it was the process's first. `is_uncheckable`: another attempt
    would end in the same way, since the reason is the update and not this machine.
    """

    scores: Annotated[tuple[MeasuredScore, ...], FailFast(), Field(max_length=MAX_SCORES)]
    reason: Reason = ""
    cpu_seconds: float = 0.0
    is_uncheckable: bool = False
    __pydantic_config__ = STRICT

    @property
    def as_scores(self) -> tuple[Score, ...]:
        """The scores as a work report has them."""
        return tuple(Score(s.name, s.value, s.threshold) for s in self.scores)


_JOB = TypeAdapter(Job)
_ANSWER = TypeAdapter(AuditAnswer)


def job_line(job: Job) -> bytes:
    """Return a job as one line. Raises AuditError when it is longer than MAX_LINE, or not to be written as JSON."""
    return _line(_JOB, job, MAX_LINE)


def answer_line(answer: AuditAnswer) -> bytes:
    """Return an answer as one line. Raises AuditError."""
    return _line(_ANSWER, answer, MAX_ANSWER)


def _line(adapter: TypeAdapter, message: object, most: int) -> bytes:
    try:
        line = adapter.dump_json(message) + b"\n"
    except PydanticSerializationError as e:
        raise AuditError(f"an audit's message that cannot be written as JSON: {e}") from None
    if len(line) > most:
        raise AuditError(f"an audit's message of {len(line)} bytes: at most {most} are allowed")
    return line


def parse_job(line: bytes) -> Job:
    """Return the job in a line. Raises AuditError, which names the wrong fields."""
    return _parse(_JOB, line, "job")


def parse_answer(line: bytes) -> AuditAnswer:
    """Return the answer in a line. Raises AuditError, also for scores that are not by ascending name."""
    answer: AuditAnswer = _parse(_ANSWER, line, "answer")
    names = [score.name for score in answer.scores]
    if names != sorted(set(names)) or bool(names) == bool(answer.reason):
        raise AuditError("an auditor's answer has scores, each once and by ascending name, or a reason")
    return answer


def _parse(adapter: TypeAdapter, line: bytes, what: str):
    try:
        return adapter.validate_json(line)
    except ValidationError as e:
        fields = ((".".join(map(str, p["loc"])), p["msg"]) for p in e.errors()[:5])
        problems = "; ".join(
            f"{printable(field, MAX_PROBLEM)}: {printable(said, MAX_PROBLEM)}" for field, said in fields
        )
        raise AuditError(f"an audit's {what} that does not parse: {problems}") from None
    except MalformedError as e:
        raise AuditError(f"an audit's {what} that does not parse: {e}") from None
