"""A swarm of three that trains, loses members, takes in others, and goes on: each promise on real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coordinator.service import LEDGER_FILE
from peer.coordinator_client import CoordinatorClient, PeerCredits
from protocol.messages import Signed, UpdateHeader
from tests.e2e.chains import check_same
from tests.e2e.commands import cairn
from tests.e2e.conftest import PEERS
from tests.e2e.stranger import stranger
from tests.e2e.world import LIMIT, World
from tests.support.waiting import ended

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]


async def test_three_peers_train_and_hold_the_same_bits(swarm: World):
    await swarm.healthy(PEERS)
    states: dict[str, set[tuple[str, str]]] = {}
    seen = {name: set() for name in PEERS}

    def look() -> bool:
        for name in PEERS:
            if (s := swarm.snapshot(name)) is not None and s.state:
                states.setdefault(s.head, set()).add((str(s.round), s.state))
                seen[name].add(s.head)
        return len(set.intersection(*seen.values())) >= 4

    # Four heads at which all three were seen: each time with the same state.
    await swarm.until("the three are seen at four heads", look, every=0.15)
    assert all(len(s) == 1 for s in states.values()), states
    await swarm.round_reached([*PEERS, "coordinator"], 5)
    branches = {n: swarm.branch(n) for n in [*PEERS, "coordinator"]}
    assert check_same(branches) >= 5

    def learned() -> bool:
        path = [c.record.body for c in swarm.branch("ada").path]
        return max(u.body.loss for u in path[-1].updates) < min(u.body.loss for u in path[0].updates) - 0.1

    await swarm.until("they learn, and do not merely agree", learned, every=0.3)
    for name in PEERS:
        assert "differs from the state" not in swarm.log(name)  # no state ever drifted from what the chain records


async def test_a_peer_killed_in_the_middle_of_an_exchange_comes_back_as_itself_and_nobody_forks(swarm: World):
    await swarm.healthy(PEERS)
    key = swarm.key("alan")
    async with stranger(swarm, "watcher") as watcher:
        await watcher.listen()
        killed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        orphan = Path(f"/proc/{swarm.trainer_of('alan')}")

        def kill(message: Signed[Any]) -> None:
            # Its commitment is out, its blob is wanted, nothing is certified: the worst moment.
            if isinstance(message.body, UpdateHeader) and message.author == key and not killed.done():
                swarm.processes["alan"].kill()
                killed.set_result(message.body.round)

        watcher.on_heard = kill
        round_ = await ended(killed, LIMIT)
        watcher.on_heard = lambda message: None
        await swarm.round_after(["ada", "grace"], 2)
        check_same({n: swarm.branch(n) for n in ("ada", "grace")})
        await swarm.until("alan's trainer has ended with it", lambda: not orphan.exists())
        swarm.start_peer("alan")
        again = await swarm.contributes_after("alan", round_ + 1)
        assert swarm.key("alan") == key
        assert again > round_ + 1
    assert "resuming: " in swarm.log("alan")
    # It did not begin from nothing: what was in its store was not fetched again.
    assert swarm.log("alan").count("fetching the run's tokenizer") == 1
    branches = {n: swarm.branch(n) for n in PEERS}
    assert check_same(branches) > 2
    assert key in branches["ada"].windows


@pytest.mark.long
async def test_who_joins_late_fetches_a_checkpoint_replays_the_rest_and_contributes_within_a_few_rounds(swarm: World):
    """It is anonymous, too: others do not learn its name and device."""
    await swarm.healthy(PEERS)
    await swarm.until("a checkpoint that is not the genesis", lambda: swarm.branch("ada").height > 5)
    late = swarm.start_peer("barbara", anonymous=True)
    try:
        # Starting Python and torch is the machine's affair; from here on it is ours.
        await swarm.until("barbara's trainer is up", lambda: "training on " in swarm.log("barbara"))
        entered = swarm.branch("ada").height
        first = await swarm.contributes_after("barbara", 0)
        assert first <= entered + 10
        log = swarm.log("barbara")
        # The checkpoint of a round in the middle, not the genesis with all rounds since.
        fetched = re.findall(r"fetching the checkpoint (\w+)", log)
        assert fetched and fetched[0] != swarm.spec.genesis.name.short, log
        check_same({n: swarm.branch(n) for n in [*PEERS, "barbara"]})
        await check_anonymous(swarm, "barbara")
    finally:
        swarm.stop("barbara")
    assert late.code == 0, swarm.logs("barbara")
    said = late.output.read_text()
    assert said.count("what others see of this peer") == 1 and "made for this run alone" in said
    code, refused = await cairn("peer", "join", str(swarm.invite), "--home", str(swarm.folder / "barbara"))
    assert code == 1 and "add --anonymous" in refused


async def check_anonymous(world: World, name: str) -> None:
    """Check that the coordinator's page, its status and its ledger have no name and no device of a peer that trains."""
    key, own = world.key(name), world.snapshot(name)
    assert own is not None and own.device and own.name == ""
    assert not (world.folder / name / "identity.key").exists()  # the machine's key, which other runs see

    def page(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{world.page}/api/{path}", timeout=LIMIT) as reply:
            return json.load(reply)

    async def heard() -> Any:
        try:
            row = (await asyncio.to_thread(page, f"peers/{key}"))["peer"]
        except urllib.error.HTTPError:
            return None
        return row if row["tokens_per_second"] and row["last_round"] else None

    shown = await world.until("the page shows its speed", heard)
    assert (shown["name"], shown["device"]) == (key.short, "")
    everything = [await asyncio.to_thread(page, path) for path in ("status", "peers", "leaderboard", "rounds/newest")]
    text = json.dumps(everything)
    assert str(key) in text and name not in text and f'"device": "{own.device}"' in text  # the others show theirs
    code, status = await cairn("status", str(world.invite))
    assert code == 0 and name not in status
    with closing(sqlite3.connect(f"file:{world.coordinator_home / LEDGER_FILE}?mode=ro", uri=True)) as db:
        assert db.execute("SELECT name FROM admissions WHERE peer = ?", (bytes(key),)).fetchall() == [("",)]
        assert not [line for line in db.iterdump() if name in line]


@pytest.mark.long
async def test_a_trainer_that_is_killed_is_started_again_and_its_peer_keeps_its_place(swarm: World):
    await swarm.healthy(PEERS)
    before = swarm.processes["grace"]
    os.kill(swarm.trainer_of("grace"), signal.SIGKILL)
    killed_at = swarm.branch("ada").height
    await swarm.until("grace says so", lambda: (s := swarm.snapshot("grace")) is not None and s.trainer_restarts > 0)
    await swarm.contributes_after("grace", killed_at + 1)
    assert swarm.processes["grace"] is before and before.running
    swarm.assert_logged("grace", r"trainer.*restarted from the store")
    check_same({n: swarm.branch(n) for n in PEERS})


@pytest.mark.long
async def test_training_goes_on_without_the_coordinator_which_then_catches_up_and_credits_every_round(swarm: World):
    await swarm.healthy(PEERS)
    swarm.processes["coordinator"].kill()
    away = swarm.branch("coordinator").height
    grace = swarm.key("grace")
    # A peer that leaves and returns meanwhile enters by the admission and the addresses that it has kept.
    swarm.stop("grace")
    assert swarm.processes["grace"].code == 0, swarm.logs("grace")
    swarm.start_peer("grace")
    left = swarm.branch("ada").height
    await swarm.contributes_after("grace", left)
    swarm.assert_logged("grace", "Going on with the admission of an earlier visit")
    await swarm.round_reached(PEERS, away + 6)
    assert swarm.branch("coordinator").height == away

    swarm.start_coordinator()
    await swarm.coordinator_ready()
    caught_up = swarm.branch("ada").height
    await swarm.round_reached(["coordinator"], caught_up)

    async def settled() -> bool:
        status = await swarm.status()
        return status.final_round is not None and status.final_round >= caught_up

    await swarm.until("the ledger holds all rounds of the outage", settled, every=0.5)
    check_same({n: swarm.branch(n) for n in [*PEERS, "coordinator"]})
    check_ledger(swarm)
    totals = await totals_of(swarm, "grace")
    assert totals.micro_credits_settled > 0 and swarm.key("grace") == grace


def check_ledger(world: World) -> None:
    """One row for each round and contributor of the final chain, none else, and each credit as the chain says."""
    spec = world.spec
    with closing(sqlite3.connect(f"file:{world.coordinator_home / LEDGER_FILE}?mode=ro", uri=True)) as db:
        rounds = db.execute("SELECT round, record, tokens FROM rounds ORDER BY round").fetchall()
        lines = db.execute(
            "SELECT r.round, p.peer, l.windows, l.micro_credits FROM lines l JOIN rounds r ON r.number = l.number "
            "JOIN peers p ON p.id = l.peer ORDER BY 1, l.line"
        )
        window, expected = spec.data.window, []
        rows = [(round_, peer, windows * window, credits) for round_, peer, windows, credits in lines]
        (issued,) = db.execute("SELECT sum(settled_micro + pending_micro + voided_micro) FROM balances").fetchone()
    assert issued == sum(row[3] for row in rows)
    path = world.branch("ada").path[: len(rounds)]
    for c in path:
        for u, windows in zip(c.record.body.updates, c.record.body.weighed, strict=True):
            tokens = windows * window
            flops = 6 * spec.model.layout.numel * tokens
            expected.append((c.record.body.round, bytes(u.author), tokens, flops // 10**9))
    assert rows == expected
    assert rounds == [
        (c.record.body.round, bytes(c.digest), c.record.body.windows * window) for c in path
    ]  # fmt: skip


async def totals_of(world: World, name: str) -> PeerCredits:
    async with CoordinatorClient(world.invite) as client:
        return await client.totals(world.key(name))


@pytest.mark.long
async def test_all_are_stopped_and_started_again_and_go_on_from_the_same_chain(swarm: World):
    await swarm.healthy(PEERS)
    run = swarm.invite.run
    everybody = [*PEERS, "coordinator"]
    await asyncio.to_thread(swarm.stop, *everybody, numbers=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    for name in everybody:
        process = swarm.processes[name]
        assert process.code == 0, (name, process.code, swarm.logs(name))
        assert "Traceback" not in process.output.read_text()
        assert re.search(r"round \d+.*the same command (resumes|goes on)", process.last_words()), swarm.logs(name)
    await swarm.until("no process is left", lambda: not swarm.left_processes())
    before = {n: swarm.branch(n) for n in everybody}
    check_same(before)

    swarm.start_coordinator()
    await swarm.coordinator_ready()
    assert swarm.invite.run == run
    for name in PEERS:
        swarm.start_peer(name)
    # The longest of the chains that were left is the one that goes on.
    longest = max(before.values(), key=lambda b: b.height)
    for name in PEERS:
        await swarm.contributes_after(name, longest.height)
    after = {n: swarm.branch(n) for n in everybody}
    check_same(after)
    assert after["ada"].records[: longest.height] == longest.records
