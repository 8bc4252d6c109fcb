"""Reports of auditors: whoever reads one finds the same outcome, and none is out of bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MalformedError, ProtocolError
from protocol.ids import Round
from protocol.message_codec import KINDS, KeySigner
from protocol.messages import AUDIT_CHECKS, MAX_SCORE, MAX_SCORE_NAME, MAX_SCORES, AuditCheck, Score, Signed, WorkReport
from protocol.wire import swarm_pb2 as wire
from tests.support.signed import PEERS, RECORD, RUN, decoder, raw
from tests.support.specs import digest

NUMBERS = st.floats(-MAX_SCORE, MAX_SCORE)
NAMES = st.text("abé", min_size=1, max_size=8)
SCORES = st.lists(st.builds(Score, NAMES, NUMBERS, NUMBERS), min_size=1, max_size=9, unique_by=lambda s: s.name).map(
    lambda found: tuple(sorted(found, key=lambda s: s.name))
)


def signed(*scores: Score, check: AuditCheck = "replay") -> Signed[WorkReport]:
    return KeySigner(PEERS[1]).sign(WorkReport(RUN, Round(3), RECORD.digest, digest("update"), check, scores))


@given(SCORES, st.sampled_from(AUDIT_CHECKS))
def test_every_report_survives_the_wire(scores: tuple[Score, ...], check: AuditCheck):
    sent = signed(*scores, check=check)
    assert decoder().decode(sent.encoded, WorkReport) == sent
    assert sent.body.passed == (not [s for s in scores if s.value < s.threshold])


def test_the_largest_report_fits():
    scores = [Score(f"{n:x}".rjust(MAX_SCORE_NAME, "x"), MAX_SCORE, -MAX_SCORE) for n in range(MAX_SCORES)]
    assert len(signed(*sorted(scores, key=lambda s: s.name)).encoded) <= KINDS[WorkReport].limit


GOOD = Score("mean", 1.0, 0.6)


@pytest.mark.parametrize(
    "scores",
    [[], [GOOD, GOOD], [Score("warm", 1.0, 0.5), GOOD], [Score("", 1.0, 0.5)], [Score("a\n", 1.0, 0.5)],
     [Score("x" * (MAX_SCORE_NAME + 1), 1.0, 0.5)], [Score("mean", math.nan, 0.5)], [Score("mean", 1.0, math.inf)],
     [Score("mean", -2 * MAX_SCORE, 0.5)], [Score(f"{n:02}", 1.0, 0.5) for n in range(MAX_SCORES + 1)]],
)  # fmt: skip
def test_scores_out_of_bounds_are_refused(scores: list[Score]):
    with pytest.raises(MalformedError):
        signed(*scores)


def test_an_unknown_check_and_another_run_are_refused():
    good = wire.Envelope.FromString(signed(GOOD).encoded).payload
    for changes in ({"check": "guess"}, {"check": ""}, {"run": bytes(32)}, {"update": b""}):
        message = wire.WorkReport.FromString(good)
        for field, value in changes.items():
            setattr(message, field, value)
        with pytest.raises(ProtocolError):
            decoder().decode(raw(PEERS[1], "work-report", message), WorkReport)
