"""The owner's directives at the coordinator: on disk before they are sent; foreign and old ones are refused."""

from __future__ import annotations

import asyncio
import base64
import shutil
import time
from dataclasses import replace

import pytest

from cairn.commands import control as owner_commands
from coordinator import control
from coordinator.checkpoints.archive import ArchivedState
from coordinator.directive_file import FILE, DirectiveFile, LeftOrder
from coordinator.errors import RefusedError
from peer.coordinator_client import CoordinatorRefused
from protocol.errors import CairnError
from protocol.ids import Digest, Round
from protocol.invite import HostPort, Invite
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import MAX_PARDONS, AuditDecision, Directive, Pardon, Rollback, RoundChanges
from tests.support.command_line import Done, cairn
from tests.support.coordinator_fakes import FakeSwarm, make_spec, peer, state
from tests.support.coordinator_service import client, running, settled, web
from tests.support.specs import OWNER
from tests.support.waiting import until

SPEC = make_spec()
RUN = SPEC.run_id


def word(sequence: int, signer=OWNER, **fields):
    return KeySigner(signer).sign(Directive(RUN, sequence, **fields))


async def finals_name_the_rollback(swarm: FakeSwarm) -> None:
    """Let rounds become final after the first rollback, and wait for a finalization that names it."""
    for _ in range(SPEC.checkpoint.final_depth + 1):
        swarm.round({0: 10})
    await until(lambda: swarm.final is not None and swarm.final.body.epoch == 1, "a final names the rollback")


def line_of(directive) -> str:
    """Return a directive as its file has it."""
    return base64.b64encode(directive.encoded).decode()


@pytest.mark.asyncio
async def test_an_order_is_kept_told_and_given_again_after_a_restart(tmp_path):
    first = word(5, run_status="paused", reason="moving")
    async with running(tmp_path) as (coordinator, swarm):
        async with client(coordinator) as c:
            assert not (await c.publish_directive()).directive
            reply = await c.publish_directive(first.encoded)
        assert reply.directive == first.encoded and swarm.directives == [first]
        async with client(coordinator) as c:
            assert (await c.publish_directive(first.encoded)).directive == first.encoded  # once more: the same
            with pytest.raises(CoordinatorRefused, match="newer directive"):
                await c.publish_directive(word(4).encoded)
            with pytest.raises(CairnError, match="owner"):
                await c.publish_directive(word(9, peer(1)).encoded)
        assert swarm.directives == [first]
    async with running(tmp_path, swarm=FakeSwarm(SPEC)) as (coordinator, swarm):
        assert swarm.directives == [first] == [coordinator.control.newest]


@pytest.mark.asyncio
async def test_whoever_looks_is_told_of_pauses_ends_and_bans_in_words(tmp_path):
    async with running(tmp_path) as (coordinator, swarm):
        swarm.round({0: 10, 1: 10})
        await settled(coordinator, 1)
        async with client(coordinator) as c:
            await c.publish_directive(
                word(1, run_status="paused", reason="moving", since=0, banned=(peer(1).key,)).encoded
            )
            swarm.beat(0, phase="paused")
            swarm.beat(1, phase="training")
            phases = {"paused", "banned"}
            await until(lambda: {p.phase for p in coordinator.overview().peers} == phases, "the pause is seen")
            o = coordinator.overview()
            assert (o.health, o.message) == ("paused", "paused by the run's owner since 1970-01-01 00:00 UTC: moving")
            assert o.is_halted and [(p.peer, p.phase) for p in o.peers] == [
                (peer(0).key, "paused"), (peer(1).key, "banned"),
            ]  # fmt: skip
            assert {p.phase for p in (await c.status()).peers} == {"paused", "banned"}
        async with web(coordinator) as get:
            shown = (await get.get("/api/peers")).json()["peers"]
            assert [p["phase"] for p in shown] == ["paused", "banned"]

            async def exported() -> bool:
                said = (await get.get("/metrics")).text
                return 'cairn_peers{phase="paused"} 1.0' in said and 'cairn_state{state="paused"} 1.0' in said

            await until(exported, "the pause is exported", every=0.05)
        async with client(coordinator) as c:
            await c.publish_directive(word(2, run_status="running", since=0).encoded)
            phases = {"paused", "training"}
            await until(lambda: {p.phase for p in coordinator.overview().peers} == phases, "the ban is lifted")


