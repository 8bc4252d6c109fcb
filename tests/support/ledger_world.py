"""A ledger of a made-up chain, as a coordinator would give it to an auditor; and ways to falsify it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from protocol.ids import Digest, Round
from protocol.ledger.audit import Auditor, AuditReport, TrustedTreeHead
from protocol.ledger.credits import CreditRule, RoundCredits, credits_of
from protocol.ledger.entries import CreditLine, decode_entry, encode_entry, encode_line, genesis_leaf, lines_root
from protocol.ledger.state import LedgerState, PostedEntry
from protocol.ledger.statements import TreeHead
from protocol.ledger.void_orders import VoidOrder, seal_void_order
from protocol.merkle import leaf_hash, tree_hash
from tests.support.coordinator_fakes import ChainMaker, back_to, make_spec
from tests.support.specs import OWNER

HOLD = 2


@dataclass
class Written:
    """One entry as it is given out."""

    sent: bytes
    lines: list[bytes]


class LedgerWorld:
    """Rounds of three peers, posted as they come. `log` is what the coordinator gives, and may be falsified."""

    def __init__(self, rounds: int = 8, **changes: Any):
        self.spec = make_spec(**({"credit": {"hold_rounds": HOLD, "flops_per_parameter_token": 1000}} | changes))
        self.maker = ChainMaker(self.spec)
        self.books = LedgerState.of(self.spec)
        self.accounts: dict[Digest, RoundCredits] = {}
        self.log: list[Written] = []
        self.heads: list[TrustedTreeHead] = []
        self.time = 1_700_000_000_000
        for r in range(rounds):
            self.round({1: 40 + r, 2: 30, 3: 20})

    def round(self, work: dict[int, int]) -> RoundCredits:
        account = credits_of(self.maker.add(work), CreditRule.of(self.spec))
        self.accounts[account.record] = account
        self.time += 60_000
        self.keep(self.books.post_round(account, self.time))
        return account

    def void(self, account: RoundCredits, line: int, reason: str = "a copy") -> None:
        share = account.lines[line]
        void_order = VoidOrder(self.spec.run_id, account.round, account.record, share.peer, share.update, reason)
        self.keep([self.books.void(seal_void_order(OWNER, void_order).encoded, self.time)])

    def rollback(self, to: int) -> None:
        record = self.books.record_of(Round(to))
        word = back_to(self.spec, record, to, self.books.epoch + 1)
        self.keep([self.books.rollback(record, Round(to), word, self.time)])
        self.maker = self.maker.fork(to + 1)

    def keep(self, posted: list[PostedEntry]) -> None:
        self.log += [Written(p.encoded, [encode_line(line) for line in p.lines]) for p in posted]

    def sign(self) -> TreeHead:
        """Return a tree head over the present log."""
        root = tree_hash([leaf_hash(w.sent) for w in self.log])
        head = TreeHead(self.spec.run_id, len(self.log), root, self.time)
        self.heads.insert(0, TrustedTreeHead(head))
        return head

    def entry_of(self, round_: int) -> int:
        """Return the number of the entry of a round."""
        return self.books.entry_of(Round(round_))

    # -- falsifying ------------------------------------------------------------------------------------------

    def change_line(self, entry: int, line: int, **changes: Any) -> None:
        """Behind the ledger's back: the line alone."""
        from protocol.ledger.entries import decode_line

        lines = self.log[entry].lines
        lines[line] = encode_line(replace(decode_line(lines[line]), **changes))

    def change_entry(self, entry: int, **changes: Any) -> None:
        """Change the contents of an entry, and leave the hash chain."""
        old = decode_entry(self.log[entry].sent)
        self.log[entry].sent = encode_entry(replace(old, payload=replace(old.payload, **changes)))  # type: ignore[arg-type]

    def hash_again(self, first: int = 0) -> None:
        """Forge the log like an attacker with the whole database: numbers, roots of lines, sums and hash chain."""
        from protocol.ledger.entries import RoundEntry, decode_line

        previous = genesis_leaf(self.spec.run_id)
        for i, written in enumerate(self.log):
            entry = decode_entry(written.sent)
            if i >= first:
                if isinstance(entry.payload, RoundEntry) and written.lines:
                    lines: list[CreditLine] = [decode_line(line) for line in written.lines]
                    what = replace(
                        entry.payload, lines_root=lines_root(lines), count=len(lines),
                        micro_credits=sum(line.micro_credits for line in lines),
                    )  # fmt: skip
                    entry = replace(entry, payload=what)
                written.sent = encode_entry(replace(entry, sequence=i, previous=previous))
            previous = Digest(leaf_hash(written.sent))

    # -- auditing --------------------------------------------------------------------------------------------

    def audit(self, final: int | None = None) -> AuditReport:
        auditor = Auditor(self.spec, self.accounts.get, self.heads)
        for written in self.log:
            auditor.add(written.sent, written.lines)
        return auditor.finish(None if final is None else Round(final))

    def found(self, **how: Any) -> list[str]:
        """Return the differences that an audit finds, in words."""
        return [d.message for d in self.audit(**how).findings]
