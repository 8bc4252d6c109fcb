"""run.toml: the file that a run's owner writes. docs/runs.md describes every field.

Most tables are the run spec's own sections. `[run]`, `[model]` and `[data]` are for people: they name a corpus, where
the spec names shards by digest. `load_run` checks everything that needs neither the data nor the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from coordinator.authoring.conversations import ConversationTable
from coordinator.authoring.errors import RunFileError
from coordinator.authoring.measurements import ADAPTER_INNER, NESTEROV, PLAIN
from coordinator.authoring.prepare import SHARD_TOKENS, TOKENIZER, check_choices
from coordinator.authoring.toml_file import problems, read_tables
from protocol.data_address import check_address
from protocol.errors import SpecError
from protocol.spec import (
    MAX_INT,
    AdapterSettings,
    AdmissionSpec,
    AuditSpec,
    CheckpointSpec,
    CodecSpec,
    CreditSpec,
    InnerSpec,
    OuterSpec,
    RoundSpec,
    Section,
)


class RunTable(Section):
    """[run]: the run's name, its initial weights and its length."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")]
    seed: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    weights: Annotated[str, Field(max_length=4096)] = ""
    total_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = 0


class ModelTable(Section):
    """[model]: the fields of a transformers config; and [model.adapter]."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    adapter: AdapterSettings | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The fields of the config."""
        return dict(self.model_extra or {})


class DataTable(Section):
    """[data]: the documents, or a folder made by `cairn data prepare`. Relative paths: relative to the run.toml."""

    source: str | list[str] | None = None
    prepared: str | None = None
    window: Annotated[int, Field(ge=8, le=2**20)]
    field: str = "text"
    vocabulary: Annotated[int, Field(ge=257, le=2**24)] | None = None
    tokenizer: str | None = None
    end_of_text: str | None = None
    validation_every: Annotated[int, Field(ge=0)] = 0
    validation: list[str] = []
    shard_tokens: Annotated[int, Field(ge=2, le=2**38)] = SHARD_TOKENS
    addresses: Annotated[list[str], Field(max_length=64)] = []
    conversations: ConversationTable | None = None

    @model_validator(mode="after")
    def _one_way(self):
        if (self.source is None) == (self.prepared is None):
            raise ValueError("write either source (documents) or prepared (a folder made by `cairn data prepare`)")
        if self.source is not None:
            check_choices(self.vocabulary, self.tokenizer, self.validation_every, self.validation, self.conversations)
            if self.shard_tokens <= self.window:
                raise ValueError(f"shard_tokens: a window of {self.window} tokens and the next do not fit: write more")
        for address in self.addresses:
            try:
                check_address(address)
            except SpecError as e:
                raise ValueError(f"addresses: {e}") from None
        if self.prepared is not None:
            allowed = ("prepared", "window", "addresses")
            # By value: what a run began with is read back with every field set.
            fields = DataTable.model_fields.items()
            also = [n for n, field in fields if n not in allowed and getattr(self, n) != field.default]
            if also:
                raise ValueError(f"{', '.join(also)}: fixed when the folder was prepared; remove it here")
        return self

    @property
    def sources(self) -> list[str]:
        """`source` as a list."""
        return [self.source] if isinstance(self.source, str) else list(self.source or [])


REPLAYABLE_HOLD_ROUNDS = 32
"""The default hold of replayable runs: in it measured fakes were convicted (docs/results/adversaries.md)."""


