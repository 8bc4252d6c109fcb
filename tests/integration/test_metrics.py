"""The metrics of /metrics; the dashboard and the alert rules name no others."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from coordinator.alerts.rules import RULES
from coordinator.metrics import HEALTHS, Metrics, MetricSources
from coordinator.peer_registry import PHASES
from coordinator.round_observations import RoundObservation
from coordinator.traffic_counter import MAX_BYTES_PER_SECOND, TrafficCounter
from protocol.ids import Digest
from tests.support.coordinator_fakes import FakeSwarm, make_spec, overview, peer
from tests.support.coordinator_service import client, running, settled, web
from tests.support.waiting import until

SPEC = make_spec()

DOCKER = Path(__file__).resolve().parents[2] / "docker"
UNITS = re.compile(r"_(total|seconds|bytes|created|info)$")
COUNTED = {
    "healthy", "state", "round", "rounds_final", "loss", "tokens_goal", "tokens_progress", "tokens_per_second", "peers",
    "peers_diverged", "peers_admitted", "round_contributors", "round_absent", "micro_credits", "chain_problem",
    "page_viewers", "alert", "rounds_credited", "archive_states", "archive_final_round", "archive_problem",
    "copies_waiting",
}  # fmt: skip
"""Names without a unit at the end: numbers of things."""


async def exported(tmp_path) -> str:
    """After a call of each kind."""
    swarm = FakeSwarm(SPEC)
    async with running(tmp_path, SPEC, swarm) as (c, _), client(c) as ask, web(c) as get:
        await ask.status()
        swarm.beat(0, device="mine")
        swarm.round({0: 600}, loss=4.0)
        await settled(c, 1)
        for path in ("/", "/api/status", "/nothing/at/all?x=mine", "/static/page.js", "/metrics"):
            await get.get(path)

        async def shown() -> str:
            text = (await get.get("/metrics")).text
            # An answer is kept for a moment: the next one counts the first request to /metrics, too.
            return text if "cairn_round 1.0" in text and 'handler="metrics"' in text else ""

        return await until(shown, "the round is exported", every=0.05)


def names_in(expression: str) -> set[str]:
    """Metrics that a PromQL expression names: words that are no function, label or word of the language."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', " ", expression)
    bare = re.sub(r"\b(by|on|without|ignoring)\s*\([^)]*\)", " ", bare)
    words = re.findall(r"\b[a-z_][a-z0-9_]*\b(?!\s*\()", bare)
    return {w for w in words if w not in ("and", "or", "unless", "by", "on", "job", "le", "e9")} - {"bool", "offset"}


