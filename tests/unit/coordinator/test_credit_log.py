"""The coordinator's answers about credits: receipts that stay the same, rounds by their numbers, totals."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coordinator.credits.leaderboard import Leaderboard, RecentAverageCredit
from coordinator.credits.log import CreditLog
from coordinator.credits.receipts import Receipts, why_not
from coordinator.errors import LedgerConflictError, LedgerError, RefusedError, TooManyError
from coordinator.history import RoundHistory
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger import BindingRow, Ledger
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import AnnouncedUpdate
from protocol.audits import AuditRule
from protocol.errors import AdmissionError, MalformedError
from protocol.ids import Digest, PeerKey
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.statements import MAX_REASON, BindAccount, BindPeer, open_binding, open_receipt, sign
from protocol.message_codec import KeySigner
from protocol.messages import AuditDecision, Directive, UpdateHeader, Verdict
from tests.support.bindings import bind
from tests.support.coordinator_fakes import FakeSwarm, make_spec, peer, state
from tests.support.specs import OWNER, digest, identity
from tests.support.waiting import LIMIT, until

HOLD = 2
SPEC = make_spec(credit={"hold_rounds": HOLD, "flops_per_parameter_token": 1000})
RULE = CreditRule.of(SPEC)
DAY = 86_400.0


class Admitters:
    """Names of peers, and the admitted ones."""

    def __init__(self):
        self.known: set[PeerKey] = {peer(n).key for n in range(10)}

    def name_of(self, key: PeerKey) -> str:
        return f"name {key.short}"

    def knows(self, key: PeerKey) -> bool:
        return key in self.known


class World:
    def __init__(self, place: str):
        self.place = place
        self.clock = [1_700_000_000.0]
        self.admitters = Admitters()
        self.swarm = FakeSwarm(SPEC)
        self.ledger = LedgerThread()

    async def open(self) -> None:
        self.ledger = LedgerThread()
        await self.ledger.open(self.place, SPEC, self.now)
        self.chain = IndexedChain(AuditRule.of(SPEC))
        self.begin_receipts()
        self.board = self.leaderboard()
        self.log = CreditLog(self.ledger, self.swarm, self.chain, self.receipts_made, self.board, asyncio.Event())
        await self.log.start()
        await self.board.load_recent()
        await self.read_balances()

    def now(self) -> float:
        return self.clock[0]

    def begin_receipts(self) -> None:
        """Begin again, with nothing in memory."""
        self.receipts_made = Receipts(SPEC, OWNER, self.swarm, self.ledger, self.now)

    def leaderboard(self) -> Leaderboard:
        a = self.admitters
        return Leaderboard(SPEC.run_id, self.ledger, self.chain, a.name_of, a.knows, self.now)

    async def read_balances(self) -> None:
        """Read the balances from the ledger, as the chain indexer does after each post."""
        balances = await self.ledger.read(lambda ledger: ledger.balances())
        self.chain.restore(None, (), RoundHistory(), {}, balances)

    async def refresh(self) -> None:
        await self.read_balances()
        await self.board.refresh()

    async def restart(self) -> None:
        await self.ledger.close()
        await self.open()

    async def post(
        self, work: dict[int, int], *, void: tuple[Digest, PeerKey] | None = None,
        decisions: tuple[AuditDecision, ...] = (),
    ):  # fmt: skip
        if void is not None:
            self.carry(void)
        credits = credits_of(self.swarm.chain.add(work, decisions=decisions), RULE)
        self.clock[0] += 60
        await self.receipts_made.note([credits])
        await self.ledger.run(lambda ledger: ledger.post(credits))
        await self.refresh()
        return credits

    def carry(self, void: tuple[Digest, PeerKey]) -> None:
        """Let the next record carry a verdict."""
        body = Directive(SPEC.run_id, len(self.swarm.chain.certificates) + 1, verdicts=(Verdict(*void, "no"),))
        self.swarm.chain.carry(KeySigner(OWNER).sign(body))

    def announce(self, number: int, *, late: bool = False, flaw: str = "", base: Digest | None = None) -> Digest:
        """Announce an update for the next round; return the digest of the header."""
        chain = self.swarm.chain
        base = base or state(len(chain.certificates))
        header = UpdateHeader(
            SPEC.run_id,
            len(chain.certificates),
            chain.head,
            base,
            0,
            0,
            4,
            1,
            digest(number),
            100,
            5.0,
            b"",  # type: ignore
        )
        signed = KeySigner(peer(number)).sign(header)
        self.swarm.headers.append(AnnouncedUpdate(signed, late, flaw))
        return signed.digest

    async def receipts(self, number: int, before: int | None = None, limit: int = 50):
        return await self.receipts_made.page(peer(number).key, before, limit)


@asynccontextmanager
async def made(place: str):
    world = World(place)
    await world.open()
    try:
        yield world
    finally:
        await world.ledger.close()


# -- receipts ------------------------------------------------------------------------------------------------------


async def test_a_receipt_says_what_was_accepted_and_when_it_settles(ledger_place):
    async with made(ledger_place) as w:
        credits = await w.post({1: 40, 2: 30})
        line = next(x for x in credits.lines if x.peer == peer(1).key)
        (item,) = (await w.receipts(1)).items
        r = open_receipt(item.encoded, SPEC.run_id, OWNER.key).body
        assert r == item.receipt and item.status == "pending"
        assert (r.accepted, r.reason, r.windows, r.tokens) == (True, "", 40, 640)
        assert (r.micro_credits, r.update, r.record) == (line.micro_credits, line.update, credits.record)
        assert (r.number, r.pending_until) == (0, HOLD)
        for expected in ("pending", "settled"):
            await w.post({2: 30})
            assert (await w.receipts(1)).items[0].status == expected
        assert w.board.rounds - 1 == r.pending_until  # the newest final round has just that number


async def test_asking_again_gives_the_same_bytes_also_after_a_restart(ledger_place):
    async with made(ledger_place) as w:
        w.announce(3)
        for _ in range(5):
            await w.post({1: 40, 2: 30})
        before = [[i.encoded for i in (await w.receipts(n)).items] for n in (1, 2, 3)]
        assert [len(x) for x in before] == [5, 5, 1]
        assert [[i.encoded for i in (await w.receipts(n)).items] for n in (1, 2, 3)] == before
        await w.restart()
        assert [[i.encoded for i in (await w.receipts(n)).items] for n in (1, 2, 3)] == before
        w.begin_receipts()
        assert [[i.encoded for i in (await w.receipts(n)).items] for n in (1, 2, 3)] == before


async def test_what_a_round_left_out_gets_a_receipt_with_the_reason(ledger_place):
    async with made(ledger_place) as w:
        told = {
            3: (w.announce(3), "too few of the contributors held all of its bytes in time"),
            4: (w.announce(4, late=True), "decided already"),
            5: (w.announce(5, flaw="it claims windows that were accepted"), "breaks a rule of the chain: it claims"),
            6: (w.announce(6, base=digest("drifted")), "another state"),
            1: (w.announce(1), "another update of this peer was accepted"),
        }
        credits = await w.post({1: 40, 2: 30})
        for number, (update, reason) in told.items():
            item = next(i for i in (await w.receipts(number)).items if i.status == "not accepted")
            r = open_receipt(item.encoded, SPEC.run_id, OWNER.key).body
            assert (r.accepted, r.update, r.record, r.number) == (False, update, credits.record, 0)
            assert reason in r.reason and (r.tokens, r.micro_credits) == (0, 0)
        assert len((await w.receipts(1)).items) == 2
        assert (await w.receipts(2)).items[0].status == "pending" and (await w.receipts(7)).items == ()
        # Received again in the next round, it is not noted again, nor with another reason.
        await w.receipts_made.note([credits])
        w.begin_receipts()
        await w.receipts_made.note([credits])
        assert [len((await w.receipts(n)).items) for n in (3, 4)] == [1, 1]


async def test_a_refusal_that_could_not_be_written_is_written_the_next_time(ledger_place, monkeypatch):
    async with made(ledger_place) as w:
        for number in (3, 4):
            w.announce(number)
        credits = credits_of(w.swarm.chain.add({1: 40}), RULE)
        await w.ledger.run(lambda ledger: ledger.post(credits))
        with monkeypatch.context() as m:
            m.setattr(Ledger, "add_refusal", failing)
            with pytest.raises(LedgerError):
                await w.receipts_made.note([credits])
        await w.receipts_made.note([credits])
        assert [len((await w.receipts(n)).items) for n in (3, 4)] == [1, 1]


def failing(*_: Any) -> None:
    raise LedgerError("the disk is full")


async def test_a_round_that_never_becomes_final_gives_no_receipts(ledger_place):
    async with made(ledger_place) as w:
        w.announce(3)
        lost = credits_of(w.swarm.chain.fork(0).add({1: 5}), RULE)
        await w.receipts_made.note([lost])  # seen at the head once, and left by the chain
        await w.post({1: 40})
        assert len((await w.receipts(3)).items) == 1


async def test_receipts_come_page_by_page_without_gaps(ledger_place):
    async with made(ledger_place) as w:
        for i in range(7):
            if i % 2:
                w.announce(1)  # an update beside the accepted one: two receipts of one round
            await w.post({1: 40, 2: 30})
        whole = [i.encoded for i in (await w.receipts(1)).items]
        assert len(whole) == 10
        for limit in (1, 2, 3, 4):
            found, before = [], None
            while True:
                page = await w.receipts(1, before, limit)
                found += [i.encoded for i in page.items]
                before = page.next
                if before is None:
                    break
            assert found == whole, limit


async def test_a_voided_line_is_said_and_its_receipt_stays(ledger_place):
    async with made(ledger_place) as w:
        credits = await w.post({1: 40, 2: 30})
        (before,) = (await w.receipts(1)).items
        line = next(x for x in credits.lines if x.peer == peer(1).key)
        await w.post({2: 30}, void=(credits.record, line.peer))
        (after,) = (await w.receipts(1)).items
        assert (after.status, after.encoded) == ("voided", before.encoded)
        view = w.board.of(peer(1).key)
        assert (view.pending, view.settled, view.voided, view.recent) == (0, 0, line.micro_credits, 0)


def test_a_long_reason_is_cut_to_what_a_receipt_holds():
    header = KeySigner(peer(1)).sign(
        UpdateHeader(SPEC.run_id, 0, digest("p"), state(0), 0, 0, 4, 1, digest(1), 100, 5.0, b"")  # type: ignore[arg-type]
    )
    credits = credits_of(FakeSwarm(SPEC).chain.add({2: 4}), RULE)
    reason = why_not(AnnouncedUpdate(header, False, "ü" * 400), credits, False, replayable=False)
    assert len(reason.encode()) <= 200 and reason.endswith("...")


async def test_a_record_that_convicts_a_peer_is_the_reason_why_its_update_is_not_in_it(ledger_place):
    async with made(ledger_place) as w:
        first = await w.post({1: 40, 2: 30, 3: 20})
        updates = [w.announce(1), w.announce(3)]
        await w.post({2: 30}, decisions=(AuditDecision(first.record, peer(1).key, True),))
        told = [next(i.receipt for i in (await w.receipts(n)).items if not i.receipt.accepted) for n in (1, 3)]
        assert [r.update for r in told] == updates
        assert told[0].reason == "the record convicts this peer"
        assert "too few of the contributors held all of its bytes in time" in told[1].reason


@pytest.mark.parametrize("late", [False, True])
def test_only_where_no_update_can_be_replayed_the_work_of_a_missed_round_is_in_the_next_update(late):
    credits = credits_of(FakeSwarm(SPEC).chain.add({2: 4}), RULE)
    header = KeySigner(peer(1)).sign(
        UpdateHeader(SPEC.run_id, 0, digest("p"), state(0), 0, 0, 4, 1, digest(1), 100, 5.0, b"")  # type: ignore[arg-type]
    )
    for replayable, work in ((False, "goes into this peer's next update"), (True, "is lost")):
        reason = why_not(AnnouncedUpdate(header, late, ""), credits, False, replayable=replayable)
        assert reason.count("its work ") == 1 and f"its work {work}" in reason
        assert len(reason.encode()) <= MAX_REASON


# -- rounds and certificates ---------------------------------------------------------------------------------------


async def test_rounds_come_page_by_page_with_what_is_settled_and_void(ledger_place, monkeypatch):
    monkeypatch.setattr("coordinator.credits.log.PAGE_LINES", 30)
    async with made(ledger_place) as w:
        credited = [await w.post({1: 40, 2: 30}) for _ in range(20)]
        credited.append(await w.post({1: 50}, void=(credited[-1].record, peer(2).key)))
        first = await w.log.rounds(0, 1000)
        rest = await w.log.rounds(len(first.rounds), 1000)
        found = [*first.rounds, *rest.rounds]
        assert len(first.rounds) == 15 and (first.size, first.settled) == (21, 21 - HOLD)
        told = [(r.number, r.record, r.lines) for r in found]
        assert told == [(i, c.record, c.lines) for i, c in enumerate(credited)]
        place = [x.peer for x in credited[19].lines].index(peer(2).key)
        assert {r.number: r.voided for r in found if r.voided} == {19: {place: 20}}
        assert found[19].status(place, 19) == "voided" and found[19].status(1 - place, 19) == "pending"
        assert (await w.log.rounds(21, 5)).rounds == ()
        size, balances = await w.log.balances(None, 1)
        assert size == 21 and len(balances) == 1
        size, more = await w.log.balances(balances[0][0], 9)
        assert dict(balances + more) == await w.ledger.read(lambda ledger: ledger.balances())


async def test_a_page_of_large_rounds_exceeds_its_size_by_one_round_at_most(ledger_place, monkeypatch):
    monkeypatch.setattr("coordinator.credits.log.PAGE_LINES", 10)
    async with made(ledger_place) as w:
        for size in (1, 1, 1, 8, 8, 8, 8):
            await w.post(dict.fromkeys(range(size), 40))
        found, lines = [], []
        while page := (await w.log.rounds(len(found), 1000)).rounds:
            found += page
            lines.append(sum(len(r.lines) for r in page))
        assert [r.number for r in found] == list(range(7)) and lines == [11, 16, 8]


async def test_a_page_of_balances_reads_only_its_own_rows(ledger_place, monkeypatch):
    async with made(ledger_place) as w:
        await w.post(dict.fromkeys(range(10), 40))
        read = []
        with monkeypatch.context() as m:
            original = Ledger.balances

            def balances(ledger: Ledger, **arguments: Any) -> Any:
                found = original(ledger, **arguments)
                read.append(len(found))
                return found

            m.setattr(Ledger, "balances", balances)
            _, first = await w.log.balances(None, 3)
            _, second = await w.log.balances(first[-1][0], 3)
        assert read == [3, 3]
        keys = sorted(peer(n).key for n in range(10))
        assert [p for p, _ in first + second] == keys[:6]


async def test_certificates_are_given_from_where_one_asks(ledger_place):
    async with made(ledger_place) as w:
        for _ in range(3):
            await w.post({1: 40})
        from protocol.chain import genesis_digest

        sent, more = await w.log.certificates(genesis_digest(SPEC.run_id), 2)
        assert len(sent) == 2 and more
        sent, more = await w.log.certificates(w.swarm.chain.certificates[1].digest, 2)
        assert len(sent) == 1 and not more
        with pytest.raises(MalformedError, match="not on the chain"):
            await w.log.certificates(digest("x"), 2)


# -- totals ----------------------------------------------------------------------------------------------------------


async def test_totals_follow_the_ledger_and_survive_a_restart(ledger_place):
    async with made(ledger_place) as w:
        for r in range(5):
            await w.post({1: 40, 2: 30 + r})
        w.clock[0] += 60
        views = [w.board.of(peer(n).key) for n in (1, 2, 9)]
        one, two, nobody = views
        assert one.settled == 3 * RULE.micro_credits(40) and one.pending == 2 * RULE.micro_credits(40)
        assert (one.tokens, one.rounds, nobody.settled, nobody.recent) == (5 * 640, 5, 0, 0)
        board = w.board.leaderboard("peer", 10, "")
        assert [v.key for v in board] == [str(peer(n).key) for n in (1, 2)]
        assert w.board.leaderboard("peer", 10, board[0].key) == board[1:]
        assert w.board.leaderboard("peer", 10, "nobody") == []
        await w.restart()
        again = [w.board.of(peer(n).key) for n in (1, 2, 9)]
        assert [(v.settled, v.pending, v.tokens, v.rounds) for v in again] == [
            (v.settled, v.pending, v.tokens, v.rounds) for v in views
        ]
        # By the hour after a restart: half an hour of a week's half-life.
        assert again[0].recent == pytest.approx(one.recent, rel=0.01) and w.board.rounds == 5


def test_the_recent_average_is_what_one_earns_a_day_and_halves_in_a_week():
    recent, key = RecentAverageCredit(), peer(1).key
    for minute in range(60 * 24 * 70):
        if minute % 30 == 0:
            recent.add(key, 1000, minute * 60)
    now = 70 * DAY
    assert recent.of(key, now) == pytest.approx(48_000, rel=0.01)
    assert recent.of(key, now + 7 * DAY) == pytest.approx(24_000, rel=0.01)
    assert recent.of(key, now - DAY) == recent.of(key, now - 1800)  # never more than it was, by a clock set back
    assert recent.of(peer(2).key, now) == 0


@pytest.mark.parametrize("seen", [True, False])
async def test_a_clock_that_was_a_year_ahead_for_one_round_changes_no_average_for_long(ledger_place, seen):
    async def post(w: World) -> None:
        credits = credits_of(w.swarm.chain.add({1: 40_000}), RULE)
        if seen:
            await w.ledger.run(lambda ledger: ledger.note_first_seen(credits.record, credits.round, w.clock[0] - 60))
        await w.ledger.run(lambda ledger: ledger.post(credits))
        await w.refresh()

    async with made(ledger_place) as w:
        for ahead in [0, 365, *[0] * 20]:
            w.clock[0] += DAY * (1 + ahead)
            await post(w)
            w.clock[0] -= DAY * ahead
        # A sum over days, not an integral: it is above the constant.
        due = sum(math.log(2) / 7 * 0.5 ** (day / 7) for day in range(22)) * RULE.micro_credits(40_000)
        assert w.board.of(peer(1).key).recent == pytest.approx(due, rel=0.15)
        if seen:
            await w.restart()
            assert w.board.of(peer(1).key).recent == pytest.approx(due, rel=0.15)
        before = w.board.of(peer(1).key).recent
        w.clock[0] += 7 * DAY
        assert w.board.of(peer(1).key).recent == pytest.approx(before / 2, rel=0.01)


def test_the_order_of_earning_does_not_matter_and_what_is_taken_back_is_gone():
    a, b, key = RecentAverageCredit(), RecentAverageCredit(), peer(1).key
    for at in (1.0, 3 * DAY, 5 * DAY):
        a.add(key, 10**9, at)
    for at in (5 * DAY, 1.0, 3 * DAY):
        b.add(key, 10**9, at)
    assert a.of(key, 6 * DAY) == pytest.approx(b.of(key, 6 * DAY))
    for at in (1.0, 3 * DAY, 5 * DAY):
        a.add(key, -(10**9), at)
    assert round(a.of(key, 6 * DAY)) == 0


async def test_several_peers_are_one_account_and_accounts_are_a_team(ledger_place):
    ada, bob = identity("ada"), identity("bob")
    async with made(ledger_place) as w:
        await w.post({1: 40, 2: 30, 3: 20})
        now = int(w.clock[0])
        assert await w.board.bind(bind(peer(1), ada, SPEC.run_id, now, "ada", "engines").encoded) == 1
        assert await w.board.bind(bind(peer(2), ada, SPEC.run_id, now, "ada", "engines").encoded) == 2
        assert await w.board.bind(bind(peer(3), bob, SPEC.run_id, now, "bob", "engines").encoded) == 1
        view = w.board.of(ada.key)
        assert (view.kind, view.name, view.team, len(view.peers)) == ("account", "ada", "engines", 2)
        assert view.pending == RULE.micro_credits(40) + RULE.micro_credits(30)
        assert (w.board.of(peer(1).key)).account == ada.key
        assert [v.name for v in w.board.leaderboard("account", 10, "")] == ["ada", "bob"]
        (team,) = w.board.leaderboard("team", 10, "")
        assert (team.key, team.pending) == ("engines", view.pending + RULE.micro_credits(20))
        await w.board.bind(bind(peer(4), identity("eve"), SPEC.run_id, now, "eve").encoded)
        assert [v.name for v in w.board.leaderboard("account", 1, "", "engines")] == ["ada"]
        assert [v.name for v in w.board.leaderboard("account", 9, str(ada.key), "engines")] == ["bob"]
        assert [v.key for v in w.board.leaderboard("peer", 9, "", "engines")] == [str(peer(n).key) for n in (1, 2, 3)]
        assert w.board.leaderboard("team", 9, "", "engines") == [team]
        assert w.board.leaderboard("account", 9, "", "nobody's") == []
        # A peer that goes to another account takes what it has earned along; a newer name counts.
        assert await w.board.bind(bind(peer(2), bob, SPEC.run_id, now + 1, "Bob", "").encoded) == 2
        await w.restart()
        assert (w.board.of(ada.key)).peers == (peer(1).key,)
        assert (w.board.of(bob.key)).name == "Bob"
        assert [v.pending for v in w.board.leaderboard("team", 10, "")] == [RULE.micro_credits(40)]
        # Two accounts may have one name: then both are shown with their keys.
        await w.board.bind(bind(peer(2), bob, SPEC.run_id, now + 2, "Ada", "").encoded)
        assert w.board.of(bob.key).name == f"Ada {bob.key.short}" and w.board.of(ada.key).name == f"ada {ada.key.short}"


async def test_an_account_cannot_use_up_the_bindings_of_a_peer_that_consented_once(ledger_place, monkeypatch):
    monkeypatch.setattr("coordinator.credits.leaderboard.MAX_BINDINGS_OF_PEER", 3)
    ada, eve = identity("ada"), identity("eve")
    async with made(ledger_place) as w:
        now = int(w.clock[0])
        consent = sign(peer(1), BindPeer(SPEC.run_id, eve.key, now)).encoded
        for later in range(10):
            word = sign(eve, BindAccount(SPEC.run_id, consent, now + later, f"eve {later}", ""))
            assert await w.board.bind(word.encoded) == 1
        for _ in range(2):
            assert w.board.of(eve.key).name == "eve 9"
            assert len(await w.ledger.run(lambda ledger: ledger.bindings())) == 1
            await w.restart()
        for later in (1, 2):
            assert await w.board.bind(bind(peer(1), ada, SPEC.run_id, now + later, "ada").encoded) == 1
        await w.restart()
        assert w.board.of(peer(1).key).account == ada.key
        with pytest.raises(TooManyError, match="was bound 3 times"):
            await w.board.bind(bind(peer(1), eve, SPEC.run_id, now + 3, "eve").encoded)


async def test_the_bindings_of_a_forgotten_peer_without_credits_are_forgotten_and_its_empty_account(ledger_place):
    """Else strangers with fresh keys fill the table of accounts for ever."""
    ada, eve, zoe = identity("ada"), identity("eve"), identity("zoe")
    async with made(ledger_place) as w:
        await w.post({1: 40})
        now = int(w.clock[0])
        for number, account in ((1, ada), (2, ada), (3, eve), (4, zoe)):
            await w.board.bind(bind(peer(number), account, SPEC.run_id, now, account.key.short, "all").encoded)
        await w.board.bind(bind(peer(4), eve, SPEC.run_id, now + 1, "eve", "all").encoded)
        assert w.board.of(zoe.key).kind == "peer"  # its only peer went to another account
        await w.board.forget_absent()
        assert len(await w.ledger.run(lambda ledger: ledger.bindings())) == 5
        w.admitters.known -= {peer(n).key for n in (1, 2, 3)}
        await w.board.forget_absent()
        for _ in range(2):
            assert w.board.of(ada.key).peers == (peer(1).key,) and w.board.of(eve.key).peers == (peer(4).key,)
            await w.restart()
        w.admitters.known.discard(peer(4).key)
        await w.board.forget_absent()
        assert w.board.of(eve.key).kind == "peer"
        assert [r.peer for r in await w.ledger.run(lambda ledger: ledger.bindings())] == [peer(1).key]
        w.admitters.known.add(peer(4).key)
        assert await w.board.bind(bind(peer(4), zoe, SPEC.run_id, now, "zoe").encoded) == 1


async def test_accounts_that_never_earned_anything_are_not_ranked(ledger_place):
    async with made(ledger_place) as w:
        await w.post({1: 40})
        for number, name in ((1, "ada"), (2, "eve")):
            word = bind(peer(number), identity(name), SPEC.run_id, int(w.clock[0]), name, f"{name}'s")
            await w.board.bind(word.encoded)
        assert [v.name for v in w.board.leaderboard("account", 9)] == ["ada"]
        assert [v.name for v in w.board.leaderboard("team", 9)] == ["ada's"]
        await w.post({2: 30})
        assert [v.name for v in w.board.leaderboard("account", 9)] == ["ada", "eve"]
        assert [v.name for v in w.board.leaderboard("team", 9)] == ["ada's", "eve's"]


async def test_stored_bindings_are_verified_beside_the_event_loop(ledger_place, monkeypatch):
    verifying: list[threading.Thread] = []

    def noted(*given):
        verifying.append(threading.current_thread())
        return open_binding(*given)

    async with made(ledger_place) as w:
        await w.board.bind(bind(peer(1), identity("ada"), SPEC.run_id, int(w.clock[0]), "ada").encoded)
        monkeypatch.setattr("coordinator.credits.leaderboard.open_binding", noted)
        await w.restart()
        assert w.board.of(peer(1).key).account == identity("ada").key
    assert verifying and threading.current_thread() not in verifying


async def test_a_binding_whose_write_failed_is_written_when_it_comes_again(ledger_place, monkeypatch):
    async with made(ledger_place) as w:
        word = bind(peer(1), identity("ada"), SPEC.run_id, int(w.clock[0]), "ada").encoded
        with monkeypatch.context() as m:
            m.setattr(Ledger, "add_binding", failing)
            with pytest.raises(LedgerError):
                await w.board.bind(word)
        assert await w.board.bind(word) == 1
        assert await w.board.bind(word) == 1
        await w.restart()
        assert (w.board.of(peer(1).key)).account == identity("ada").key
        assert len(await w.ledger.run(lambda ledger: ledger.bindings())) == 1


async def test_receipts_are_signed_beside_the_event_loop(ledger_place, monkeypatch):
    signing: list[threading.Thread] = []

    def noted(*given):
        signing.append(threading.current_thread())
        return sign(*given)

    monkeypatch.setattr("coordinator.credits.receipts.sign", noted)
    async with made(ledger_place) as w:
        for windows in (40, 50):
            await w.post({1: windows})
        for _ in range(2):  # each is signed once
            assert len((await w.receipts(1)).items) == 2
    assert len(signing) == 2 and threading.current_thread() not in signing


async def test_a_binding_whose_caller_goes_away_counts_when_it_is_stored(ledger_place, monkeypatch):
    begun, go, add = threading.Event(), threading.Event(), Ledger.add_binding

    def slow(ledger: Ledger, row: BindingRow) -> None:
        begun.set()
        go.wait(LIMIT)
        add(ledger, row)

    async with made(ledger_place) as w:
        monkeypatch.setattr(Ledger, "add_binding", slow)
        word = bind(peer(1), identity("ada"), SPEC.run_id, int(w.clock[0]), "ada").encoded
        caller = asyncio.create_task(w.board.bind(word))
        await until(begun.is_set, "the binding is being stored")
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        go.set()
        await until(lambda: w.board.of(peer(1).key).account == identity("ada").key, "the binding counts")


async def test_what_is_voided_while_recent_credits_are_read_is_taken_out_once(ledger_place):
    async with made(ledger_place) as w:
        await w.post({1: 40})
        credits = await w.post({1: 40})
        await w.ledger.close()
        w.ledger = LedgerThread()
        await w.ledger.open(w.place, SPEC, lambda: w.clock[0])
        board = w.leaderboard()
        await board.load()
        w.carry((credits.record, peer(1).key))
        last = credits_of(w.swarm.chain.add({2: 30}), RULE)
        await w.ledger.run(lambda ledger: ledger.post(last))
        await board.load_recent()
        await board.refresh()
        one = RULE.micro_credits(40) * math.log(2) / 7
        assert board.of(peer(1).key).recent == round(one) > 0


async def test_a_page_that_was_just_full_still_brings_new_totals(ledger_place, monkeypatch):
    async with made(ledger_place) as w:
        monkeypatch.setattr("coordinator.credits.leaderboard.PAGE", 1)
        await w.post({1: 40})
        assert (w.board.of(peer(1).key)).pending == RULE.micro_credits(40)


async def test_a_binding_or_a_refusal_that_could_not_be_written_is_written_when_it_is_asked_again(
    ledger_place, monkeypatch
):
    def full(ledger: Ledger, what: object) -> None:
        raise LedgerConflictError("no space left")

    async with made(ledger_place) as w:
        ada = identity("ada")
        word = bind(peer(1), ada, SPEC.run_id, int(w.clock[0]), "ada").encoded
        w.announce(3, late=True)
        credits = credits_of(w.swarm.chain.add({1: 40}), RULE)
        with monkeypatch.context() as m:
            m.setattr(Ledger, "add_binding", full)
            m.setattr(Ledger, "add_refusal", full)
            for _ in range(2):
                with pytest.raises(LedgerConflictError):
                    await w.board.bind(word)
                with pytest.raises(LedgerConflictError):
                    await w.receipts_made.note([credits])
        assert await w.board.bind(word) == 1
        await w.receipts_made.note([credits])
        await w.ledger.run(lambda ledger: ledger.post(credits))
        assert [i.status for i in (await w.receipts(3)).items] == ["not accepted"]
        await w.restart()
        assert (w.board.of(ada.key)).peers == (peer(1).key,)


async def test_a_round_that_the_database_lost_is_added_to_the_recent_average_once(tmp_path, monkeypatch):
    async with made(str(tmp_path / "ledger.sqlite")) as w:
        for _ in range(2):
            await w.post({1: 40})
        before = w.board.of(peer(1).key).recent
        with monkeypatch.context() as m:
            m.setattr(Ledger, "size", lambda ledger: 1)
            await w.board.refresh()
        await w.board.refresh()
        assert w.board.of(peer(1).key).recent == before > 0 and w.board.rounds == 2


async def test_standings_are_up_to_date_also_when_a_page_was_just_full(tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.credits.leaderboard.PAGE", 2)
    async with made(str(tmp_path / "ledger.sqlite")) as w:
        for _ in range(2):
            credits = credits_of(w.swarm.chain.add({1: 40}), RULE)
            await w.ledger.run(lambda ledger, c=credits: ledger.post(c))
        await w.refresh()
        assert (w.board.of(peer(1).key)).pending == 2 * RULE.micro_credits(40)


async def test_a_binding_that_is_not_good_is_refused(ledger_place, monkeypatch):
    ada, bob = identity("ada"), identity("bob")
    async with made(ledger_place) as w:
        now = int(w.clock[0])
        first = bind(peer(1), ada, SPEC.run_id, now, "ada")
        assert await w.board.bind(first.encoded) == await w.board.bind(first.encoded) == 1  # again: nothing happens
        assert len(await w.ledger.read(lambda ledger: ledger.bindings())) == 1
        with pytest.raises(RefusedError, match="newer"):
            await w.board.bind(bind(peer(1), bob, SPEC.run_id, now - 5, "bob").encoded)
        with pytest.raises(RefusedError, match="clock is 5000 s ahead"):
            await w.board.bind(bind(peer(1), bob, SPEC.run_id, now + 5000, "bob").encoded)
        with pytest.raises(RefusedError, match="not known here"):
            await w.board.bind(bind(identity("stranger"), ada, SPEC.run_id, now, "ada").encoded)
        from protocol.ledger.statements import BindAccount, BindPeer, sign

        stolen = sign(peer(2), BindPeer(SPEC.run_id, bob.key, now)).encoded
        with pytest.raises(AdmissionError):
            await w.board.bind(sign(ada, BindAccount(SPEC.run_id, stolen, now, "ada", "")).encoded)
        monkeypatch.setattr("coordinator.credits.leaderboard.MAX_PEERS_OF_ACCOUNT", 1)
        with pytest.raises(TooManyError, match="at most 1 peers"):
            await w.board.bind(bind(peer(2), ada, SPEC.run_id, now, "ada").encoded)
        monkeypatch.setattr("coordinator.credits.leaderboard.MAX_BINDINGS_OF_PEER", 1)
        with pytest.raises(TooManyError, match="bound 1 times"):
            await w.board.bind(bind(peer(1), ada, SPEC.run_id, now + 1, "ada").encoded)
        assert time.time() > 0 and (w.board.of(ada.key)).peers == (peer(1).key,)
