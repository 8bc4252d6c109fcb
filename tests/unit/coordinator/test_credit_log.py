"""The coordinator's log of credits: receipts that stay the same, heads that never contradict, valid proofs."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.credits import tree_heads
from coordinator.credits.leaderboard import Leaderboard, RecentAverageCredit
from coordinator.credits.log import CreditLog
from coordinator.credits.receipts import Receipts, why_not
from coordinator.credits.tree_heads import TreeHeadSigner
from coordinator.errors import LedgerConflictError, LedgerError, RefusedError, TooManyError
from coordinator.history import RoundHistory
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger import Ledger, TreeHeadRow
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import AnnouncedUpdate
from protocol.errors import AdmissionError, MalformedError
from protocol.ids import Digest, PeerKey
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.entries import RoundEntry, decode_entry, decode_line
from protocol.ledger.statements import bind, open_receipt, open_tree_head
from protocol.ledger.void_orders import VoidOrder, seal_void_order
from protocol.merkle import leaf_hash
from protocol.message_codec import KeySigner
from protocol.messages import UpdateHeader
from protocol.proofs import check_consistency, check_inclusion
from tests.support.coordinator_fakes import FakeSwarm, make_spec, peer, state
from tests.support.specs import OWNER, digest, identity
from tests.support.waiting import until

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
        self.swarm = FakeSwarm(SPEC)
        self.ledger = LedgerThread()

    async def open(self) -> None:
        self.ledger = LedgerThread()
        await self.ledger.open(self.place, SPEC, self.now)
        self.chain = IndexedChain()
        self.heads = TreeHeadSigner(SPEC.run_id, OWNER, self.ledger, self.now)
        self.receipts_made = Receipts(SPEC, OWNER, self.swarm, self.ledger, self.now)
        self.board = self.leaderboard()
        self.log = CreditLog(
            self.ledger, self.swarm, self.chain, self.heads, self.receipts_made, self.board, asyncio.Event()
        )
        await self.log.start()
        await self.board.load_recent()
        await self.read_balances()

    def now(self) -> float:
        return self.clock[0]

    def leaderboard(self) -> Leaderboard:
        admitters = Admitters()
        return Leaderboard(SPEC.run_id, self.ledger, self.chain, admitters.name_of, admitters.knows, self.now)

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

    async def post(self, work: dict[int, int]):
        account = credits_of(self.swarm.chain.add(work), RULE)
        self.clock[0] += 60
        await self.receipts_made.note([account])
        await self.ledger.run(lambda ledger: ledger.post(account))
        await self.refresh()
        return account

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
        account = await w.post({1: 40, 2: 30})
        line = next(x for x in account.lines if x.peer == peer(1).key)
        (item,) = (await w.receipts(1)).items
        r = open_receipt(item.encoded, SPEC.run_id, OWNER.key).body
        assert r == item.receipt and item.status == "pending"
        assert (r.accepted, r.reason, r.windows, r.tokens) == (True, "", 40, 640)
        assert (r.micro_credits, r.update, r.record) == (line.micro_credits, line.update, account.record)
        assert (r.entry, r.pending_until) == (0, HOLD)
        stored = decode_line((await w.log.lines(0, 1))[0][0].lines[r.line])
        assert (stored.peer, stored.update, stored.micro_credits) == (r.peer, r.update, r.micro_credits)
        for expected in ("pending", "settled"):
            await w.post({2: 30})
            assert (await w.receipts(1)).items[0].status == expected
        assert w.board.rounds - 1 == r.pending_until  # the newest round entry has just that number


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
        w.receipts_made._signed.clear()
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
        account = await w.post({1: 40, 2: 30})
        for number, (update, reason) in told.items():
            item = next(i for i in (await w.receipts(number)).items if i.status == "not accepted")
            r = open_receipt(item.encoded, SPEC.run_id, OWNER.key).body
            assert (r.accepted, r.update, r.record, r.entry) == (False, update, account.record, 0)
            assert reason in r.reason and (r.tokens, r.micro_credits) == (0, 0)
        assert len((await w.receipts(1)).items) == 2
        assert (await w.receipts(2)).items[0].status == "pending" and (await w.receipts(7)).items == ()
        # Received again in the next round, it is not noted again, nor with another reason.
        await w.receipts_made.note([account])
        w.receipts_made._noted.clear()
        await w.receipts_made.note([account])
        assert [len((await w.receipts(n)).items) for n in (3, 4)] == [1, 1]


async def test_a_refusal_that_could_not_be_written_is_written_the_next_time(ledger_place, monkeypatch):
    async with made(ledger_place) as w:
        for number in (3, 4):
            w.announce(number)
        account = credits_of(w.swarm.chain.add({1: 40}), RULE)
        await w.ledger.run(lambda ledger: ledger.post(account))
        with monkeypatch.context() as m:
            m.setattr(Ledger, "add_refusal", failing)
            with pytest.raises(LedgerError):
                await w.receipts_made.note([account])
        await w.receipts_made.note([account])
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
        account = await w.post({1: 40, 2: 30})
        (before,) = (await w.receipts(1)).items
        line = next(x for x in account.lines if x.peer == peer(1).key)
        void_order = VoidOrder(SPEC.run_id, account.round, account.record, line.peer, line.update, "a copy")
        await w.ledger.run(lambda ledger: ledger.void(seal_void_order(OWNER, void_order).encoded))
        await w.refresh()
        (after,) = (await w.receipts(1)).items
        assert (after.status, after.encoded) == ("voided", before.encoded)
        view = w.board.of(peer(1).key)
        assert (view.pending, view.settled, view.voided, view.recent) == (0, 0, line.micro_credits, 0)


def test_a_long_reason_is_cut_to_what_a_receipt_holds():
    header = KeySigner(peer(1)).sign(
        UpdateHeader(SPEC.run_id, 0, digest("p"), state(0), 0, 4, 1, digest(1), 100, 5.0, b"")  # type: ignore[arg-type]
    )
    account = credits_of(FakeSwarm(SPEC).chain.add({2: 4}), RULE)
    reason = why_not(AnnouncedUpdate(header, False, "ü" * 400), account, False)
    assert len(reason.encode()) <= 200 and reason.endswith("...")


# -- tree heads ----------------------------------------------------------------------------------------------------


async def heads_of(w: World, limit: int = 100) -> list[Any]:
    return [open_tree_head(sent, SPEC.run_id, OWNER.key).body for sent in await w.log.heads(None, limit)]


async def test_a_head_is_at_most_a_minute_old_and_covers_the_log(ledger_place):
    async with made(ledger_place) as w:
        (empty,) = await heads_of(w)
        assert empty.size == 0
        await w.post({1: 40})
        w.clock[0] -= 30
        assert (await heads_of(w))[0] == empty  # half a minute old: good enough
        w.clock[0] += 31
        newest = (await heads_of(w))[0]
        assert newest.size == 1 and newest.time == int(w.clock[0] * 1000)
        assert newest.root == await w.ledger.read(lambda ledger: ledger.root())
        w.clock[0] += 100
        again = (await heads_of(w))[0]
        assert (again.size, again.root) == (1, newest.root) and again.time > newest.time
        # One that says nothing new is not written down each minute.
        assert len(await w.ledger.read(lambda ledger: ledger.heads(100))) == 2
        await w.restart()
        assert (await heads_of(w))[0].size == 1


async def test_a_head_that_cannot_be_stored_is_a_problem_until_it_is(ledger_place, monkeypatch):
    async with made(ledger_place) as w:
        await w.log.heads(None, 1)
        await w.post({1: 40})
        w.clock[0] += 300

        def full(ledger: Ledger, head: TreeHeadRow) -> None:
            raise LedgerConflictError("no space left")

        with monkeypatch.context() as m:
            m.setattr(Ledger, "add_head", full)
            monkeypatch.setattr(tree_heads, "POLL_SECONDS", 0.01)
            signing = asyncio.create_task(w.heads.sign_forever())
            await until(lambda: "no space left" in w.heads.problem)
        await until(lambda: not w.heads.problem, "the head is signed")
        signing.cancel()
        assert w.heads.problem == ""


async def test_the_newest_head_is_as_old_as_it_was_signed_not_as_it_was_written_down(ledger_place):
    """A run that rests writes a head an hour; the alert `log` must stay quiet."""
    async with made(ledger_place) as w:
        w.clock[0] += 400
        assert w.heads.age == 400  # none was ever signed: that is news too
        for _ in range(20):
            await w.log.heads(None, 1)
            assert w.heads.age < 0.01
            w.clock[0] += 61
        (written,) = await w.ledger.read(lambda ledger: ledger.heads(1))
        assert w.clock[0] - written.time / 1000 > 1000 and 60 < w.heads.age < 62


async def test_a_shorter_or_other_log_is_never_signed(tmp_path):
    async with made(str(tmp_path / "ledger.sqlite")) as w:
        for _ in range(4):
            await w.post({1: 40})
        w.clock[0] += 61
        head = (await heads_of(w))[0]
        await w.ledger.close()
        tamper(tmp_path, "UPDATE entries SET leaf = x'" + "00" * 32 + "' WHERE sequence = 1", "UPDATE entries")
        tamper(tmp_path, "UPDATE nodes SET hash = x'" + "00" * 32 + "' WHERE level = 1 AND place = 0")
        tamper(tmp_path, "UPDATE nodes SET hash = x'" + "00" * 32 + "' WHERE level = 2 AND place = 0")
        log = await reopened(w)
        with pytest.raises(LedgerConflictError, match="another root"):
            await log.newest()
        await w.ledger.close()
        tamper(tmp_path, "UPDATE heads SET size = 99, encoded = encoded")
        bigger = head.__class__(SPEC.run_id, 99, digest("root"), head.time)
        from protocol.ledger.statements import sign

        tamper(tmp_path, f"UPDATE heads SET encoded = x'{sign(OWNER, bigger).encoded.hex()}'")
        log = await reopened(w)
        with pytest.raises(LedgerConflictError, match="a tree head over 99 was signed"):
            await log.newest()
        await w.ledger.close()
        tamper(tmp_path, f"UPDATE heads SET encoded = x'{sign(identity('forger'), bigger).encoded.hex()}'")
        log = await reopened(w)
        with pytest.raises(LedgerConflictError, match="none of this run's owner"):
            await log.newest()
        w.clock[0] += 400
        assert log.age == 400  # so there is an alert
        w.ledger = LedgerThread()


async def test_a_hash_that_is_missing_is_said_and_nothing_is_signed(tmp_path):
    async with made(str(tmp_path / "ledger.sqlite")) as w:
        for _ in range(4):
            await w.post({1: 40})
        await heads_of(w)
        await w.ledger.close()
        tamper(tmp_path, "DELETE FROM nodes WHERE level = 2")
        log = await reopened(w)
        with pytest.raises(LedgerConflictError, match="a hash of the log is missing"):
            await log.newest()
        w.ledger = LedgerThread()


async def test_a_log_that_does_not_grow_is_signed_all_the_same(ledger_place):
    async with made(ledger_place) as w:
        assert w.heads.age == 0  # since the start
        await w.post({1: 40})
        for _ in range(10):
            w.clock[0] += 61
            await heads_of(w)
            assert w.heads.age == 0
        w.clock[0] += 30
        assert w.heads.age == 30


async def reopened(w: World) -> TreeHeadSigner:
    w.clock[0] += 100

    class Opened(LedgerThread):
        """Without the ledger's own check at its start: tree heads look for themselves."""

    w.ledger = Opened()
    ledger = Ledger.__new__(Ledger)
    reader = Ledger(w.place, SPEC, reader=True)
    ledger.__dict__.update(reader.__dict__)
    w.ledger._ledger = w.ledger._reader = reader
    log = TreeHeadSigner(SPEC.run_id, OWNER, w.ledger, lambda: w.clock[0])
    await log.start()
    return log


