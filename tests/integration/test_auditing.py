"""`cairn audit` and `cairn account` against a coordinator, honest and not: what a stranger finds on its own machine."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import sqlite3
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from starlette.applications import Starlette

from cairn.connection import CoordinatorConnection
from cairn.ledger_audit import AuditResult, as_plain, audit_credits, receipt_problem, result_lines
from cairn.main import main
from coordinator.credits.leaderboard import Leaderboard
from coordinator.credits.log import CreditLog
from coordinator.credits.receipts import Receipts
from coordinator.history import RoundHistory
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger_thread import LedgerThread
from coordinator.page.credit_routes import credit_routes
from coordinator.swarm import AnnouncedUpdate
from peer.coordinator_client import CoordinatorRefused
from peer.keyfile import load_or_make
from peer.log_client import LogClient
from peer.swarm.errors import PeerRefused, PeerUnreachable
from protocol.audits import AuditRule
from protocol.chain import Chain, UnknownParent
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.statements import open_receipt
from protocol.message_codec import KeySigner, encode_certificate
from protocol.messages import AuditDecision, Directive, Finalization, Rollback, Score, UpdateHeader, Verdict
from protocol.rounds.policy import RoundPolicy
from protocol.version import PROTOCOL
from protocol.wire import swarm_pb2 as wire
from tests.support.coordinator_fakes import FakeSwarm, make_spec, peer, state
from tests.support.coordinator_service import running, settled
from tests.support.specs import OWNER, digest
from tests.support.waiting import until

SPEC = make_spec(
    credit={"hold_rounds": 2, "flops_per_parameter_token": 1000}, genesis={"digest": state(0).hex(), "size": 524_288}
)
RULE = CreditRule.of(SPEC)


class Asker:
    """Members of a swarm, each with the chain that it keeps: `asking_chain.ChainReader` without a network."""

    def __init__(self, chains: dict[PeerKey, Chain | None]):
        self._chains = chains
        self.members = list(chains)

    async def ask(self, member: PeerKey, have: Sequence[Digest]) -> wire.ChainReply:
        chain = self._chains[member]
        if chain is None:
            raise PeerUnreachable(f"peer {member.short} does not answer")
        try:
            found, more = chain.certificates_after(have, count=3)
        except UnknownParent as e:
            raise PeerRefused(str(e)) from None
        final = chain.finalization.encoded if chain.finalization is not None else b""
        word = chain.newest_directive.encoded if chain.newest_directive is not None else b""
        sent = [encode_certificate(c) for c in found]
        return wire.ChainReply(certificates=sent, finalization=final, more=more, directive=word)


class World:
    """A run of some rounds, its ledger on disk, and who audits it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.clock = [1_700_000_000.0]
        self.swarm = FakeSwarm(SPEC)
        self.swarm.chain.weighs = True  # members check it
        self.chains: dict[PeerKey, Chain | None] = {}
        self.ledger = LedgerThread()

    def chain(self, first: int = 0) -> Chain:
        """Return the chain that a member keeps, from a round on."""
        limits = RoundPolicy.of(SPEC).chain_limits
        if first:
            limits = replace(limits, max_records=1, min_main_records=len(self.swarm.chain.certificates) - first)
        chain = Chain(SPEC.run_id, SPEC.genesis.name, limits)
        for certificate in self.swarm.chain.certificates:
            chain.add(certificate)
        assert (chain.root == chain.genesis) == (first == 0)
        return chain

    async def rollback(self, record: Digest, *, told: bool = True) -> None:
        """Roll the ledger back to round 5; with `told`, the next record carries the directive."""
        rollback = Rollback(1, record, Round(6), state(6))
        if told:
            self.swarm.chain.carry(KeySigner(OWNER).sign(Directive(SPEC.run_id, 1, rollback=rollback)))
        await self.ledger.run(lambda ledger: ledger.rollback(rollback))

    async def open(self) -> None:
        # An owner who falsifies the database first disables the check at its opening.
        self.monkeypatch.setattr("coordinator.ledger.store.Ledger.check", lambda *_: [])
        self.ledger = LedgerThread()
        await self.ledger.open(self.folder / "ledger.sqlite", SPEC, lambda: self.clock[0])
        now = self.now
        self.indexed = IndexedChain(AuditRule.of(SPEC))
        self.board = Leaderboard(SPEC.run_id, self.ledger, self.indexed, lambda k: k.short, lambda k: True, now)
        self.log = CreditLog(
            self.ledger, self.swarm, self.indexed, Receipts(SPEC, OWNER, self.swarm, self.ledger, now), self.board,
            asyncio.Event(),
        )  # fmt: skip
        await self.log.start()

    def now(self) -> float:
        return self.clock[0]

    async def post(self, rounds: int, *, voided: int = 0) -> None:
        """Post rounds. `voided`: windows of earlier rounds that the first one voids."""
        for number in range(rounds):
            made = self.swarm.chain.add({1: 40, 2: 30, 3: 20}, voided=0 if number else voided)
            credits = credits_of(made, RULE)
            self.clock[0] += 61
            await self.ledger.run(lambda ledger, c=credits: ledger.post(c))
        balances = await self.ledger.read(lambda ledger: ledger.balances())
        self.indexed.restore(None, (), RoundHistory(), {}, balances)
        await self.board.refresh()

    def falsify(self, *statements: str) -> None:
        """Change the database itself."""
        with sqlite3.connect(self.folder / "ledger.sqlite") as db:
            for statement in statements:
                db.execute(statement)
        db.close()

    async def falsified(self, *statements: str) -> None:
        """Change the database itself, and let the coordinator continue with it."""
        await self.ledger.close()
        self.falsify(*statements)
        await self.open()

    def connect(self) -> CoordinatorConnection:
        """Return a coordinator whose page and calls answer without a network."""
        log = self.log
        app = Starlette(routes=credit_routes(log))

        async def fetch(url: str) -> bytes:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as web:
                answer = await web.get(url)
            if answer.status_code != 200:
                raise CoordinatorRefused(f"{answer.status_code}: {answer.text}")
            return answer.content

        class Client:
            async def certificates(self, after: Digest, limit: int) -> tuple[Sequence[bytes], bool]:
                try:
                    return await log.certificates(after, limit)
                except MalformedError as e:
                    raise CoordinatorRefused(str(e)) from None

            async def certificate(self, record: Digest) -> bytes | None:
                return await log.certificate(record)

        client: Any = Client()
        invite: Any = None
        read = LogClient("http://x/", SPEC.run_id, OWNER.key, fetch)
        return CoordinatorConnection(invite, client, read, SPEC, ("somewhere",), ())

    async def audit(self) -> AuditResult:
        chains = self.chains or {peer(1).key: self.chain()}

        @asynccontextmanager
        async def asker(*_: Any, **__: Any):
            yield Asker(chains)

        self.monkeypatch.setattr("peer.swarm.anonymous.chain_reader", asker)
        return await audit_credits(self.connect())

    async def found(self) -> list[str]:
        return [d.message for d in (await self.audit()).report.findings]


