"""The coordinator over its ledger: the same on both databases, and made again from the chain when it is lost."""

from __future__ import annotations

from dataclasses import replace

from coordinator import service
from protocol.ids import Round
from protocol.ledger.credits import CreditRule, credits_of, sum_credits
from protocol.message_codec import KeySigner
from protocol.messages import Directive, Rollback, Verdict
from tests.support.coordinator_fakes import FakeSwarm, make_spec, peer, state
from tests.support.coordinator_service import client, running, settled
from tests.support.specs import OWNER
from tests.support.waiting import until

SPEC = make_spec(credit={"hold_rounds": 2})
DEPTH = SPEC.checkpoint.final_depth


async def test_what_a_peer_is_told_is_the_same_on_both_databases_and_after_a_restart(tmp_path, ledger_place):
    swarm = FakeSwarm(SPEC)
    where = {"ledger": ledger_place} if "://" in ledger_place else {}
    for more in (4, 3):
        for _ in range(more):
            swarm.round({0: 6000, 1: 7000})
        async with running(tmp_path, SPEC, swarm, **where) as (c, _), client(c) as ask:
            await settled(c, len(swarm.chain.certificates))
            totals = await ask.totals(peer(1).key)
    credited = [credits_of(c, CreditRule.of(SPEC)) for c in swarm.chain.certificates]
    posted = len(credited) - DEPTH
    has, waits = sum_credits(credited[: posted - 2])[peer(1).key], sum_credits(credited[posted - 2 :])[peer(1).key]
    assert (totals.micro_credits_settled, totals.micro_credits_pending) == (has.micro_credits, waits.micro_credits)
    assert totals.rounds == len(credited)


async def test_what_nobody_can_have_done_is_void_by_a_directive_that_the_chain_carries(tmp_path):
    # Of 28,832 parameters and 6 FLOPs: 10^12 FLOPs a second are 5.8 million tokens.
    spec = make_spec(credit={"hold_rounds": 9, "max_teraflops_per_second": 1})
    clock = [1_700_000_000.0]
    async with running(tmp_path, spec, now=lambda: clock[0]) as (c, swarm):
        swarm.round({0: 6000, 1: 7000})
        await settled(c, 1)
        clock[0] += 20
        lied = swarm.round({0: 6000, 1: 900_000_000 // spec.data.window})
        await until(lambda: swarm.directives, "a directive is published")
        (directive,) = swarm.directives
        (verdict,) = directive.body.verdicts
        assert (verdict.record, verdict.peer) == (lied.digest, peer(1).key) and directive.author == OWNER.key
        # The owner's orders meanwhile say it again, and say nothing else.
        paused = replace(directive.body, sequence=directive.body.sequence + 1, run_status="paused")
        await c.control.accept(KeySigner(OWNER).sign(paused).encoded)
        swarm.chain.carry(swarm.directives[-1])
        for _ in range(DEPTH + 1):
            swarm.round({0: 6000})
        await settled(c, DEPTH + 3)
        await until(lambda: c.chain.balances[peer(1).key].voided.rounds == 1, "it is void")
        await until(lambda: c.indexer.verdicts == (), "nothing is left to be void")
        assert len(swarm.directives) == 2


async def test_verdicts_of_directives_that_no_record_has_carried_are_all_brought_into_the_chain(tmp_path):
    """Records carry the newest directive only. Those given between two records must not replace each other's."""
    spec = make_spec(credit={"hold_rounds": 9})
    async with running(tmp_path, spec) as (c, swarm):
        made = [swarm.round({0: 6000, 1: 7000}) for _ in range(2)]
        await settled(c, 2)
        verdicts = [Verdict(certificate.digest, peer(n).key, "a copy") for n, certificate in enumerate(made)]
        for sequence, verdict in enumerate(verdicts, 1):
            directive = Directive(spec.run_id, sequence, verdicts=(verdict,))
            await c.control.accept(KeySigner(OWNER).sign(directive).encoded)
        await until(lambda: set(swarm.directives[-1].body.verdicts) == set(verdicts), "the newest has both")
        swarm.chain.carry(swarm.directives[-1])
        for _ in range(DEPTH + 1):
            swarm.round({0: 6000})
        await settled(c, DEPTH + 3)
        await until(lambda: all(c.chain.balances[peer(n).key].voided.rounds == 1 for n in (0, 1)), "both are void")
        await until(lambda: c.indexer.verdicts == (), "the chain has both")
        assert len(swarm.directives) == 3


async def test_a_database_that_was_deleted_gives_the_same_answers(tmp_path):
    """Also of what a rollback left, and of receipts."""
    swarm = FakeSwarm(SPEC)

    async def answers(c) -> tuple:
        receipts = [(await c.credits.receipts.page(peer(n).key, None, 100)).items for n in range(3)]
        rounds = [replace(r, time=0) for r in (await c.credits.rounds(0, 100)).rounds]
        return c.chain.balances, c.chain.posted, receipts, rounds

    async with running(tmp_path, SPEC, swarm) as (c, _):
        for r in range(DEPTH + 5):
            swarm.round({0: 6000 + r, 1: 7000})
        await until(lambda: c.chain.posted is not None and c.chain.posted[0] == 4)
        old = swarm.chain
        back = Rollback(1, old.certificates[1].digest, Round(2), state(2))
        directive = KeySigner(OWNER).sign(Directive(SPEC.run_id, 1, rollback=back))
        swarm.blobs.add(state(2))
        swarm.turn_to(old.fork(2))
        await c.control.accept(directive.encoded)
        swarm.left = old.certificates[2:]
        swarm.finals.clear()
        swarm.chain.carry(directive)
        for r in range(DEPTH + 3):
            swarm.round({2: 9000 + r})
        await until(lambda: c.chain.posted is not None and c.chain.posted[0] == 4)
        before = await answers(c)
    assert before[0][peer(0).key].settled.rounds + before[0][peer(0).key].pending.rounds == 5
    for file in tmp_path.glob(f"{service.LEDGER_FILE}*"):
        file.unlink()
    async with running(tmp_path, SPEC, swarm) as (c, _):
        await until(lambda: c.chain.posted is not None and c.chain.posted[0] == 4)
        assert await answers(c) == before
    async with running(tmp_path, SPEC, swarm) as (c, _):  # and a restart that lost nothing
        await until(lambda: c.chain.open != ())
        assert await answers(c) == before
