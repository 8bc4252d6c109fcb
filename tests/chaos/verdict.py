"""The promises of a ledger after any failure of its process or its disk."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace

from coordinator.errors import LedgerError
from coordinator.ledger import Ledger
from coordinator.ledger.store import connect
from protocol.ledger.credits import PeerBalances
from tests.chaos import story


def problems(where: str, acknowledged: Iterable[str] = ()) -> list[str]:
    """Return the broken promises of a ledger; a ledger that refuses to open is one."""
    try:
        ledger = Ledger(where, story.SPEC)
    except LedgerError as e:
        return [f"it does not open: {e}"]
    try:
        return [*ledger.check(), *_not_the_story(ledger), *_lost(where, ledger, acknowledged)]
    finally:
        ledger.close()


def _not_the_story(ledger: Ledger) -> list[str]:
    """Rounds are a beginning of the story, each with its verdicts; and everybody has what follows, once."""
    last = ledger.last()
    count = last[0] + 1 if last else 0
    found, expected = [], {}
    if ledger.round_credits(limit=count + 10) != [replace(story.round_credits(n), verdicts=()) for n in range(count)]:
        found.append("the rounds are not those that were posted")
    for n in range(count):
        settled = count - 1 - n >= story.SPEC.credit.hold_rounds
        for i, line in enumerate(story.round_credits(n).lines):
            voided = i == 0 and bool(story.verdicts_on(n)) and n < count - 1
            kind = "voided" if voided else "settled" if settled else "pending"
            s = expected.get(line.peer, PeerBalances())
            expected[line.peer] = s.plus(line, kind)
    if ledger.balances() != expected:
        found.append("credit is lost or doubled")
    return found


def _lost(where: str, ledger: Ledger, acknowledged: Iterable[str]) -> list[str]:
    last = ledger.last()
    count = last[0] + 1 if last else 0
    admissions = {a.first_at for a in ledger.admissions()}
    with closing(connect(where, story.SPEC, reader=True)) as stored:
        refusals = {r[0] for r in stored.query("SELECT round FROM refusals")}
    found = []
    for said in acknowledged:
        kind, number = said.split()
        there = {"round": range(count), "admitted": admissions, "refused": refusals}[kind]
        if int(number) not in there:
            found.append(f"lost although acknowledged: {said}")
    return found
