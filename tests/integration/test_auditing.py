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
from cairn.ledger_audit import AuditResult, _lines, _plain, audit_log, head_file, receipt_problem
from cairn.main import main
from coordinator.credits.leaderboard import Leaderboard
from coordinator.credits.log import CreditLog
from coordinator.credits.receipts import Receipts
from coordinator.credits.tree_heads import TreeHeadSigner
from coordinator.history import RoundHistory
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger_thread import LedgerThread
from coordinator.page.credit_routes import credit_routes
from coordinator.page.endpoints import IMMUTABLE
from coordinator.swarm import AnnouncedUpdate
from peer.coordinator_client import CoordinatorRefused
from peer.keyfile import load_or_make
from peer.log_client import LogClient
from peer.swarm.errors import PeerRefused, PeerUnreachable
from protocol.chain import Chain, UnknownParent
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.entries import decode_entry, decode_line, encode_entry, encode_line, lines_root
from protocol.ledger.statements import TreeHead, open_receipt, sign
from protocol.merkle import leaf_hash, tree_hash
from protocol.message_codec import KeySigner, encode_certificate
from protocol.messages import Directive, Finalization, Rollback, UpdateHeader
from protocol.rounds.policy import RoundPolicy
from protocol.wire import swarm_pb2 as wire
from tests.support.coordinator_fakes import FakeSwarm, back_to, make_spec, peer, state
from tests.support.coordinator_service import running, settled
from tests.support.specs import OWNER, digest, identity
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
        if told:
            word = Directive(SPEC.run_id, 1, rollback=Rollback(1, record, Round(6), state(6)))
            self.swarm.chain.carry(KeySigner(OWNER).sign(word))
        directive = back_to(SPEC, record, 5)
        await self.ledger.run(lambda ledger: ledger.rollback(record, 5, directive))  # type: ignore[arg-type]

    async def open(self) -> None:
        # An owner who falsifies the database first disables the check at its opening.
        self.monkeypatch.setattr("coordinator.ledger.store.check_opened", lambda *_: None)
        self.ledger = LedgerThread()
        await self.ledger.open(self.folder / "ledger.sqlite", SPEC, lambda: self.clock[0])
        now = self.now
        self.indexed = IndexedChain()
        self.board = Leaderboard(SPEC.run_id, self.ledger, self.indexed, lambda k: k.short, lambda k: True, now)
        self.log = CreditLog(
            self.ledger, self.swarm, self.indexed, TreeHeadSigner(SPEC.run_id, OWNER, self.ledger, now),
            Receipts(SPEC, OWNER, self.swarm, self.ledger, now), self.board, asyncio.Event(),
        )  # fmt: skip
        await self.log.start()

    def now(self) -> float:
        return self.clock[0]

    async def post(self, rounds: int) -> None:
        for _ in range(rounds):
            account = credits_of(self.swarm.chain.add({1: 40, 2: 30, 3: 20}), RULE)
            self.clock[0] += 61
            await self.ledger.run(lambda ledger, a=account: ledger.post(a))
            await self.log.heads(None, 1)
        balances = await self.ledger.read(lambda ledger: ledger.balances())
        self.indexed.restore(None, (), RoundHistory(), {}, balances)
        await self.board.refresh()

    def falsify(self, *statements: str) -> None:
        """Change the database itself, without its triggers."""
        with sqlite3.connect(self.folder / "ledger.sqlite") as db:
            for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
                db.execute(f"DROP TRIGGER {name}")
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

    async def audit(self, home: str = "home") -> AuditResult:
        chains = self.chains or {peer(1).key: self.chain()}

        @asynccontextmanager
        async def asker(*_: Any, **__: Any):
            yield Asker(chains)

        self.monkeypatch.setattr("peer.swarm.anonymous.chain_reader", asker)
        return await audit_log(self.connect(), self.folder / home)

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


