"""The evaluation of diaries in the benchmark of an exchange on an emulated WAN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.exchange_wan import judging
from benchmarks.exchange_wan.__main__ import beside_hivemind, goals, number, show, transports
from benchmarks.exchange_wan.job import Diary, Job, publish, read_diary
from benchmarks.exchange_wan.run_spec import furnish, spec_of, write_genesis
from benchmarks.exchange_wan.setting import SYSTEMS, Setting
from benchmarks.exchange_wan.values import fill, is_right, shares
from benchmarks.overlap import run_file, topology
from coordinator.authoring.toml_file import tomllib
from peer.store import Store
from protocol.codec import make_codec
from protocol.state import state_layout, tensors_from_checkpoint

SETTING = Setting(parameters=25_000_000, peers=4)


# -- the floor -----------------------------------------------------------------------------------------------


def test_a_model_has_at_least_the_parameters_that_were_asked_for():
    assert SETTING.layout.numel == 24 * 2**20
    assert Setting(1, 4).layout.numel == 2**20


def test_the_floor_of_updates_is_all_others_down_one_line_and_two_round_trips():
    size = make_codec(spec_of(_job(Path("/"), "sign")).codec, SETTING.layout).size
    assert SYSTEMS["sign"].size(SETTING.layout) == size
    assert SYSTEMS["sign"].floor(SETTING) == pytest.approx(3 * size * 8 / 100e6 + 0.2)


def test_the_floor_of_an_all_reduce_is_twice_all_but_ones_own_share():
    values = 4 * SETTING.layout.numel
    assert SYSTEMS["gloo"].floor(SETTING) == pytest.approx(2 * 0.75 * values * 8 / 100e6 + 0.2)
    for name in ("hivemind-u8", "pccl-u8"):
        assert SYSTEMS[name].sent(SETTING) == pytest.approx(values / 4 * 1.5)


# -- times ---------------------------------------------------------------------------------------------------


def _diaries(**late: float) -> dict[int, list[dict[str, Any]]]:
    """Return diaries of two peers, the second of which announces 0.1 s after the first."""
    found = {}
    for p, began in ((0, 10.0), (1, 10.1)):
        said = [("announced", began), ("held", 10.5), ("held", 10.7 + late.get("held", 0.0)), ("certified", 10.9)]
        found[p] = [{"what": what, "round": 3, "at": at} for what, at in said]
        found[p].append({"what": "done", "round": 3, "at": 11.0, "state": "aa", "shares": None, "taking_part": 2})
    return found


def test_a_round_lasts_from_the_first_announcement_until_the_last_peer_is_there():
    times = judging.times_of(_diaries(), 3, [0, 1])
    assert (times.held, times.certified, times.applied) == pytest.approx((0.7, 0.9, 1.0))
    assert times.own == pytest.approx(0.65)


def test_a_blob_that_comes_after_the_certificate_counts_too_but_not_the_own_one_of_the_next_round():
    assert judging.times_of(_diaries(held=0.25), 3, [0, 1]).held == pytest.approx(0.95)
    diaries = _diaries()
    diaries[1].append({"what": "held", "round": 3, "at": 15.0})
    assert judging.times_of(diaries, 3, [0, 1]).held == pytest.approx(0.7)


def test_a_reducers_round_is_over_when_its_result_came_not_when_it_was_looked_at():
    diaries = {0: [{"what": "announced", "round": 0, "at": 1.0}, {"what": "done", "round": 0, "at": 9.0, "ended": 2.5}]}
    assert judging.times_of(diaries, 0, [0]).held == pytest.approx(1.5)


def test_a_round_has_not_ended_while_one_of_the_living_has_not():
    diaries = _diaries()
    assert judging.ended(diaries, 3, [0, 1])
    diaries[1].pop()
    assert not judging.ended(diaries, 3, [0, 1])
    assert judging.last_end(diaries, 3, [0, 1], since=10.0) is None
    assert judging.words_of_death(diaries, 3, [0, 1]) == "not done within the time allowed"
    assert judging.ended(diaries, 3, [0])
    assert judging.last_end(diaries, 3, [0], since=10.0) == pytest.approx(1.0)


# -- right or wrong ------------------------------------------------------------------------------------------


def test_peers_with_two_states_are_wrong_and_so_is_a_record_without_one_of_them():
    diaries = _diaries()
    assert judging.right(diaries, 3, [0, 1])
    diaries[1][-1]["state"] = "bb"
    assert not judging.right(diaries, 3, [0, 1])
    assert "DIFFER" in judging.words_of_death(diaries, 3, [0, 1])
    diaries = _diaries()
    diaries[0][-1]["taking_part"] = 1
    assert not judging.right(diaries, 3, [0, 1])


def _values(numbers: list[int], peers: int = 4) -> torch.Tensor:
    """Return the mean of these peers' values."""
    each = []
    for i in numbers:
        each.append(torch.empty(5000))
        fill(each[-1], i)
    return torch.stack(each).mean(0)