@pytest.mark.asyncio
async def test_what_is_late_goes_by_the_policy_that_holds_now(tmp_path):
    clock = [time.time()]
    slower = RoundChanges(max_seconds=5000.0, member_seconds=300.0, exchange_seconds=700.0)
    async with running(tmp_path, now=lambda: clock[0]) as (coordinator, swarm):

        async def after(seconds: float) -> str:
            for passed in (60, seconds):  # an overview is kept for a moment
                clock[0] += passed
                swarm.beat(0)
                health = coordinator.overview().health
            return health

        await until(lambda: coordinator.indexer.caught_up, "the coordinator has read the chain")
        assert await after(4000) == "stalled"
        swarm.round({0: 10})
        await settled(coordinator, 1)
        async with client(coordinator) as c:
            await c.publish_directive(word(1, changes=slower, from_round=2).encoded)
        assert coordinator.directives.round_policy == SPEC.round, "not yet"
        swarm.round({0: 10, 1: 10})
        await settled(coordinator, 2)
        for n in (1, 7):  # the last one has never contributed
            swarm.beat(n, phase="resting")
        assert await after(4000) == "healthy"
        judged = coordinator.alert_input()
        assert judged.resting == 1
        assert judged.round_limit == 5000 + 700 + SPEC.round.patience_seconds
        swarm.beat(0, seconds_since=250)
        clock[0] += 60
        (shown,) = [p for p in coordinator.overview().peers if p.peer == peer(0).key]
        assert shown.phase == "training", "not silent"
        async with client(coordinator) as c:
            await c.publish_directive(word(2, from_round=0).encoded)
        assert coordinator.directives.round_policy == SPEC.round, "as in the spec again"


@pytest.mark.asyncio
async def test_the_banned_and_newcomers_of_an_ended_run_are_refused_with_the_reason(tmp_path):
    async with running(tmp_path) as (coordinator, _):
        async with client(coordinator) as c:
            await c.publish_directive(word(1, banned=(peer(1).key,), reason="wrong updates").encoded)
            with pytest.raises(CoordinatorRefused, match=r"banned this key \(wrong updates\)"):
                await c.admit(peer(1), "one")
            await c.admit(peer(2), "two")
            await c.publish_directive(word(2, run_status="ended").encoded)
            with pytest.raises(CoordinatorRefused, match="ended by its owner"):
                await c.admit(peer(3), "three")


@pytest.mark.asyncio
@pytest.mark.parametrize("full", [1, 2**20])
async def test_a_ban_and_a_pause_keep_their_own_reasons_after_other_orders_and_a_restart(tmp_path, monkeypatch, full):
    monkeypatch.setattr("coordinator.directive_file.FULL", full)  # bytes that the file may have before it is shortened
    one, two, three = (peer(i).key for i in (1, 2, 3))
    orders = (
        {"banned": (one,), "reason": "sends noise"},
        {"banned": (one,), "reason": "enough", "run_status": "ended", "since": 1},
        {"banned": (one, two), "reason": "enough", "run_status": "ended", "since": 1},  # a ban without a reason
        {"banned": (one, two, three), "reason": "floods", "run_status": "ended", "since": 1},
    )

    async def check(coordinator) -> None:
        async with client(coordinator) as c:
            reasons = (r"key \(sends noise\):", "key:", r"key \(floods\):", r"\(enough\)$")
            for number, said in enumerate(reasons, 1):
                with pytest.raises(CoordinatorRefused, match=said):
                    await c.admit(peer(number), "x")
        assert coordinator.directives.order[1].endswith("UTC: enough")

    async with running(tmp_path) as (coordinator, _):
        async with client(coordinator) as c:
            for number, fields in enumerate(orders, 1):
                fields["banned"] = tuple(sorted(fields["banned"]))
                await c.publish_directive(word(number, **fields).encoded)
        await check(coordinator)
    async with running(tmp_path, swarm=FakeSwarm(SPEC)) as (coordinator, _):
        await check(coordinator)


