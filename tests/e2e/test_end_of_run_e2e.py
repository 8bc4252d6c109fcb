"""A run that reaches its end: everybody finishes by itself, and what was trained can be used."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from cairn.checkpoints import find_checkpoint
from coordinator.checkpoints.archive import read_manifest
from peer.node.enrollment import ADMISSION
from tests.e2e.chains import check_same
from tests.e2e.world import LIMIT, World

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

PEERS = ["ada", "alan"]
TOTAL = 70_000


async def test_at_the_end_of_a_run_all_finish_and_its_model_can_be_loaded_and_used():
    with World(total_tokens=TOTAL) as world:
        world.start_coordinator(evaluate_every=100)
        await world.coordinator_ready()
        for name in PEERS:
            world.start_peer(name)
        await world.until("both have seen the run out", lambda: not any(world.processes[n].running for n in PEERS))
        for name in PEERS:
            process = world.processes[name]
            assert process.code == 0, world.logs(name)
            assert "Traceback" not in process.output.read_text()
        branches = {n: world.branch(n) for n in [*PEERS, "coordinator"]}
        length = check_same(branches)
        assert all(b.height == length for b in branches.values())
        window = world.spec.data.window
        tokens = sum(c.record.body.windows for c in branches["ada"].path) * window
        # No round is begun once the run has what it wanted.
        last = branches["ada"].path[-1].record.body.windows * window
        assert tokens >= TOTAL > tokens - last
        snapshots = [world.snapshot_left(n) for n in PEERS]
        assert len({s.state for s in snapshots}) == 1 and snapshots[0].accepted_tokens == tokens

        folder = await world.until("the last state is archived", lambda: _archived(world, length))
        sheet = read_manifest(folder)
        assert sheet is not None and sheet.tokens == tokens and str(sheet.state) == snapshots[0].state
        await world.until(
            "the last state is evaluated",
            lambda: world.has_logged("coordinator", rf"validation of round {length}: loss [0-9.]+ nats"),
        )
        status = await world.status()
        assert status.tokens == tokens and status.final_round == length - 1
        # Nothing is pending: all that was accepted is paid.
        assert all(p.micro_credits_pending == 0 for p in status.peers)

        # As anybody would: by the name of the folder alone.
        model = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, folder)
        assert sum(p.numel() for p in model.parameters()) == world.spec.model.layout.numel
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        assert 257 <= len(vocabulary) <= 300

        command = [sys.executable, "-m", "cairn", "generate", str(folder), "--prompt", "once upon", "--tokens", "20"]
        text = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=LIMIT)
        assert text.returncode == 0 and text.stdout.startswith("once upon") and len(text.stdout) > 15, text

        world.start_peer("late")
        await world.until("a newcomer is told, and leaves", lambda: not world.processes["late"].running)
        said = world.processes["late"].output.read_text()
        assert world.processes["late"].code == 0 and "Traceback" not in said, said
        model = f"http://127.0.0.1:{world.page}/#model"
        assert "is finished" in said and model in said, said
        assert not (world.peer_folder("late") / "store" / "values" / ADMISSION).exists()
        # It has a verified copy, which came by HTTP, where `cairn export` looks; the others have their own state.
        fetched = find_checkpoint(world.peer_folder("late"))
        assert fetched.origin.state == sheet.state and f"cairn export {world.peer_folder('late')}" in said
        for name in PEERS:
            assert model in world.processes[name].output.read_text(), world.logs(name)
            assert find_checkpoint(world.peer_folder(name)).origin.state == sheet.state

        await asyncio.to_thread(world.stop, "coordinator")
        assert world.processes["coordinator"].code == 0
    assert world.left == ([], [])


async def test_a_run_that_its_owner_ends_leaves_its_last_state_to_the_owner():
    with World() as world:
        world.start_coordinator()
        await world.coordinator_ready()
        for name in PEERS:
            world.start_peer(name)
        await world.round_after(["coordinator"], 2)
        command = [sys.executable, "-m", "cairn", "run", "end", str(world.coordinator_home), "--yes"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=2 * LIMIT)
        assert done.returncode == 0 and "is archived in" in done.stdout, f"{done.stdout}{done.stderr}\n{world.logs()}"
        await world.until("both have left", lambda: not any(world.processes[n].running for n in PEERS))
        length = check_same({n: world.branch(n) for n in [*PEERS, "coordinator"]})
        sheet = read_manifest(await world.until("the last state is archived", lambda: _archived(world, length)))
        for name in PEERS:
            said = world.processes[name].output.read_text()
            assert world.processes[name].code == 0 and "Traceback" not in said, world.logs(name)
            assert sheet is not None and str(sheet.state) == world.snapshot_left(name).state
            assert f"http://127.0.0.1:{world.page}/#model" in said and "the same command resumes" not in said
        world.start_peer("late")
        await world.until("a newcomer leaves", lambda: not world.processes["late"].running)
        said = world.processes["late"].output.read_text()
        assert world.processes["late"].code == 0 and "ended by the run's owner" in said, said
        await asyncio.to_thread(world.stop, "coordinator")
    assert world.left == ([], [])


def _archived(world: World, round: int) -> Path | None:
    folder = world.coordinator_home / "checkpoints" / f"round-{round:06d}"
    return folder if read_manifest(folder) is not None else None
