"""Claims of the state that a run ends with, and the peers that are still needed for it."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.resting_state import RestingStateClaims
from protocol.chain import Chain
from protocol.ids import Digest, Round
from protocol.message_codec import KeySigner
from protocol.messages import Directive, Heartbeat
from protocol.rounds.policy import RoundPolicy
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.specs import OWNER

WINDOW = make_spec().data.window
FINISHED = make_spec(total_tokens=12 * WINDOW, genesis={"digest": state(0).hex(), "size": 524_288})
ENDLESS = make_spec(genesis={"digest": state(0).hex(), "size": 524_288})


class World:
    def __init__(self, spec=FINISHED):
        self.spec, self.maker = spec, ChainMaker(spec)
        self.chain = Chain(spec.run_id, spec.genesis.name, RoundPolicy.of(spec).chain_limits)
        self.claims = RestingStateClaims(self.chain, spec)
        self._sequence = 0

    def round(self) -> None:
        """Certify a round of four peers with three windows each."""
        self.chain.add(self.maker.add({n: 3 for n in range(1, 5)}))

    def order(self, run_status: str) -> None:
        self.chain.add_directive(KeySigner(OWNER).sign(Directive(self.spec.run_id, 1, run_status=run_status)))

    def hear(self, number: int, held: Digest | None, *, head: Digest | None = None, phase: str = "paused") -> bool:
        self._sequence += 1
        fields: dict[str, Any] = dict(
            run=self.spec.run_id, sequence=self._sequence, phase=phase, round=Round(1), head=head or self.chain.head,
            weight=0, windows=0, tokens_per_second=0.0, loss=0.0, bytes_up=0, bytes_down=0, known_headers=(),
            addresses=(), admission=b"", device="", state=held,
        )  # fmt: skip
        return self.claims.receive(KeySigner(peer(number)).sign(Heartbeat(**fields)))

    def wanted(self) -> tuple[set[int], int]:
        found = self.claims.resting_state(None)
        assert found is not None
        return {n for n in range(9) if peer(n).key in found.wanted}, found.needed


def test_while_the_run_goes_on_nothing_is_claimed():
    w = World()
    assert w.claims.resting_state(None) is None, "not before the first record, however the run stands"
    w = World(ENDLESS)
    w.round()
    assert not w.hear(1, state(1)) and w.claims.agreed() is None and w.claims.resting_state(None) is None


def test_more_than_two_thirds_of_the_last_contributors_are_needed_at_any_time():
    w = World()
    w.round()
    assert w.wanted() == ({1, 2, 3, 4}, 3)
    assert w.hear(1, state(1)) and not w.hear(1, state(1)), "only the first is news"
    assert not w.hear(7, state(1)) and not w.hear(2, state(1), head=state(9)) and not w.hear(2, None)
    w.hear(2, state(8))
    assert w.wanted()[1] == 2 and w.claims.agreed() is None
    w.hear(2, state(1))
    assert w.wanted() == ({3, 4}, 1) and w.claims.agreed() is None
    w.hear(4, state(1))
    agreed = w.claims.agreed()
    assert agreed is not None and agreed[0] == state(1)
    assert {h.author for h in agreed[1]} == {peer(n).key for n in (1, 2, 4)}
    assert w.wanted() == ({1, 2, 4}, 1), "one of those who have it must give it"
    found = w.claims.resting_state(state(1))
    assert found is not None and (found.state, found.round, found.record) == (state(1), 1, w.chain.head)


@pytest.mark.parametrize("run_status", ["paused", "ended"])
def test_at_an_order_to_stop_those_count_that_are_paused_and_a_new_record_begins_anew(run_status):
    w = World(ENDLESS)
    w.round()
    w.order(run_status)
    assert not w.hear(1, state(1), phase="exchanging"), "it may be about to certify the next record"
    for n in (1, 2, 3):
        w.hear(n, state(1))
    assert w.claims.agreed() is not None
    w.round()
    assert w.claims.agreed() is None and w.wanted() == ({1, 2, 3, 4}, 3)


def test_an_older_heartbeat_changes_nothing():
    w = World()
    w.round()
    w.hear(1, state(1))
    w._sequence = -1
    w.hear(1, state(2))
    w.hear(2, state(1))
    w.hear(3, state(1))
    agreed = w.claims.agreed()
    assert agreed is not None and agreed[0] == state(1)
