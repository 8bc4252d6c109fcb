"""Verdicts and pardons in a directive: bounded, in one order, each verdict with its reason."""

from __future__ import annotations

import pytest

from protocol.directive_codec import MAX_DIRECTIVE_ENVELOPE
from protocol.errors import MalformedError
from protocol.ids import MAX_ROUND, Round
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import (
    MAX_BANNED,
    MAX_PARDONS,
    MAX_REASON,
    MAX_VERDICT_REASON,
    MAX_VERDICTS,
    Directive,
    Pardon,
    Verdict,
)
from tests.support.signed import RUN
from tests.support.specs import OWNER, digest, identity


def opened(*verdicts: Verdict, **more) -> Directive:
    sent = KeySigner(OWNER).sign(Directive(RUN, 1, verdicts=verdicts, **more)).encoded
    assert len(sent) <= MAX_DIRECTIVE_ENVELOPE
    return MessageDecoder(RUN, OWNER.key, remember=1).decode(sent, Directive).body


def test_the_largest_directive_fits_with_its_verdicts_and_pardons():
    long = "x" * MAX_VERDICT_REASON
    named = sorted(digest(str(n)) for n in range(MAX_VERDICTS))
    verdicts = tuple(Verdict(d, identity("liar").key, long) for d in named)
    banned = tuple(sorted(identity(f"banned {n}").key for n in range(MAX_BANNED)))
    pardons = tuple(Pardon(key, Round(MAX_ROUND - 1)) for key in banned[:MAX_PARDONS])
    found = opened(*verdicts, banned=banned, reason="y" * MAX_REASON, pardons=pardons)
    assert (found.verdicts, found.pardons) == (verdicts, pardons)


def test_verdicts_out_of_bounds_are_refused():
    a, b = sorted((digest("a"), digest("b")))
    who = identity("liar").key
    for wrong in (
        [Verdict(a, who, "")],
        [Verdict(a, who, "x" * (MAX_VERDICT_REASON + 1))],
        [Verdict(a, who, "two\nlines")],
        [Verdict(b, who, "x"), Verdict(a, who, "x")],
        [Verdict(a, who, "x"), Verdict(a, who, "y")],
        [Verdict(d, who, "x") for d in sorted(digest(str(n)) for n in range(MAX_VERDICTS + 1))],
    ):
        with pytest.raises(MalformedError):
            opened(*wrong)


def test_pardons_out_of_bounds_are_refused():
    a, b = sorted((identity("a").key, identity("b").key))
    for wrong in (
        (Pardon(b, Round(1)), Pardon(a, Round(2))),
        (Pardon(a, Round(2)), Pardon(a, Round(1))),
        (Pardon(a, Round(1)), Pardon(a, Round(1))),
        (Pardon(a, Round(MAX_ROUND + 1)),),
        tuple(Pardon(a, Round(n)) for n in range(MAX_PARDONS + 1)),
    ):
        with pytest.raises(MalformedError):
            opened(pardons=wrong)
