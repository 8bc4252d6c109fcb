"""Audits in the page's API: who was convicted or acquitted, on which numbers, at what cost, and what is open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from protocol.ids import PeerKey
from tests.page.world import FRAMED, LIAR, STRANGER, SUSPECT, World, audited_world
from tests.support.coordinator_fakes import peer
from tests.support.waiting import LIMIT, wait_until


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = audited_world(tmp_path_factory.mktemp("audits"))
    yield made
    made.close()


@pytest.fixture
def get(world: World) -> Iterator[Any]:
    with httpx.Client(base_url=world.url, timeout=LIMIT, trust_env=False) as client:
        schemas = client.get("/api/openapi.json").json()["paths"]

        def ask(path: str, where: str = "") -> Any:
            answer = client.get(path)
            assert answer.status_code == 200, answer.text
            schema = schemas[where or path.partition("?")[0]]["get"]["responses"]["200"]
            jsonschema.validate(answer.json(), schema["content"]["application/json"]["schema"])
            return answer.json()

        yield ask


def key(number: int) -> PeerKey:
    return peer(number).key


def test_decisions_are_listed_newest_first_with_their_numbers_and_their_cost(get):
    found = get("/api/audits")
    assert found["total"] == 2
    guilty, framed = found["decided"]
    assert (guilty["peer"], guilty["decision"]["convicted"]) == (str(key(LIAR)), True)
    assert (framed["peer"], framed["decision"]["convicted"]) == (str(key(FRAMED)), False)
    assert guilty["reports_total"] == 7 and guilty["accusers"] == 7
    assert {s["name"] for r in guilty["reports"] for s in r["scores"]} == {"scale", "signs"}
    assert "signs 0.7 to 0.796 where 0.97 is needed" in guilty["finding"]
    decision = guilty["decision"]
    assert decision["final"] and decision["barred_until"] == decision["round"] + 1 + 64
    assert decision["micro_credits_voided"] > 0 and decision["refuted"] == []
    assert framed["decision"]["micro_credits_voided"] == 0 and framed["decision"]["barred_until"] is None
    assert {r["peer"] for r in framed["decision"]["refuted"]} == {str(key(0)), str(key(1))}
    assert [r["passed"] for r in framed["reports"]] == [False] * 2 + [True] * 5
    assert get("/api/audits?offset=1&limit=1")["decided"] == [framed]


def test_failed_reports_without_a_decision_are_listed_and_passed_ones_are_not(get):
    found = get("/api/audits")
    assert found["undecided_total"] == 2
    by_peer = {c["peer"]: c for c in found["undecided"]}
    assert set(by_peer) == {str(key(SUSPECT)), str(key(STRANGER))}
    assert by_peer[str(key(SUSPECT))]["accusers"] == 0, "a loss check accuses nobody"
    assert by_peer[str(key(STRANGER))]["accusers"] == 1


def test_the_convicted_is_marked_among_the_peers_and_its_credit_is_void(get):
    rows = {p["peer"]: p for p in get("/api/peers?limit=50")["peers"]}
    row = rows[str(key(LIAR))]
    assert row["phase"] == "barred" and row["conviction"]["barred"] and row["micro_credits_pending"] == 0
    assert "signs 0.7 to 0.796" in row["conviction"]["message"]
    assert all(p["conviction"] is None for k, p in rows.items() if k != str(key(LIAR)))
    own = get(f"/api/peers/{key(LIAR)}", "/api/peers/{key}")
    assert [c["decision"]["convicted"] for c in own["audits"]] == [True]


def test_receipts_name_the_decision_that_voids_the_credit(get):
    decision = get("/api/audits")["decided"][0]
    receipts = get(f"/api/receipts?peer={key(LIAR)}")["receipts"]
    void = [r for r in receipts if r["status"] == "voided"]
    why = f"by the conviction in round {decision['decision']['round']} for the update of round {decision['round']}"
    assert void and {r["void_reason"] for r in void} == {why}
    others = get(f"/api/receipts?peer={key(0)}")["receipts"]
    assert {(r["status"], r["void_reason"]) for r in others} <= {("pending", ""), ("settled", "")}


def test_after_a_restart_the_same_is_shown(world, get):
    before = get("/api/audits")
    world.stop()
    world.start()
    with httpx.Client(base_url=world.url, timeout=LIMIT, trust_env=False) as client:
        wait_until(lambda: client.get("/api/audits").json() == before, "the same cases after a restart")