def expressions(kind: str) -> list[str]:
    """Return the metrics that the dashboard or the alert rules name."""
    if kind == "rules":
        return [r["expr"] for g in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"] for r in g["rules"]]
    board = json.loads((DOCKER / "grafana" / "cairn.json").read_text())
    return [t["expr"] for p in board["panels"] for t in p.get("targets", ())]


@pytest.mark.parametrize("kind", ["rules", "dashboard"])
async def test_what_the_dashboard_and_the_rules_name_is_exported(tmp_path, kind):
    text = await exported(tmp_path)
    there = {s.name for f in text_string_to_metric_families(text) for s in f.samples} | {"up"}
    named = set().union(*map(names_in, expressions(kind)))
    assert named - there == set() and len(named) >= 10
    if kind == "dashboard":  # and nothing that operators need is missing from it
        missing = {
            n for n in there if n.startswith("cairn_") and not n.endswith(("_sum", "_count", "_created"))
        } - named
        of_archive = {n for n in missing if n.startswith(("cairn_archive_", "cairn_copies_", "cairn_evaluation"))}
        assert missing - of_archive <= {"cairn_healthy", "cairn_chain_problem", "cairn_peers_admitted"}


async def test_names_have_units_and_labels_are_few_and_never_a_strangers(tmp_path):
    text = await exported(tmp_path)
    families = {f.name: f for f in text_string_to_metric_families(text)}
    for name, f in families.items():
        assert f.documentation, name
        if name.startswith("cairn_"):
            assert f.type == "counter" or UNITS.search(name) or name.removeprefix("cairn_") in COUNTED, name
    assert "mine" not in text and str(peer(0).key) not in text and "nothing" not in text
    assert {s.labels["handler"] for s in families["cairn_http_requests"].samples} == {"page", "api", "other", "static", "metrics"}  # fmt: skip  # noqa: E501
    assert {s.labels["phase"] for s in families["cairn_peers"].samples} == set(PHASES)
    states = {s.labels["state"]: s.value for s in families["cairn_state"].samples}
    assert set(states) == set(HEALTHS) and sum(states.values()) == 1
    assert {s.labels["name"] for s in families["cairn_alert"].samples} == {r.name for r in RULES}
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6
    assert families["cairn_disk_free_bytes"].samples[0].value > 0
    assert "cairn_rounds_credited" in families


def test_the_rules_and_the_dashboard_are_well_formed():
    prometheus = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    assert prometheus["rule_files"] == ["alerts.yml"] and prometheus["scrape_configs"][0]["job_name"] == "cairn"
    (group,) = yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"]
    seen = set()
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"} and re.match(r"Cairn\w+$", rule["alert"])
        assert rule["labels"]["severity"] in ("critical", "warning", "info") and rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        seen.add(rule["alert"])
    assert len(seen) == len(group["rules"])
    for expression in expressions("rules") + expressions("dashboard"):
        for a, b in ("()", "{}", "[]"):
            assert expression.count(a) == expression.count(b), expression
        assert expression.count('"') % 2 == 0
        # A counter is looked at by its rate; a histogram by its buckets.
        for name in names_in(expression):
            if name.endswith("_bucket"):
                assert "histogram_quantile" in expression and "le" in expression + "le"
    board = json.loads((DOCKER / "grafana" / "cairn.json").read_text())
    assert board["schemaVersion"] >= 36 and board["uid"] == "cairn-run"
    ids = [p["id"] for p in board["panels"]]
    assert len(ids) == len(set(ids))
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(places) == len(set(places)) and all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board["panels"])
    for p in board["panels"]:
        assert p["type"] in ("row", "stat", "timeseries") and p["title"]
        assert all('job="$job"' in t["expr"] for t in p.get("targets", ()))


async def test_the_times_that_were_observed_of_a_round_are_counted_by_phase(tmp_path):
    async def no_archive() -> list[tuple[str, str, float]]:
        return []

    metrics = Metrics(
        MetricSources(
            overview=lambda: overview(1, {}), viewers=int, folder=tmp_path, admitted=int, rounds_credited=int,
            alerts=tuple, archive=no_archive,
        )
    )  # fmt: skip
    decided = RoundObservation(4, Digest(bytes(32)), 100.0, 130.0, 133.0, 135.0, 2, None, None, (), 0)
    metrics.round_decided(decided)
    assert await times_of(metrics) == {"train": (1, 30), "exchange": (1, 5), "all": (1, 35)}
    metrics.round_decided(replace(decided, began=None))  # this coordinator did not see it begin
    assert await times_of(metrics) == {"train": (1, 30), "exchange": (2, 10), "all": (1, 35)}
    metrics.round_decided(replace(decided, began=None, announced=None, proposed=None))  # nor anything before its end
    assert await times_of(metrics) == {"train": (1, 30), "exchange": (2, 10), "all": (1, 35)}


async def times_of(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Return the number and the sum of the times of each phase."""
    text = (await metrics.text()).decode()

    def values(kind: str) -> dict[str, float]:
        return {
            s.labels["phase"]: s.value
            for f in text_string_to_metric_families(text)
            for s in f.samples
            if s.name == f"cairn_round_duration_seconds_{kind}"
        }

    sums = values("sum")
    return {phase: (count, sums[phase]) for phase, count in values("count").items()}


def test_bytes_only_grow_also_when_peers_start_again_leave_or_lie():
    traffic = TrafficCounter()
    traffic.update(overview(1, {1: ("training", 1000), 2: ("training", 500)}), 0)
    assert (traffic.up, traffic.down) == (0, 0)  # the time before the first sample is unknown
    traffic.update(overview(1, {1: ("training", 1500), 2: ("training", 100)}), 10)
    assert (traffic.up, traffic.down) == (600, 1200)
    traffic.update(overview(1, {1: ("training", 1600)}), 20)
    traffic.update(overview(1, {1: ("training", 1600), 2: ("training", 9999)}), 30)
    assert traffic.up == 700
    traffic.update(overview(1, {1: ("training", 2**63)}), 31)
    assert traffic.up == 700 + MAX_BYTES_PER_SECOND
    traffic.update(replace(overview(1, {}), peers=()), 40)
    assert traffic.up == 700 + MAX_BYTES_PER_SECOND