@pytest.mark.asyncio
@pytest.mark.parametrize("full", [1, 2**20])
async def test_the_policy_before_a_pending_change_is_in_force_after_a_restart(tmp_path, monkeypatch, full):
    monkeypatch.setattr("coordinator.directive_file.FULL", full)
    swarm = FakeSwarm(SPEC)
    for i in range(8):
        swarm.chain.add({0: 1, 1: 1 + i})
    async with running(tmp_path, swarm=swarm) as (coordinator, _):
        await until(lambda: coordinator.chain.posted and coordinator.chain.posted[0] >= 4, "round 4 is posted")
        async with client(coordinator) as c:
            for number, (seconds, first) in enumerate([(600.0, 2), (700.0, 1000)], 1):
                changes = RoundChanges(patience_seconds=seconds)
                await c.publish_directive(word(number, changes=changes, from_round=first).encoded)
        assert coordinator.directives.round_policy.patience_seconds == 600
    async with running(tmp_path, swarm=swarm) as (coordinator, _):
        assert coordinator.directives.round_policy.patience_seconds == 600


@pytest.mark.asyncio
async def test_a_rollback_takes_the_ledger_back_once_and_only_to_a_state_that_is_archived(tmp_path):
    swarm = FakeSwarm(SPEC)
    for i in range(8):
        swarm.chain.add({0: 1, 1: 1 + i})
    async with running(tmp_path, swarm=swarm) as (coordinator, _):
        chain = coordinator.chain
        await until(lambda: chain.posted is not None and chain.posted[0] >= 4, "round 4 is posted")
        to, left = swarm.chain.certificates[2], chain.posted[1]
        back = word(3, rollback=Rollback(1, to.digest, Round(3), state(3)))
        async with client(coordinator) as c:
            with pytest.raises(CairnError):
                await c.publish_directive(back.encoded)
            assert swarm.directives == [] and coordinator.control.newest is None
            swarm.blobs.add(state(3))
            swarm.chain = swarm.chain.fork(3)
            await c.publish_directive(back.encoded)
        assert chain.posted == (2, to.digest) and swarm.offered == [state(3)]
        later = word(4, rollback=back.body.rollback, run_status="paused")
        async with client(coordinator) as c:
            await c.publish_directive(later.encoded)
        assert chain.posted == (2, to.digest)
        await finals_name_the_rollback(swarm)
    lines = (tmp_path / FILE).read_text().splitlines()
    assert lines == [line_of(back), f"done 1 {left.hex()}", line_of(later)]


@pytest.mark.asyncio
async def test_a_word_that_the_swarm_has_from_elsewhere_is_heeded_and_no_order_is_given_on_top_of_less(tmp_path):
    swarm = FakeSwarm(SPEC)
    for i in range(8):
        swarm.chain.add({0: 1, 1: 1 + i})
    async with running(tmp_path, swarm=swarm) as (coordinator, _):
        chain = coordinator.chain
        await until(lambda: chain.posted is not None and chain.posted[0] >= 4)
        to = swarm.chain.certificates[2]
        back = Rollback(1, to.digest, Round(3), state(3))
        theirs = word(7, banned=(peer(1).key,), rollback=back)
        swarm.chain = swarm.chain.fork(3)  # before the directive: else the old chain may still be seen with it
        swarm.directives.append(theirs)
        async with client(coordinator) as c:
            with pytest.raises(CoordinatorRefused, match="the swarm knows a newer directive"):
                await c.publish_directive(
                    word(8, run_status="paused").encoded
                )  # by a peer that does not know of the ban
        swarm.turn_to(swarm.chain)
        await until(lambda: chain.posted == (2, to.digest))
        async with client(coordinator) as c:
            assert (await c.publish_directive()).directive == theirs.encoded
            with pytest.raises(CoordinatorRefused, match="banned"):
                await c.admit(peer(1), "one")
            await c.publish_directive(word(9, banned=(peer(1).key,), rollback=back, run_status="paused").encoded)
        await finals_name_the_rollback(swarm)
    assert DirectiveFile(tmp_path, MessageDecoder(RUN, OWNER.key, remember=4)).read()[1].keys() == {1}


