"""A split that only some see.

An observer receives the messages of both sides. It passes each side the other's records, but not their blobs.
"""

from __future__ import annotations

from collections import Counter

import pytest

from protocol.ids import Digest, Round, sha256
from protocol.messages import RoundRecord
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.blobs import applied_blobs
from protocol.rounds.branch_quarantine import MAX_EARLY_FAILURES
from tests.simulation.checkers import check_counted_once, disagreement
from tests.simulation.network import Weather
from tests.simulation.node import Node
from tests.simulation.signer import FakeSigner, certificate
from tests.simulation.world import World, policy_for
from tests.support.long_cases import long_cases
from tests.support.rounds_bench import OTHERS, POLICY, RUN
from tests.support.second_round import BUSY, NEXT, SLOW, Second

RIVALS = OTHERS[3:7]
"""As many as outvote the three of the first record while nobody has stake."""

PEERS, SPLIT_SECONDS = 8, 94.0


def split(seed: int, peer: type[Node] = Node, **changes: float) -> World:
    """Four peers against four for a while, an observer between them; then, from now on, the network is whole."""
    policy = policy_for(
        PEERS, target_windows=12 * PEERS, max_update_windows=24 * PEERS, max_seconds=20.0, exchange_seconds=5.0,
        propose_seconds=1.0, heartbeat_seconds=0.3, member_seconds=3.0, **{"patience_seconds": 5.0, **changes},
    )  # fmt: skip
    world = World(seed, PEERS, Weather(delay=0.04, jitter=0.01), policy=policy)
    for i in range(PEERS):
        world.add(peer, speed=2.0 + 0.02 * i)
    world.add(observer=True)
    for node in world.nodes:
        world.clock.at(world.rng.uniform(0, 1), node.boot)
    world.clock.run_until(20.0)
    for a in range(PEERS // 2):
        for b in range(PEERS // 2, PEERS):
            world.network.cut |= {(a, b), (b, a)}
    world.clock.run_until(20.0 + SPLIT_SECONDS)
    world.network.cut.clear()
    return world


def check_agreement_soon(world: World) -> None:
    """Check that all honest nodes agree within three seconds and two rounds from now.

    If a peer's moves to the other branch failed too often, they agree when its quarantine ends.
    """
    whole, height = world.clock.now, world.height()
    failed = Counter(peer for _, peer, r in world.reports if r.kind == "apply-failed")
    most = max(failed.values(), default=0)
    quarantine = world.policy.patience_seconds * 2 ** (most - 1) if most > MAX_EARLY_FAILURES else 0.0
    while disagreement(world.honest) is not None and world.clock.now < whole + quarantine + 60.0:
        world.clock.run_until(world.clock.now + 0.25)
    assert world.clock.now - whole <= quarantine + 3.0 and (quarantine or world.height() - height <= 2)
    check_counted_once(world)


class HalfServed(Node):
    """Gets the other side's updates of the first round after each checkpoint, of the others none: as from a coordinator
    that archives states."""

    def fetch(self, incarnation, action, deadline):
        rounds = [c.record.body.round for c in self.world.records.values() if action.blob in applied_blobs(c)]
        if any(number % self.world.policy.checkpoint_every == 0 for number in rounds):
            self.world.clock.after(0.1, self.fetched, incarnation, action.blob)
        else:
            super().fetch(incarnation, action, deadline)


@pytest.mark.parametrize("seed", [1, *long_cases(2)])
def test_who_cannot_get_all_of_another_branch_keeps_its_own_state_and_goes_on(seed: int):
    """A peer finds out only on the way to the other branch that updates are missing.

    Nobody abandons its own record for that.
    """
    world = split(seed, HalfServed)
    assert any(r.kind == "apply-failed" for _, _, r in world.reports)
    assert all(n.machine.phase in ("training", "exchanging") for n in world.honest)
    check_agreement_soon(world)


@pytest.mark.parametrize("seed", [1, *long_cases(0)])
def test_after_a_split_the_heavier_branch_is_followed_at_once_though_it_was_set_aside_again_and_again(seed: int):
    world = split(seed)
    assert any(r.kind == "withheld" for _, _, r in world.reports)
    check_agreement_soon(world)


def _away(b: Second) -> None:
    """Deliver a branch of more contributors beside the first record; nobody serves its updates."""
    rivals = [b.header(key, 50) for key in RIVALS]
    b.step(ev.CertificateReceived(certificate(b.record(RIVALS[0], rivals), RIVALS), RIVALS[0]))


def _next(b: Second, by, label: bytes, end: int, parent=None, number: int = 1, base=NEXT, first: int = 10):
    """Deliver and return a certificate of one contributor on our branch; its blob is held here."""
    parent = parent or b.first
    theirs = b.header(by, label=label, round=Round(number), parent=parent, base_state=base, first_window=first,
                      end_window=end)  # fmt: skip
    weights = b.chain.weights(parent, (theirs,))
    record = FakeSigner(by).sign(RoundRecord(RUN, Round(number), parent, base, 0, (theirs,), weights=weights))
    b.hold(theirs)
    b.step(ev.BlobHeld(theirs.body.blob, theirs.author))
    made = certificate(record, [by])
    b.step(ev.CertificateReceived(made, by))
    return made


def test_while_the_heavier_branch_cannot_be_had_its_own_is_gone_along():
    b = Second()
    _away(b)
    made = _next(b, BUSY, b"2", 15)
    assert b.chain.weight(b.chain.head) == 200 and not b.of(do.ApplyRecord)
    b.step(ev.Tick(), b.now + 2 * POLICY.heartbeat_seconds)
    assert [a.certificate for a in b.of(do.ApplyRecord)] == [made]
    assert b.chain.weight(b.chain.head) == 200  # nothing was quarantined: its updates may still come


def test_going_along_the_own_branch_does_not_put_off_that_the_other_is_set_aside():
    """Nor, then, that a heavier branch which can be had is moved to."""
    b = Second()
    _away(b)
    since, parent, state, rival = b.now, b.first, NEXT, None
    b.step(ev.Tick(), since + 2 * POLICY.heartbeat_seconds)
    for i in range(20):
        made = _next(b, BUSY, bytes([i]), 12 + 2 * i, parent, 1 + i, state, 10 + 2 * i)
        if b.of(do.SyncState):
            break
        assert [a.certificate for a in b.of(do.ApplyRecord)] == [made]
        parent, state = made.digest, Digest(sha256(b"state", bytes([i])))
        b.step(ev.StateReached(parent, state))
        if rival is None:
            rival = _next(b, SLOW, b"rival", 50)  # beside our second record, and heavier than all that follows
        b.step(ev.Tick(), b.now + 4.0)
        if b.of(do.SyncState):
            break
    assert [a.path[-1] for a in b.of(do.SyncState)] == [rival]
    assert POLICY.patience_seconds <= b.now - since <= POLICY.patience_seconds + 5
