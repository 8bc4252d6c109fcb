"""The machine's phases: one table, in code and in docs/rounds.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protocol.messages import PHASES
from protocol.rounds.phase import TRANSITIONS, InvariantError, Phase, check_transition, phase_of

PAGE = Path(__file__).parents[3] / "docs" / "rounds.md"


def test_the_docs_draw_the_table():
    """A row may name several phases on each side."""
    rows = re.findall(r"^\| ([\w, ]+) \| ([\w, ]+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    names = {phase.value for phase in Phase}
    steps = [(a, b, cause) for froms, tos, cause in rows for a in froms.split(", ") for b in tos.split(", ")]
    drawn = [((a, b), cause) for a, b, cause in steps if a in names and b in names]
    assert len(drawn) == len(dict(drawn))
    assert dict(drawn) == {(a.value, b.value): cause for a, to in TRANSITIONS.items() for b, cause in to.items()}


def test_each_phase_has_a_row_in_the_table_and_in_the_docs():
    assert set(TRANSITIONS) == set(Phase)
    for phase in Phase:
        assert re.search(rf"^\| {phase} \| [^|]+ \| [^|]+ \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_heartbeats_carry_every_phase_but_the_last():
    assert {phase.value for phase in Phase} == {*PHASES, "left"}


@pytest.mark.parametrize("before", list(Phase))
@pytest.mark.parametrize("after", list(Phase))
def test_no_other_transition_is_allowed(before: Phase, after: Phase):
    if before is after or after in TRANSITIONS[before]:
        check_transition(before, after)
    else:
        with pytest.raises(InvariantError, match="table"):
            check_transition(before, after)


def test_earlier_facts_take_precedence():
    facts = dict(
        left=False, observer=False, leaving=False, resting=False, joined=True, holds_state=True, announced=True,
        paused=True,
    )  # fmt: skip
    assert phase_of(**facts) is Phase.EXCHANGING
    assert phase_of(**{**facts, "announced": False}) is Phase.PAUSED
    assert phase_of(**{**facts, "announced": False, "paused": False}) is Phase.TRAINING
    assert phase_of(**{**facts, "holds_state": False}) is Phase.SYNCING
    assert phase_of(**{**facts, "joined": False}) is Phase.JOINING
    assert phase_of(**{**facts, "resting": True, "joined": False}) is Phase.RESTING
    assert phase_of(**{**facts, "leaving": True, "resting": True}) is Phase.LEAVING
    assert phase_of(**{**facts, "observer": True, "leaving": True, "resting": True}) is Phase.RESTING
    assert phase_of(**{**facts, "observer": True, "leaving": True}) is Phase.OBSERVING
    assert phase_of(**{**facts, "observer": True, "left": True}) is Phase.LEFT