@pytest.mark.asyncio
async def test_two_rollbacks_that_were_ordered_at_once_are_not_both_taken(tmp_path):
    swarm = FakeSwarm(SPEC)
    for i in range(4):
        swarm.chain.add({0: 1, 1: 1 + i})
    swarm.blobs |= {state(1), state(2)}
    async with running(tmp_path, swarm=swarm) as (coordinator, _):
        first, second = (
            word(n, rollback=Rollback(1, swarm.chain.certificates[n - 1].digest, Round(n), state(n))) for n in (1, 2)
        )
        async with client(coordinator) as c:
            await c.publish_directive(first.encoded)
            with pytest.raises(CoordinatorRefused, match="rolled back meanwhile"):
                await c.publish_directive(second.encoded)
        assert swarm.directives == [first] and swarm.offered == [state(1)]


@pytest.mark.asyncio
async def test_a_ban_of_a_key_that_no_peer_has_is_ordered_and_pointed_out(tmp_path, monkeypatch):
    async with running(tmp_path) as (coordinator, swarm):
        swarm.beat(1)
        owned = owner_commands.OwnedRun(tmp_path, OWNER, SPEC, coordinator.invite())
        monkeypatch.setattr(owner_commands, "open_run", lambda *_: owned)
        monkeypatch.setattr(owner_commands, "SPREAD_SECONDS", 0.0)
        await until(lambda: coordinator.overview().peers, "the peer is shown", every=0.05)
        done = await asyncio.to_thread(cairn, "run", "ban", tmp_path, str(peer(1).key), "ab" * 32)
    assert done.returncode == 0 and coordinator.control.newest is not None
    assert len(coordinator.control.newest.body.banned) == 2
    assert "note: the coordinator shows no peer abababab: compare" in done.stderr


@pytest.mark.asyncio
async def test_a_pardon_names_the_newest_conviction_and_is_only_for_the_barred(tmp_path, monkeypatch):
    swarm, liar = FakeSwarm(SPEC), peer(1).key
    audited = swarm.chain.add({0: 10, 1: 10})
    swarm.chain.add({0: 10}, decisions=[AuditDecision(audited.digest, liar, True)], voided=10)
    async with running(tmp_path, swarm=swarm) as (coordinator, _):
        owned = owner_commands.OwnedRun(tmp_path, OWNER, SPEC, coordinator.invite())
        monkeypatch.setattr(owner_commands, "open_run", lambda *_: owned)
        monkeypatch.setattr(owner_commands, "SPREAD_SECONDS", 0.0)

        async def pardon(*keys: object) -> Done:
            return await asyncio.to_thread(cairn, "run", "pardon", tmp_path, *map(str, keys))

        def barred() -> list[object]:
            return [key for key, _ in coordinator.chain.audits.bars(coordinator.overview().round)]

        await until(lambda: barred() == [liar], "the liar is barred", every=0.05)
        refused = await pardon(peer(0).key, liar)
        assert (
            refused.returncode == 1 and f"no conviction bars {peer(0).key.short} now: the run's page" in refused.stderr
        )
        assert coordinator.control.newest is None
        done = await pardon(liar)
        newest = coordinator.control.newest
        assert done.returncode == 0 and newest is not None and newest.body.pardons == (Pardon(liar, Round(1)),)
        swarm.chain.carry(newest)
        swarm.round({0: 10})
        await until(lambda: not barred(), "the pardon is carried", every=0.05)
        again = await pardon(liar)
        assert again.returncode == 1 and "no conviction bars" in again.stderr