async def test_an_honest_ledger_is_clean_and_its_head_is_remembered(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        first = await w.audit()
        assert first.clean and first.seen_before is None and first.heads == 8
        assert (first.report.rounds, first.from_members, first.from_coordinator) == (8, {peer(1).key: 8}, 0)
        await w.post(2)
        second = await w.audit()
        assert second.clean and second.seen_before is not None and second.seen_before.size == first.head.size
        assert second.report.issued == 10 * sum(RULE.micro_credits(n) for n in (40, 30, 20))
        text = "\n".join(_lines(second))
        assert "clean" in text and "10 certificates from 1 members" in text
        assert json.loads(json.dumps(_plain(second)))["clean"] is True


async def test_what_members_no_longer_keep_comes_from_the_coordinator_and_is_said(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        monkeypatch.setattr("cairn.audited_chain.PAGE", 2)
        w.chains = {peer(1).key: w.chain(first=5), peer(2).key: None}
        found = await w.audit()
        assert found.clean and found.from_coordinator == 6 and found.from_members == {peer(1).key: 2}
        assert any("6 certificates that members no longer keep" in x for x in found.warnings)


async def test_a_swarm_where_nobody_answers_is_said(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        w.chains = {peer(2).key: None}
        found = await w.audit()
        assert found.clean and found.from_coordinator == 8
        assert any("no member of the swarm" in x for x in found.warnings)


async def test_receipts_are_proved(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        r = w.connect()
        (head,) = await r.log.heads()
        receipts, _ = await r.log.receipts(peer(1).key)
        assert len(receipts) == 8
        for item in receipts:
            assert await receipt_problem(r, item.word.body, head.body) == ""
        good = receipts[3].word.body
        for changes, words in (
            ({"micro_credits": 10**6}, "says otherwise"),
            ({"entry": good.entry + 1}, "not the round"),
            ({"peer": peer(2).key}, "says otherwise"),
            ({"line": 77}, "says otherwise"),
            ({"entry": 9999}, "no entry"),
        ):
            assert words in await receipt_problem(r, replace(good, **changes), head.body)
        refused = replace(
            good, accepted=False, reason="no", windows=0, tokens=0, micro_credits=0, line=0, pending_until=0
        )
        assert "was not accepted" in await receipt_problem(r, refused, head.body)
        assert await receipt_problem(r, replace(refused, update=digest("other")), head.body) == ""


# -- falsified in the database ---------------------------------------------------------------------------------------


def row(w: World, query: str) -> Any:
    db = sqlite3.connect(w.folder / "ledger.sqlite")
    try:
        return db.execute(query).fetchone()
    finally:
        db.close()


async def test_a_changed_amount_is_named(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        entry = row(w, "SELECT entry FROM rounds WHERE round = 3")[0]
        line = decode_line(row(w, f"SELECT encoded FROM lines WHERE entry = {entry} AND line = 1")[0])
        more = encode_line(replace(line, micro_credits=10**9))
        await w.falsified(f"UPDATE lines SET encoded = x'{more.hex()}' WHERE entry = {entry} AND line = 1")
        found = await w.found()
        assert f"line 1 of entry {entry} (round 3)" in found[0] and "1000000000" in found[0]


async def test_a_credit_moved_to_another_peer_is_named_though_its_hashes_were_made_anew(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        entry = row(w, "SELECT entry FROM rounds WHERE round = 7")[0]
        lines = [
            decode_line(row(w, f"SELECT encoded FROM lines WHERE entry = {entry} AND line = {i}")[0]) for i in (0, 1, 2)
        ]
        thief = next(i for i in map(identity, range(1000)) if lines[0].peer < i.key < lines[2].peer)
        lines[1] = replace(lines[1], peer=thief.key)
        old = decode_entry(row(w, f"SELECT encoded FROM entries WHERE sequence = {entry}")[0])
        new = encode_entry(replace(old, payload=replace(old.payload, lines_root=lines_root(lines))))  # type: ignore[arg-type]
        await w.falsified(
            f"UPDATE lines SET encoded = x'{encode_line(lines[1]).hex()}' WHERE entry = {entry} AND line = 1",
            f"UPDATE entries SET encoded = x'{new.hex()}', leaf = x'{leaf_hash(new).hex()}' WHERE sequence = {entry}",
        )
        found = await w.found()
        assert any(f"line 1 of entry {entry}" in f and f"to peer {thief.key.short}" in f for f in found)
        assert any(f"entry {entry} commits to other lines" in f for f in found)
        assert any("tree head" in f for f in found)


async def test_a_deleted_entry_is_named(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        entry = row(w, "SELECT entry FROM rounds WHERE round = 3")[0]
        await w.falsified(f"DELETE FROM entries WHERE sequence = {entry}")
        found = await w.found()
        assert any(f"entry {entry} is missing" in f for f in found)
        assert any("round 3 (record" in f and "is not credited" in f for f in found)


async def test_reordered_entries_are_named(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        entry = row(w, "SELECT entry FROM rounds WHERE round = 3")[0]
        await w.falsified(
            f"UPDATE entries SET sequence = -1 WHERE sequence = {entry}".replace("-1", "100000"),
            f"UPDATE entries SET sequence = {entry} WHERE sequence = {entry + 1}",
            f"UPDATE entries SET sequence = {entry + 1} WHERE sequence = 100000",
        )
        found = await w.found()
        assert any(f"place {entry} holds entry {entry + 1}" in f for f in found)


async def test_the_end_cut_off_is_named_by_what_this_machine_saw(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        assert (await w.audit()).clean
        size = row(w, "SELECT count(*) FROM entries")[0]
        cut = [row(w, f"SELECT leaf FROM entries WHERE sequence = {n}")[0] for n in range(size - 2)]
        head = sign(OWNER, TreeHead(SPEC.run_id, size - 2, tree_hash(cut), int(w.clock[0] * 1000))).encoded
        await w.falsified(
            f"DELETE FROM entries WHERE sequence >= {size - 2}", f"DELETE FROM lines WHERE entry >= {size - 2}",
            f"DELETE FROM rounds WHERE entry >= {size - 2}", "DELETE FROM branch WHERE round >= 7", "DELETE FROM heads",
            f"INSERT INTO heads (id, size, root, time, encoded) VALUES (1, 0, x'{'00' * 32}', 5, x'{head.hex()}')",
        )  # fmt: skip
        found = await w.found()
        assert any("seen by this machine" in f and "entries were removed" in f for f in found)
        assert head_file(tmp_path / "home", SPEC.run_id).exists()


async def test_a_forged_head_is_named(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        forged = sign(OWNER, TreeHead(SPEC.run_id, 5, digest("forged"), 1_700_000_000_000)).encoded
        stranger = sign(identity("s"), TreeHead(SPEC.run_id, 3, digest("forged"), 1_700_000_000_000)).encoded
        await w.falsified(
            f"INSERT INTO heads (id, size, root, time, encoded) VALUES (0, 5, x'{'00' * 32}', 5, x'{forged.hex()}')",
            f"INSERT INTO heads (id, size, root, time, encoded) VALUES (-1, 3, x'{'00' * 32}', 5, x'{stranger.hex()}')",
        )
        found = await w.found()
        assert any("over 5 entries" in f and digest("forged").short in f for f in found)
        assert any("was not signed by the owner" in f for f in found)


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
            account = credits_of(lighter.add({8: 5}), RULE)
            w.clock[0] += 61
            await w.ledger.run(lambda ledger, a=account: ledger.post(a))
        found = await w.found()
        assert any("not in the chain" in f or "not on the chain that the swarm follows" in f for f in found)


async def test_a_rollback_is_clean_also_when_members_have_left_the_branch(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        old = w.swarm.chain
        w.swarm.chain = old.fork(6)
        await w.rollback(old.certificates[5].digest)
        for _ in range(4):
            account = credits_of(w.swarm.chain.add({1: 50, 2: 50}), RULE)
            w.clock[0] += 61
            await w.ledger.run(lambda ledger, a=account: ledger.post(a))
        found = await w.audit()
        assert len(found.report.unproved) == 2 and found.report.findings == []
        w.swarm.left = old.certificates[6:]
        found = await w.audit()
        assert found.clean, _lines(found)


async def test_a_rollback_that_no_member_has_heard_of_is_unproved(tmp_path, monkeypatch):
    """As of a branch of the owner's own, which the swarm never knew."""
    async with made(tmp_path, monkeypatch) as w:
        await w.rollback(w.swarm.chain.certificates[5].digest, told=False)
        w.clock[0] += 61
        await w.log.heads(None, 1)
        found = await w.audit()
        assert any("no member that was asked has heard of this rollback" in d.message for d in found.report.unproved)


async def test_what_the_coordinator_alone_tells_of_a_rollback_is_not_what_members_have_heard(tmp_path, monkeypatch):
    """It gives a certificate, of peers of its own, that carries the word."""
    async with made(tmp_path, monkeypatch) as w:
        members, record = w.swarm.chain, w.swarm.chain.certificates[5].digest
        w.chains = {peer(1).key: w.chain()}
        w.swarm.chain = members.fork(6)
        await w.rollback(record)
        account = credits_of(w.swarm.chain.add({8: 5}), RULE)
        w.clock[0] += 61
        await w.ledger.run(lambda ledger: ledger.post(account))
        w.swarm.left = members.certificates[6:]
        w.clock[0] += 61
        await w.log.heads(None, 1)
        found = await w.audit()
        assert any("no member that was asked has heard of this rollback" in d.message for d in found.report.unproved)


async def test_rounds_long_past_are_the_chains_also_after_a_rolled_back_one_was_looked_for(tmp_path, monkeypatch):
    """The auditor reads to the end of the chain for a record of the branch that was left, and forgets what it read."""
    async with made(tmp_path, monkeypatch) as w:
        monkeypatch.setattr("cairn.audited_chain.KEPT", 4)
        old = w.swarm.chain
        w.swarm.chain = old.fork(6)
        await w.rollback(old.certificates[5].digest)
        w.swarm.left = old.certificates[6:]
        for _ in range(12):
            account = credits_of(w.swarm.chain.add({1: 50, 2: 50}), RULE)
            w.clock[0] += 61
            await w.ledger.run(lambda ledger, a=account: ledger.post(a))
        found = await w.audit()
        assert found.clean, _lines(found)


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
        account = credits_of(lighter.add({8: 5}), RULE)
        w.swarm.left = lighter.certificates[5:]
        await w.ledger.run(lambda ledger: ledger.post(account))
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
        assert found == ["the log ends before rounds 5 to 6: finalized by the owner, and not credited"]


# -- over HTTP ---------------------------------------------------------------------------------------------------------


async def test_the_routes_give_the_same(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        app = Starlette(routes=credit_routes(w.log))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as web:
            head = (await web.get("/api/log/head")).json()["heads"]
            assert len(head) == 1
            entries = await web.get("/api/log/entries?first=0&limit=5")
            assert len(entries.json()["entries"]) == 5 and entries.headers["cache-control"] == IMMUTABLE
            assert (await web.get("/api/log/entries?first=0")).headers["cache-control"] == "no-store"
            lines = await web.get("/api/log/lines?first=0&limit=2")
            assert [(g["entry"], len(g["lines"])) for g in lines.json()["groups"]] == [(0, 3), (1, 3)]
            assert lines.json()["next"] == 2 and lines.headers["cache-control"] == IMMUTABLE
            assert (await web.get("/api/log/lines?first=3&limit=1")).json()["groups"] == []  # a settlement
            size = entries.json()["size"]
            assert (await web.get(f"/api/log/inclusion?entry=2&size={size}")).json()["hashes"]
            assert (await web.get(f"/api/log/consistency?first=2&second={size}")).json()["hashes"]
            key = peer(1).key
            page = (await web.get(f"/api/receipts?peer={key}&limit=3")).json()
            assert len(page["receipts"]) == 3 and page["next"] and page["receipts"][0]["status"] == "pending"
            older = (await web.get(f"/api/receipts?peer={key}&limit=100&before={page['next']}")).json()
            assert len(older["receipts"]) == 5 and older["next"] is None
            account = (await web.get(f"/api/accounts/{key}")).json()
            assert account["rounds"] == 8 and account["rounds_total"] == 8
            for bad in (
                "/api/log/inclusion?entry=2", "/api/log/inclusion?entry=2&size=9999", "/api/log/entries?limit=100000",
                "/api/receipts?peer=zz", "/api/accounts/zz", "/api/log/consistency?first=-1&second=3",
                "/api/log/entries?first=99999999999999999999",
            ):  # fmt: skip
                answer = await web.get(bad)
                assert answer.status_code == 400 and len(answer.text) < 300, bad
            assert (await web.get("/api/export/credits.exe")).status_code == 404
        rows = w.board.leaderboard("peer", 2, "")
        assert [r.key for r in rows] == [str(peer(n).key) for n in (1, 2)]


async def test_all_credits_come_as_csv_and_parquet(tmp_path, monkeypatch):
    async with made(tmp_path, monkeypatch) as w:
        monkeypatch.setattr("coordinator.credits.export.MAX_ENTRIES", 4)  # page by page
        monkeypatch.setattr("coordinator.credits.export.ROW_GROUP", 5)
        app = Starlette(routes=credit_routes(w.log))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as web:
            text = await web.get("/api/export/credits.csv")
            assert "attachment" in text.headers["content-disposition"]
            rows = list(csv.DictReader(io.StringIO(text.text)))
            assert len(rows) == 24 and [r["round"] for r in rows[::3]] == [str(n) for n in range(8)]
            assert [r["status"] for r in rows[::3]] == ["settled"] * 6 + ["pending"] * 2
            total = sum(int(r["micro_credits"]) for r in rows)
            assert total == 8 * sum(RULE.micro_credits(n) for n in (40, 30, 20))
            pyarrow = pytest.importorskip("pyarrow.parquet")
            data = (await web.get("/api/export/credits.parquet")).content
            table = pyarrow.read_table(io.BytesIO(data))
            assert [{k: str(v) for k, v in r.items()} for r in table.to_pylist()] == rows
            monkeypatch.setattr("coordinator.credits.log.MAX_EXPORTS", 0)
            assert (await web.get("/api/export/credits.csv")).status_code == 503


# -- the commands ---------------------------------------------------------------------------------------------------


async def test_the_commands_bind_show_export_and_check_receipts(tmp_path, monkeypatch):
    async with running(tmp_path, spec=SPEC, swarm=FakeSwarm(SPEC)) as (c, swarm):
        for n in (1, 2):
            await c.admitter.admit(admit_request(n), "127.0.0.1")
        swarm.headers.append(AnnouncedUpdate(late_header(swarm), True, ""))
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
        assert "no signed head yet" in await run("audit", "receipt", invite)  # the first was signed at the start
        monkeypatch.setattr("coordinator.credits.tree_heads.HEAD_SECONDS", 0)
        assert "good: entry" in await run("audit", "receipt", invite)
        file = tmp_path / "one.receipt"
        file.write_text(shown["receipts"][0]["bytes"])
        assert "good: entry" in await run("audit", "receipt", invite, str(file))
        open_receipt((await receipts_of(c, 1))[0], SPEC.run_id, OWNER.key)
        # A ledger without a swarm to ask: clean, and said. The demo's swarm is not on the network.
        done = await asyncio.to_thread(cairn, "audit", "ledger", invite)
        assert done.exit_code == 0 and "no member of the swarm" in done.output, done.output


async def test_the_commands_say_in_one_line_what_is_missing(tmp_path):
    async with running(tmp_path, spec=SPEC, swarm=FakeSwarm(SPEC)) as (c, _):
        invite = str(replace(c.invite(), addresses=()))
        for args, words in (
            (("account", "show", invite), "no peer yet"),
            (("account", "bind", invite, "--name", "ada"), "cairn account new"),
            (("account", "consent", invite, "zz"), "ACCOUNT"),
            (("account", "show", invite, "--peer", "a", "--account", "b"), "not both"),
            (("audit", "receipt", invite), "--peer"),
        ):
            done = await asyncio.to_thread(CliRunner().invoke, main, [*args, "--home", str(tmp_path)])
            assert done.exit_code == 1 and words in done.output and done.output.count("\n") == 1, done.output


def admit_request(number: int) -> bytes:
    import time

    from protocol.envelope import seal
    from protocol.wire import coordinator_pb2

    body = coordinator_pb2.AdmissionRequest(run=SPEC.run_id, time=int(time.time()), name=f"peer {number}")
    return seal(peer(number), "admission-request", body.SerializeToString(deterministic=True)).encoded


def late_header(swarm: FakeSwarm) -> Any:
    header = UpdateHeader(
        SPEC.run_id, Round(0), swarm.chain.head, state(0), 0, 4, 1, digest(3), 100, 5.0, b""
    )  # fmt: skip
    return KeySigner(peer(3)).sign(header)


async def receipts_of(c: Any, number: int) -> list[bytes]:
    return [i.encoded for i in (await c.credits.receipts.page(peer(number).key, None, 10)).items]


def write_key(path: Path, who: Any) -> None:
    from protocol.identity import to_key_file

    path.write_text(to_key_file(who))
    path.chmod(0o600)