def test_the_mean_of_all_and_that_of_the_survivors_are_told_apart():
    assert shares(_values([0, 1, 2, 3]), 4) == {"all": 1.0, "survivors": 0.0}
    assert shares(_values([0, 1, 2]), 4) == {"all": 0.0, "survivors": 1.0}
    assert shares(_values(list(range(8))), 8) == {"all": 1.0, "survivors": 0.0}


@pytest.mark.parametrize(("peers", "alone"), [(4, i) for i in range(4)] + [(8, i) for i in range(8)])
def test_what_a_peer_had_itself_is_no_mean(peers: int, alone: int):
    assert shares(_values([alone]), peers) == {"all": 0.0, "survivors": 0.0}


def test_what_is_averaged_in_part_is_wrong_whatever_was_reported():
    values = _values([0, 1, 2, 3])
    values[:500] = _values([0])[:500]
    found = shares(values, 4)
    assert found["all"] == pytest.approx(0.9)
    assert not is_right([{"all": 1.0, "survivors": 0.0}, found])
    diaries = {
        p: [{"what": "done", "round": 0, "at": 1.0, "shares": s, "taking_part": 4}]
        for p, s in enumerate([{"all": 1.0, "survivors": 0.0}, found])
    }
    assert not judging.right(diaries, 0, [0, 1])
    assert "10%" in judging.words_of_death(diaries, 0, [0, 1])


def test_peers_that_hold_different_means_are_wrong_though_each_is_one():
    assert not is_right([{"all": 1.0, "survivors": 0.0}, {"all": 0.0, "survivors": 1.0}])
    assert is_right([{"all": 0.0, "survivors": 1.0}] * 3)
    assert not is_right([])


def test_who_has_not_said_what_it_holds_is_not_right_yet():
    diaries = {p: [{"what": "done", "round": 0, "at": 1.0, "shares": None, "taking_part": 2}] for p in (0, 1)}
    diaries[0].append({"what": "values", "round": 0, "at": 1.1, "shares": {"all": 1.0, "survivors": 0.0}})
    assert not judging.right(diaries, 0, [0, 1])
    diaries[1].append(diaries[0][-1])
    assert judging.right(diaries, 0, [0, 1])


# -- the table -----------------------------------------------------------------------------------------------


def _row(name: str, **changes: Any) -> dict[str, Any]:
    row = {
        "name": name, "says": name, "parameters": 25_165_824, "peers": 4, "mbit": 100.0, "rtt_ms": 100.0,
        "tcp": "cubic", "size": 1, "floor": 1.0, "exchange": 1.2, "certified": 1.3, "applied": 1.5, "own": 1.2,
        "ratio": 1.2, "up": 1.0, "down": 1.0, "cpu": {"node": 1.0, "apply (of the trainer's)": 0.5},
        "matchmaking": None, "right": True, "death": None, "rounds": [{"right": True}, {"right": True}],
    }  # fmt: skip
    return row | changes


def test_a_rival_counts_only_where_the_swarm_is_the_same():
    ours, rival = _row("sparse"), _row("hivemind-u8", applied=30.0, matchmaking=6.0)
    found = goals([ours, rival, _row("hivemind-fp16", applied=60.0)])
    assert [(round(g["value"], 1), g["met"]) for g in found] == [(1.2, True), (20.0, True), (24.0, True)]
    assert len(goals([ours, rival | {"peers": 8}])) == 1


