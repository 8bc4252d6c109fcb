"""The retention of archived states, and the files with their evaluations."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.checkpoints.retention import RetentionCandidate, RetentionPolicy, evictable, to_delete
from coordinator.checkpoints.settings import AboutTable, CheckpointSettings, SettingsError, check_address, load_settings
from coordinator.errors import CoordinatorError
from coordinator.json_lines import JsonLines


def states(*rounds: int, final: int = 10**6, size: int = 10, **losses: float) -> list[RetentionCandidate[int]]:
    return [RetentionCandidate(r, r, size, r <= final, losses.get(f"r{r}")) for r in rounds]


def left(found: list[RetentionCandidate[int]], policy: RetentionPolicy) -> list[int]:
    gone = {k.key for k in to_delete(found, policy)}
    return [k.key for k in found if k.key not in gone]


def test_the_newest_the_first_of_each_stretch_and_the_best_stay():
    found = states(0, 5, 10, 15, 20, 25, 30, 35, r10=2.0, r15=3.0, r20=float("nan"))
    assert left(found, RetentionPolicy(newest=2)) == [0, 30, 35]
    assert left(found, RetentionPolicy(newest=1, every=12)) == [0, 15, 25, 35]
    assert left(found, RetentionPolicy(newest=1, best=1)) == [0, 10, 35]


def test_what_stays_for_ever_is_the_same_state_whenever_it_is_looked_at():
    there: list[int] = []
    for r in range(0, 205, 5):
        there = left(states(*there, r), RetentionPolicy(newest=2, every=40))
    assert there == [0, 40, 80, 120, 160, 195, 200]


def test_a_state_lives_until_it_can_be_final():
    found = states(0, 5, 10, 15, 20, 25, 30, final=5)
    assert left(found, RetentionPolicy(newest=1, waiting=4)) == [0, 5, 15, 20, 25, 30]


def test_no_bound_takes_a_state_that_waits_to_become_final():
    """Else none becomes final any more: the next state is there before the record of one can be final."""
    found = states(0, 10, 20, 30, final=10)
    assert left(found, RetentionPolicy(newest=5, waiting=2, bytes=30)) == [0, 10, 20, 30]
    assert left(found, RetentionPolicy(newest=5, waiting=1, bytes=30)) == [0, 10, 30]
    assert [k.key for k in evictable(found, RetentionPolicy(newest=5, waiting=2))] == []
    assert [k.key for k in evictable(found, RetentionPolicy(newest=5, waiting=1))] == [20]


def test_the_bound_takes_the_merely_new_first_and_never_the_newest_final():
    found = states(0, 10, 20, 30, 40, 50, final=40, r10=1.0)
    policy = RetentionPolicy(newest=3, best=1, every=20)
    assert left(found, policy) == [0, 10, 20, 30, 40, 50]
    assert left(found, RetentionPolicy(**{**_fields(policy), "bytes": 50})) == [0, 10, 20, 40, 50]  # 30 is only new
    assert left(found, RetentionPolicy(**{**_fields(policy), "bytes": 40})) == [0, 20, 40, 50]
    assert left(found, RetentionPolicy(**{**_fields(policy), "bytes": 1})) == [0, 40, 50]
    assert [k.key for k in evictable(found, policy)] == [30]


def _fields(policy: RetentionPolicy) -> dict[str, int]:
    return {name: getattr(policy, name) for name in ("newest", "every", "best", "bytes", "waiting")}


@given(
    st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.booleans(), st.none() | st.floats()), max_size=30),
    st.builds(RetentionPolicy, st.integers(0, 5), st.integers(0, 20), st.integers(0, 4), st.integers(0, 300)),
)
def test_never_removed_are_the_first_the_newest_the_newest_final_and_what_is_open(rows, policy: RetentionPolicy):
    found = [RetentionCandidate(r, r, 10, f, loss, h) for r, f, h, loss in {row[0]: row for row in rows}.values()]
    there = set(left(found, policy))
    finals = [k.round for k in found if k.final]
    assert {k.round for k in found if k.held or k.round == 0} <= there
    assert {max((k.round for k in found), default=None), max(finals, default=None)} - {None} <= there
    again = [k for k in found if k.round in there]
    assert not [k for k in to_delete(again, policy) if k.round in there and not policy.bytes]


def test_a_journal_keeps_the_newest_and_passes_over_what_a_crash_tore(tmp_path):
    path = tmp_path / "rows.jsonl"
    journal = JsonLines(path, 10)
    for i in range(40):
        journal.add({"i": i})
    assert len(path.read_bytes().splitlines()) <= 15
    assert [r["i"] for r in JsonLines(path, 10).rows] == list(range(30, 40))
    with path.open("ab") as file:
        file.write(b'{"i": 99')
    torn = JsonLines(path, 10)
    torn.add({"i": 100})
    assert [r["i"] for r in JsonLines(path, 10).rows][-2:] == [39, 100]


def test_a_full_disk_costs_no_row_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    journal = JsonLines(path, 10)
    journal.add({"i": 1})
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(CoordinatorError, match="no space left.*free some"):
            journal.add({"i": 2})
    journal.add({"i": 3})
    assert [r["i"] for r in JsonLines(path, 10).rows] == [1, 2, 3]
    assert [json.loads(line)["i"] for line in path.read_text().splitlines()] == [1, 2, 3]


# -- settings -------------------------------------------------------------------------------------------------


def test_options_go_over_the_file(tmp_path):
    file = tmp_path / "coordinator.toml"
    file.write_text('[archive]\nnewest = 7\nbytes = "200G"\naddress = "s3://a"\ncopies = { newest = 50 }\n')
    found = load_settings(file, address="/mnt/b", keep="every=100, best=3", evaluate_every=20)
    assert found.archive.policy == RetentionPolicy(7, 100, 3, 200 * 10**9)
    assert found.archive.policy_of_copies == RetentionPolicy(50)
    assert (found.archive.address, found.evaluation.every) == ("/mnt/b", 20)
    assert load_settings() == CheckpointSettings()
    file.write_text('[about]\nlicense = "data: CC BY 4.0; model: Apache-2.0"\n')
    assert load_settings(file).about == AboutTable(license="data: CC BY 4.0; model: Apache-2.0")


@pytest.mark.parametrize(
    "text, keep, said",
    [
        ("[archive]\nnewst = 7", None, "archive.newst"),
        ("[archiv]\nnewest = 7", None, "archiv"),
        ('[archive]\nbytes = "many"', None, "50G"),
        ("[archive\n", None, "not TOML"),
        (f'[about]\ndescription = "{"x" * 301}"', None, "about.description.*300"),
        ('[about]\ncontact = "a\\nb"', None, "about.contact.*printable text on one line"),
        ('[about]\nlicense = "a\\u001b[31m"', None, "about.license.*printable"),
        ('[about]\nlicense = "a\\u202eb"', None, "about.license.*printable"),
        ("[about]\nlicense = 4", None, "about.license"),
        ('[about]\nowner = "x"', None, "about.owner: is not a setting"),
        ("", "newest", "'newest': write such as"),
        ("", "newest=0", "archive.newest"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(tmp_path, text, keep, said):
    file = tmp_path / "coordinator.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=said.replace("[", "\\[")):
        load_settings(file, keep=keep)


def test_copies_do_not_go_where_they_would_be_taken_for_the_archive(tmp_path):
    check_address("s3://bucket/x", tmp_path)
    check_address(str(tmp_path / "other"), tmp_path / "run")
    for address in (str(tmp_path / "run" / "checkpoints"), f"file://{tmp_path}/run"):
        with pytest.raises(SettingsError, match="place of their own"):
            check_address(address, tmp_path / "run")
    with pytest.raises(SettingsError, match="only read from"):
        check_address("https://example.org/x", tmp_path)
    check_address("sftp://cairn@host/x", tmp_path)
    with pytest.raises(SettingsError, match="has a password") as e:
        check_address("sftp://cairn:s3cret@host/x", tmp_path)
    assert "s3cret" not in str(e.value)