@pytest.mark.asyncio
async def test_an_order_that_comes_while_a_rollback_asks_stays_in_force(tmp_path, monkeypatch):
    swarm = FakeSwarm(SPEC)
    for i in range(4):
        swarm.chain.add({0: 1, 1: 1 + i})
    swarm.blobs.add(state(2))
    archived = ArchivedState(tmp_path, RUN, 2, state(2), swarm.chain.certificates[1].digest, 0)
    monkeypatch.setattr("coordinator.checkpoints.archive.Archive.all", lambda _archive: [archived])
    kept, undone = (Pardon(peer(2).key, Round(n)) for n in (1, 2))
    ban = word(5, banned=(peer(1).key,), reason="sends noise", pardons=(kept, undone))
    async with running(tmp_path, swarm=swarm) as (coordinator, _):
        loop, clock = asyncio.get_running_loop(), coordinator.control.clock
        monkeypatch.setattr(coordinator.control, "clock", lambda: clock() + 3600)  # no member has answered meanwhile

        async def order_ban() -> None:
            async with client(coordinator) as c:
                await c.publish_directive(ban.encoded)
            swarm.chain = swarm.chain.fork(2)

        def agree(*_: object, **__: object) -> None:
            asyncio.run_coroutine_threadsafe(order_ban(), loop).result()

        owned = owner_commands.OwnedRun(tmp_path, OWNER, SPEC, coordinator.invite())
        monkeypatch.setattr(owner_commands, "open_run", lambda *_: owned)
        monkeypatch.setattr("click.confirm", agree)
        await asyncio.to_thread(cairn, "run", "rollback", tmp_path, "2")
        newest = coordinator.control.newest
    assert newest is not None and newest.body.rollback is not None
    assert newest.body.banned == (peer(1).key,)
    assert newest.body.pardons == (kept,), "round 2 comes again, and nothing in it is pardoned yet"


def test_pardons_wait_until_a_record_carries_them():
    keys = sorted(peer(n).key for n in range(MAX_PARDONS + 2))
    convicted = {key: Pardon(key, Round(5)) for key in keys}
    first = owner_commands.pardons_with(owner_commands.RunStatus(Directive(RUN, 1), 9, convicted), set(keys[:2]))
    assert first == tuple(convicted[key] for key in keys[:2])
    given = Directive(RUN, 2, pardons=first)
    waiting = owner_commands.RunStatus(given, 9, convicted)
    assert len(owner_commands.pardons_with(waiting, set(keys[2:MAX_PARDONS]))) == MAX_PARDONS
    with pytest.raises(CairnError, match="no record carries 2 of those before yet"):
        owner_commands.pardons_with(waiting, set(keys[2:]))
    carried = owner_commands.RunStatus(given, 10, {key: convicted[key] for key in keys[2:]})
    assert owner_commands.pardons_with(carried, set(keys[2:])) == tuple(convicted[key] for key in keys[2:])
    repeated = owner_commands.pardons_with(carried, {keys[2]})
    assert repeated == tuple(convicted[key] for key in keys[:3]), "the record that carries them may lose yet"


@pytest.mark.asyncio
@pytest.mark.parametrize("posted", [2, 8])
async def test_a_rollback_is_not_done_again_when_the_folder_was_lost_and_the_ledger_was_not(tmp_path, posted):
    """As with a ledger in PostgreSQL: whether the ledger had followed it, or had not come so far before."""
    swarm = FakeSwarm(SPEC)
    for i in range(posted):
        swarm.chain.add({0: 1, 1: 1 + i})

    async def settled(coordinator, round_):
        chain = coordinator.chain
        await until(lambda: chain.posted is not None and chain.posted[0] >= round_, f"round {round_} is posted")

    async with running(tmp_path, swarm=swarm) as (coordinator, _):
        if posted == 8:
            await settled(coordinator, 4)
        to = swarm.chain.certificates[1]
        back = word(3, rollback=Rollback(1, to.digest, Round(2), state(2)))
        swarm.blobs.add(state(2))
        swarm.chain = swarm.chain.fork(2)
        async with client(coordinator) as c:
            await c.publish_directive(back.encoded)
        for i in range(8):
            swarm.chain.add({2: 5 + i}, attempt=1)
        swarm.changed()
        await settled(coordinator, 6)
        last = coordinator.chain.posted
    (tmp_path / FILE).unlink()
    swarm.directives = [word(4, rollback=back.body.rollback, run_status="paused")]
    async with running(tmp_path, swarm=swarm) as (coordinator, _):
        await control.asyncio.sleep(0.1)
        assert coordinator.chain.posted == last and not coordinator.indexer.problem


KEY1, KEY2 = peer(1).key, peer(2).key


@pytest.fixture
def own(monkeypatch):
    """Let the commands find a run in this folder, whose coordinator is this one; None: nothing answers."""
    monkeypatch.setattr(owner_commands, "SPREAD_SECONDS", 0.0)

    def owning(folder, coordinator=None):
        nowhere = Invite(RUN, Digest(bytes(32)), (HostPort("127.0.0.1", 9),))
        owned = owner_commands.OwnedRun(folder, OWNER, SPEC, coordinator.invite() if coordinator else nowhere)
        monkeypatch.setattr(owner_commands, "open_run", lambda *_: owned)

    return owning