def test_each_codec_stands_beside_hivemind_in_the_same_swarm_and_losing_is_shown():
    rival = _row("hivemind-u8", says="hivemind's averager, u8", exchange=0.75, applied=0.75)
    rows = [_row("int8"), _row("none"), rival, _row("sign", peers=8), _row("gloo")]
    lines = beside_hivemind(rows).splitlines()[2:]
    assert len(lines) == 1 and "int8" in lines[0]
    assert [cell.strip() for cell in lines[0].split("|")[-3:-1]] == ["0.50", "right"]


def test_signs_by_quic_stand_beside_the_same_swarm_by_tcp():
    quic, tcp = _row("sign", exchange=2.0, applied=4.0), _row("sign-no-udp", exchange=1.0, applied=3.0)
    (line,) = transports([quic, _row("sign", peers=8), tcp]).splitlines()[2:]
    assert [cell.strip() for cell in line.split("|")[3:-1]] == ["2.0", "1.0", "4.0", "3.0"]


def test_a_table_shows_who_was_wrong_and_what_a_death_did():
    death = {"seconds": 3.0, "right": False, "says": "success, with 3 peers", "next_seconds": None, "after": 0.5}
    rows = [_row("gloo", right=False, death=death, rounds=[{"right": True}, {"right": False}])]
    text = show({"rows": rows, "goals": goals(rows)})
    assert "WRONG in 1 of 2" in text
    assert "3.0 s, WRONG: success, with 3 peers; no next round" in text
    assert "1.5" not in text.splitlines()[-1]


def test_a_table_gives_the_first_round_too_where_it_was_written_down():
    shown = show({"rows": [_row("sign", warming=[6.31, 5.0]), _row("gloo")], "goals": []})
    assert "6.31 (of 2)" in shown and shown.count("(of") == 1


@pytest.mark.parametrize(("text", "value"), [("25M", 25_000_000), ("1.5B", 1_500_000_000), ("800", 800)])
def test_numbers_of_parameters_are_read_as_people_write_them(text: str, value: int):
    assert number(text) == value


# -- what the peers share ------------------------------------------------------------------------------------


def _job(folder: Path, kind: str = "sparse", parameters: int = 1) -> Job:
    return Job(str(folder), ["10.77.0.1", "10.77.0.2"], parameters, {"kind": kind}, {}, 60.0)


def test_all_who_are_given_a_job_make_the_same_run_of_it(tmp_path: Path):
    job = Job.read(_job(tmp_path).write())
    spec = spec_of(job)
    assert spec.run_id == spec_of(_job(tmp_path)).run_id
    write_genesis(spec, tmp_path / "genesis")
    tensors_from_checkpoint(state_layout(spec.model.layout, spec.outer), (tmp_path / "genesis").read_bytes())
    with Store(tmp_path / "store", 10**9) as store:
        furnish(store, spec, tmp_path / "genesis")
        assert all(store.has(b.name) for b in (spec.genesis, spec.tokenizer, spec.data.train[0]))


def test_a_diary_is_read_as_far_as_it_is_written(tmp_path: Path):
    diary = Diary(_job(tmp_path), 1)
    diary.say("announced", 4, blob="aa")
    with open(tmp_path / "diary-1.jsonl", "a") as file:
        file.write('{"what": "hel')
    assert [(e["what"], e["round"], e["blob"]) for e in read_diary(tmp_path, 1)] == [("announced", 4, "aa")]
    assert read_diary(tmp_path, 0) == []


def test_a_round_begins_for_all_at_the_time_that_is_published(tmp_path: Path):
    diary = Diary(_job(tmp_path), 0)
    assert diary.begins(0) is None
    publish(tmp_path / "go-0", "12.5")
    assert diary.begins(0) == 12.5
    publish(tmp_path / "stop", "")
    assert not diary.wait(1)


def test_the_run_for_overlap_has_no_end_and_no_checkpoints_on_its_way(tmp_path: Path):
    text = run_file('[run]\ntotal_tokens = 5\n[data]\nsource = "a"\n[checkpoint]\nevery = 5\n', tmp_path)
    run = tomllib.loads(text)
    assert run["checkpoint"]["every"] == 256
    assert run["run"]["total_tokens"] > 10**8
    hosts = topology(2.0, 100.0).hosts
    assert hosts["p1"].up * 8 == pytest.approx(2e6)
    assert hosts["p1"].down == hosts["coord"].up