def tamper(folder: Path, statement: str, *_: str) -> None:
    """Behind the triggers."""
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")
        db.execute(statement)
    db.close()


# -- the log and its proofs ------------------------------------------------------------------------------------------


async def test_entries_lines_and_proofs_are_those_of_the_signed_head(ledger_place):
    async with made(ledger_place) as w:
        for r in range(6):
            await w.post({1: 40 + r, 2: 30})
        w.clock[0] += 61
        head = (await heads_of(w))[0]
        entries, size = await w.log.entries(0, 1000)
        assert size == len(entries) == head.size
        assert (await w.log.entries(3, 2))[0] == entries[3:5] and (await w.log.entries(size, 5))[0] == []
        for n, sent in enumerate(entries):
            check_inclusion(leaf_hash(sent), n, size, await w.log.inclusion(n, size), head.root)
        found, following = await w.log.lines(0, 1000)
        assert following == size
        rounds = [n for n, sent in enumerate(entries) if isinstance(decode_entry(sent).payload, RoundEntry)]
        assert [g.entry for g in found] == rounds
        await w.post({1: 40})
        w.clock[0] += 61
        newer = (await heads_of(w))[0]
        path = await w.log.consistency(head.size, newer.size)
        check_consistency(head.size, head.root, newer.size, newer.root, path)
        for bad in (w.log.inclusion(0, 99), w.log.inclusion(9, 9), w.log.consistency(5, 3), w.log.consistency(0, 99)):
            with pytest.raises(MalformedError):
                await bad


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
        # A peer that goes to another account takes what it has earned along; a newer name counts.
        assert await w.board.bind(bind(peer(2), bob, SPEC.run_id, now + 1, "Bob", "").encoded) == 2
        await w.restart()
        assert (w.board.of(ada.key)).peers == (peer(1).key,)
        assert (w.board.of(bob.key)).name == "Bob"
        assert [v.pending for v in w.board.leaderboard("team", 10, "")] == [RULE.micro_credits(40)]
        # Two accounts may have one name: then both are shown with their keys.
        await w.board.bind(bind(peer(2), bob, SPEC.run_id, now + 2, "Ada", "").encoded)
        assert w.board.of(bob.key).name == f"Ada {bob.key.short}" and w.board.of(ada.key).name == f"ada {ada.key.short}"


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