@pytest.mark.asyncio
async def test_an_order_that_was_left_in_a_restored_folder_does_not_undo_what_was_ordered_since(tmp_path, own, caplog):
    """The whole folder is restored, and the owner gives an order before the coordinator runs again."""
    folder, copy = tmp_path / "run", tmp_path / "copy"
    folder.mkdir()
    old = word(5)
    async with running(folder) as (coordinator, _):
        async with client(coordinator) as c:
            await c.publish_directive(old.encoded)
    shutil.copytree(folder, copy)
    since = word(9, banned=(KEY1,), changes=RoundChanges(max_members=9), run_status="paused")
    own(copy)
    done = await asyncio.to_thread(cairn, "run", "ban", copy, str(KEY2))
    assert done.returncode == 0 and "the order is left in" in done.stdout
    async with running(copy, swarm=FakeSwarm(SPEC)) as (coordinator, swarm):
        assert coordinator.control.wait_reason()
        swarm.beat(1, admission=b"x", directive_sequence=9)
        await asyncio.sleep(0.3)
        assert swarm.directives == [old], "it waits for what the member has"
        swarm.directives.append(since)
        swarm.changed()
        await until(lambda: "Give it again if you still want it. It was: running; 1 banned" in caplog.text)
        assert coordinator.control.newest == since == swarm.directives[-1]


@pytest.mark.asyncio
@pytest.mark.parametrize("rolled_back", [False, True])
async def test_an_order_at_a_restored_coordinator_is_made_from_what_the_swarm_has(tmp_path, own, rolled_back):
    """`directives` and `store/` are not restored, and the owner gives an order before a member has sent anything."""
    swarm = FakeSwarm(SPEC)
    for i in range(8):
        swarm.chain.add({0: 1, 1: 1 + i})
    async with running(tmp_path, swarm=swarm) as (coordinator, _):
        await until(lambda: coordinator.chain.posted and coordinator.chain.posted[0] >= 4, "round 4 is posted")
    assert not (tmp_path / FILE).exists()
    swarm.forget_subscribers()
    back = Rollback(1, swarm.chain.certificates[2].digest, Round(3), state(3)) if rolled_back else None
    theirs = word(9, banned=(KEY1,), run_status="paused", rollback=back)
    async with running(tmp_path, swarm=swarm) as (coordinator, _):
        async with client(coordinator) as c:
            reply = await c.publish_directive()
            assert not reply.directive and "no member has answered" in reply.wait
        own(tmp_path, coordinator)
        ordering = asyncio.create_task(asyncio.to_thread(cairn, "run", "ban", tmp_path, str(KEY2)))
        await asyncio.sleep(1)
        swarm.beat(1, admission=b"x", directive_sequence=9)
        await asyncio.sleep(1)
        assert not swarm.directives
        if rolled_back:
            swarm.chain = swarm.chain.fork(3)
        swarm.directives.append(theirs)
        swarm.changed()
        done = await ordering
        newest = coordinator.control.newest
    assert done.returncode == 0 and "waiting for up to two minutes" in done.stderr, done.stderr
    assert newest is not None and newest == swarm.directives[-1]
    assert newest.body.banned == tuple(sorted((KEY1, KEY2)))
    assert newest.body.run_status == "paused" and newest.body.rollback == back


