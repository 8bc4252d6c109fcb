"""Shared by several tests: ledger accounts."""

from __future__ import annotations

from protocol.ledger.credits import CreditRule, credits_of
from tests.support.coordinator_fakes import ChainMaker, make_spec

SPEC = make_spec()


RULE = CreditRule.of(SPEC)


def make_accounts(rounds: int):
    chain = ChainMaker(SPEC)
    for r in range(rounds):
        chain.add({n: 500 + 10 * n + r for n in range(3)}, loss=5 - r / 100)
    return [credits_of(c, RULE) for c in chain.certificates]
