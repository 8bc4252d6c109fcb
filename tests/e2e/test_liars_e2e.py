"""Hostile peers: each is refused with a reason in the members' logs, and the rounds go on."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from peer.swarm import PeerRefused, PeerUnreachable
from peer.swarm.transfer.frames import REQUEST_BYTES, ReplyStatus
from protocol.envelope import seal
from protocol.ids import Digest, RunId
from protocol.message_codec import KeySigner
from protocol.messages import Admission, Signed, UpdateHeader
from protocol.wire import swarm_pb2 as wire
from tests.e2e.chains import check_same
from tests.e2e.conftest import PEERS
from tests.e2e.stranger import Stranger, stranger
from tests.e2e.world import LIMIT, World
from tests.support.waiting import NotInTime, ended, until

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]


async def goes_on(world: World, liar: Stranger) -> None:
    """Two more rounds on one chain, with the stranger still there and in none of them."""
    await world.round_after(PEERS, 2)
    branches = {n: world.branch(n) for n in PEERS}
    check_same(branches)
    assert liar.key not in branches["ada"].windows


async def all_log(world: World, pattern: str) -> None:
    for name in PEERS:
        await world.until(f"{name} logs {pattern!r}", lambda n=name: world.has_logged(n, pattern))


async def any_logs(world: World, pattern: str) -> None:
    await world.until(f"a member logs {pattern!r}", lambda: any(world.has_logged(n, pattern) for n in PEERS))


async def test_messages_that_break_the_protocol_are_refused_with_the_reason(swarm: World):
    await swarm.healthy(PEERS)
    async with stranger(swarm, "forger") as liar:
        await liar.listen()
        beat = await liar.new_round()
        now = int(time.time())
        expired = liar.admission(not_before=now - 90_000, not_after=now - 3_600)
        own = Admission(liar.spec.run_id, liar.key, now - 10, now + 3600, "self-made")
        self_made = KeySigner(liar.identity).sign(own).encoded
        good = liar.admission(not_before=now - 10, not_after=now + 3600)
        adas = swarm.admission_of("ada")
        blob = Digest(os.urandom(32))
        forged = bytearray(liar.heartbeat().encoded)
        forged[-1] ^= 1
        lies: dict[str, bytes] = {
            r"another run": liar.heartbeat(run=RunId(os.urandom(32))).encoded,
            r"the admission of peer \w+ is not valid now": liar.heartbeat(admission=expired).encoded,
            r"not signed by the run's owner": liar.heartbeat(admission=self_made).encoded,
            rf"presents an admission of {swarm.key('ada').short}": liar.header(beat, adas, blob).encoded,
            r"signature": bytes(forged),
            r"at most 65536 are accepted": oversized(liar),
            r"do not parse": b"\xff" * 100,
        }
        for reason, sent in lies.items():
            for name in PEERS:
                await liar.send(name, sent)
            await all_log(swarm, rf"refused a message from {liar.key.short}: .*{reason}")
        # The same expired admission with an update, in a new round; and what claims more than an update can be.
        beat = await liar.new_round()
        await liar.tell(liar.header(beat, expired, blob))
        for flaw in ({"blob_size": 2**30}, {"end_window": 10**9}, {"rebase_window": 4}):
            beat = await liar.new_round()
            await liar.tell(liar.header(beat, good, blob, **flaw))
        await all_log(swarm, rf"the update of {liar.key.short} is refused: a blob of {2**30} bytes is no update")
        await all_log(swarm, rf"the update of {liar.key.short} is refused: it claims {10**9} windows")
        await all_log(swarm, rf"the update of {liar.key.short} is refused: its rebase_window is 4, not 0")
        await goes_on(swarm, liar)


def oversized(liar: Stranger) -> bytes:
    """Return a well signed heartbeat of too many bytes; no honest signer makes one."""
    body = wire.Heartbeat(run=liar.spec.run_id, known_headers=range(2**60, 2**60 + 9000))
    return seal(liar.identity, "heartbeat", body.SerializeToString()).encoded


@pytest.mark.long
async def test_a_peer_with_another_spec_is_in_another_run_and_nobody_hears_it(swarm: World):
    await swarm.healthy(PEERS)
    other = swarm.spec.model_copy(update={"seed": 8})
    liar = Stranger(swarm, "other spec")
    assert other.run_id != swarm.spec.run_id
    await liar.enter(other.run_id)
    try:
        for name in PEERS:
            with pytest.raises((PeerRefused, PeerUnreachable)):
                await liar.send(name, liar.heartbeat().encoded)
        await goes_on(swarm, liar)
        assert all(liar.key.short not in swarm.log(n) for n in PEERS)
    finally:
        await liar.stop()


async def test_an_update_with_a_malformed_blob_is_refused_and_its_author_named(swarm: World):
    await swarm.healthy(PEERS)
    async with stranger(swarm, "garbler") as liar:
        admission = await liar.admit()
        await liar.listen()

        async def all_have_refused_one() -> bool:
            """Announce one in the next round. It may be decided before everybody has the blob: then try another."""
            # The right size, served readily, and its digest is right: only the codec can tell.
            blob = liar.store.put(os.urandom(liar.blob_size))
            beat = await liar.new_round()
            await liar.tell(liar.header(beat, admission, blob))
            pattern = rf"an update of {liar.key.short} breaks the codec's rules: .+"
            with suppress(NotInTime):
                await until(lambda: all(swarm.has_logged(n, pattern) for n in PEERS), seconds=8, every=0.1)
            return all(swarm.has_logged(n, pattern) for n in PEERS)

        await swarm.until("all refuse a malformed blob", all_have_refused_one)
        await goes_on(swarm, liar)


@pytest.mark.long
async def test_an_update_that_its_author_never_serves_delays_one_round_and_no_more(swarm: World):
    await swarm.healthy(PEERS)
    async with stranger(swarm, "miser") as liar:
        admission = await liar.admit()
        await liar.listen()
        blob = Digest(os.urandom(32))
        beat = await liar.new_round()
        await liar.tell(liar.header(beat, admission, blob))
        # It keeps sending heartbeats: the update of a silent member is dropped sooner.
        posing = asyncio.create_task(liar.pose(admission))
        try:
            # The first peer that proposes without the update closes the round for all; the others may still be waiting.
            await any_logs(swarm, rf"peer {liar.key.short} kept the round waiting")
        finally:
            posing.cancel()
            with suppress(asyncio.CancelledError):
                await posing
        await swarm.round_reached(PEERS, beat.round + 1)
        await goes_on(swarm, liar)


@pytest.mark.long
async def test_nobody_sees_an_update_of_an_open_round_who_has_not_announced_one(swarm: World):
    await swarm.healthy(PEERS)
    ada = swarm.key("ada")
    async with stranger(swarm, "copier") as liar:
        admission = await liar.admit()
        await liar.listen()
        announced: asyncio.Queue[Signed[UpdateHeader]] = asyncio.Queue()

        def note(message: Signed[Any]) -> None:
            if isinstance(message.body, UpdateHeader) and message.author == ada:
                announced.put_nowait(message)

        liar.on_heard = note
        # A member that seems to train holds the round open for a while: all have announced but this one.
        posing = asyncio.create_task(liar.pose(admission))
        try:
            await swarm.until("ada counts the copier", lambda: _members(swarm) >= len(PEERS))

            async def refused_until_it_announced() -> bool:
                """Check one round.

                Return False if it was decided before the last answer, when anybody may have its blobs.
                """
                while not announced.empty():
                    announced.get_nowait()
                header = (await ended(announced.get(), LIMIT)).body
                reply = await liar.ask_for_chunk("ada", header.blob)
                if reply.status is not ReplyStatus.REFUSED:
                    return False
                assert f"you have not announced an update in round {header.round} yet" in reply.reason
                # Now it commits to something, and ada serves it at once, while the round is as open as before.
                beat = replace(liar.heartbeats[ada], round=header.round, head=header.parent, state=header.base_state)
                await liar.send("ada", liar.header(beat, admission, Digest(os.urandom(32))).encoded)
                reply = await liar.ask_for_chunk("ada", header.blob)
                return reply.status is ReplyStatus.OK and len(reply.data) == liar.blob_size

            await swarm.until("refused in a round until it announced in it", refused_until_it_announced)
        finally:
            posing.cancel()
            with suppress(asyncio.CancelledError):
                await posing
        await goes_on(swarm, liar)


def _members(world: World) -> int:
    snapshot = world.snapshot("ada")
    return snapshot.members if snapshot is not None else 0


@pytest.mark.long
async def test_garbage_on_a_stream_ends_the_stream_and_nothing_else(swarm: World):
    await swarm.healthy(PEERS)
    async with stranger(swarm, "babbler") as liar:
        for name in PEERS:
            reader, writer = await liar.swarm.open_blob_stream(swarm.key(name), 60)
            writer.write(b"\xff" * REQUEST_BYTES * 1000)
            with suppress(ConnectionError):
                await writer.drain()
                await ended(reader.read())  # refused, then closed from the other side
            writer.close()
        await all_log(swarm, rf"peer {liar.key.short} sent something that is not a request for a blob")
        await goes_on(swarm, liar)