@asynccontextmanager
async def made(folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: int = 8):
    world = World(folder, monkeypatch)
    await world.open()
    await world.post(rounds)
    try:
        yield world
    finally:
        await world.ledger.close()


# -- honest ----------------------------------------------------------------------------------------------------------


async def test_honest_credits_are_clean(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        first = await w.audit()
        assert first.clean, result_lines(first)
        assert (first.report.rounds, first.from_members, first.from_coordinator) == (8, {peer(1).key: 8}, 0)
        await w.post(2)
        second = await w.audit()
        assert second.clean
        # Newcomers weigh the lower quartile of their claims in the first round, 20; the rest counts in the second.
        weighed = [c.record.body.weighed for c in w.swarm.chain.certificates]
        assert {sum(each) for each in weighed[:1]} == {60} and sum(map(sum, weighed)) == 10 * (40 + 30 + 20)
        assert second.report.issued == sum(RULE.micro_credits(n) for each in weighed for n in each)
        text = "\n".join(result_lines(second))
        assert "clean" in text and "10 certificates from 1 members" in text
        assert json.loads(json.dumps(as_plain(second)))["clean"] is True


async def test_what_members_no_longer_keep_comes_from_the_coordinator_and_is_said(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        monkeypatch.setattr("cairn.audited_chain.PAGE", 2)
        w.chains = {peer(1).key: w.chain(first=5), peer(2).key: None}
        found = await w.audit()
        assert found.clean and found.from_coordinator == 6 and found.from_members == {peer(1).key: 2}
        assert any("6 certificates that members no longer keep" in x for x in found.warnings)


async def test_a_member_that_certifies_alone_without_end_does_not_hold_the_audit(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        lone, asked = FakeSwarm(SPEC).chain, Asker.ask
        lone.weighs = True

        async def endless(self: Asker, member: PeerKey, have: Sequence[Digest]) -> wire.ChainReply:
            if member != peer(9).key:
                return await asked(self, member, have)
            assert len(lone.certificates) < 100, "nobody else is asked"
            return wire.ChainReply(certificates=[encode_certificate(lone.add({9: 1}))], more=True)

        monkeypatch.setattr(Asker, "ask", endless)
        w.chains = {peer(9).key: None, peer(1).key: w.chain()}
        found = await w.audit()
        assert found.clean and found.from_members[peer(1).key] == 8
        # If the honest member keeps nothing so old, the coordinator is asked in the end.
        monkeypatch.setattr("cairn.audited_chain.SPARE", 16)
        w.chains = {peer(9).key: None, peer(1).key: w.chain(first=5)}
        found = await w.audit()
        assert found.clean and found.from_coordinator > 0


async def test_a_swarm_where_nobody_answers_is_said(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        w.chains = {peer(2).key: None}
        found = await w.audit()
        assert found.clean and found.from_coordinator == 8
        assert any("no member of the swarm" in x for x in found.warnings)
        text = "\n".join(result_lines(found))
        assert "8 final rounds" in text and "; no member was there to say up to which round it is final" in text


async def test_receipts_are_those_of_the_certificates(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch, rounds=4) as w:
        item, *_ = await w.connect().log.receipts(peer(1).key)
        good = item.word.body
        assert await receipt_problem(w.connect(), good) == ""
        refused = replace(
            good, accepted=False, reason="late", windows=0, tokens=0, micro_credits=0, pending_until=0,
            update=digest("never listed"),
        )  # fmt: skip
        assert await receipt_problem(w.connect(), refused) == ""
        for wrong, words in (
            (replace(good, windows=41), "it says 41 windows"),
            (replace(good, micro_credits=1), "earn"),
            (replace(good, update=digest("another")), "does not list the update"),
            (replace(good, peer=peer(2).key), "does not list the update"),
            (replace(good, round=Round(1)), "not of the round"),
            (replace(good, record=digest("no record")), "does not give the certificate"),
            (replace(refused, update=good.update), "says that it was not accepted"),
            (replace(good, pending_until=good.pending_until + 1), "it settles with number"),
        ):
            assert words in await receipt_problem(w.connect(), wrong)


# -- falsified -------------------------------------------------------------------------------------------------------


async def test_a_changed_amount_is_named(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        await w.falsified("UPDATE lines SET windows = windows + 10 WHERE number = 3 AND line = 1")
        (found,) = await w.found()
        assert found.startswith("line 1 of number 3 (round 3): peer ") and "windows" in found


async def test_a_credit_moved_to_another_peer_is_named(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        await w.falsified("INSERT INTO peers (id, peer) VALUES (99, x'" + bytes(peer(9).key).hex() + "')",
                          "UPDATE lines SET peer = 99 WHERE number = 3 AND line = 1")  # fmt: skip
        (found,) = await w.found()
        assert f"to peer {peer(9).key.short}; by the certificate they are" in found


async def test_a_total_that_is_not_the_sum_is_named(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        await w.falsified("UPDATE balances SET settled_micro = settled_micro + 1 WHERE peer = 1",
                          "DELETE FROM balances WHERE peer = 2")  # fmt: skip
        found = await w.found()
        assert len(found) == 2 and all("is said to have" in f for f in found)


async def test_a_deleted_round_is_named(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        await w.falsified("DELETE FROM lines WHERE number = 3", "DELETE FROM rounds WHERE number = 3")
        found = await w.found()
        assert any("round 3" in f and "is not credited before number 4" in f for f in found)
        assert any("rounds are missing or out of order" in f for f in found)


async def test_a_void_that_no_verdict_says_is_named_and_so_is_one_that_is_kept_back(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch, rounds=4) as w:
        last = w.swarm.chain.certificates[-1]
        verdict = Verdict(last.digest, last.record.body.contributors[0], "too fast")
        w.swarm.chain.carry(KeySigner(OWNER).sign(Directive(SPEC.run_id, 1, verdicts=(verdict,))))
        await w.post(3, voided=last.record.body.weighed[0])
        found = await w.audit()
        assert found.clean and found.report.voided > 0, result_lines(found)
        await w.falsified("UPDATE lines SET voided_by = 5 WHERE number = 4 AND line = 0")
        assert ["no verdict in the chain says so" in f for f in await w.found()] == [True]
        await w.falsified("UPDATE lines SET voided_by = NULL")
        assert ["and the coordinator does not say so" in f for f in await w.found()] == [True]


async def test_a_wrong_count_of_settled_rounds_is_named(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        assert (await w.audit()).clean
        for count in (0, 8):
            await w.falsified(f"UPDATE state SET settled = {count}")
            assert await w.found() == [f"{count} of 8 rounds are said to be settled, not 6"]


class FalsePage:
    """A page that changes its answers about totals."""

    def __init__(self, honest: LogClient, change: Any):
        self._honest = honest
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    async def balances(self, after: PeerKey | None = None) -> tuple[int, dict[PeerKey, tuple[int, int, int]]]:
        return self._change(after, *await self._honest.balances(after))


async def test_totals_that_cannot_be_compared_are_not_called_clean(tmp_path, monkeypatch):
    """The coordinator says with invented totals that one more round is final."""
    async with made(tmp_path, monkeypatch) as w:
        invented = {peer(9).key: (10**9, 0, 0)}
        honest = w.connect()
        page: Any = FalsePage(honest.log, lambda after, size, found: (size + 1, invented))
        monkeypatch.setattr(w, "connect", lambda: replace(honest, log=page))
        found = await w.audit()
        assert not found.clean and any("totals were not compared" in d.message for d in found.report.unproved)


async def test_totals_are_read_again_when_a_round_becomes_final_meanwhile(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        honest, reads = w.connect(), []

        def change(after: Any, size: int, found: Any) -> Any:
            reads.append(size)
            return (size + (len(reads) == 1), found)

        page: Any = FalsePage(honest.log, change)
        monkeypatch.setattr(w, "connect", lambda: replace(honest, log=page))
        assert (await w.audit()).clean and len(reads) == 2


async def test_a_page_of_totals_that_never_ends_does_not_hold_the_audit(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        monkeypatch.setattr("cairn.ledger_audit.MAX_TOTALS", 50)
        monkeypatch.setattr("cairn.ledger_audit.BALANCES_PAGE", 10)
        honest, served = w.connect(), []

        def change(after: Any, size: int, found: Any) -> Any:
            start = len(served)
            served.extend(range(10))
            return size, {PeerKey((start + i).to_bytes(32, "big")): (1, 0, 0) for i in range(10)}

        page: Any = FalsePage(honest.log, change)
        monkeypatch.setattr(w, "connect", lambda: replace(honest, log=page))
        found = await w.audit()
        assert not found.clean and len(served) == 60


async def test_totals_must_come_by_ascending_key():
    keys = sorted(peer(n).key for n in range(3))

    async def read(told: list[PeerKey], after: PeerKey | None) -> list[PeerKey]:
        async def fetch(url: str) -> bytes:
            amounts = {f"micro_credits_{s}": 0 for s in ("settled", "pending", "voided")}
            return json.dumps({"size": 1, "balances": [{"peer": str(k)} | amounts for k in told]}).encode()

        return list((await LogClient("http://x/", SPEC.run_id, OWNER.key, fetch).balances(after))[1])

    for told, after in ((keys, None), (keys[1:], keys[0]), ([], keys[2])):
        assert await read(told, after) == told
    for told, after in ((keys[::-1], None), ([keys[0]] * 2, None), (keys, keys[0]), (keys[:1], keys[1])):
        with pytest.raises(MalformedError, match="ascending key"):
            await read(told, after)


async def test_an_invented_round_is_named(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        invented = credits_of(w.swarm.chain.fork(8).add({1: 500, 9: 500}), RULE)
        w.clock[0] += 61
        await w.ledger.run(lambda ledger: ledger.post(invented))
        found = await w.found()
        assert any("credits round 8" in f and "not in the chain" in f for f in found)


async def test_a_branch_that_the_swarm_does_not_follow_is_named(tmp_path, monkeypatch):
    """The owner's own peers certified a lighter branch, and the coordinator gives its certificates."""
    async with made(tmp_path, monkeypatch, rounds=5) as w:
        theirs = w.swarm.chain
        lighter = theirs.fork(5)
        for _ in range(3):
            theirs.add({1: 40, 2: 30, 3: 20})
        chain = w.chain()
        w.chains = {peer(1).key: chain}
        w.swarm.chain = lighter
        for _ in range(2):
            credits = credits_of(lighter.add({8: 5}), RULE)
            w.clock[0] += 61
            await w.ledger.run(lambda ledger, c=credits: ledger.post(c))
        found = await w.found()
        assert any("not in the chain" in f or "not on the chain that the swarm follows" in f for f in found)


async def test_a_rollback_is_clean_also_when_members_have_left_the_branch(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        old = w.swarm.chain
        w.swarm.chain = old.fork(6)
        await w.rollback(old.certificates[5].digest)
        for _ in range(4):
            credits = credits_of(w.swarm.chain.add({1: 50, 2: 50}), RULE)
            w.clock[0] += 61
            await w.ledger.run(lambda ledger, c=credits: ledger.post(c))
        found = await w.audit()
        assert len(found.report.unproved) == 2 and found.report.findings == []
        w.swarm.left = old.certificates[6:]
        found = await w.audit()
        assert found.clean, result_lines(found)


async def test_what_the_coordinator_alone_tells_of_a_rollback_is_not_what_members_have_heard(tmp_path, monkeypatch):
    """It gives a certificate, of peers of its own, that carries the word."""
    async with made(tmp_path, monkeypatch) as w:
        members, record = w.swarm.chain, w.swarm.chain.certificates[5].digest
        w.chains = {peer(1).key: w.chain()}
        w.swarm.chain = members.fork(6)
        await w.rollback(record)
        credits = credits_of(w.swarm.chain.add({8: 5}), RULE)
        w.clock[0] += 61
        await w.ledger.run(lambda ledger: ledger.post(credits))
        w.swarm.left = members.certificates[6:]
        found = await w.audit()
        assert any("no member that was asked knows of rollback 1" in d.message for d in found.report.unproved)


async def test_rounds_long_past_are_the_chains_also_after_a_rolled_back_one_was_looked_for(tmp_path, monkeypatch):
    """The auditor reads to the end of the chain for a record of the branch that was left, and forgets what it read."""
    async with made(tmp_path, monkeypatch) as w:
        monkeypatch.setattr("cairn.audited_chain.KEPT", 4)
        old = w.swarm.chain
        w.swarm.chain = old.fork(6)
        await w.rollback(old.certificates[5].digest)
        w.swarm.left = old.certificates[6:]
        for _ in range(12):
            credits = credits_of(w.swarm.chain.add({1: 50, 2: 50}), RULE)
            w.clock[0] += 61
            await w.ledger.run(lambda ledger, c=credits: ledger.post(c))
        found = await w.audit()
        assert found.clean, result_lines(found)


async def test_an_old_final_that_was_rolled_back_is_no_reason_to_blame_the_log(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch, rounds=5) as w:
        record = w.swarm.chain.certificates[4].digest
        word = KeySigner(OWNER).sign(Directive(SPEC.run_id, 1, rollback=Rollback(1, record, Round(5), state(5))))
        stale, knowing = w.chain(), w.chain()
        for _ in range(3):
            w.swarm.chain.add({1: 40, 2: 30, 3: 20})
            stale.add(w.swarm.chain.certificates[-1])
        stale.add_finalization(KeySigner(OWNER).sign(Finalization(SPEC.run_id, Round(7), w.swarm.chain.head)))
        assert knowing.add_directive(word)
        w.swarm.chain = w.swarm.chain.fork(5)
        w.chains = {peer(1).key: knowing, peer(2).key: stale}
        assert await w.found() == []


async def test_a_branch_of_the_owners_own_is_named_though_its_certificates_are_given(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch, rounds=5) as w:
        lighter = w.swarm.chain.fork(5)
        w.swarm.chain.add({1: 40, 2: 30, 3: 20})
        credits = credits_of(lighter.add({8: 5}), RULE)
        w.swarm.left = lighter.certificates[5:]
        await w.ledger.run(lambda ledger: ledger.post(credits))
        found = await w.found()
        assert any("credits round 5" in f and "the swarm follows another" in f for f in found)


async def test_what_is_final_and_not_credited_is_named(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch, rounds=5) as w:
        for _ in range(3):
            w.swarm.chain.add({1: 40, 2: 30, 3: 20})
        chain = w.chain()
        chain.add_finalization(
            KeySigner(OWNER).sign(Finalization(SPEC.run_id, 6, w.swarm.chain.certificates[6].digest))
        )  # type: ignore
        w.chains = {peer(1).key: chain}
        found = await w.found()
        assert found == ["the credits end before rounds 5 to 6: finalized by the owner, and not credited"]


# -- over HTTP ---------------------------------------------------------------------------------------------------------


async def test_the_routes_give_the_same(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        app = Starlette(routes=credit_routes(w.log))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as web:
            rounds = (await web.get("/api/credits/rounds?first=6&limit=5")).json()
            assert (rounds["size"], rounds["settled"], [r["number"] for r in rounds["rounds"]]) == (8, 6, [6, 7])
            line = rounds["rounds"][0]["lines"][0]
            assert line["voided_by"] is None and line["tokens"] == line["windows"] * SPEC.data.window
            balances = (await web.get("/api/credits/balances?limit=2")).json()
            assert balances["size"] == 8 and len(balances["balances"]) == 2
            key = peer(1).key
            page = (await web.get(f"/api/receipts?peer={key}&limit=3")).json()
            assert len(page["receipts"]) == 3 and page["next"] and page["receipts"][0]["status"] == "pending"
            older = (await web.get(f"/api/receipts?peer={key}&limit=100&before={page['next']}")).json()
            assert len(older["receipts"]) == 5 and older["next"] is None
            account = (await web.get(f"/api/accounts/{key}")).json()
            assert account["rounds"] == 8 and account["rounds_total"] == 8
            for bad in (
                "/api/credits/rounds?limit=100000", "/api/credits/rounds?first=99999999999999999999",
                "/api/credits/balances?after=zz", "/api/receipts?peer=zz", "/api/accounts/zz",
            ):  # fmt: skip
                answer = await web.get(bad)
                assert answer.status_code == 400 and len(answer.text) < 300, bad
            assert (await web.get("/api/export/credits.exe")).status_code == 404
        rows = w.board.leaderboard("peer", 2, "")
        assert [r.key for r in rows] == [str(peer(n).key) for n in (1, 2)]


async def test_all_credits_come_as_csv_and_parquet(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        monkeypatch.setattr("coordinator.credits.export.MAX_ROUNDS", 3)  # page by page
        monkeypatch.setattr("coordinator.credits.export.ROW_GROUP", 5)
        app = Starlette(routes=credit_routes(w.log))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as web:
            text = await web.get("/api/export/credits.csv")
            assert "attachment" in text.headers["content-disposition"]
            rows = list(csv.DictReader(io.StringIO(text.text)))
            assert len(rows) == 24 and [r["round"] for r in rows[::3]] == [str(n) for n in range(8)]
            assert [r["status"] for r in rows[::3]] == ["settled"] * 6 + ["pending"] * 2
            total = sum(int(r["micro_credits"]) for r in rows)
            weighed = [c.record.body.weighed for c in w.swarm.chain.certificates[:8]]
            assert total == sum(RULE.micro_credits(n) for each in weighed for n in each)
            pyarrow = pytest.importorskip("pyarrow.parquet")
            data = (await web.get("/api/export/credits.parquet")).content
            table = pyarrow.read_table(io.BytesIO(data))
            assert [{k: str(v) for k, v in r.items()} for r in table.to_pylist()] == rows

            async def export(host: str) -> int:
                transport = httpx.ASGITransport(app=app, client=(host, 1))
                async with httpx.AsyncClient(transport=transport, base_url="http://x") as other:
                    return (await other.get("/api/export/credits.csv")).status_code

            hosts = ["192.0.2.7", "192.0.2.7", "192.0.2.8", "192.0.2.9"]
            assert await asyncio.gather(*map(export, hosts)) == [200, 503, 200, 503]
            assert await export("192.0.2.9") == 200


# -- the commands ---------------------------------------------------------------------------------------------------


async def test_the_commands_bind_show_export_and_check_receipts(tmp_path, monkeypatch):
    async with running(tmp_path, spec=SPEC, swarm=FakeSwarm(SPEC)) as (c, swarm):
        for n in (1, 2):
            await c.admitter.admit(admit_request(n), "127.0.0.1")
        swarm.headers.append(AnnouncedUpdate(late_header(swarm), True, ""))
        swarm.chain.weighs = True
        for _ in range(7):
            swarm.round({1: 40, 2: 30})
        await settled(c, 7)
        await until(lambda: c.credits.leaderboard.rounds == 4)
        invite = str(replace(c.invite(), addresses=()))
        home = tmp_path / "home"
        home.mkdir()
        write_key(home / "identity.key", peer(1))

        def cairn(*args: str) -> Any:
            return CliRunner().invoke(main, [*args, "--home", str(home)])

        async def run(*args: str) -> str:
            done = await asyncio.to_thread(cairn, *args)
            assert done.exit_code == 0, done.output
            return done.output

        assert "a new account" in await run("account", "new")
        account = load_or_make(home / "account.key")
        unbound = json.loads(await run("account", "show", invite, "--json"))
        assert (unbound["kind"], unbound["key"]) == ("peer", str(peer(1).key)) and unbound["receipts"]
        assert "which has 1 peers now" in await run("account", "bind", invite, "--name", "ada", "--team", "engines")
        # Another machine's peer, whose owner keeps the account's key here.
        other = tmp_path / "other"
        other.mkdir()
        write_key(other / "identity.key", peer(2))
        arguments = ["account", "consent", invite, str(account.key), "--home", str(other)]
        consent = CliRunner().invoke(main, arguments).output
        assert "2 peers now" in await run("account", "bind", invite, "--name", "ada", "--consent", consent.strip())
        shown = json.loads(await run("account", "show", invite, "--json"))
        assert (shown["kind"], shown["name"], len(shown["peers"]), len(shown["receipts"])) == ("account", "ada", 2, 8)
        text = await run("account", "show", invite, "--peer", str(peer(1).key))
        assert "pending: settles" in text and "settled" in text and "credits" in text
        text = await run("account", "show", invite, "--peer", str(peer(3).key))
        assert "not accepted: it was announced when" in " ".join(text.split())
        out = tmp_path / "credits.csv"
        done = await asyncio.to_thread(CliRunner().invoke, main, ["account", "export", invite, str(out)])
        assert done.exit_code == 0 and len(out.read_text().splitlines()) == 9, done.output
        assert "good: by a certificate" in await run("audit", "receipt", invite)
        file = tmp_path / "one.receipt"
        file.write_text(shown["receipts"][0]["bytes"])
        assert "good: by a certificate" in await run("audit", "receipt", invite, str(file))
        open_receipt((await receipts_of(c, 1))[0], SPEC.run_id, OWNER.key)
        # A ledger without a swarm to ask: clean, and said. The demo's swarm is not on the network.
        done = await asyncio.to_thread(CliRunner().invoke, main, ["audit", "ledger", invite])
        assert done.exit_code == 0 and "no member of the swarm" in done.output, done.output


async def test_account_show_names_the_conviction_that_voids_credit(tmp_path):
    spec = make_spec(credit={"hold_rounds": 8})
    swarm = FakeSwarm(spec)
    audited = swarm.round({1: 30, 2: 30, 3: 30})
    failed = [swarm.chain.report(audited, 1, by, Score("signs", 0.7, 0.97)) for by in (2, 3)]
    swarm.round({2: 30, 3: 30}, reports=failed, decisions=[AuditDecision(audited.digest, peer(1).key, True)])
    for _ in range(4):
        swarm.round({2: 30, 3: 30})
    async with running(tmp_path, spec=spec, swarm=swarm) as (c, _):
        await settled(c, 6)
        await until(lambda: c.chain.audits.decided[0].outcome.voided is not None, "the conviction is final")
        invite = str(replace(c.invite(), addresses=()))
        command = ["account", "show", invite, "--peer", str(peer(1).key)]
        done = await asyncio.to_thread(CliRunner().invoke, main, command, env={"COLUMNS": "200"})
        assert "voided by the conviction in round 1 for the update of round 0" in " ".join(done.output.split())
        client = await asyncio.to_thread(CliRunner().invoke, main, ["status", invite], env={"COLUMNS": "200"})
        said = " ".join(client.output.split())
        assert f"({peer(1).key.short}) is convicted in round 1" in said and "barred until round 66" in said


async def test_the_commands_say_in_one_line_what_is_missing(tmp_path):
    async with running(tmp_path, spec=SPEC, swarm=FakeSwarm(SPEC)) as (c, _):
        invite = str(replace(c.invite(), addresses=()))
        for args, words in (
            (("account", "show", invite), "no peer yet"),
            (("account", "bind", invite, "--name", "ada"), "cairn account new"),
            (("audit", "receipt", invite), "--peer"),
        ):
            done = await asyncio.to_thread(CliRunner().invoke, main, [*args, "--home", str(tmp_path)])
            assert done.exit_code == 1 and words in done.output and done.output.count("\n") == 1, done.output
        for args, words in (
            (("account", "consent", invite, "zz"), "Invalid value for ACCOUNT"),
            (("account", "show", invite, "--peer", "a", "--account", "b"), "not both"),
        ):
            wrong = CliRunner().invoke(main, [*args, "--home", str(tmp_path)])
            assert wrong.exit_code == 2 and words in wrong.output


def admit_request(number: int) -> bytes:
    import time

    from protocol.envelope import seal
    from protocol.wire import coordinator_pb2

    name = f"peer {number}"
    body = coordinator_pb2.AdmissionRequest(run=SPEC.run_id, time=int(time.time()), name=name, protocol=PROTOCOL)
    return seal(peer(number), "admission-request", body.SerializeToString(deterministic=True)).encoded


def late_header(swarm: FakeSwarm) -> Any:
    header = UpdateHeader(
        SPEC.run_id, Round(0), swarm.chain.head, state(0), 0, 0, 4, 1, digest(3), 100, 5.0, b""
    )  # fmt: skip
    return KeySigner(peer(3)).sign(header)


async def receipts_of(c: Any, number: int) -> list[bytes]:
    return [i.encoded for i in (await c.credits.receipts.page(peer(number).key, None, 10)).items]


def write_key(path: Path, who: Any) -> None:
    from protocol.identity import to_key_file

    path.write_text(to_key_file(who))
    path.chmod(0o600)
