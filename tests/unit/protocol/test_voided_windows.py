"""The windows that a record voids: what its state shows, and what the ledger's fold counts, on one branch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.chain import genesis_digest
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.fold import CreditFold
from protocol.messages import AuditDecision, Directive, RoundRecord, UpdateHeader, Verdict
from protocol.record_node import RecordNode
from tests.simulation.signer import FakeSigner, certificate
from tests.support.empty_chain import OWNER, RUN, STATE

KEYS = sorted(PeerKey(sha256(b"key", bytes([i]))) for i in range(4))

round_of_work = st.tuples(
    st.dictionaries(st.integers(0, 3), st.integers(1, 99), min_size=1),
    st.sets(st.integers(0, 3), max_size=2),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=3),
)
"""Windows by peer; peers that the record convicts; verdicts: how many records back, and the peer."""


@given(st.lists(round_of_work, max_size=14), st.integers(0, 5))
def test_a_branch_and_the_ledgers_fold_void_the_same_and_each_window_once(script, hold):
    node, rule = RecordNode(genesis_digest(RUN)), CreditRule(1, 10**9, 7, hold)
    fold = CreditFold(RUN, rule)
    pending: dict[int, tuple[int, ...]] = {}
    for number, (work, convicted, accused) in enumerate(script):
        path = list(node.branch())
        named = {(path[min(back, len(path) - 1)].digest, KEYS[peer]) for back, peer in accused}
        verdicts = tuple(Verdict(record, key, "a copy") for record, key in sorted(named))
        directive = OWNER.sign(Directive(RUN, number + 1, verdicts=verdicts)) if verdicts else None
        decisions = tuple(AuditDecision(STATE, KEYS[peer], True) for peer in sorted(convicted))
        updates = tuple(
            FakeSigner(KEYS[i]).sign(
                UpdateHeader(
                    RUN, Round(number), node.digest, STATE, 0, 0, n, 1, Digest(sha256(b"blob", KEYS[i])), 9, 1.0, b""
                )
            )
            for i, n in sorted(work.items())
        )
        by_author = node.voided_after(directive, decisions, hold)
        body = RoundRecord(
            RUN, Round(number), node.digest, STATE, 0, updates, directive, decisions=decisions,
            voided=sum(by_author.values()),
        )  # fmt: skip
        made = certificate(FakeSigner(updates[0].author).sign(body), [u.author for u in updates])
        step = fold.add(credits_of(made, rule))
        assert sum(pending[n][line] for n, line in step.voided) == body.voided
        pending[number] = tuple(u.body.windows for u in updates)
        node = RecordNode(made.digest, node, made, 99, hold, 8)
        assert (
            node.weight * 7 == fold.tokens == sum(b.pending.tokens + b.settled.tokens for b in fold.balances.values())
        )
        assert all(node.history(key).backlog == 0 for key in by_author)
