"""The page's API: described whole and truly, asked about anything, and its answers kept for a moment."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import httpx
import jsonschema
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from coordinator.alerts.tracker import Alert
from coordinator.checkpoints.archive import MANIFEST
from coordinator.checkpoints.settings import AboutTable
from coordinator.errors import TooManyError
from coordinator.indexed_chain import MAX_REMEMBERED
from coordinator.limits import ConcurrencyLimit
from coordinator.overview import PeerOverview
from coordinator.page import downloads, json_view, openapi, pictures, response_limits, schemas
from coordinator.page.answers import MAX_KEPT, AnswerCache, EncodedBody
from coordinator.page.api import MAX_CHAIN_READS, PageApi
from coordinator.page.app import make_app
from coordinator.page.credit_routes import CREDIT_ENDPOINTS
from coordinator.page.endpoints import ENDPOINTS, SORTS, ApiEndpoint
from coordinator.page.feed import VIEWERS_OF_ONE, Feed
from coordinator.page.run_card import MAX_TYPE, run_card
from coordinator.page.server import MAX_PER_NETWORK, PageServer
from coordinator.peer_registry import PHASES
from protocol.ids import Digest
from protocol.invite import HostPort, Invite
from protocol.ledger.credit_text import credit_text
from protocol.spec import RunSpec
from tests.page.log_fakes import FakeLog
from tests.page.world import World
from tests.support.coordinator_fakes import PARAMETERS, FakeSwarm, make_spec, overview, peer
from tests.support.coordinator_service import running, settled
from tests.support.specs import OWNER, identity, spec_fields
from tests.support.waiting import LIMIT, NEVER, until

ROUNDS = 9
ACCOUNT = identity("ada")
HOSTILE = "<a b='\"'>&]]></svg>"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("run")
    world = World(folder)
    checkpoint(folder, 5, run=str(world.swarm.spec.run_id))
    world.start()
    world.name_peers()
    world.play(ROUNDS)
    world.bind(5, ACCOUNT, HOSTILE, "engines")
    yield world
    world.close()


@pytest.fixture
def get(world: World):
    with httpx.Client(base_url=world.url, timeout=LIMIT, trust_env=False) as client:
        yield client


def checkpoint(folder: Path, round_: int, **more) -> bytes:
    """Make an archived state, as the coordinator's archive does; return its weights."""
    place = folder / "checkpoints" / f"round-{round_:06d}"
    place.mkdir(parents=True)
    weights = bytes(range(256)) * 4000
    (place / "model.safetensors").write_bytes(weights)
    (place / "config.json").write_text("{}")
    names = dict.fromkeys(("run", "state", "record"), str(Digest(bytes(32))))
    (place / MANIFEST).write_text(json.dumps(names | {"round": round_, "tokens": 99} | more))
    return weights


QUESTIONS = {
    "/api/peers": ["", "?sort=credits&order=down&limit=3", "?q=h200", "?q=nobody", "?offset=5000", f"?q={peer(3).key}"],
    "/api/peers/{key}": [str(peer(5).key)],
    "/api/rounds/newest": ["", "?limit=3", "?before=4", "?before=0"],
    "/api/rounds/{number}": ["0", str(ROUNDS - 1)],
    "/api/rounds/{number}/certificate": ["0", str(ROUNDS - 1)],
    "/api/leaderboard": ["", "?by=account", "?by=team", "?by=account&team=engines", f"?limit=2&after={peer(1).key}"],
}


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: e.path)
def test_every_answer_is_what_the_document_says(endpoint, get):
    schema = get.get("/api/openapi.json").json()["paths"][endpoint.path]["get"]["responses"]["200"]
    check = jsonschema.Draft202012Validator(schema["content"]["application/json"]["schema"])
    check.check_schema(check.schema)
    for question in QUESTIONS.get(endpoint.path, [""]):
        path = re.sub("{.*}", question, endpoint.path) if "{" in endpoint.path else endpoint.path + question
        answer = get.get(path)
        assert answer.status_code == 200, path
        check.validate(answer.json())


