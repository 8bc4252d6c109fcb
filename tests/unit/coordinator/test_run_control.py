"""A directive that was begun is followed to its end: without its caller, after a fault, and by a repeated command.

No order is given while the swarm may know a newer one.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import asynccontextmanager, closing

import pytest

from coordinator import control
from coordinator.chain_indexer import ChainIndexer
from coordinator.control import RunControl
from coordinator.credits.plausibility import PlausibilityCheck
from coordinator.directive_file import DirectiveFile, LeftOrder
from coordinator.directives import DirectiveEffects
from coordinator.errors import LedgerError, RefusedError
from coordinator.finalizer import Finalizer
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger_thread import LedgerThread
from protocol.audits import AuditRule
from protocol.ids import Round
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import Directive, Rollback, Verdict
from tests.support.coordinator_fakes import FakeSwarm, make_spec, peer, state
from tests.support.specs import OWNER
from tests.support.waiting import ended, until

SPEC = make_spec()


class World:
    """A run whose round 4 is posted, and the order to go back to round 3."""

    def __init__(self, folder):
        self.swarm = swarm = FakeSwarm(SPEC)
        for i in range(8):
            swarm.chain.add({0: 1, 1: 1 + i})
        swarm.blobs.add(state(3))
        self.ledger = LedgerThread()
        self.rolled_back: list[Rollback] = []
        self.chain = IndexedChain(AuditRule.of(SPEC))
        self.finalizer = Finalizer(SPEC, OWNER, swarm, self.ledger, self.chain)
        effects = DirectiveEffects(SPEC.round, self.chain)
        self.indexer = ChainIndexer(
            SPEC, swarm, self.ledger, self.chain, self.finalizer, PlausibilityCheck(SPEC), effects, lambda: 1000.0,
            on_pass=lambda: self.control.tend(),
        )  # fmt: skip
        decoder = MessageDecoder(SPEC.run_id, OWNER.key, remember=4)
        self.file = DirectiveFile(folder, decoder)
        self.control = RunControl(
            decoder, swarm, effects, self.indexer, self.ledger, self.file, KeySigner(OWNER), SPEC.run_id,
            lambda: 1000.0, self.roll_back,
        )  # fmt: skip
        to = swarm.chain.certificates[2].digest
        self.time = 0.0
        self.control.clock = lambda: self.time
        self.order = KeySigner(OWNER).sign(Directive(SPEC.run_id, 3, rollback=Rollback(1, to, Round(3), state(3))))

    async def roll_back(self, rollback):
        self.rolled_back.append(rollback)

    def publish(self, directive):
        """Publish as a swarm does: the chain follows the rollback."""
        self.swarm.directives.append(directive)
        self.swarm.on_disk = self.swarm.chain.certificates
        self.swarm.chain = self.swarm.chain.fork(3)

    def fill_disk(self, times):
        """Have the swarm publish, and the ledger refuse a number of rollbacks. Return the list of these."""
        roll_back, tries = self.indexer.rollback, []

        async def publish(directive):
            self.publish(directive)

        async def full(rollback):
            if len(tries) >= times:
                return await roll_back(rollback)
            tries.append(rollback)
            raise LedgerError("the disk is full")

        self.swarm.publish_directive, self.indexer.rollback = publish, full
        return tries

    def is_done(self):
        back = self.order.body.rollback
        follows = self.chain.posted == (2, back.record) and self.finalizer.epoch == 1 and back in self.rolled_back
        return follows and 1 in self.file.read()[1]


@asynccontextmanager
async def running(folder, *, archived=False):
    w = World(folder)
    await w.ledger.open(folder / "ledger.sqlite", SPEC)
    await w.indexer.read_ledger()
    await w.control.start(begun=archived)
    w.indexer.start()
    await until(lambda: w.chain.posted is not None and w.chain.posted[0] == 4)
    try:
        yield w
    finally:
        await w.control.stop()
        await w.indexer.stop()
        await w.ledger.close()


@pytest.mark.parametrize("stops", [False, True])
async def test_a_rollback_whose_caller_goes_away_goes_on_to_its_end(tmp_path, stops):
    async with running(tmp_path) as w:
        begun, go = asyncio.Event(), asyncio.Event()

        async def slow(directive):
            begun.set()
            await go.wait()
            w.publish(directive)

        w.swarm.publish_directive = slow
        caller = asyncio.create_task(w.control.accept(w.order.encoded))
        await ended(begun.wait())
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        asyncio.get_running_loop().call_soon(go.set)
        if not stops:
            await w.control.accept(w.order.encoded)
            assert w.is_done()
    assert w.is_done() and w.swarm.directives == [w.order] and len(w.control.effects.marks) == 1


@pytest.mark.parametrize("repeated", [False, True])
async def test_a_rollback_that_a_fault_has_interrupted_is_completed(tmp_path, repeated):
    async with running(tmp_path) as w:
        w.fill_disk(1)
        with pytest.raises(LedgerError, match="the disk is full"):
            await w.control.accept(w.order.encoded)
        assert not w.is_done()
        if repeated:
            await w.control.accept(w.order.encoded)
        else:
            w.swarm.changed()
            await until(w.is_done)
        assert w.is_done() and w.swarm.directives == [w.order] and len(w.control.effects.marks) == 1


async def test_before_the_ledger_follows_a_rollback_the_certificates_that_it_leaves_are_kept(tmp_path):
    """Receipts of those rounds stay, and a ledger that is lost credits them again."""
    async with running(tmp_path) as w:
        posted = w.swarm.chain.certificates[:5]
        w.fill_disk(1)
        with pytest.raises(LedgerError, match="the disk is full"):
            await w.control.accept(w.order.encoded)
        assert [w.swarm.certificate(c.digest) for c in posted] == posted
        before = await w.ledger.run(lambda ledger: ledger.balances())
        await w.control.accept(w.order.encoded)
        assert w.is_done()
    swarm = w.swarm
    for file in tmp_path.glob("ledger.sqlite*"):
        file.unlink()
    w = World(tmp_path)
    w.swarm.chain, w.swarm.left, w.swarm.directives = swarm.chain, swarm.left, swarm.directives
    await w.ledger.open(tmp_path / "ledger.sqlite", SPEC)
    try:
        await w.indexer.read_ledger()
        await w.control.start()
        assert await w.ledger.run(lambda ledger: ledger.balances()) == before
    finally:
        await w.control.stop()
        await w.ledger.close()


async def test_a_fault_that_lasts_is_said_once_though_it_is_tried_again_and_again(tmp_path, caplog):
    async with running(tmp_path) as w:
        tries = w.fill_disk(100)
        with pytest.raises(LedgerError, match="the disk is full"):
            await w.control.accept(w.order.encoded)

        def tried_four_times():
            w.control.tend()
            return len(tries) >= 4

        await until(tried_four_times)
        assert caplog.text.count("is not followed to its end here") == 1


def word(sequence, **fields):
    return KeySigner(OWNER).sign(Directive(SPEC.run_id, sequence, **fields))


async def test_after_a_start_an_order_waits_until_members_are_heard_or_are_none(tmp_path):
    async with running(tmp_path, archived=True) as w:
        for time, why in ((0, "no member has answered"), (control.WAIT_SECONDS - 1, "no member has answered")):
            w.time = time
            with pytest.raises(RefusedError, match=f"{why}.*: give the order again in a minute"):
                await w.control.accept(word(1).encoded)
            assert why in w.control.wait_reason() and not w.swarm.directives
        w.time = control.WAIT_SECONDS
        await w.control.accept(word(1).encoded)
        assert not w.control.wait_reason() and len(w.swarm.directives) == 1
    async with running(tmp_path) as w:  # the folder's own directive shows that the run has begun
        assert "no member has answered" in w.control.wait_reason()
        w.swarm.beat(2, admission=b"x")
        assert "have just begun to answer" in w.control.wait_reason()
        w.time = control.SETTLE_BEATS * SPEC.round.heartbeat_seconds
        assert not w.control.wait_reason()


async def test_a_member_that_claims_a_newer_directive_delays_an_order_and_prevents_none(tmp_path):
    async with running(tmp_path) as w:
        w.swarm.beat(1, admission=b"x", directive_sequence=2**60)
        with pytest.raises(RefusedError, match="a member has a newer directive of the owner, which is not here yet"):
            await w.control.accept(word(1).encoded)
        w.time = control.WAIT_SECONDS
        await w.control.accept(word(1).encoded)
        w.swarm.beat(2, admission=b"x", directive_sequence=2**61)
        await w.control.accept(word(2).encoded)
        w.time += control.CLAIM_SECONDS
        assert "a member has a newer directive" in w.control.wait_reason()


async def test_verdicts_wait_as_orders_do(tmp_path):
    verdict = Verdict(state(1), peer(1).key, "too much")
    theirs = word(5, run_status="paused", banned=(peer(1).key,))
    async with running(tmp_path, archived=True) as w:
        w.indexer.verdicts = (verdict,)
        w.swarm.beat(1, admission=b"x", directive_sequence=5)
        w.time = control.WAIT_SECONDS - 1
        w.control.tend()
        await asyncio.sleep(0.3)
        assert not w.swarm.directives
        w.swarm.directives.append(theirs)
        w.swarm.changed()

        def given():
            w.indexer.verdicts = (verdict,)
            w.control.tend()
            newest = w.control.newest
            return newest is not None and newest.body.verdicts == (verdict,) and newest.body

        w.time += control.WAIT_SECONDS
        body = await until(given)
        assert body.banned == theirs.body.banned and body.run_status == "paused"


async def test_an_order_counts_only_if_it_was_made_from_the_newest_directive(tmp_path):
    async with running(tmp_path) as w:
        first = await w.control.accept(word(1, banned=(peer(1).key,)).encoded, b"")
        for base in (b"", bytes(state(1))):
            with pytest.raises(RefusedError, match="another directive was given meanwhile"):
                await w.control.accept(word(2).encoded, base)
        assert w.control.newest == first
        second = await w.control.accept(word(3).encoded, bytes(first.digest))
        assert await w.control.accept(second.encoded, bytes(first.digest)) == second, "the same one again"


async def test_orders_that_were_left_are_given_in_order_if_they_are_made_from_the_newest(tmp_path, caplog):
    orders = [word(n, run_status=status) for n, status in ((1, "paused"), (2, "running"), (3, "ended"))]
    first, second, stale = orders
    file = World(tmp_path).file
    file.leave(LeftOrder(second, bytes(first.digest)))
    file.leave(LeftOrder(first, b""))
    file.leave(LeftOrder(stale, bytes(first.digest)))
    async with running(tmp_path) as w:
        w.control.tend()
        await until(lambda: "Give it again if you still want it. It was: ended" in caplog.text)
        assert w.swarm.directives == [first, second] and w.control.newest == second
        assert not w.file.left() and not w.control.wait_reason()


async def test_an_order_that_the_swarms_rollback_replaces_is_said_to_be_lost(tmp_path, caplog):
    """Nobody was there when it was given, so nothing showed that the swarm was rolled back."""
    async with running(tmp_path) as w:
        await w.control.accept(word(9, run_status="paused").encoded, b"")
        w.publish(w.order)
        w.swarm.changed()
        await until(w.is_done)
        assert w.control.newest == w.order and "does not count: give it again" in caplog.text


async def test_a_ledger_that_loses_a_rollback_that_was_followed_follows_it_again(tmp_path):
    async with running(tmp_path) as w:

        async def publish(directive):
            w.publish(directive)

        w.swarm.publish_directive = publish
        path = tmp_path / "ledger.sqlite"
        with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(":memory:")) as old:
            db.backup(old)
            await w.control.accept(w.order.encoded)
            assert w.is_done()
            old.backup(db)
        post, followed = w.indexer.post_abandoned, asyncio.Event()

        async def post_again(*left):
            await post(*left)
            followed.set()

        w.indexer.post_abandoned = post_again
        w.swarm.changed()
        await ended(followed.wait())
        assert w.is_done() and await w.ledger.run(lambda ledger: ledger.epoch()) == 1
        await until(lambda: not w.indexer.problem)


async def test_in_a_run_that_has_begun_orders_wait_though_nothing_of_it_is_here(tmp_path):
    """Only the keys and the spec were kept: the members have the newest directive."""
    w = World(tmp_path)
    await w.ledger.open(tmp_path / "ledger.sqlite", SPEC)
    await w.indexer.read_ledger()
    try:
        await w.control.start(begun=True)
        assert "no member has answered" in w.control.wait_reason()
        with pytest.raises(RefusedError, match="give the order again"):
            await w.control.accept(w.order.encoded, b"")
    finally:
        await w.control.stop()
        await w.ledger.close()
