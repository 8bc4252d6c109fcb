"""The ledger against a model of a few lines, under whatever Hypothesis can think of; invariants after every step.

CAIRN_LEDGER_EXAMPLES=2000 CAIRN_LEDGER_STEPS=60 makes it long; CAIRN_LEDGER_URL=postgresql://... runs it on a server
(in a database that holds nothing else).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.errors import LedgerConflictError
from coordinator.ledger import Ledger
from coordinator.ledger.store import connect
from protocol.chain import genesis_digest
from protocol.ids import Digest, Round, sha256
from protocol.ledger.credits import Balance, CreditRule, PeerBalances, RoundCredits
from protocol.messages import Rollback, Verdict
from tests.support.coordinator_fakes import make_spec, peer, state

work = st.dictionaries(st.integers(0, 4), st.integers(1, 9000), min_size=1, max_size=4)


@dataclass
class Posted:
    """A round that was posted, as the model knows it."""

    credits: RoundCredits
    voided: set[int] = field(default_factory=set)


class LedgerMachine(RuleBasedStateMachine):
    """Rounds, verdicts and rollbacks in any order, with restarts, crashes and clocks that jump."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="cairn-ledger-")
        self.clock = 1_700_000_000.0
        self.made = 0
        self.posted: list[Posted] = []
        self.branch: list[RoundCredits] = []
        self.gone: list[RoundCredits] = []

    @initialize(hold=st.integers(0, 4), seed=st.integers(0, 2**40))
    def begin(self, hold: int, seed: int) -> None:
        self.spec = make_spec(credit={"hold_rounds": hold}, seed=seed)
        self.rule_ = CreditRule.of(self.spec)
        self.where = os.environ.get("CAIRN_LEDGER_URL") or f"{self.folder}/ledger.sqlite"
        if "CAIRN_LEDGER_URL" in os.environ:  # the schema of an earlier example
            db = connect(self.where, self.spec)
            db.query(f"DROP SCHEMA cairn_{self.spec.run_id.hex()[:16]} CASCADE")
            db.close()
        self.ledger = Ledger(self.where, self.spec, now=lambda: self.clock)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- what is made ----------------------------------------------------------------------------------------

    def new_credits(self, round_: int, parent: Digest, windows: dict[int, int]) -> RoundCredits:
        """Return the credits of a new round."""
        self.made += 1
        record = Digest(sha256(b"record", self.made.to_bytes(8, "big")))
        lines = tuple(
            self.rule_.line(key, Digest(sha256(record, key)), w)
            for key, w in sorted((peer(n).key, w) for n, w in windows.items())
        )
        return RoundCredits(Round(round_), record, parent, Digest(bytes(32)), 3.5, lines)

    @property
    def tip(self) -> Digest:
        return self.branch[-1].record if self.branch else genesis_digest(self.spec.run_id)

    def next(self, windows: dict[int, int]) -> RoundCredits:
        return self.new_credits(len(self.branch), self.tip, windows)

    def is_settled(self, number: int) -> bool:
        return len(self.posted) - 1 - number >= self.rule_.hold_rounds

    # -- what happens ----------------------------------------------------------------------------------------

    @rule(windows=work)
    def submit(self, windows: dict[int, int]) -> None:
        credits = self.next(windows)
        assert self.ledger.post(credits)
        self.branch.append(credits)
        self.posted.append(Posted(credits))

    @rule(windows=work)
    def settle(self, windows: dict[int, int]) -> None:
        """So many rounds that whatever was pending settles."""
        for _ in range(self.rule_.hold_rounds):
            self.submit(windows)

    @precondition(lambda self: self.branch)
    @rule(data=st.data())
    def replay(self, data) -> None:
        assert self.ledger.post(data.draw(st.sampled_from(self.branch))) is False

    @precondition(lambda self: self.branch)
    @rule(data=st.data(), windows=work)
    def equivocate(self, data, windows: dict[int, int]) -> None:
        """Another record for a round that is there, other lines for its record, a round that does not follow."""
        credits = data.draw(st.sampled_from(self.branch))
        more = tuple(replace(e, micro_credits=e.micro_credits + 1) for e in credits.lines)
        follows = self.next(windows)
        for wrong in (
            self.new_credits(credits.round, credits.parent, windows),
            replace(credits, lines=more),
            replace(follows, round=Round(follows.round + 1)),
            replace(follows, parent=Digest(bytes(32))),
            replace(follows, lines=(*follows.lines, follows.lines[0])),
            replace(follows, lines=(replace(follows.lines[0], micro_credits=10**9),)),
        ):
            with pytest.raises(LedgerConflictError):
                self.ledger.post(wrong)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def post_what_was_rolled_back(self, data) -> None:
        with pytest.raises(LedgerConflictError):
            self.ledger.post(data.draw(st.sampled_from(self.gone)))

    @precondition(lambda self: self.posted)
    @rule(data=st.data(), windows=work)
    def void(self, data, windows: dict[int, int]) -> None:
        """Post a round that carries verdicts on another one: on a line, on nobody, on a record that is unknown."""
        number = data.draw(st.integers(max(0, len(self.posted) - 6), len(self.posted) - 1))
        posted = self.posted[number]
        i = data.draw(st.integers(0, len(posted.credits.lines) - 1))
        record, who = posted.credits.record, posted.credits.lines[i].peer
        verdicts = (Verdict(record, who, "x"), Verdict(record, peer(99).key, "x"), Verdict(Digest(bytes(32)), who, "x"))
        credits = replace(self.next(windows), verdicts=verdicts)
        assert self.ledger.post(credits)
        if not self.is_settled(number):
            posted.voided.add(i)
        self.branch.append(replace(credits, verdicts=()))
        self.posted.append(Posted(credits))

    @precondition(lambda self: self.branch)
    @rule(data=st.data(), by_record=st.booleans(), windows=work)
    def rollback(self, data, by_record: bool, windows: dict[int, int]) -> None:
        """Roll back by the directive when it comes, or by the record that carries it."""
        to = data.draw(st.sampled_from(self.branch))
        self.made += 1
        rollback = Rollback(self.made, to.record, Round(to.round + 1), state(0))
        ahead = to is not self.branch[-1]
        self.gone += self.branch[to.round + 1 :]
        del self.branch[to.round + 1 :]
        if by_record and ahead:
            credits = replace(self.next(windows), rollback=rollback)
            assert self.ledger.post(credits)
            self.branch.append(replace(credits, rollback=None))
            self.posted.append(Posted(credits))
        else:
            assert self.ledger.rollback(rollback)
        assert self.ledger.rollback(rollback) is False

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.where, self.spec, now=lambda: self.clock)

    @rule(windows=work, then=st.sampled_from(["fail", "part", "other process"]))
    def crash(self, windows: dict[int, int], then: str) -> None:
        """Interrupt a transaction, apply part of one, or let another process write meanwhile."""
        credits = self.next(windows)
        if then == "other process":
            other = Ledger(self.where, self.spec, now=lambda: self.clock)
            assert other.post(credits)
            other.close()
        elif then == "fail":
            with pytest.raises(RuntimeError), self.ledger.group():
                self.ledger.post(credits)
                raise RuntimeError("the machine is gone")
            return
        else:
            with self.ledger.group():
                with pytest.raises(RuntimeError), self.ledger.part():
                    self.ledger.post(self.next(windows))
                    raise RuntimeError("one of many")
                self.ledger.post(credits)
        self.branch.append(credits)
        self.posted.append(Posted(credits))

    @rule(seconds=st.integers(-(10**6), 10**6))
    def clock_jumps(self, seconds: int) -> None:
        self.clock += seconds

    # -- what is always so -----------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        expected: dict[bytes, PeerBalances] = {}
        for number, posted in enumerate(self.posted):
            for i, line in enumerate(posted.credits.lines):
                kind = "voided" if i in posted.voided else "settled" if self.is_settled(number) else "pending"
                s = expected.get(line.peer, PeerBalances())
                expected[line.peer] = replace(s, **{kind: getattr(s, kind).plus(line)})
        assert self.ledger.balances() == expected
        assert self.ledger.round_credits(limit=1000) == self.branch
        assert self.ledger.last() == ((self.branch[-1].round, self.tip) if self.branch else None)
        assert Balance() not in [s.settled for s in expected.values() if s.settled.rounds]

    @invariant()
    def the_index_is_whole(self) -> None:
        assert self.ledger.size() == len(self.posted)
        assert self.ledger.settled_count() == sum(self.is_settled(n) for n in range(len(self.posted)))
        assert self.ledger.check() == []


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=int(os.environ.get("CAIRN_LEDGER_EXAMPLES", 12)),
    stateful_step_count=int(os.environ.get("CAIRN_LEDGER_STEPS", 20)),
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