def test_orders_that_wait_stay_in_a_full_file(tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.directive_file.FULL", 1)
    stored = DirectiveFile(tmp_path, MessageDecoder(RUN, OWNER.key, remember=4))
    waiting, refused, given = (LeftOrder(word(n), bytes(state(n))) for n in (3, 4, 5))
    stored.leave(waiting)
    stored.leave(refused)
    stored.leave(given)
    stored.mark_refused(refused.directive)
    stored.append(given.directive)
    stored.append(word(6))
    assert stored.left() == [waiting] and [d.body.sequence for d in stored.read()[0]] == [6]


def test_a_line_torn_by_a_kill_is_left_out_and_the_next_stands_alone(tmp_path):
    stored = DirectiveFile(tmp_path, MessageDecoder(RUN, OWNER.key, remember=4))
    stored.append(word(1))
    with open(tmp_path / FILE, "a") as file:
        file.write(line_of(word(2))[:50])
    stored.append(word(3))
    stored.mark_done(2, None)
    stored.mark_done(3, Digest(bytes(range(32))))
    words, done = stored.read()
    assert [w.body.sequence for w in words] == [1, 3] and done == {2: None, 3: Digest(bytes(range(32)))}


def test_a_full_file_keeps_the_newest_directive_and_the_first_of_each_rollback(tmp_path, monkeypatch):
    """Each verdict that the coordinator reaches makes a directive: the file must not grow with them."""
    monkeypatch.setattr("coordinator.directive_file.FULL", 5000)
    stored = DirectiveFile(tmp_path, MessageDecoder(RUN, OWNER.key, remember=4))
    left = Digest(bytes(range(32)))
    first = {}
    for epoch in (0, 1, 2):
        rollback = Rollback(epoch, left, Round(epoch), left) if epoch else None
        for n in range(30):
            given = word(100 * epoch + n + 1, rollback=rollback)
            stored.append(given)
            first.setdefault(epoch, given)
        if epoch:
            stored.mark_done(epoch, left)
    directives, done = stored.read()
    assert (tmp_path / FILE).stat().st_size < 2 * 5000
    assert max(directives, key=lambda d: d.body.precedence) == word(230, rollback=Rollback(2, left, Round(2), left))
    assert [next(d for d in directives if d.body.epoch == e) for e in (1, 2)] == [first[1], first[2]]
    assert done == {1: left, 2: left}
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_changes_that_make_no_spec_are_refused_before_they_are_signed():
    from cairn.commands.control import check_changes, parse_setting

    check_changes(SPEC, RoundChanges(target_tokens=10_000_000))
    with pytest.raises(CairnError, match="member_seconds"):
        check_changes(SPEC, RoundChanges(member_seconds=SPEC.round.heartbeat_seconds))
    with pytest.raises(CairnError, match="max_update_tokens"):
        check_changes(SPEC, replace(RoundChanges(), max_update_tokens=1))
    assert parse_setting("max_members=12") == ("max_members", 12)
    assert parse_setting("target_tokens=2M") == parse_setting("target_tokens=2_000_000") == ("target_tokens", 2_000_000)
    assert parse_setting("max_seconds=12.5") == ("max_seconds", 12.5)
    assert parse_setting("max_seconds=spec") == (
        "max_seconds",
        None,
    )
    with pytest.raises(CairnError, match="FIELD=VALUE"):
        parse_setting("heartbeat_seconds=1")
    with pytest.raises(CairnError, match="'2.5' is not a number"):
        parse_setting("max_members=2.5")
    assert issubclass(RefusedError, CairnError)


def test_a_change_of_policy_without_the_coordinator_names_no_round_that_is_over(tmp_path, monkeypatch):
    owned = owner_commands.OwnedRun(tmp_path, OWNER, SPEC, Invite(RUN, Digest(bytes(32)), (HostPort("127.0.0.1", 9),)))
    monkeypatch.setattr(owner_commands, "open_run", lambda *_: owned)
    said = cairn("run", "policy", tmp_path, "target_tokens=2M").stdout
    assert "round 0" not in said and "from the round after the first that carries it" in said
    assert "from round 500 on" in cairn("run", "policy", tmp_path, "target_tokens=2M", "--from-round", "500").stdout


@pytest.mark.parametrize(
    "open_round, first, moves",
    [(50, 51, True), (None, 0, True), (50, 1000, False), (999, 1000, False), (1200, 1201, False)],
)
def test_a_change_of_policy_says_that_it_moves_an_earlier_one(open_round: int | None, first: int, moves: bool):
    from cairn.commands.control import RunStatus, moved_changes

    earlier = Directive(RUN, 1, changes=RoundChanges(target_tokens=10_000_000), from_round=Round(1000))
    said = "the changes ordered for round 1000 hold then, too" if moves else ""
    assert moved_changes(RunStatus(earlier, open_round), first) == said
    assert not moved_changes(RunStatus(Directive(RUN, 0), open_round), first)