async def test_what_is_voided_while_recent_credits_are_read_is_taken_out_once(ledger_place):
    async with made(ledger_place) as w:
        await w.post({1: 40})
        account = await w.post({1: 40})
        await w.ledger.close()
        w.ledger = LedgerThread()
        await w.ledger.open(w.place, SPEC, lambda: w.clock[0])
        board = w.leaderboard()
        await board.load()
        void_order = VoidOrder(SPEC.run_id, account.round, account.record, peer(1).key, account.lines[0].update, "no")
        await w.ledger.run(lambda ledger: ledger.void(seal_void_order(OWNER, void_order).encoded))
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
        account = credits_of(w.swarm.chain.add({1: 40}), RULE)
        with monkeypatch.context() as m:
            m.setattr(Ledger, "add_binding", full)
            m.setattr(Ledger, "add_refusal", full)
            for _ in range(2):
                with pytest.raises(LedgerConflictError):
                    await w.board.bind(word)
                with pytest.raises(LedgerConflictError):
                    await w.receipts_made.note([account])
        assert await w.board.bind(word) == 1
        await w.receipts_made.note([account])
        await w.ledger.run(lambda ledger: ledger.post(account))
        assert [i.status for i in (await w.receipts(3)).items] == ["not accepted"]
        await w.restart()
        assert (w.board.of(ada.key)).peers == (peer(1).key,)


async def test_standings_are_up_to_date_also_when_a_page_was_just_full(tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.credits.leaderboard.PAGE", 2)
    async with made(str(tmp_path / "ledger.sqlite")) as w:
        for _ in range(2):
            account = credits_of(w.swarm.chain.add({1: 40}), RULE)
            await w.ledger.run(lambda ledger, a=account: ledger.post(a))
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
        with pytest.raises(RefusedError, match="never admitted"):
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
