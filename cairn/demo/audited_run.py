"""The run file of a demo with liars: the demo's own, with updates that can be replayed and time to do so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.files import write_whole
from coordinator.authoring.runfile import load_run
from coordinator.authoring.toml_file import tomllib
from protocol.ids import PeerKey

ROUNDS, ROUND_SECONDS = 28, 12
HOLD_ROUNDS = 24
"""Rounds in which an update may be audited. Replays of two liars' updates take 6 rounds on two idle cores, 20 on two
that three such swarms share."""


@dataclass(frozen=True, slots=True)
class Change:
    """A field that differs from the original file, and the reason, for a person."""

    table: str
    field: str
    value: Any
    why: str


def write_audited_run(source: Path, out: Path, founders: Sequence[PeerKey]) -> Path:
    """Write the run file to `out` and return that. Raises CairnError where that fails, or `source` is no run file.

    `founders`: the honest peers, which share a round of the original file.
    """
    load_run(source)  # says what is wrong with it, and where
    tables = tomllib.loads(source.read_text())
    changes = tuple(_changes(tables, founders))
    for change in changes:
        tables.setdefault(change.table, {})[change.field] = change.value
    data = tables["data"]
    conversations = data.get("conversations", {})
    for table in (tables["run"], data, conversations, *conversations.get("mix", [])):
        for field in ("weights", "source", "prepared", "tokenizer", "validation", "chat_template"):
            if table.get(field):
                table[field] = _absolute(table[field], source.parent)
    reasons = {(c.table, c.field): c.why for c in changes}
    heading = f"# Made by `cairn demo --liars` from {source.name}. Where it differs, a comment says why."
    write_whole(out, "\n".join([heading, *_lines(tables, (), reasons)]) + "\n")
    return out


def _changes(tables: Mapping[str, Any], founders: Sequence[PeerKey]) -> Iterator[Change]:
    step = tables.get("inner", {}).get("batch", 16) * tables["data"]["window"]
    update = max(1, tables["round"]["target_tokens"] // len(founders) // step) * step
    whole = len(founders) * update
    yield Change("run", "name", f"{tables['run']['name']}-audited", "Another run than that of the demo without liars.")
    yield Change("run", "total_tokens", ROUNDS * whole, f"{ROUNDS} rounds of {len(founders)} honest peers.")
    yield Change("audit", "replayable", True, "Any peer can train an update again, and compare.")
    yield Change("codec", "kind", "sign", "Signs are compared.")
    yield Change("codec", "beta", 0.0, "No error feedback: nobody else has it.")
    yield Change("credit", "hold_rounds", HOLD_ROUNDS, "The rounds in which an update can be audited.")
    why = "The honest peers have stake, and so a say, from the beginning."
    yield Change("admission", "founders", [key.hex() for key in founders], why)
    yield Change("round", "target_tokens", 2 * whole, "More than all can claim: rounds end by the clock, see below.")
    yield Change("round", "max_update_tokens", update, "What an honest peer trains in a round: nobody claims more.")
    yield Change("round", "max_seconds", ROUND_SECONDS, "Longer than the training: the rest is for audits.")


def _absolute(paths: Any, folder: Path) -> Any:
    if isinstance(paths, list):
        return [_absolute(path, folder) for path in paths]
    return paths if "://" in paths else str(folder.resolve() / Path(paths).expanduser())


def _lines(table: Mapping[str, Any], names: tuple[str, ...], reasons: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Yield the lines of a TOML table, then those of the tables in it."""
    fields = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    if names and (fields or not table):
        yield from ("", f"[{'.'.join(names)}]")
    for name, value in fields.items():
        if why := reasons.get((".".join(names), name)):
            yield f"# {why}"
        yield f"{name} = {_value(value)}"
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*names, name), reasons)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_value(v)}" for name, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)  # JSON's plain values are TOML's, but for null: TOML has none
