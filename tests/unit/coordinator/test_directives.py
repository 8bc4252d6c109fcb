"""The effects of directives at the coordinator, as far as people see them."""

from __future__ import annotations

from dataclasses import replace

from coordinator.directives import MARK_KINDS, DirectiveEffects, RunMark
from coordinator.indexed_chain import IndexedChain
from protocol.audits import AuditRule
from protocol.ids import Digest, Round
from protocol.messages import Directive, Rollback
from tests.support.coordinator_fakes import make_spec, peer


def test_pauses_resumptions_rollbacks_and_the_end_are_marked_and_nothing_else_is():
    spec = make_spec()
    effects = DirectiveEffects(spec.round, IndexedChain(AuditRule.of(spec)))
    paused = Directive(spec.run_id, 10_000, "paused", 9, "the data are checked")
    banned = replace(paused, sequence=20_000, banned=(peer(1).key,))
    resumed = replace(banned, sequence=30_000, run_status="running", since=30, reason="")
    back = replace(resumed, sequence=40_500, rollback=Rollback(1, Digest(bytes(32)), Round(7), Digest(bytes(32))))
    ended = replace(back, sequence=50_000, run_status="ended", since=50, reason="enough")
    for directive in (paused, banned, resumed, back, ended):
        effects.apply(directive)
    assert list(effects.marks) == [
        RunMark(9.0, "paused", "the data are checked"), RunMark(30.0, "resumed", ""),
        RunMark(40.5, "rolled back", "to round 7"), RunMark(50.0, "ended", "enough"),
    ]  # fmt: skip
    assert {m.kind for m in effects.marks} == set(MARK_KINDS)