def kept_checkpoints(hold_rounds: int, every: int) -> int:
    """Return the least `checkpoint.keep` with which jurors can replay an update while its credit is held."""
    return -(-hold_rounds // every)


class RunFile(Section):
    """A checked run.toml."""

    run: RunTable
    model: ModelTable
    data: DataTable
    inner: InnerSpec = InnerSpec()
    codec: CodecSpec = CodecSpec()
    outer: OuterSpec = OuterSpec()
    round: RoundSpec
    admission: AdmissionSpec = AdmissionSpec()
    credit: CreditSpec = CreditSpec()
    audit: AuditSpec = AuditSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    _path: Path = PrivateAttr(default=Path("run.toml"))

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from."""
        return self._path.parent

    @property
    def weights(self) -> Path | None:
        """The folder of the initial weights; None if they are drawn."""
        return self.folder / Path(self.run.weights).expanduser() if self.run.weights else None

    @property
    def prepared(self) -> Path | None:
        """The folder of prepared data; None if documents are named."""
        return None if self.data.prepared is None else self.folder / Path(self.data.prepared).expanduser()

    @property
    def tokenizer(self) -> Path | None:
        """The file of a given tokenizer, or of the prepared folder; None if one is to be trained."""
        if self.prepared is not None:
            return self.prepared / TOKENIZER
        return self.folder / Path(self.data.tokenizer).expanduser() if self.data.tokenizer else None

    @model_validator(mode="after")
    def _consistent(self):
        if not isinstance(self.model.config.get("model_type"), str):
            raise ValueError('model.model_type: is missing: write one, e.g. model_type = "llama"')
        if self.model.adapter is not None and not self.run.weights:
            raise ValueError("run.weights: an adapter needs a trained base: name that model's folder")
        if self.inner.schedule.kind != "constant" and not self.inner.schedule.total_tokens:
            raise ValueError(
                "run.total_tokens: a schedule that decays needs an end: write the run's tokens, or "
                'inner.schedule.kind = "constant"'
            )
        step = self.inner.batch * self.data.window
        is_text = self.data.conversations is None and self.data.prepared is None  # else fewer tokens count: see RunSpec
        if is_text and self.round.max_update_tokens < step:
            raise ValueError(f"round.max_update_tokens: must allow one inner step, batch * window = {step} tokens")
        if remedy := self.audit.remedy(self.codec, self.round, self.credit, self.model.config):
            raise ValueError(f"audit.replayable: needs {remedy}")
        return self


def load_run(path: Path) -> RunFile:
    """Return the checked run.toml. Raises RunFileError with a line for each problem: file, line and field."""
    if not path.exists():
        raise RunFileError(f"{path}: no such file: `cairn run plan --out FILE` writes one to begin with")
    tables, text = read_tables(path, RunFileError, "this is not a run.toml")
    _fill_in(tables)
    try:
        run_file = RunFile.model_validate(tables)
    except ValidationError as e:
        missing = "is missing: `cairn run plan --out FILE` writes every field with its meaning"
        raise RunFileError("\n".join(problems(e, path, text, RunFile, missing=missing, filled_in=FILLED_IN))) from None
    run_file._path = path.resolve()
    return run_file


FILLED_IN = {
    ("inner", "schedule", "total_tokens"): frozenset({("run", "total_tokens")}),
    ("round", "max_update_tokens"): frozenset({("round", "target_tokens"), ("data", "window"), ("inner", "batch")}),
    ("checkpoint", "keep"): frozenset({("credit", "hold_rounds"), ("checkpoint", "every")}),
}
"""Fields that follow from others: a mistake in one of those is not reported at these as well."""


def _fill_in(tables: dict[str, Any]) -> None:
    """Fill in the defaults that depend on other fields.

    The schedule ends with the run, an update holds up to two rounds' work, and signs have their own outer step.
    An adapter has the optimizers that it learns best with.
    Replayable updates have no error feedback, and their credit and what a replay needs are kept for as long as a
    conviction takes.
    """
    run, window_of = tables.get("run"), tables.get("data")
    inner, round_ = tables.setdefault("inner", {}), tables.get("round")
    if isinstance(inner, dict) and isinstance(run, dict):
        schedule = inner.setdefault("schedule", {})
        if isinstance(schedule, dict) and "total_tokens" in run:
            schedule.setdefault("total_tokens", run["total_tokens"])
    model = tables.get("model")
    is_adapter = isinstance(model, dict) and "adapter" in model
    if is_adapter and isinstance(inner, dict):
        inner.setdefault("optimizer", ADAPTER_INNER.value)
    codec, outer = tables.setdefault("codec", {}), tables.setdefault("outer", {})
    audit = tables.get("audit")
    if isinstance(audit, dict) and audit.get("replayable") is True:
        if isinstance(codec, dict):
            codec.setdefault("beta", 0.0)
        credit, checkpoint = tables.setdefault("credit", {}), tables.setdefault("checkpoint", {})
        if isinstance(credit, dict) and isinstance(checkpoint, dict):
            hold = credit.setdefault("hold_rounds", REPLAYABLE_HOLD_ROUNDS)
            every = checkpoint.get("every", CheckpointSpec().every)
            if all(type(n) is int and n > 0 for n in (hold, every)):
                checkpoint.setdefault("keep", max(CheckpointSpec().keep, kept_checkpoints(hold, every)))
    if isinstance(codec, dict) and isinstance(outer, dict):
        if codec.get("kind", CodecSpec().kind) == "sign":
            optimizer = outer.setdefault("optimizer", (PLAIN if is_adapter else NESTEROV).optimizer)
            if optimizer == PLAIN.optimizer:
                outer.setdefault("lr", PLAIN.lr)
            elif optimizer == NESTEROV.optimizer:
                outer.setdefault("lr", NESTEROV.lr)
                outer.setdefault("momentum", NESTEROV.momentum)
    if isinstance(round_, dict) and isinstance(window_of, dict) and isinstance(inner, dict):
        target, window = round_.get("target_tokens"), window_of.get("window")
        batch = inner.get("batch", InnerSpec().batch)
        if all(type(n) is int and n > 0 for n in (target, window, batch)):
            round_.setdefault("max_update_tokens", max(2 * target, 4 * batch * window))  # type: ignore[operator]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the differences between two dumped run files, field by field, for a person."""
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key} was {_shown(a)}, is now {_shown(b)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)[:80]