def test_every_route_is_in_the_document_and_nothing_else_is(world, get):
    document = get.get("/api/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    routes = {r.path for r in _routes(world.app)} | {"/events"}  # a stream, which is no route of Starlette's
    pages = {"/", "/api", "/static/{name:path}", "/favicon.svg", "/favicon.ico"}
    assert routes - pages == set(document["paths"])
    for path, ways in document["paths"].items():
        named = {p["name"] for p in ways["get"].get("parameters", ()) if p["in"] == "path"}
        assert named == set(re.findall("{(.*?)}", path))
    human = get.get("/api").text
    assert all(path in human for path in document["paths"]) and "<script" not in human


def _routes(app: ASGIApp):
    found = []
    todo = [app]
    while todo:  # the application is wrapped
        this = todo.pop()
        for cell in getattr(this, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "routes"):
                found += cell.cell_contents.routes
            elif callable(cell.cell_contents):
                todo.append(cell.cell_contents)
    assert found
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_peers_and_alerts_of_any_kind_are_what_the_document_says(phase):
    o = overview(4, {1: (phase, 0)})
    o = replace(o, run="0" * 64, health="paused", alerts=(Alert("loss", 99.5, "the loss is nan"),))
    shown = json_view.status(o, str, 100.0)
    jsonschema.validate(shown, schemas.STATUS)
    assert shown["alerts"] == [{"name": "loss", "since": 100, "message": "the loss is nan"}]


def test_events_are_what_the_document_says(world, get):
    schema = openapi.document()["paths"]["/events"]["get"]["responses"]["200"]["content"]
    with get.stream("GET", "/events") as events:
        line = next(line for line in events.iter_lines() if line.startswith("data: "))
    jsonschema.validate(json.loads(line[6:]), schema["text/event-stream"]["schema"])


@pytest.mark.parametrize(
    "path, code",
    [
        ("/api/peers?sort=evil", 400), ("/api/peers?limit=0", 400), ("/api/peers?limit=9999", 400),
        ("/api/peers?q=" + "x" * 65, 400), ("/api/peers?offset=-1", 400), ("/api/peers/abc", 400),
        ("/api/peers/" + "0" * 64, 404), ("/api/rounds/x", 400), ("/api/rounds/-1", 400), ("/api/rounds/999", 404),
        ("/api/rounds/999/certificate", 404), ("/api/rounds/newest?before=²", 400), ("/api/leaderboard?by=luck", 400),
        ("/checkpoints/round-000005/owner.key", 404), ("/checkpoints/..%2f..%2f/ledger.sqlite", 404),
        ("/checkpoints/round-000009/model.safetensors", 404), ("/api/nothing", 404),
        ("/badge/peer/abc.svg", 400), (f"/badge/peer/{'A' * 64}.svg", 400), (f"/badge/peer/{'0' * 64}.svg", 404),
        (f"/badge/account/{peer(5).key}.svg", 404), (f"/badge/team/{peer(5).key}.svg", 404),
        ("/api/leaderboard?team=" + "x" * 41, 400),
    ],
)  # fmt: skip
def test_questions_that_make_no_sense_are_answered_with_words(path, code, get):
    answer = get.get(path)
    assert answer.status_code == code and answer.text.strip() and "text/plain" in answer.headers["content-type"]


def test_peers_are_sorted_filtered_and_paged(get):
    def keys(query: str) -> list[str]:
        return [p["peer"] for p in get.get(f"/api/peers?{query}").json()["peers"]]

    every = keys("limit=200")
    assert len(every) == 12
    assert keys("limit=5&offset=5") == every[5:10]
    for sort in SORTS:
        assert sorted(keys(f"sort={sort}&limit=200")) == sorted(every)
    speeds = [p["tokens_per_second"] for p in get.get("/api/peers?sort=speed&order=down").json()["peers"]]
    assert speeds == sorted(speeds, reverse=True) and len(set(speeds)) > 5
    found = get.get("/api/peers?q=H200").json()
    assert 0 < found["matching"] < found["total"] == 12
    assert all("H200" in p["device"] for p in found["peers"])


def test_a_round_says_who_was_in_who_was_not_and_why_and_how_long_it_took(get):
    rows = get.get("/api/rounds/newest?limit=100").json()
    assert [r["round"] for r in rows["rounds"]] == list(range(ROUNDS))[::-1] and rows["next"] is None
    missed = {a["reason"] for r in rows["rounds"] for a in r["absent"] or ()}
    assert missed >= {"late", "syncing", "no window"}
    seen = [r["observed"] for r in rows["rounds"] if r["observed"]["whole"]]
    assert len(seen) >= ROUNDS - 2
    for s in seen:
        assert s["train"] + s["exchange"] + s["commit"] == pytest.approx(s["whole"], abs=0.05)
    late = next(r for r in rows["rounds"] if any(a["reason"] == "late" for a in r["absent"]))
    whole = get.get(f"/api/rounds/{late['round']}").json()
    assert len(whole["contributors"]) == late["contributors_total"] == 11
    assert all(c["announced_seconds"] is not None for c in whole["contributors"])
    absent = whole["absent"][0]
    peer_page = get.get(f"/api/peers/{absent['peer']}").json()
    assert {r["round"]: r["absence"] for r in peer_page["newest"]}[late["round"]]["message"] == absent["message"]


def test_the_run_is_shown_in_short_with_an_invite_that_has_no_code(world, get):
    run = get.get("/api/run").json()
    spec = world.swarm.spec
    assert run["model"] == {
        "type": "llama", "parameters": PARAMETERS, "bytes": spec.genesis.size, "adapter": None, "layers": 2,
        "width": 32, "heads": 2, "context": 64, "vocabulary": 256,
    }  # fmt: skip
    assert run["about"] == {"description": "<b>Stories</b>", "contact": "ada@example.org", "license": "data: CC0"}
    assert run["data"]["tokens"] == 10_000 and run["data"]["windows"] == spec.data.train_windows
    assert run["settings"]["inner"]["lr"] == spec.inner.lr and run["owner"] == str(OWNER.key) and run["began"]
    assert run["join"]["local"] and run["join"]["admission"] == "open"
    invite = Invite.parse(run["join"]["invite"])
    assert (invite.run, invite.code) == (spec.run_id, "")
    assert get.get("/invite.svg").headers["content-type"] == "image/svg+xml"
    page = get.get("/").text
    assert "<title>tiny stories</title>" in page and 'content="tiny stories: a language model' in page


def test_an_adapter_is_shown_with_its_base():
    fields = spec_fields()
    base = {"digest": "ab" * 32, "size": 4_000_000_000}
    fields["model"]["adapter"] = {"rank": 4, "alpha": 8, "dtype": "nf4", "base": base, "parameters": 7_000_000_000}
    model = run_card(RunSpec.model_validate(fields), None, None, AboutTable())["model"]
    assert model["adapter"] == {"rank": 4, "alpha": 8.0, "dtype": "nf4", "base": 7_000_000_000}


@pytest.mark.parametrize("mode", ["invite", "allow"])
async def test_the_invite_of_a_run_that_does_not_admit_everybody_is_not_shown(tmp_path, mode):
    spec = make_spec(admission={"mode": mode})
    async with running(tmp_path, spec, codes=("secret",)) as (c, _), serving(c.api) as get:
        join = (await get.get("/api/run")).json()["join"]
        assert join == {"admission": mode, "invite": None, "local": False}
        assert (await get.get("/invite.svg")).status_code == 404


def test_models_whose_config_has_other_names_are_shown_too():
    spec = make_spec()
    config = {"model_type": "gpt2" * 99, "n_layer": 12, "n_embd": 768, "n_head": True, "vocab_size": "many"}
    invite = Invite(spec.run_id, Digest(bytes(32)), (HostPort("run.example.org", 7410),))
    shown = spec.model_copy(update={"model": spec.model.model_copy(update={"config": config})})
    card = run_card(shown, None, invite, AboutTable())
    jsonschema.validate(card, schemas.RUN)
    assert card["join"] == {"admission": "open", "invite": str(invite), "local": False}
    sizes = [card["model"][name] for name in ("layers", "width", "heads", "context", "vocabulary")]
    assert sizes == [12, 768, None, None, None] and len(card["model"]["type"]) == MAX_TYPE


def test_a_badge_is_for_other_pages_and_says_how_the_run_is(get):
    answer = get.get("/badge.svg")
    assert answer.headers.get_list("cross-origin-resource-policy") == ["cross-origin"]
    assert answer.headers["cache-control"] == "public, max-age=30"
    assert get.get("/invite.svg").headers.get_list("cross-origin-resource-policy") == ["same-origin"]
    (title,) = ElementTree.fromstring(answer.content).findall("{*}title")
    assert re.fullmatch(r"tiny stories: healthy · \d% · 12 peers", title.text or "")
    o = replace(overview(4, {1: ("training", 0)}), name='<&"', health="ended", total_tokens=0)
    text = "".join(ElementTree.fromstring(pictures.run_badge(o)).itertext())
    assert text == '<&": ended<&"ended'


def test_a_volunteer_has_a_badge_with_its_credits_and_rounds(get):
    def title(answer: httpx.Response) -> str:
        assert answer.headers.get_list("cross-origin-resource-policy") == ["cross-origin"]
        assert answer.headers["cache-control"] == "public, max-age=30"
        return ElementTree.fromstring(answer.content).findtext("{*}title") or ""

    shown = get.get(f"/api/peers/{peer(5).key}").json()
    earned = f"{credit_text(shown['peer']['micro_credits_settled'])} credits · {shown['rounds']} rounds"
    assert 0 < shown["rounds"] < ROUNDS and title(get.get(f"/badge/peer/{peer(5).key}.svg")) == f"donald: {earned}"
    assert title(get.get(f"/badge/account/{ACCOUNT.key}.svg")).startswith(f"{HOSTILE}: ")
    once = pictures.volunteer_badge("ada", 12_345_678, 1)
    assert "".join(ElementTree.fromstring(once).itertext()) == "ada: 12.3 credits · 1 roundada12.3 credits · 1 round"
    assert "this run knows no such peer" in get.get(f"/badge/peer/{'0' * 64}.svg").text


async def test_badges_are_limited_and_made_once_for_many_requests(world, monkeypatch):
    from coordinator.limits import Rate
    from coordinator.page import app

    made, picture = [], pictures.volunteer_badge
    monkeypatch.setattr(app, "REQUESTS_OF_ONE", Rate(0.1, 3))
    monkeypatch.setattr(pictures, "volunteer_badge", lambda *about: made.append(about) or picture(*about))
    transport = httpx.ASGITransport(app=make_app(world.coordinator.api), client=("192.0.2.7", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as get:
        codes = [(await get.get(f"/badge/peer/{peer(5).key}.svg")).status_code for _ in range(4)]
    assert codes == [200, 200, 200, 429] and len(made) == 1


def test_after_a_restart_a_peer_is_gone_since_its_last_round(tmp_path):
    world = World(tmp_path).start()
    try:
        world.play(3)
        world.stop()
        world.swarm.heard.clear()
        world.clock.shift += 3600
        world.start()
        with httpx.Client(base_url=world.url, timeout=LIMIT, trust_env=False) as get:
            (newest,) = get.get("/api/rounds/newest?limit=1").json()["rounds"]
            found = get.get(f"/api/peers/{peer(0).key}").json()["peer"]
            assert found["phase"] == "gone" and found["since"] == newest["observed"]["certified"]
            assert get.get("/api/status").json()["tokens_per_second"] == 0
    finally:
        world.close()


async def test_a_peer_that_left_long_ago_is_not_listed_and_is_found_by_its_key_with_its_credits(tmp_path):
    async with running(tmp_path) as (c, swarm):
        for n in (0, 1, 8):
            swarm.beat(n)
        swarm.round({0: 600, 7: 500, 8: 500})
        swarm.beat(8, seconds_since=1e6)
        await settled(c, 1)
        assert c.api.peers("state", False, "", 0, 25)["total"] == 4, "its round is among the newest"
        for _ in range(MAX_REMEMBERED + 4):
            swarm.round({0: 600, 1: 700})
        await settled(c, MAX_REMEMBERED + 5)
        await until(lambda: c.api.peers("state", False, "", 0, 25)["total"] == 2, "the others are not listed")
        found = c.api.peers("state", False, "", 0, 25)
        assert {p["peer"] for p in found["peers"]} == {str(peer(n).key) for n in (0, 1)}
        for n in (7, 8):
            shown = c.api.peer(peer(n).key)["peer"]
            assert shown["phase"] == "gone" and shown["micro_credits_settled"] > 0
        o = c.overview()
        earned = c.chain.balances.values()
        assert o.settled == sum(b.settled.micro_credits for b in earned)
        assert o.pending == sum(x.micro_credits for x in c.chain.pending.values())
        assert {p["key"] for p in c.api.leaderboard("peer", 10, "", "")} == {str(peer(n).key) for n in (0, 1, 7, 8)}


def test_a_certificate_can_be_checked_by_whoever_gets_it(world, get):
    import base64

    from protocol.message_codec import MessageDecoder
    from protocol.messages import RoundRecord, Vote

    given = get.get("/api/rounds/4/certificate").json()
    decoder = MessageDecoder(world.swarm.spec.run_id, OWNER.key)
    record = decoder.decode(base64.b64decode(given["bytes"]["record"]), RoundRecord)
    assert str(record.digest) == given["record"] and record.body.round == 4
    votes = [decoder.decode(base64.b64decode(v), Vote) for v in given["bytes"]["votes"]]
    assert {v.body.record for v in votes} == {record.digest} and len(votes) == len(given["votes"])


async def test_few_certificates_are_read_at_once_and_who_asks_for_more_is_told_to_come_again(world):
    may_end, reading = asyncio.Event(), []

    async def certificates_after(record: Digest, limit: int) -> None:
        reading.append(record)
        await may_end.wait()

    view = SimpleNamespace(certificates_after=certificates_after)
    app = make_app(replace(world.coordinator.api, view=view))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as get:
        asked = [asyncio.create_task(get.get(f"/api/rounds/{n}/certificate")) for n in range(MAX_CHAIN_READS)]
        await until(lambda: len(reading) == MAX_CHAIN_READS)
        refused = await get.get(f"/api/rounds/{MAX_CHAIN_READS}/certificate")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5") and len(reading) == MAX_CHAIN_READS
        may_end.set()
        assert {(await each).status_code for each in asked} == {404}
        assert (await get.get(f"/api/rounds/{MAX_CHAIN_READS}/certificate")).status_code == 404, "there is room again"


async def test_what_is_told_of_credits_is_what_the_document_says(world):
    log = FakeLog()
    app = make_app(world.coordinator.api, log.routes())
    key, asked = str(peer(1).key), {"/api/credits/rounds": "?first=3", "/api/credits/balances": "?limit=3"}
    asked |= {"/api/receipts": f"?peer={key}&limit=30"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as get:
        document = (await get.get("/api/openapi.json")).json()["paths"]
        assert document.keys() >= {e.path for e in (*CREDIT_ENDPOINTS, *ENDPOINTS)}
        for route in log.routes():
            schema = document[route.path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            path = route.path.replace("{key}", key).replace("{number}", "3") + asked.get(route.path, "")
            jsonschema.validate((await get.get(path)).json(), schema)
        human = await get.get("/api")
        assert all(e.path in human.text for e in CREDIT_ENDPOINTS)


# -- kept for a moment --------------------------------------------------------------------------------------------


def test_what_a_browser_has_is_not_sent_again(get):
    for path in ("/api/rounds/0", "/api/openapi.json", "/", "/static/js/main.js"):
        first = get.get(path)
        again = get.get(path, headers={"if-none-match": first.headers["etag"]})
        assert first.status_code == 200 and again.status_code == 304 and not again.content
    assert get.get("/static/js/main.js").headers["content-type"].startswith("text/javascript")
    assert get.get("/api/charts").headers["content-encoding"] == "gzip"


def test_only_an_answer_that_waits_for_something_is_a_coroutine():
    waiting = [f for f in vars(PageApi).values() if inspect.iscoroutinefunction(f)]
    assert waiting and all("await " in inspect.getsource(f) for f in waiting)


@pytest.mark.parametrize("kept", [True, False])
async def test_no_answer_is_encoded_on_the_event_loop(kept: bool, monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []

    def encode(value: Any) -> bytes:
        threads.append(threading.current_thread())
        return b"[]"

    async def answer(source: Any) -> list[str]:
        return []

    monkeypatch.setattr(json_view, "encode", encode)
    route = ApiEndpoint("/", "", {}, answer).route(SimpleNamespace(head=0), AnswerCache() if kept else None)
    transport = httpx.ASGITransport(app=Router([route]))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as get:
        assert (await get.get("/")).json() == []
    assert threads and threading.current_thread() not in threads


async def test_many_who_ask_the_same_cost_one_making():
    clock, made = [0.0], []

    async def make() -> EncodedBody:
        made.append(1)
        await asyncio.sleep(0.01)
        clock[0] += 0.2
        return EncodedBody.of(b"[]")

    answers = AnswerCache(lambda: clock[0])
    await asyncio.gather(*(answers.get("x", 1.0, make) for _ in range(50)))
    assert len(made) == 1
    clock[0] += 1.5
    await answers.get("x", 1.0, make)
    assert len(made) == 1, "what took long is kept longer"
    clock[0] += 0.6
    await answers.get("x", 1.0, make)
    assert len(made) == 2

    async def make_at_once() -> EncodedBody:
        made.append(1)
        return EncodedBody.of(b"[]")

    for n in range(200):
        await answers.get(n, 1.0, make_at_once)
    made.clear()
    for n in reversed(range(200)):
        await answers.get(n, 1.0, make_at_once)
    assert len(made) == 200 - MAX_KEPT, "the newest are kept"


async def test_one_who_leaves_does_not_end_the_making_for_others_and_a_failure_is_not_kept():
    begun, go = asyncio.Event(), asyncio.Event()

    async def make() -> EncodedBody:
        begun.set()
        await go.wait()
        return EncodedBody.of(b"[]")

    answers = AnswerCache()
    first = asyncio.create_task(answers.get("x", 1.0, make))
    await begun.wait()
    second = asyncio.create_task(answers.get("x", 1.0, make))
    first.cancel()
    await asyncio.sleep(0)
    go.set()
    assert await second is not None

    async def fail() -> EncodedBody:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError):
            await answers.get("y", 1.0, fail)


async def test_one_address_that_asks_too_much_is_told_to_wait_and_others_are_not(world, monkeypatch):
    from coordinator.limits import Rate
    from coordinator.page import app

    monkeypatch.setattr(app, "REQUESTS_OF_ONE", Rate(0.1, 3))
    made = make_app(world.coordinator.api)

    async def asks(host: str) -> int:
        transport = httpx.ASGITransport(app=made, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as get:
            return (await get.get("/favicon.svg")).status_code

    assert [await asks("192.0.2.7") for _ in range(4)] == [200, 200, 200, 429]
    assert await asks("192.0.2.8") == 200
    assert {await asks("127.0.0.1") for _ in range(9)} == {200}


# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_downloaded_whole_or_by_range(get):
    (row,) = get.get("/api/checkpoints").json()
    assert row["round"] == 5 and {f["name"] for f in row["files"]} == {"model.safetensors", "config.json", MANIFEST}
    place, weights = "/checkpoints/round-000005/model.safetensors", bytes(range(256)) * 4000
    whole = get.get(place)
    assert whole.content == weights and whole.headers["accept-ranges"] == "bytes"
    for asked, start, end in (
        ("0-0", 0, 1),
        ("100-", 100, None),
        ("-5", -5, None),
        ("1000000-99999999", 1000000, None),
    ):
        part = get.get(place, headers={"range": f"bytes={asked}"})
        assert part.status_code == 206 and part.content == weights[start:end], asked
        assert part.headers["content-range"].endswith(f"/{len(weights)}")
    assert get.get(place, headers={"range": "bytes=99999999-"}).status_code == 416
    for ignored in ("bytes=5-3", "lines=1-2", "bytes=0-1,4-5"):
        assert get.get(place, headers={"range": ignored}).status_code == 200
    changed = {"range": "bytes=0-9", "if-range": '"another"'}
    assert get.get(place, headers=changed).content == weights
    assert get.head(place).headers["content-length"] == str(len(weights)) and not get.head(place).content


async def test_downloads_are_few_and_no_faster_than_agreed(tmp_path):
    from starlette.applications import Starlette
    from starlette.routing import Route

    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(downloads.PIECE * 4))
    found = downloads.Downloads(lambda folder, name: path, rate=downloads.PIECE * 10)
    app = Starlette(routes=[Route("/{folder}/{file}", found.answer)])
    found.places = ConcurrencyLimit(2, 2)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as get:
        began = asyncio.get_running_loop().time()
        two = [asyncio.create_task(get.get("/a/b")) for _ in range(2)]
        await asyncio.sleep(0.05)  # both have begun, and take 0.7 s
        assert (await get.get("/a/b")).status_code == 503
        assert [len(r.content) for r in await asyncio.gather(*two)] == [path.stat().st_size] * 2
        assert asyncio.get_running_loop().time() - began > 0.65, "eight pieces, ten a second"
        assert (await get.get("/a/b")).status_code == 200


class Reader:
    """A client of the download route that reads at a given pace."""

    def __init__(self, host: str):
        self.scope: dict[str, Any] = {"type": "http", "method": "GET", "headers": [], "client": (host, 1)}
        self.path_params = {"folder": "a", "file": "b"}
        self.status = self.bytes = 0
        self.seconds_a_piece = 0.0

    async def read(self, found: downloads.Downloads) -> Reader:
        request = Request(self.scope | {"path_params": self.path_params})
        with suppress(response_limits.SlowClientError):  # as `make_app` does
            await (await found.answer(request))(self.scope, self._never, response_limits.paced(self._send))
        return self

    async def get(self, app: Any, path: str, *, paced: bool = False, method: str = "GET") -> Reader:
        """Request a path of an application; `paced`: one that does not cut slow clients itself."""
        more = {"path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http", "root_path": "",
                "method": method}  # fmt: skip
        with suppress(response_limits.SlowClientError):
            await app(self.scope | more, self._never, response_limits.paced(self._send) if paced else self._send)
        return self

    async def _never(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        if message.get("body"):
            await asyncio.sleep(self.seconds_a_piece)
            self.bytes += len(message["body"])


@pytest.fixture
def large(tmp_path) -> downloads.Downloads:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(downloads.PIECE * 100))
    return downloads.Downloads(lambda folder, name: path, rate=1e12)


async def test_one_address_has_two_downloads_at_most_and_others_have_theirs(large):
    """Eight readers of one address, or of one IPv6 network, leave six places to others."""
    for prefix in ("192.0.2.7", "2001:db8:0:1::"):
        readers = [Reader(prefix + (str(i) if ":" in prefix else "")) for i in range(8)]
        for reader in readers:
            reader.seconds_a_piece = 0.005
        reading = [asyncio.create_task(r.read(large)) for r in readers]
        await until(lambda: all(r.status for r in readers))  # noqa: B023
        assert sorted(r.status for r in readers) == [200] * 2 + [503] * 6
        other = await Reader("192.0.2.99").read(large)
        assert other.status == 200 and other.bytes == 100 * downloads.PIECE
        await asyncio.gather(*reading)
    assert not len(large.places)


async def test_who_reads_a_checkpoint_too_slowly_is_cut_and_its_place_is_free(large, monkeypatch):
    monkeypatch.setattr(response_limits, "SEND_SECONDS", 0.2)
    monkeypatch.setattr(response_limits, "LEAST_BYTES_PER_SECOND", response_limits.PIECE / 0.02)
    slow, fast = Reader("192.0.2.7"), Reader("192.0.2.8")
    slow.seconds_a_piece, fast.seconds_a_piece = 0.04, 0.0
    await asyncio.gather(slow.read(large), fast.read(large))
    assert fast.bytes == 100 * downloads.PIECE and 2 <= slow.bytes / response_limits.PIECE <= 15
    assert not len(large.places)


async def test_who_reads_any_answer_too_slowly_is_cut(world, monkeypatch):
    monkeypatch.setattr(response_limits, "SEND_SECONDS", 0.2)
    monkeypatch.setattr(response_limits, "LEAST_BYTES_PER_SECOND", response_limits.PIECE / 0.01)
    body = bytes(50 * response_limits.PIECE)

    async def answer(_: Request) -> Response:
        return Response(body)

    app = make_app(world.coordinator.api, [Route("/large", answer)])
    slow, fast = Reader("192.0.2.7"), Reader("192.0.2.8")
    slow.seconds_a_piece = 0.05
    await asyncio.wait_for(asyncio.gather(slow.get(app, "/large"), fast.get(app, "/large")), 10)
    assert fast.bytes == len(body) and 1 <= slow.bytes / response_limits.PIECE <= 15


async def test_a_network_has_few_answers_at_once_and_slow_readers_free_their_places(monkeypatch):
    monkeypatch.setattr(response_limits, "SEND_SECONDS", 0.3)

    async def answer(_: Request) -> Response:
        return Response(bytes(response_limits.PIECE * 3))

    places = ConcurrencyLimit(9, 2)
    app = Router([Route("/a", response_limits.LimitedEndpoint(answer, places))])

    async def read(host: str, seconds: float) -> Reader:
        reader = Reader(host)
        reader.seconds_a_piece = seconds
        return await reader.get(app, "/a", paced=True)

    # One network: eight addresses of one /64, and four /64s of one /56 that share two /64s' places.
    hosts = [f"2001:db8:0:1::{i}" for i in range(8)] + [f"2001:db8:0:{i}::1" for i in range(2, 6)]
    slow = [asyncio.create_task(read(host, 60.0)) for host in hosts]
    await until(lambda: sum(r.done() for r in slow) >= 8)
    assert (await read("192.0.2.7", 0.0)).status == 200
    head = Reader("192.0.2.8")
    assert (await head.get(app, "/a", method="HEAD")).status == 405 and head.bytes < 100, "it costs as much as GET"
    assert sorted([(await each).status for each in slow]) == [200] * 4 + [503] * 8 and not len(places)


def test_connections_are_counted_for_the_networks_of_an_owner():
    """An owner of a /56 has 256 networks /64."""
    config = PageServer(Router([])).config
    config.load()
    made_by: Any = config.http_protocol_class
    cut: list[str] = []

    class Transport:
        def __init__(self, host: str):
            self.host = host

        def get_extra_info(self, name: str) -> Any:
            return (self.host, 5) if name == "peername" else None

        def abort(self) -> None:
            cut.append(self.host)

        def close(self) -> None:
            pass

    async def connect(hosts: list[str]) -> list[Any]:
        made = []
        for host in hosts:
            protocol = made_by(config=config, server_state=ServerState(), app_state={})
            protocol.connection_made(Transport(host))
            made.append(protocol)
        return made

    async def work() -> None:
        own = await connect(["2001:db8::1"] * (MAX_PER_NETWORK + 3))
        assert len(cut) == 3
        await connect([f"2001:db8:0:{i:x}::1" for i in range(1, MAX_PER_NETWORK + 5)])
        assert len(cut) == 3 + 4
        for protocol in own:
            protocol.connection_lost(None)
        await connect(["2001:db8::1"] * MAX_PER_NETWORK)
        assert len(cut) == 3 + 4

    asyncio.run(work())


async def test_live_views_of_one_address_leave_room_for_others():
    feed = Feed(limit=40)
    views = [feed.join("192.0.2.7") for _ in range(VIEWERS_OF_ONE)]
    with pytest.raises(TooManyError, match="read /api/status"):
        feed.join("192.0.2.7")
    feed.join("192.0.2.8")
    feed.leave(views[0])
    feed.join("192.0.2.7")
    for _ in range(40 - len(feed)):
        feed.join(None)  # a reverse proxy on this machine stands for everybody
    with pytest.raises(TooManyError):
        feed.join(None)


# -- samples and checkpoints that are made elsewhere --------------------------------------------------------------


@asynccontextmanager
async def serving(source):
    transport = httpx.ASGITransport(app=make_app(source))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as get:
        yield get


class Counted:
    """A peer of an overview; it counts how often each field is read."""

    def __init__(self, peer: PeerOverview, read: Counter[str]):
        self._peer, self._read = peer, read

    def __getattr__(self, name: str) -> Any:
        self._read[name] += 1
        return getattr(self._peer, name)


def test_peers_are_made_searchable_and_sorted_once_for_an_overview(world):
    read: Counter[str] = Counter()
    page = replace(world.coordinator.api)
    shown = world.coordinator.overview()
    counted: Any = tuple(Counted(p, read) for p in shown.peers)
    shown = replace(shown, peers=counted)
    page.overview = lambda: shown
    for text in ("h200", "a100", ""):
        page.peers("credits", True, text, 0, 0)  # none is shown, which reads the same fields
    assert read["phase"] == read["settled"] == len(shown.peers) > 0


async def test_metrics_are_made_once_for_many_requests(world, monkeypatch):
    from coordinator.page import app

    monkeypatch.setattr(app, "METRICS_SECONDS", NEVER)
    made = []

    async def text() -> bytes:
        made.append(len(made))
        return b"cairn_round %d\n" % made[-1]

    async with serving(replace(world.coordinator.api, metrics_text=text)) as get:
        answers = [await get.get("/metrics") for _ in range(5)]
    assert [a.text for a in answers] == ["cairn_round 0\n"] * 5
    assert answers[0].headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_samples_and_checkpoints_come_from_who_keeps_them(world):
    api = world.coordinator.api

    class Keeper:
        def validation_points(self):
            return [(0, 10.5), (5, 3.1), (900, 2.0)]

        def samples(self, before, limit):
            assert before > 5 and limit == 50
            about = {"round": 5, "state": "0" * 64, "temperature": 0.7, "validation_loss": 3.1}
            return [about | {"prompt": "Once", "text": " upon a time"}]

        def checkpoints(self):
            row = {"round": 5, "state": "0" * 64, "record": "0" * 64, "tokens": 7, "bytes": 9, "files": []}
            return [row | {"final": True, "copied": False, "validation_loss": 3.1}]

    keeper: Any = Keeper()

    before, api.archiver = api.archiver, keeper
    try:
        async with serving(api) as get:
            assert (await get.get("/api/samples")).json()[0]["prompt"] == "Once"
            charts = (await get.get("/api/charts")).json()
            begin, point, ahead = charts["validation"]
            assert point["loss"] == 3.1 and point["tokens"] == charts["tokens"][4] and point["seen_at"]
            assert begin["tokens"] == 0 and ahead["tokens"] is ahead["seen_at"] is None
            document = openapi.document()["paths"]
            for path in ("/api/samples", "/api/checkpoints", "/api/charts"):
                schema = document[path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
                jsonschema.validate((await get.get(path)).json(), schema)
    finally:
        api.archiver = before


def test_a_swarm_that_has_not_begun_has_all_the_answers(tmp_path):
    world = World(tmp_path, FakeSwarm(World(tmp_path).swarm.spec)).start()
    try:
        with httpx.Client(base_url=world.url, timeout=LIMIT, trust_env=False) as get:
            document = get.get("/api/openapi.json").json()["paths"]
            for e in ENDPOINTS:
                if "{" not in e.path:
                    schema = document[e.path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
                    jsonschema.validate(get.get(e.path).json(), schema)
            assert "no peer is training" in get.get("/api/status").json()["message"]
    finally:
        world.close()
