"""The coordinator over its books: the same on both databases, and trouble when the ledger is not what it was."""

from __future__ import annotations

import asyncio

from coordinator import service
from coordinator.ledger.store import connect
from protocol.ledger.credits import CreditRule, credits_of, sum_credits
from tests.support.coordinator_fakes import FakeSwarm, make_spec, peer
from tests.support.coordinator_service import client, running, settled
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
            account = await ask.account(peer(1).key)
    accounts = [credits_of(a, CreditRule.of(SPEC)) for a in swarm.chain.certificates]
    posted = len(accounts) - DEPTH
    has, waits = sum_credits(accounts[: posted - 2])[peer(1).key], sum_credits(accounts[posted - 2 :])[peer(1).key]
    assert (account.micro_credits_settled, account.micro_credits_pending) == (has.micro_credits, waits.micro_credits)
    assert account.rounds == len(accounts)
    assert [(e.round, e.settled) for e in account.newest] == [(r, r < posted - 2) for r in reversed(range(7))]
