"""The judge of credits sees what is missing, doubled, settled too early, or never settled."""

from __future__ import annotations

import pytest

from tests.e2e.chains import Branch
from tests.scenarios.credited import credits_apart
from tests.support.coordinator_fakes import PARAMETERS, ChainMaker, make_spec, peer

SPEC = make_spec()
A, B = str(peer(1).key), str(peer(2).key)


def told(final: int | None = 3, rounds: int = 6, **changes: tuple[int, int]) -> str:
    """Return the judge's answer for a chain of six rounds and these credits."""
    chain = ChainMaker(SPEC)
    for _ in range(6):
        chain.add({1: 3000, 2: 1000})
    of_one = 6 * PARAMETERS * 1000 * SPEC.data.window // 10**9
    assert of_one > 0
    three = 6 * PARAMETERS * 3000 * SPEC.data.window // 10**9
    found = {A: (4 * three, (rounds - 4) * three), B: (4 * of_one, (rounds - 4) * of_one)}
    found |= {A if name == "a" else B: value for name, value in changes.items()}
    head = str(chain.certificates[rounds - 1].record.digest)
    return credits_apart(SPEC, Branch(tuple(chain.certificates), 6, None), head, final, found)


def test_what_the_chain_says_is_right_also_when_the_coordinator_is_a_round_behind():
    assert told() == "" and told(rounds=5) == ""


@pytest.mark.parametrize("wrong", [{"b": (0, 0)}, {"a": (10**6, 0)}, {"final": 2}, {"final": 4}])
def test_what_is_otherwise_is_named(wrong):
    assert "by the chain" in told(**wrong)


def test_what_is_posted_is_pending_until_it_was_held_long_enough():
    spec = make_spec(credit={"hold_rounds": 2})
    chain = ChainMaker(spec)
    for _ in range(6):
        chain.add({1: 3000})
    of_one = 6 * PARAMETERS * 3000 * spec.data.window // 10**9
    branch, head = Branch(tuple(chain.certificates), 6, None), str(chain.certificates[5].record.digest)
    assert credits_apart(spec, branch, head, 4, {A: (3 * of_one, 3 * of_one)}) == ""
    assert "by the chain" in credits_apart(spec, branch, head, 4, {A: (5 * of_one, of_one)})


def test_what_is_never_settled_is_named():
    assert "are final" in told(final=None)
