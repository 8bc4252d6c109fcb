"""A run for somebody who has not joined it, as its coordinator describes it by an invite or the address of its page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import async_timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cairn.number_format import bar, percent
from cairn.peer_screen import page_address
from coordinator.authoring.memory import eight_bit_saving, training_memory
from peer.fetched_data import data_bytes
from protocol.data_address import public_url
from protocol.errors import CairnError, MalformedError
from protocol.ids import RunId
from protocol.invite import HostPort
from protocol.messages import TRAINING_PHASES
from protocol.plain_text import printable
from protocol.quantised import BLOCK
from protocol.spec import AdapterSettings, AdapterSpec, RunSpec, open_spec
from protocol.strict_json import read_json
from protocol.training_memory import size_in
from protocol.units import byte_size, count

if TYPE_CHECKING:
    from peer.coordinator_client import SwarmStatus

PAGE_PORT = 7411
"""The page's port, if an address names none."""

ANSWER_SECONDS = 60.0
"""Maximum seconds for all answers of one coordinator."""

MAX_STATUS = 1024 * 1024

JOIN = {
    "open": "open to everybody",
    "invite": "by invite: ask the run's owner",
    "allow": "for the keys that its owner lists",
}

_Text = Annotated[str, Field(max_length=600)]
_Count = Annotated[int, Field(ge=0, le=2**63)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_M = TypeVar("_M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run: its verified spec, and how it goes by its coordinator's word. Texts are printable. `peers` train now."""

    spec: RunSpec
    health: str
    message: str
    round: int
    tokens: int
    tokens_per_second: float
    loss: float
    peers: int
    page: str
    description: str = ""
    contact: str = ""
    license: str = ""


class _Status(BaseModel):
    """The part of the page's /api/status that is used here."""

    model_config = ConfigDict(strict=True, extra="ignore")

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    health: _Text
    message: _Text
    round: _Count
    tokens: _Count
    tokens_per_second: _Number | _Count
    loss: _Number | _Count | None
    training: _Count


class _About(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    description: _Text = ""
    contact: _Text = ""
    license: _Text = ""


class _Run(BaseModel):
    """The part of the page's /api/run that is used here."""

    model_config = ConfigDict(strict=True, extra="ignore")

    about: _About = _About()


def page_of(place: str) -> str:
    """Return the address of the page that a place names, with a slash at its end. Raises CairnError.

    A place is the address of a page, with or without a view of it, or HOST[:PORT].
    """
    if place.startswith(("http://", "https://")):
        if address := page_address(place.partition("#")[0]):
            return address
        raise CairnError(f"{place[:100]!r} is not the address of a run's page: write for example http://HOST:7411/")
    try:
        return f"http://{HostPort.parse(place if ':' in place else f'{place}:{PAGE_PORT}')}/"
    except MalformedError as e:
        raise CairnError(f"{e}: give an invite, the address of a run's page, or HOST[:PORT] of one") from None


async def ask(place: str) -> ListedRun:
    """Return the run of the coordinator that a place names: an invite, or what `page_of` takes. Raises CairnError."""
    is_invite = re.match(r"cairn[0-9]+:", place) is not None
    try:
        async with async_timeout.timeout(ANSWER_SECONDS):
            return await (_by_invite(place) if is_invite else _by_page(page_of(place)))
    except asyncio.TimeoutError:
        raise CairnError(f"no answer within {ANSWER_SECONDS:.0f} s: try again, or ask the run's owner") from None


async def _by_invite(text: str) -> ListedRun:
    from cairn.connection import connect

    async with connect(text) as coordinator:
        status: SwarmStatus = await coordinator.client.status()
    training = sum(p.phase in TRAINING_PHASES for p in status.peers)
    return ListedRun(
        coordinator.spec, status.health, status.message, status.round, status.tokens, status.tokens_per_second,
        status.loss, training, status.page, status.description, status.contact, status.license,
    )  # fmt: skip


async def _by_page(page: str) -> ListedRun:
    from peer.coordinator_client import CoordinatorRefused
    from peer.log_client import fetch_url

    s = await _answer(page, "status", _Status)
    try:
        spec = open_spec(await fetch_url(f"{page}api/spec.signed", ()), RunId.parse(s.run))
    except CoordinatorRefused:
        raise CairnError(
            f"{page} is of an older version of Cairn, which does not tell of its run: give an invite"
        ) from None
    about = (await _answer(page, "run", _Run)).about
    health, message, *owners = map(printable, (s.health, s.message, about.description, about.contact, about.license))
    return ListedRun(
        spec, health, message, s.round, s.tokens, float(s.tokens_per_second), float(s.loss or 0), s.training, page,
        *owners,
    )  # fmt: skip


async def _answer(page: str, name: str, kind: type[_M]) -> _M:
    """Return what a page answers. Raise CairnError."""
    from peer.log_client import fetch_url

    data = await fetch_url(f"{page}api/{name}", ())
    try:
        read_json(data, name, MAX_STATUS)
        return kind.model_validate_json(data)
    except (MalformedError, ValidationError):
        raise CairnError(f"what answers at {page} is not the page of a run, or of another version of Cairn") from None


def memory(spec: RunSpec, device_type: str = "cuda") -> int:
    """Return about how many bytes of memory training takes on one device of a type, "cuda" or "cpu"."""
    model, on_cpu = spec.model, device_type == "cpu"
    frozen = 0 if model.adapter is None else frozen_bytes(model.adapter, model.config, on_cpu=on_cpu)
    return training_memory(model.layout, model.config, spec.inner, spec.data.window, frozen, on_cpu=on_cpu)


def frozen_bytes(adapter: AdapterSpec, config: Mapping[str, Any], *, on_cpu: bool) -> int:
    """Return about the bytes of a frozen base in memory.

    No model is built: anybody may publish a run, and in a config a few bytes can ask for a million modules.
    """
    if on_cpu and not adapter.quantised:
        return 4 * adapter.parameters
    if on_cpu:  # the file has the other values as bf16, and they are held in fp32
        coded = (0.5 if adapter.dtype == "nf4" else 1.0) + 4 / BLOCK
        return round(adapter.base.size + 2 * max(0.0, adapter.base.size - coded * adapter.parameters) / (2 - coded))
    # As it is fetched, but embeddings of bf16 are held in fp32.
    looked_up = size_in(config, "hidden_size", "n_embd") * size_in(config, "vocab_size")
    return adapter.base.size + (2 * looked_up if adapter.kind == "BF16" else 0)


def packages(adapter: AdapterSettings | None) -> list[str]:
    """Return the packages that a run needs beside those of every run."""
    return [] if adapter is None else ["peft", "bitsandbytes"][: 1 + adapter.quantised]


def lines(run: ListedRun) -> list[str]:
    """Return a run as lines for people."""
    spec, adapter = run.spec, run.spec.model.adapter
    model = f"{count(spec.model.layout.numel)} parameters"
    if adapter is not None:
        base = f"a base of {count(adapter.parameters)} ({adapter.dtype}, {byte_size(adapter.base.size)})"
        model = f"an adapter of {model} on {base}, needs {' and '.join(packages(adapter))}"
    where = f"{byte_size(data_bytes(spec, private_data=False))} to fetch"
    if any(public_url(address) for address in spec.data.addresses):
        where += ", the rest read from an address as needed"
    on_gpu, on_cpu = (memory(spec, kind) for kind in ("cuda", "cpu"))
    less = eight_bit_saving(spec.model.layout, spec.model.config, spec.inner, spec.audit, on_gpu)
    estimated = "estimated" + (f"; {byte_size(on_gpu - less)} with --moments 8bit" if less else "")
    enough = f"a GPU with {byte_size(on_gpu)} of memory ({estimated}), or a CPU with {byte_size(on_cpu)}"
    tokens = sum(shard.tokens for shard in spec.data.train)
    done = f"{count(run.tokens)} tokens"
    if spec.total_tokens:
        share = run.tokens / spec.total_tokens
        done = f"{bar(share)} {percent(share)} of {count(spec.total_tokens)} tokens"
    speed = f", {count(run.tokens_per_second)} tokens/s together" if run.tokens_per_second else ""
    if run.loss:
        done += f", loss {run.loss:.3f}"
    return [
        f"{spec.name} ({spec.run_id.short})  {run.health}: {run.message}",
        *([f"  about     {run.description}"] if run.description else []),
        f"  model     {printable(spec.model.config['model_type'][:40])}, {model}",
        f"  data      {count(tokens)} tokens, {where}; windows of {spec.data.window}",
        f"  progress  {done}, round {run.round}",
        f"  peers     {run.peers} training{speed}",
        f"  enough    {enough}",
        f"  join      {JOIN[spec.admission.mode]}",
        *(f"  {name:<9} {said}" for name in ("license", "contact", "page") if (said := getattr(run, name))),
    ]


def as_json(run: ListedRun) -> dict[str, Any]:
    """Return a run as an object of `cairn runs --json`.

    `data_bytes` are of all training data, `fetched_bytes` what a peer fetches, `memory_bytes` what a GPU needs, about.
    `base_parameters` are frozen, `packages` needed beside the usual ones, `loss` 0 while there is none.
    """
    spec, adapter = run.spec, run.spec.model.adapter
    return {
        "name": spec.name,
        "run": str(spec.run_id),
        "health": run.health,
        "message": run.message,
        "model_type": spec.model.config["model_type"],
        "parameters": spec.model.layout.numel,
        "base_parameters": 0 if adapter is None else adapter.parameters,
        "packages": packages(adapter),
        "data_tokens": sum(shard.tokens for shard in spec.data.train),
        "data_bytes": sum(shard.size for shard in spec.data.train),
        "fetched_bytes": data_bytes(spec, private_data=False),
        "window": spec.data.window,
        "round": run.round,
        "tokens": run.tokens,
        "total_tokens": spec.total_tokens,
        "loss": run.loss,
        "peers": run.peers,
        "tokens_per_second": run.tokens_per_second,
        "memory_bytes": memory(spec),
        "admission": spec.admission.mode,
        "page": run.page,
        "description": run.description,
        "contact": run.contact,
        "license": run.license,
    }
