"""The calibration of audits: its replays are the trainer's steps, and its summary says what separates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import audit_scores
from benchmarks.audit_scores import COLUMNS, SETTLED, run, summary
from benchmarks.convergence.corpus import Corpus
from benchmarks.convergence.setting import PROFILES, Setting


@pytest.fixture(scope="module")
def audits() -> list[dict]:
    """Five rounds of three unequal peers, small batches: a step is one piece, so a replay can be exact."""
    tokens = np.repeat(np.random.default_rng(0).integers(0, 512, 20_000).astype(np.uint16), 2)
    corpus = Corpus(tokens, tokens[:2_000], (), None)
    setting = Setting(replace(PROFILES["tiny"], peers=3, batch=2), 0, corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_scores, "PEERS", ((4, 0), (6, 2), (6, 3)))
        *_, entry = run(setting, 5)
    return [dict(zip(COLUMNS, row, strict=True)) for row in entry["audits"]]


@pytest.mark.long
def test_a_replay_from_the_authors_own_start_is_exact(audits: list[dict]):
    exact = [a for a in audits if a["fake"] == "honest" and a["agree stateful"] is not None]
    assert {a["peer"] for a in exact} == {0, 1, 2}
    assert all(a["agree stateful"] == 1.0 for a in exact)


@pytest.mark.long
def test_a_replay_of_all_updates_from_the_first_is_exact(audits: list[dict]):
    """All that is private then follows from public values, except the scale of the estimated feedback."""
    first = [a for a in audits if a["round"] == 3 and a["fake"] == "honest" and a["agree four"] is not None]
    assert first
    assert all(a["agree four"] > 0.99 for a in first)


@pytest.mark.long
def test_every_replay_prefers_honest_work_to_random_signs(audits: list[dict]):
    (honest, noise) = [a for a in audits if a["round"] == 4 and a["peer"] == 1 and a["fake"] in ("honest", "random")]
    for score in COLUMNS[3:-2]:
        assert honest[score] > noise[score], score


def test_a_summary_separates_scores_relative_to_the_peer_and_the_round():
    column = COLUMNS.index("agree pair")

    def row(round_: int, peer: int, fake: str, agree: float) -> list:
        cells: list = [round_, peer, fake, *[None] * (len(COLUMNS) - 3)]
        cells[column] = agree
        return cells

    draw = np.random.default_rng(1)
    rows = []
    for round_ in range(SETTLED + 8):
        for peer, usual in enumerate((0.2, 0.3, 0.4)):
            expected = usual * (1 + 0.02 * round_)
            rows.append(row(round_, peer, "honest", 0.5 + expected * draw.normal(1, 0.005)))
            rows.append(row(round_, peer, "half", 0.5 + 0.7 * expected))
    found = summary([{"columns": list(COLUMNS), "audits": rows}])["agree pair"]
    assert found["honest"]["n"] == 24
    assert found["honest"]["mean"] == pytest.approx(1.0, abs=0.01)
    assert found["honest"]["sd"] < 0.02
    assert found["fakes"]["half"]["mean"] == pytest.approx(0.7, abs=0.02)
    assert found["fakes"]["half"]["found"] == 1.0
