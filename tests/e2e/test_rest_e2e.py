"""A user takes the devices back for a while: the others go on at once, nothing is lost, and the peer comes back."""

from __future__ import annotations

from datetime import datetime

import pytest

from cairn.peer_settings import FILE
from tests.e2e.chains import check_same
from tests.e2e.commands import cairn
from tests.e2e.conftest import PEERS
from tests.e2e.world import World

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]


async def control(swarm: World, what: str, *run: str) -> str:
    """Ask ada's peer for something by the command, and return what is printed."""
    code, out = await cairn("peer", what, *run, "--home", str(swarm.folder / "ada"))
    assert code == 0, out + swarm.logs("ada")
    return out


async def test_a_pause_frees_the_devices_and_loses_nothing_and_nobody_waits_for_it(swarm: World):
    await swarm.healthy(PEERS)
    key, others = swarm.key("ada"), ["alan", "grace"]
    trainer = swarm.trainer_of("ada")
    said = await control(swarm, "pause")
    assert "paused: its devices are free after" in said, said
    # The command has ended: so have the trainer, its use of any device, and its steps.
    assert trainer not in swarm.left_processes()
    paused = await swarm.until("the status says so", lambda: (s := swarm.snapshot("ada")) and s.devices_free and s)
    assert (paused.phase, paused.rest) == ("resting", "paused by its user")
    swarm.assert_logged("ada", r"resting: paused by its user")

    # Its work is handed in: rounds after that one are decided without it, and nobody calls it late or gone.
    reached = await swarm.round_after(others, 3)
    without = [c.record.body for c in swarm.branch("alan").path[reached - 2 :]]
    assert without and all(key not in body.contributors for body in without)
    for name in others:
        assert not swarm.has_logged(name, f"peer {key.short} (kept the round waiting|neither proposed nor voted)")
    (seen,) = [p for p in (await swarm.status()).peers if p.peer == key]
    assert seen.phase == "resting"
    later = swarm.snapshot("ada")
    assert later is not None and later.trained_windows == paused.trained_windows and later.devices_free
    await swarm.until("it follows meanwhile", lambda: swarm.branch("ada").height >= reached)

    assert "working again" in await control(swarm, "resume", swarm.invite.run.hex())
    await swarm.contributes_after("ada", reached)
    claims = [
        (u.body.first_window, u.body.end_window)
        for c in swarm.branch("ada").path
        for u in c.record.body.updates
        if u.author == key
    ]
    assert [end for _, end in claims[:-1]] == [first for first, _ in claims[1:]], claims
    check_same({n: swarm.branch(n) for n in PEERS})

    # The file of rules counts while it runs.
    rules = swarm.folder / "ada" / FILE
    hour = (datetime.now().hour + 6) % 24
    rules.write_text(f'hours = "{hour}-{(hour + 6) % 24}"\n')
    resting = await swarm.until("it rests by its rules", lambda: (s := swarm.snapshot("ada")) and s.devices_free and s)
    assert resting.rest.startswith("outside the hours") and resting.phase == "resting"
    assert "still resting: outside the hours" in await control(swarm, "resume")
    assert "has left" in await control(swarm, "leave", str(swarm.invite))
    rules.unlink()
    await swarm.until("ada's process ends", lambda: not swarm.processes["ada"].running)
    assert swarm.processes["ada"].code == 0, swarm.logs("ada")
    code, out = await cairn("peer", "pause", "--home", str(swarm.folder / "ada"))
    assert code == 1 and "no peer is running under" in out and "Traceback" not in out
