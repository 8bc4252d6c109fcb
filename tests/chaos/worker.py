"""A coordinator's ledger under load: posts rounds, admits, refuses, and acknowledges each, until it is killed.

`early` and `split` are how not to do it, for the harness to find: an acknowledgement before the commit, and a round in
two transactions.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import coordinator.ledger_thread as threads
from coordinator.errors import LedgerError
from coordinator.ledger import Ledger, store
from protocol.ledger.credits import RoundCredits
from tests.chaos import story

AT_ONCE = 4


def run(where: str, mode: str, acknowledge: Callable[[str], None], rounds: int = 10**9) -> None:
    """Post rounds until a kill, or up to a number of rounds.

    `acknowledge` gets "opened", "round N", "admitted N", "refused N".
    """
    if mode == "early":
        threads.write_group = _answers_before_the_commit
    if mode == "split":
        threads.Ledger = _InTwoTransactions
        threads.write_group = _one_by_one
    asyncio.run(_work(where, acknowledge, rounds))


async def _work(where: str, acknowledge: Callable[[str], None], rounds: int) -> None:
    thread = threads.LedgerThread()
    await thread.open(where, story.SPEC, lambda: 1_700_000_000.0)
    last = await thread.run(lambda ledger: ledger.last())
    start = last[0] + 1 if last else 0
    first = 1 + max((a.first_at for a in await thread.run(lambda ledger: ledger.admissions())), default=-1)
    acknowledge("opened")
    loads = [
        asyncio.create_task(_one_after_the_other(thread, acknowledge, "admitted", _add_certificates, first)),
        asyncio.create_task(_one_after_the_other(thread, acknowledge, "refused", _refuse, first)),
    ]
    for r in range(start, rounds, AT_ONCE):
        # Earlier rounds are posted again, as by a coordinator that does not trust its memory.
        numbers = [max(0, r - 1), *range(r, min(r + AT_ONCE, rounds))]
        await asyncio.gather(*(_post(thread, acknowledge, n) for n in numbers))
    for load in loads:
        load.cancel()
    await asyncio.gather(*loads, return_exceptions=True)
    await thread.close()


async def _post(thread: threads.LedgerThread, acknowledge: Callable[[str], None], number: int) -> None:
    await thread.run(lambda ledger: ledger.post(story.round_credits(number)))
    acknowledge(f"round {number}")


async def _one_after_the_other(thread, acknowledge, name, work, first: int) -> None:
    number = first
    while True:
        await thread.run(lambda ledger, n=number: work(ledger, n))
        acknowledge(f"{name} {number}")
        number += 1


def _add_certificates(ledger: Ledger, number: int) -> None:
    ledger.add_admission(story.admitted(number))


def _refuse(ledger: Ledger, number: int) -> None:
    ledger.add_refusal(story.refusal(number))


# -- how not to do it ----------------------------------------------------------------------------------------


def _answers_before_the_commit(ledger: Ledger, jobs) -> None:
    with ledger.group():
        for job in jobs:
            with ledger.part():
                job.result = job.work(ledger)
            job.answer()


def _one_by_one(ledger: Ledger, jobs) -> None:
    for job in jobs:
        try:
            job.result = job.work(ledger)
        except LedgerError as e:
            job.error = e
        job.answer()


class _InTwoTransactions(store.Ledger):
    """Writes a round first, and the balances that follow from it then."""

    def post(self, credits: RoundCredits, *, finalization: bytes | None = None) -> bool:
        with self._writing():
            fold = self._current()
            if credits.round < fold.rounds:
                return False
            step = fold.add(credits)
            self._write(credits, step, finalization)
        with self._db.transaction():
            self._write_balances(step.peers, fold)
        return True


def on_pipe(fd: int) -> Callable[[str], None]:
    """Acknowledges on a pipe: one write a line, so that a kill cuts none in two."""
    return lambda said: os.write(fd, f"{said}\n".encode()) and None
