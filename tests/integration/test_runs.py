"""`cairn runs`: what a coordinator says of its run to somebody who has not joined it."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from dataclasses import replace

import pytest

from cairn.listed_run import ListedRun, as_json, ask, lines, packages, page_of
from coordinator.authoring.memory import training_memory
from coordinator.checkpoints.settings import AboutTable
from protocol.errors import CairnError
from protocol.spec import AdapterSettings
from protocol.units import byte_size, count
from tests.support.command_line import (
    cairn,
    logging_as_it_was,  # noqa: F401 - a fixture
)
from tests.support.coordinator_fakes import FakeSwarm, make_spec
from tests.support.coordinator_service import running, settled
from tests.support.trainer_world import World

SPEC = make_spec()


@pytest.mark.parametrize(
    ("place", "page"),
    [
        ("run.example.org", "http://run.example.org:7411/"),
        ("192.0.2.1:80", "http://192.0.2.1:80/"),
        ("[2001:db8::1]:7411", "http://[2001:db8::1]:7411/"),
        ("https://run.example.org/#peer/abc", "https://run.example.org/"),
        ("http://example.org/cairn/one", "http://example.org/cairn/one/"),
    ],
)
def test_a_place_names_a_page(place: str, page: str):
    assert page_of(place) == page


@pytest.mark.parametrize("place", ["", "a b", "http://x/\x1b[2J", "ftp://x/", "host:99999", "2001:db8::1", "x" * 300])
def test_what_names_no_page_is_refused_with_the_forms_that_do(place: str):
    with pytest.raises(CairnError, match="HOST"):
        page_of(place)


async def test_a_run_is_the_same_by_invite_and_by_the_address_of_its_page(tmp_path):
    swarm = FakeSwarm(SPEC)
    about = AboutTable(description="Old stories", contact="ada@example.org", license="data: CC0")
    async with running(tmp_path, SPEC, swarm, about=about) as (coordinator, _):
        for _ in range(3):
            swarm.round({0: 600, 1: 700}, loss=3.5)
        await settled(coordinator, 3)
        places = (str(coordinator.invite()), f"127.0.0.1:{coordinator.page_port}", coordinator.page_url)
        found = [await ask(place) for place in places]
        for run in found:
            assert run.spec == SPEC and (run.round, run.tokens) == (3, found[0].tokens) and run.tokens > 0
            assert run.health == found[0].health and run.message and run.page
            assert (run.description, run.contact, run.license) == ("Old stories", "ada@example.org", "data: CC0")
        said = "\n".join(lines(found[0]))
        enough = "of memory (estimated; "
        for fact in (
            "parameters",
            "tokens",
            enough,
            "with --moments 8bit), or",
            "open to everybody",
            "round 3",
            found[0].page,
        ):
            assert fact in said
        for line in ("about     Old stories", "license   data: CC0", "contact   ada@example.org"):
            assert f"\n  {line}\n" in said
        done = await asyncio.to_thread(cairn, "runs", "--json", places[1], f"127.0.0.1:{free_port()}")
    assert done.returncode == 1 and "does not answer" in done.stderr and "Traceback" not in done.stderr
    (told,) = json.loads(done.stdout)
    assert told["name"] == SPEC.name and told["run"] == str(SPEC.run_id) and told["admission"] == "open"
    assert (told["description"], told["contact"], told["license"]) == ("Old stories", "ada@example.org", "data: CC0")
    assert told["memory_bytes"] > 14 * told["parameters"] > 0


def test_a_run_that_trains_an_adapter_tells_of_its_base(tmp_path, monkeypatch):
    spec = World.make(tmp_path, adapter=AdapterSettings(rank=4, alpha=8)).spec
    monkeypatch.setitem(sys.modules, "peft", None)  # somebody who looks for a run has not installed it
    model, adapter = spec.model, spec.model.adapter
    assert adapter is not None
    run = ListedRun(spec, "healthy", "well", 1, 1, 1.0, 1.0, 1, "")
    base = f"a base of {count(adapter.parameters)} (bfloat16, {byte_size(adapter.base.size)})"
    said = "\n".join(lines(run))
    assert f"llama, an adapter of {count(model.layout.numel)} parameters on {base}, needs peft\n" in said
    fetched = adapter.base.size + spec.data.train[0].size
    assert f", {byte_size(fetched)} to fetch; " in said
    # On a GPU linear layers are held as they are fetched, in bf16, and embeddings in fp32.
    frozen = adapter.base.size + 2 * 64 * 32, 4 * adapter.parameters
    on_gpu, on_cpu = (
        training_memory(model.layout, model.config, spec.inner, spec.data.window, n, on_cpu=bool(i))
        for i, n in enumerate(frozen)
    )
    assert f"a GPU with {byte_size(on_gpu)} of memory (estimated), or a CPU with {byte_size(on_cpu)}\n" in said
    told = as_json(run)
    assert (told["memory_bytes"], told["fetched_bytes"], told["packages"]) == (on_gpu, fetched, ["peft"])
    assert packages(adapter.model_copy(update={"dtype": "nf4"})) == ["peft", "bitsandbytes"]

    data = spec.data.model_copy(update={"addresses": ["https://example.org/data"]})
    elsewhere = replace(run, spec=spec.model_copy(update={"data": data}))
    read = f"{byte_size(adapter.base.size)} to fetch, the rest read from an address as needed"
    assert read in "\n".join(lines(elsewhere)) and as_json(elsewhere)["fetched_bytes"] == adapter.base.size
    # A config is any stranger's: no model is built of it.
    fields = {"model_type": "stablelm", "qk_layernorm": True, "num_attention_heads": 10**9, "num_hidden_layers": 10**12}
    strange = model.model_copy(update={"config": {**model.config, **fields}})
    assert as_json(replace(run, spec=spec.model_copy(update={"model": strange})))["memory_bytes"] > 0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


async def test_a_spec_that_the_owner_did_not_sign_is_not_shown(tmp_path, monkeypatch):
    async with running(tmp_path, SPEC) as (coordinator, _):
        page = f"127.0.0.1:{coordinator.page_port}"
        from peer import log_client

        async def altered(url: str, pauses=()) -> bytes:
            data = await log_client_fetch(url, pauses)
            return data.replace(b'"seed":', b'"seed":1') if url.endswith("signed") else data

        log_client_fetch = log_client.fetch_url
        monkeypatch.setattr(log_client, "fetch_url", altered)
        with pytest.raises(CairnError):
            await ask(page)


async def test_what_is_no_page_of_a_run_is_said_to_be_none():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CairnError, match="not the page of a run"):
            await ask(f"127.0.0.1:{port}")


def test_a_run_of_a_stranger_cannot_write_control_characters_to_the_terminal():
    spec = make_spec()
    model = spec.model.model_copy(update={"config": spec.model.config | {"model_type": "\x1b[2Jllama"}})
    run = ListedRun(spec.model_copy(update={"model": model}), "healthy", "well", 1, 1, 1.0, 1.0, 1, "")
    assert all(line.isprintable() for line in lines(run)) and "?[2Jllama" in lines(run)[1]
    assert "1 training, 1 tokens/s together" in lines(run)[4]
    assert lines(replace(run, tokens_per_second=0.0))[4].endswith("1 training")  # not known before the second round
