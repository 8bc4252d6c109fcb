"""The settings in coordinator.toml (docs/checkpoints.md): no peer needs them, so the spec has none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coordinator.authoring.toml_file import read_tables
from coordinator.checkpoints.retention import RetentionPolicy
from coordinator.errors import CoordinatorError
from protocol.plain_text import is_plain
from protocol.spec import explain

FILE = "coordinator.toml"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class SettingsError(CoordinatorError):
    """A wrong coordinator.toml or option."""


def parse_bytes(value: Any) -> int:
    """Return the bytes of 200, "800M" or "50G". Raises ValueError."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)([KMGT]?)", str(value).strip().upper())
    if found is None:
        raise ValueError('write bytes, or a number with K, M, G or T such as "50G"')
    return int(float(found[1]) * UNITS[found[2]])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=10**9)]


def _one_line(text: str) -> str:
    if not is_plain(text):
        raise ValueError("must be printable text on one line")
    return text


Line = Annotated[str, Field(max_length=300), AfterValidator(_one_line)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PolicyTable(_Table):
    """A retention policy: see `checkpoints.retention`."""

    newest: Annotated[int, Field(ge=1, le=10**6)] = 5
    every: Count = 0
    best: Count = 0
    bytes: Bytes = 0

    @property
    def policy(self) -> RetentionPolicy:
        return RetentionPolicy(self.newest, self.every, self.best, self.bytes)


class ArchiveTable(PolicyTable):
    """[archive]."""

    reserve: Bytes = 10**9
    updates: Bytes = 20 * 10**9
    few_members: Count = 8
    address: Annotated[str, Field(max_length=4096)] = ""
    mbits: Annotated[float, Field(ge=0)] = 0.0
    copies: PolicyTable | None = None

    @property
    def policy_of_copies(self) -> RetentionPolicy:
        return (self.copies or self).policy


class EvaluationTable(_Table):
    """[evaluation]."""

    every: Count = 1
    windows: Annotated[int, Field(ge=1, le=10**6)] = 512
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")] = "auto"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    memory: Bytes = 0
    seconds: Annotated[float, Field(ge=1, le=10**6)] = 1800.0


class SamplesTable(_Table):
    """[samples]."""

    prompts: Annotated[list[Annotated[str, Field(min_length=1, max_length=2000)]], Field(max_length=16)] = []
    tokens: Annotated[int, Field(ge=0, le=1000)] = 48
    temperature: Annotated[float, Field(gt=0, le=10)] = 0.8
    seed: Count = 1


class AboutTable(_Table):
    """[about]: the owner's words on the run, for people; nobody signs them."""

    description: Line = ""
    contact: Line = ""
    license: Line = ""


class CheckpointSettings(_Table):
    """All tables."""

    about: AboutTable = AboutTable()

    archive: ArchiveTable = ArchiveTable()
    evaluation: EvaluationTable = EvaluationTable()
    samples: SamplesTable = SamplesTable()


def load_settings(
    file: Path | None = None, *, address: str | None = None, keep: str | None = None, evaluate_every: int | None = None
) -> CheckpointSettings:
    """Return the settings of the file, overridden by the options. Raises SettingsError.

    `keep` is such as "newest=5,every=100,best=3,bytes=200G".
    """
    tables: dict[str, Any] = {} if file is None else read_tables(file, SettingsError, "name a coordinator.toml")[0]
    options: dict[str, dict[str, Any]] = {"archive": {} if keep is None else parse_keep(keep), "evaluation": {}}
    if address is not None:
        options["archive"]["address"] = address
    if evaluate_every is not None:
        options["evaluation"]["every"] = evaluate_every
    for name, given in options.items():
        if given and isinstance(tables.setdefault(name, {}), dict):
            tables[name] = tables[name] | given
    try:
        return CheckpointSettings.model_validate(tables)
    except ValidationError as e:
        where = "the options" if file is None else str(file)
        raise SettingsError(explain(e, where).replace("a field of the spec", "a setting")) from None


def check_address(address: str, folder: Path) -> None:
    """Raise SettingsError for an address with a password, within the run's own folder, or read-only."""
    if re.search(r"://[^/@]*:[^/]*@", address):
        raise SettingsError(
            "archive.address has a password, which logs would show: leave it out, and set it in the environment, such "
            "as FSSPEC_SFTP_PASSWORD"
        )
    if address.startswith(("http://", "https://")):
        raise SettingsError(f"{address}: a web address is only read from: name a folder, or such as s3://bucket/runs")
    local = address.removeprefix("file://").removeprefix("local://")
    if address and "://" not in local and "::" not in local:
        there = Path(local).expanduser().resolve()
        if folder.resolve() in (there, *there.parents):
            raise SettingsError(f"{address}: copies need a place of their own: name one outside {folder}")


def parse_keep(text: str) -> dict[str, str]:
    """Return the fields of a policy such as "newest=5,bytes=200G". Raises SettingsError."""
    found = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in ("newest", "every", "best", "bytes"):
            raise SettingsError(f"{text[:80]!r}: write such as newest=5,every=100,best=3,bytes=200G, or some of it")
        found[name] = value.strip()
    return found
