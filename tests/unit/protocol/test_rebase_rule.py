"""The rule for `rebase_window`: headers and records that break it are refused, in runs of both kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.chain import Chain
from protocol.errors import ChainError
from protocol.ids import Digest, Round, sha256
from protocol.messages import Certificate, RoundRecord, Signed, UpdateHeader
from protocol.rebase_rule import rebase_refusal
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.policy import RoundPolicy
from tests.simulation.signer import FakeSigner, certificate
from tests.support.empty_chain import KEYS, RUN, STATE, new
from tests.support.rounds_bench import ME, OTHERS, POLICY, Bench, blob_of
from tests.support.second_round import Second
from tests.support.specs import tiny_spec

BATCH = 4
Windows = tuple[int, int, int]
"""The first window of an update, its rebase_window, and its end."""


def header(windows: Windows) -> UpdateHeader:
    return UpdateHeader(RUN, Round(0), STATE, STATE, *windows, 1, STATE, 9, 1.0, b"")


def claim(chain: Chain, parent: Digest, who: int, windows: Windows) -> Signed[UpdateHeader]:
    blob = Digest(sha256(b"blob", KEYS[who], parent))
    body = UpdateHeader(RUN, chain.height(parent), parent, STATE, *windows, 1, blob, 9, 1.0, b"")
    return FakeSigner(KEYS[who]).sign(body)


def listing(chain: Chain, parent: Digest, claims: dict[int, Windows]) -> Certificate:
    """Return a certificate after `parent` that lists these updates, weighed as the chain does."""
    updates = tuple(claim(chain, parent, who, windows) for who, windows in sorted(claims.items()))
    weights = chain.weights(parent, updates)
    body = RoundRecord(RUN, chain.height(parent), parent, STATE, 0, updates, weights=weights)
    return certificate(FakeSigner(updates[0].author).sign(body), [u.author for u in updates])


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40), st.booleans())
def test_without_replays_only_the_first_window_is_a_rebase_window(first: int, rebase: int, more: int, continues: bool):
    refusal = rebase_refusal(header((first, rebase, first + more)), None, continues=continues)
    assert (refusal is None) == (rebase == first)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40), st.integers(1, 8), st.booleans())
def test_with_replays_only_whole_inner_steps_that_continue_an_update_come_before_the_rebase(
    first: int, rebase: int, more: int, batch: int, continues: bool
):
    end = first + more
    ends_of_steps = range(first, end + 1, batch)
    good = end in ends_of_steps and rebase in (ends_of_steps if continues else [first])
    refusal = rebase_refusal(header((first, rebase, end)), batch, continues=continues)
    assert (refusal is None) == good


LIES: list[tuple[int | None, Windows, str]] = [
    (None, (8, 12, 16), "not replayable"),
    (None, (8, 7, 16), "not replayable"),
    (None, (8, 16, 16), "not replayable"),
    (BATCH, (8, 4, 16), "outside its windows"),
    (BATCH, (8, 20, 16), "outside its windows"),
    (BATCH, (8, 2**53, 16), "outside its windows"),
    (BATCH, (8, 10, 16), "whole inner steps"),
    (BATCH, (8, 8, 14), "whole inner steps"),
    (BATCH, (8, 12, 14), "whole inner steps"),
]


@pytest.mark.parametrize("batch, windows, why", LIES)
def test_no_record_with_a_wrong_rebase_window_enters_the_chain(batch: int | None, windows: Windows, why: str):
    chain = new(replay_batch=batch)
    first = listing(chain, chain.genesis, {0: (0, 0, 8), 1: (0, 0, 8)})
    assert chain.add(first)
    with pytest.raises(ChainError, match=rf"the update of {KEYS[0].short}: its .*{why}"):
        chain.add(listing(chain, first.digest, {0: windows, 1: (8, 8, 16)}))
    assert chain.head == first.digest
    assert chain.add(listing(chain, first.digest, {0: (8, 8, 16), 1: (8, 8, 16)}))


@pytest.mark.parametrize("rebase", [8, 12, 16])
def test_who_is_in_the_record_before_may_have_trained_before_the_state_came(rebase: int):
    chain = new(replay_batch=BATCH)
    first = listing(chain, chain.genesis, {0: (0, 0, 8)})
    assert chain.add(first) and chain.add(listing(chain, first.digest, {0: (8, rebase, 16)}))


def test_who_is_not_in_the_record_before_has_trained_from_its_state_alone():
    chain = new(replay_batch=BATCH)
    with pytest.raises(ChainError, match="lists no update of its author"):
        chain.add(listing(chain, chain.genesis, {0: (0, 4, 8)}))
    first = listing(chain, chain.genesis, {0: (0, 0, 8), 1: (0, 0, 8)})
    assert chain.add(first)
    second = listing(chain, first.digest, {1: (8, 12, 16)})
    assert chain.add(second)
    with pytest.raises(ChainError, match="lists no update of its author"):
        chain.add(listing(chain, second.digest, {0: (8, 12, 16), 1: (16, 20, 24)}))
    assert chain.add(listing(chain, second.digest, {0: (8, 8, 16), 1: (16, 20, 24)}))


def test_the_rule_holds_after_the_oldest_record_in_memory_too():
    chain = new(replay_batch=BATCH, max_records=1, min_main_records=1)
    records = [listing(chain, chain.genesis, {0: (0, 0, 4)})]
    assert chain.add(records[0])
    for i in range(1, 4):
        records.append(listing(chain, chain.head, {0: (4 * i, 4 * i, 4 * i + 4)}))
        assert chain.add(records[-1])
    assert chain.root == records[2].digest
    with pytest.raises(ChainError, match="lists no update of its author"):
        chain.add(listing(chain, chain.root, {1: (0, 4, 8)}))
    assert chain.add(listing(chain, chain.root, {0: (12, 16, 16)}))


@pytest.mark.parametrize("batch, windows, why", LIES)
def test_no_member_takes_a_header_or_votes_for_a_record_with_a_wrong_rebase_window(
    batch: int | None, windows: Windows, why: str
):
    b = Bench(policy=replace(POLICY, replay_batch=batch))
    headers = [b.header(key, 8) for key in OTHERS[:3]]
    made = certificate(b.record(OTHERS[0], headers), OTHERS[:3])
    b.step(ev.CertificateReceived(made, OTHERS[0]))
    for h in headers:
        b.step(ev.BlobHeld(h.body.blob, h.author))
    after = Digest(sha256(b"next"))
    b.step(ev.StateReached(made.digest, after))
    second = dict(round=Round(1), parent=made.digest, base_state=after, label=b"2")
    first, rebase, end = windows
    lie = b.header(OTHERS[0], first_window=first, rebase_window=rebase, end_window=end, **second)
    b.step(ev.MessageReceived(lie))
    assert [n.kind for n in b.of(do.Notice)] == ["refused"] and why in b.of(do.Notice)[0].text
    assert b.machine.summary(b.now).headers == ()
    good = b.header(OTHERS[1], first_window=8, end_window=16, **second)
    updates = tuple(sorted((lie, good), key=lambda h: h.author))
    weights = b.chain.weights(made.digest, updates)
    record = RoundRecord(RUN, Round(1), made.digest, after, 0, updates, weights=weights)
    b.step(ev.MessageReceived(FakeSigner(OTHERS[1]).sign(record)))
    assert [n.kind for n in b.of(do.Notice)] == ["refused"] and why in b.of(do.Notice)[0].text
    assert b.machine.summary(b.now).headers == ()


def test_a_member_announces_the_rebase_window_of_its_trainer():
    b = Second(policy=replace(POLICY, replay_batch=5))
    b.step(ev.TrainingProgress(25, 1.0, 1.0))
    b.step(ev.UpdateReady(b.first, 25, 30, 50, 5, blob_of(ME, b"2"), 9, 1.0))
    assert [(h.first_window, h.rebase_window, h.end_window) for h in b.said(UpdateHeader)] == [(25, 30, 50)]


@pytest.mark.parametrize("replayable", [True, False])
def test_the_policy_and_the_chain_of_a_replayable_run_know_the_windows_of_an_inner_step(replayable: bool):
    spec = tiny_spec(codec={"kind": "sign", "beta": 0}, audit={"replayable": replayable})
    policy = RoundPolicy.of(spec)
    assert policy.chain_limits.replay_batch == policy.replay_batch == (spec.inner.batch if replayable else None)
