"""The coordinator moves: old invites still lead to it, by any member; who comes while it is away waits in the swarm."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from cairn.commands.invite import renewed_invite
from cairn.demo.processes import free_ports
from peer.coordinator_client import Admission, CoordinatorClient
from peer.node.coordinator_discovery import COORDINATOR_ADDRESS
from protocol.coordinator_address import open_coordinator_address
from protocol.invite import HostPort, Invite
from protocol.message_codec import MessageDecoder
from tests.e2e.chains import check_same
from tests.e2e.world import World

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

ADMITTED_SECONDS = 60
"""The shortest that there is: renewed after half of it."""


class Moving(World):
    """Its coordinator starts at ports of its choice; whoever joins brings the invite of the first day."""

    def __init__(self):
        super().__init__(tables={"admission": {"seconds": ADMITTED_SECONDS}})
        self.published: Invite | None = None

    def __enter__(self) -> Moving:
        super().__enter__()
        return self

    def move(self) -> HostPort:
        self.grpc, self.page, self.swarm = free_ports(3)
        self.start_coordinator()
        return HostPort("127.0.0.1", self.grpc)

    def join(self, name: str, invite: Invite, *more: str) -> None:
        self._start(
            name,
            "peer", "join", str(invite), "--home", str(self.folder / name), "--name", name, "--threads", "1",
            "--device", "cpu", "--listen", "/ip4/127.0.0.1/tcp/0", "--plain", *more,
        )  # fmt: skip

    def knows(self, name: str) -> tuple[HostPort, ...]:
        """Return the coordinator's address that a peer has stored."""
        file = self.peer_folder(name) / "store" / "values" / COORDINATOR_ADDRESS
        if not file.exists():
            return ()
        return open_coordinator_address(file.read_bytes(), self.spec.run_id, self.spec.owner_key).body.coordinators

    def admitted_until(self, name: str) -> int:
        decoder = MessageDecoder(self.spec.run_id, self.spec.owner_key)
        return decoder.decode(self.admission_of(name), Admission).body.not_after


async def test_who_brings_the_invite_of_the_first_day_enters_wherever_the_coordinator_is_and_however_long_it_is_away():
    with Moving() as world:
        world.start_coordinator()
        await world.coordinator_ready()
        first = world.invite
        assert len(first.addresses) == 1, "of the first day: only the coordinator's own swarm address"
        for name in ("ada", "alan"):
            world.join(name, first)
        await world.contributes_after("ada", 0)
        await world.contributes_after("alan", 0)
        here = HostPort("127.0.0.1", world.grpc)
        await world.until("both know where it is", lambda: world.knows("ada") == world.knows("alan") == (here,))

        world.processes["coordinator"].kill()
        until, began = world.admitted_until("ada"), world.branch("ada").height
        # Nobody answers at any address of the first invite: one that a member prints leads to a member.
        world.join("lost", first)
        now = Invite.parse(renewed_invite(str(first), world.folder / "ada"))
        assert len(now.addresses) >= 2 and now.run == first.run
        world.join("grace", now)
        world.join("barbara", first, "--via", next(a for a in now.addresses if a not in first.addresses))
        for name in ("grace", "barbara"):
            await world.until(f"{name} waits", lambda n=name: world.has_logged(n, "waiting for the coordinator"))
        await world.until("who knows nobody gives up", lambda: not world.processes["lost"].running)
        said = world.processes["lost"].output.read_text()
        assert (
            re.search(r"error: the coordinator at .* does not answer.*cairn peer invite", said)
            and "Traceback" not in said
        )
        waited = world.branch("grace").height
        await world.round_reached(["ada", "alan", "grace", "barbara"], max(waited, began) + 5)
        assert not world.rounds_with("grace") and not world.rounds_with("barbara")

        there = world.move()
        await world.coordinator_ready()
        everybody = ["ada", "alan", "grace", "barbara"]
        for name in everybody:
            await world.until(f"{name} knows where it is", lambda n=name: world.knows(n) == (there,))
        for name in ("grace", "barbara"):
            await world.contributes_after(name, 0)
        await world.until(
            "admissions are renewed at the new address",
            lambda: min(map(world.admitted_until, ("ada", "alan"))) > until,
        )
        assert world.admitted_until("ada") > time.time()

        # One more, with the invite of the first day, while all are there.
        world.join("donald", first, "--via", now.addresses[0])
        await world.contributes_after("donald", 0)
        await world.round_reached(["coordinator"], world.branch("ada").height)
        check_same({n: world.branch(n) for n in [*everybody, "donald", "coordinator"]})
        async with CoordinatorClient(world.invite) as client:

            async def credited(name: str) -> bool:
                totals = await client.totals(world.key(name))
                return totals.micro_credits_settled + totals.micro_credits_pending > 0

            for name in [*everybody, "donald"]:
                await world.until(f"{name} is credited", lambda n=name: credited(n))
        await asyncio.to_thread(world.stop, *everybody, "donald", "coordinator")
    assert world.left == ([], [])
