"""Every line of the doctor says yes, maybe and no, each for its reason and with what to do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peer.coordinator_client import LastState, PeerStatus, RunInfo, SwarmStatus
from peer.doctor import links, pace
from peer.doctor.clock import clock_finding
from peer.doctor.device import device_finding, files_finding, fits, memory_finding
from peer.doctor.disk import SAVED_TENSORS, disk_finding, files_room, state_bytes, to_save
from peer.doctor.findings import DoctorFinding, verdict_of
from peer.doctor.measurements import Device, DownloadProbe, PresentSwarm, Sample, Trial, step_seconds
from peer.doctor.probes import dial, disk_space
from peer.errors import PeerError
from peer.fetched_data import data_bytes
from peer.training.offload import note_of
from protocol.ids import Digest
from protocol.spec import RunSpec
from protocol.training_memory import saved_bytes
from tests.support.node_world import address_of
from tests.support.specs import digest, identity, spec_fields, tiny_spec

GB = 10**9
SPEC = tiny_spec()
"""4 windows of 16 tokens in a step; 1,024 tokens or 30 s in a round; at most 16,384 tokens in an update."""

GPU = Device("NVIDIA RTX 4090", "cuda", "dp=1", 1, 10 * GB, 23 * GB, 24 * GB, "2.9.0", "12.8", "570.1")
CPU = Device("CPU x86_64", "cpu", "fsdp=2", 2, 3 * GB, 7 * GB, 8 * GB, "2.9.0+cpu")
BASE = GB
"""Bytes of a state."""
NOTE = note_of("files", SPEC)
SAVED = saved_bytes(SPEC.model.layout, SPEC.model.config, SPEC.inner, replayable=False)


def spec_with(**rounds: object) -> RunSpec:
    return tiny_spec(round=spec_fields()["round"] | rounds)


REPLAYABLE = tiny_spec(audit={"replayable": True}, codec={"kind": "sign", "beta": 0})


def status(*phases: str, health: str = "healthy", message: str = "3 peers training") -> SwarmStatus:
    """Return a status with a peer in each phase."""
    nobody: dict[str, Any] = dict.fromkeys(PeerStatus.__dataclass_fields__, 0)
    peers = tuple(PeerStatus(**nobody | {"phase": phase}) for phase in phases)
    head = digest("head")
    return SwarmStatus("tiny", health, message, 3, head, head, 3, 0, 0, 500.0, 3.0, peers, "", None, 0, None)


def says(finding: DoctorFinding | None, verdict: str, *words: str) -> DoctorFinding:
    """Return the finding. Raise AssertionError unless it has this verdict and these words, and a remedy if needed."""
    assert finding is not None
    assert finding.verdict == verdict, finding
    assert not [word for word in words if word not in f"{finding.found} {finding.remedy}"], finding
    assert bool(finding.remedy) == (verdict in ("warning", "no")), finding
    return finding


@pytest.mark.parametrize(
    ("ahead", "verdict", "word"),
    [(0.4, "ok", "agrees"), (-29.9, "ok", "agrees"), (None, "note", "not compared"), (31.0, "warning", "31 s ahead of"),
     (-599.0, "warning", "599 s behind"), (3600.0, "no", "NTP"), (-601.0, "no", "601 s behind")],
)  # fmt: skip
def test_the_clock(ahead: float | None, verdict: str, word: str):
    says(clock_finding(ahead), verdict, word)


def test_the_disk(tmp_path: Path):
    def found(limit: int, used: int, free: int, saves: int = 0) -> DoctorFinding:
        return disk_finding(SPEC, tmp_path, limit=limit, used=used, free=free, saves=saves, private_data=False)

    says(found(GB, 0, 2 * GB), "ok", "2.0 GB are free")
    says(found(GB, 0, GB // 2), "warning", "may grow to 1.0 GB", "--disk")
    says(found(20_000, 0, GB), "no", "--disk allows 20.0 kB")
    says(found(GB, 0, 1000), "no", "1.0 kB are free", "--home")
    # It has everything already, but what is saved.
    says(found(GB, GB, GB - 1, GB), "no", "1.0 GB for what the trainer saves", "--home")
    says(found(GB, GB, GB, GB), "ok")
    says(found(GB, GB - 1000, GB + 999, GB), "warning", "may grow to 1.0 GB")
    assert "saves" not in found(GB, GB, GB).found


def test_a_trainer_saves_its_state_beside_the_last_one(tmp_path: Path):
    """As it is: a peer that has trained can come back with room for one more."""
    model = SPEC.model
    assert to_save(SPEC, tmp_path) == 2 * SAVED and 12 * model.layout.numel <= SAVED <= 16 * model.layout.numel
    position = saved_bytes(model.layout, model.config, SPEC.inner, replayable=True)
    assert position == SAVED - 4 * model.layout.numel
    (tmp_path / SAVED_TENSORS.replace("*", "7")).write_bytes(bytes(SAVED))
    assert to_save(SPEC, tmp_path) == SAVED


def test_the_disk_needs_no_room_for_data_that_is_read_at_an_address(tmp_path: Path):
    data = spec_fields()["data"] | {"addresses": ["file:///data"]}
    data["train"] = [{"digest": data["train"][0]["digest"], "size": 10 * GB, "tokens": 5 * GB}]
    spec = tiny_spec(data=data)
    says(disk_finding(spec, tmp_path, limit=GB, used=0, free=GB, saves=0, private_data=False), "no", "10.0 GB of data")
    says(
        disk_finding(spec, tmp_path, limit=GB, used=0, free=2 * GB, saves=0, private_data=True), "ok", "1.0 kB of data"
    )


def test_files_of_the_trainer_have_half_of_what_data_and_checkpoints_leave():
    data, states = data_bytes(SPEC, private_data=False), (SPEC.checkpoint.keep + 2) * state_bytes(SPEC)
    held = data + states

    def room(limit: int, used: int, free: int) -> int:
        found = files_room(SPEC, limit=limit, used=used, free=free, saves=0, private_data=False)
        with_saves = files_room(SPEC, limit=limit, used=used, free=free + GB, saves=GB, private_data=False)
        assert found == with_saves
        return found

    assert room(held + 2 * GB, 0, 100 * GB) == room(held + 2 * GB, held + GB, GB) == GB
    assert room(held + 20 * GB, 0, held + GB) == room(held + 20 * GB, 2 * held, GB) == GB
    assert room(held + 2 * GB, held + 3 * GB // 2, 100 * GB) == GB // 2  # updates fill the rest
    assert room(held - 1, 0, GB) == room(GB, 0, held) == room(held + GB, held + 2 * GB, 100 * GB) == 0


def test_the_device():
    says(device_finding(Trial(GPU)), "ok", "NVIDIA RTX 4090", "driver 570.1", "CUDA 12.8")
    says(device_finding(Trial(CPU)), "ok", "2 x CPU x86_64, laid out as fsdp=2")
    idle = replace(CPU, unused=("NVIDIA T4",))
    says(device_finding(Trial(idle)), "warning", "torch 2.9.0+cpu does not use NVIDIA T4", "a torch with CUDA")
    refused = device_finding(Trial(refused="cuda is asked for, and there is none"))
    assert (refused.verdict, refused.found) == ("no", "cuda is asked for, and there is none")


def test_the_memory_before_a_step():
    says(memory_finding(Trial(GPU), BASE), "ok", "10.0 GB", "23.0 GB of a GPU's 24.0 GB are free")
    says(memory_finding(Trial(replace(GPU, needed=20 * GB)), BASE), "warning", "more memory")
    says(memory_finding(Trial(replace(GPU, free=9 * GB)), BASE), "no", "stop other programs")
    says(memory_finding(Trial(replace(GPU, needed=25 * GB)), BASE), "no", "--parallel", "or a larger --disk")
    says(memory_finding(Trial(replace(GPU, limit=9 * GB)), BASE), "no", "--gpu-memory", "a larger --disk")
    for fits_or_moved in ({"free": 11 * GB}, {"needed": 25 * GB, "offloaded": GB}):
        finding = memory_finding(Trial(replace(GPU, **fits_or_moved)), BASE)
        assert finding is not None and "more of them" in finding.remedy and "--disk" not in finding.remedy
    says(memory_finding(Trial(replace(CPU, needed=5 * GB)), BASE), "no", "10.0 GB", "this machine's 8.0 GB")
    says(memory_finding(Trial(replace(GPU, offloaded=GB)), BASE), "ok", "1.0 GB more lie in the machine's memory")
    says(memory_finding(Trial(replace(GPU, offloaded=GB, note=NOTE)), BASE), "ok", "1.0 GB more lie in files")
    assert memory_finding(Trial(), BASE) is None
    assert fits(GPU) and not fits(replace(GPU, free=9 * GB)) and not fits(replace(CPU, needed=4 * GB))


def test_what_each_round_writes_to_files_is_told_before_joining():
    found = says(files_finding(Trial(replace(GPU, offloaded=1, note=NOTE))), "warning", "training waits meanwhile")
    assert f"{found.found}: {found.remedy}" == NOTE and found.remedy.startswith("add memory")
    assert files_finding(Trial(replace(GPU, offloaded=1))) is None and files_finding(Trial()) is None


def test_the_memory_of_a_step_is_what_it_used_and_the_state_that_a_trial_does_not_hold():
    def after(device: Device, used: int) -> DoctorFinding | None:
        return memory_finding(Trial(device, [Sample(1, 0.1, memory=used), Sample(4, 0.1, memory=used // 2)]), BASE)

    says(after(GPU, 20 * GB), "ok", "training uses 21.0 GB")
    says(after(GPU, 21 * GB), "warning", "22.0 GB")
    says(after(GPU, 23 * GB), "no", "24.0 GB")
    says(after(CPU, 2 * GB), "ok", "training uses 5.0 GB")  # two ranks share the machine


def test_the_seconds_of_a_step_are_those_of_the_largest_after_the_first():
    """The gradient of fewer windows is scaled to a step's; the optimizer takes the same time for any number."""
    assert step_seconds([], 8) is None
    assert step_seconds([Sample(1, 9.0)], 8) == 72.0
    assert step_seconds([Sample(1, 9.0), Sample(1, 2.0), Sample(1, 4.0)], 8) == 24.0
    assert step_seconds([Sample(1, 9.0, 9.0), Sample(1, 2.0, 3.0)], 8) == 19.0
    assert step_seconds([Sample(1, 9.0), Sample(1, 2.0), Sample(4, 9.0), Sample(4, 1.0)], 8) == 2.0


ALONE = PresentSwarm()


def step(spec: RunSpec, seconds: float, swarm: PresentSwarm = ALONE, device: Device = GPU) -> DoctorFinding:
    trial = Trial(device, [Sample(spec.inner.batch, seconds)])
    finding = pace.step_finding(spec, trial, pace.pace_of(spec, swarm, trial))
    assert finding is not None
    return finding


def test_a_step_within_a_round():
    says(step(SPEC, 1.0), "ok", "4 x 16 tokens takes 1 s (64 tokens/s, without torch.compile)", "16 s: 16 steps here")
    says(step(SPEC, 1.0, PresentSwarm(3, 960.0), CPU), "ok", "takes 1 s (64 tokens/s);", "about 1 s: 1 step here")


def test_a_step_that_is_longer_than_a_round_counts_later_or_is_lost():
    fast = PresentSwarm(9, 2048.0)
    says(step(SPEC, 1.0, fast), "warning", "in one round of 2")
    says(step(SPEC, 45.0), "warning", "30 s now", "in one round of 2")
    says(step(REPLAYABLE, 1.0), "ok")
    says(step(REPLAYABLE, 1.0, fast), "warning", "drops a step")
    says(step(REPLAYABLE, 31.0), "no", "would never contribute")


def test_a_machine_that_is_faster_than_its_updates_may_claim():
    says(step(spec_with(max_update_tokens=512), 1.0), "warning", "50% of the time", "round.max_update_tokens")


def test_a_step_that_was_not_measured():
    def found(trial: Trial, spec: RunSpec = SPEC) -> DoctorFinding | None:
        return pace.step_finding(spec, trial, None)

    assert found(Trial()) is None
    says(found(Trial(GPU)), "note", "does not fit")
    says(found(Trial(GPU, waited=60.0)), "warning", "not one of the 4 windows", "in 60 s", "a faster device")
    says(found(Trial(GPU, waited=60.0), REPLAYABLE), "no", "in 60 s")
    says(found(Trial(GPU, waited=7.0), REPLAYABLE), "warning", "in 7 s")  # 4 windows may end in 30 s
    some = Trial(GPU, [Sample(4, 1.0)], refused="the GPU fell off the bus")
    broken = pace.step_finding(SPEC, some, pace.pace_of(SPEC, ALONE, some))
    assert broken is not None and (broken.verdict, broken.found) == ("no", "the GPU fell off the bus")


def test_the_credits_of_an_hour_are_those_of_the_runs_rule():
    trial = Trial(GPU, [Sample(4, 1.0)])
    speed = pace.pace_of(SPEC, PresentSwarm(), trial)
    assert speed is not None
    # 6 FLOPs for each of 28,832 parameters, and 64 tokens a second
    assert pace.micro_credits_an_hour(SPEC, speed) == 6 * 28_832 * 64 * 3600 // 10**9
    says(pace.credit_finding(SPEC, speed), "note", "less than 0.01 an hour", "if every update is accepted")
    fast = replace(speed, windows=speed.windows * 40_000_000)
    says(pace.credit_finding(SPEC, fast), "note", "about 1,594 an hour, about 38,263 a day")


def test_the_traffic_grows_with_the_members_of_a_gathered_round_and_not_of_a_reduced_one():
    def of(spec: RunSpec, members: int) -> pace.Traffic:
        return pace.traffic_of(spec, PresentSwarm(members, 102.4), None, 5000, private_data=False)

    size = pace.ReducePlan.of(SPEC).update_size
    none, one, nine = of(SPEC, 0), of(SPEC, 1), of(SPEC, 9)
    assert (none.exchange, one.exchange, nine.exchange) == (size, size, 9 * size)
    assert nine.rounds_an_hour == 360  # 1,024 tokens at 102.4 tokens/s
    assert nine.in_an_hour == nine.out_an_hour == 360 * 9 * size
    assert nine.mbits == pytest.approx(8e-6 * 9 * size / 10)  # exchange_seconds
    assert nine.first == 5000
    says(pace.traffic_finding(nine), "note", "9 other members", "at first 5.0 kB in")
    reduced = spec_with(exchange="reduce")
    assert of(reduced, 9).exchange == of(reduced, 40).exchange < of(SPEC, 40).exchange


def test_training_data_at_an_address_is_read_once_if_it_fits_into_the_cache_and_by_chunks_if_not():
    trial = Trial(GPU, [Sample(4, 1.0)])

    def of(tokens: int, private_data: bool) -> pace.Traffic:
        data = spec_fields()["data"] | {"addresses": ["file:///data"]}
        data["train"] = [{"digest": data["train"][0]["digest"], "size": 2 * tokens, "tokens": tokens}]
        spec = tiny_spec(data=data)
        return pace.traffic_of(
            spec, PresentSwarm(), pace.pace_of(spec, PresentSwarm(), trial), 0, private_data=private_data
        )

    assert (of(10_000, True).first, of(10_000, True).data_an_hour) == (20_000, 0)
    assert (of(GB, False).first, of(GB, False).data_an_hour) == (0, 0)  # fetched from members, in `first` already
    assert of(GB, True).data_an_hour == 4 * 3600 * (2**18 + 32)
    assert "of it training data" in pace.traffic_finding(of(GB, True)).found


def test_the_link():
    traffic = pace.traffic_of(SPEC, PresentSwarm(9), None, 0, private_data=False)
    enough = traffic.mbits * 2
    says(
        pace.link_finding(traffic, DownloadProbe(int(enough * 125_000), 1.0)),
        "ok",
        "Mbit/s down",
        "up was not measured",
    )
    says(pace.link_finding(traffic, DownloadProbe(int(enough * 125_000), 4.0)), "warning", "come late")
    says(pace.link_finding(traffic, None), "note", "Not measured")


def test_the_run():
    info = RunInfo(SPEC, b"", (), "")
    says(links.run_finding(info, status()), "ok", "tiny is healthy: 3 peers training")
    says(links.run_finding(info, status(health="paused")), "warning", "until its owner resumes it")
    rests = replace(info, last=LastState(Digest(bytes(32)), 3, None))
    says(links.run_finding(rests, status()), "warning")
    over = replace(info, over="finished: 2,000 tokens")
    says(links.run_finding(over, status()), "no", "finished: 2,000 tokens", "fetch the model")


def test_the_swarm_is_those_that_are_there():
    there = ("joining", "training", "exchanging", "syncing", "paused")
    assert links.swarm_of(status(*there, "silent", "gone", "banned", "barred")) == PresentSwarm(5, 500.0)


def test_a_speed_that_no_swarm_has_breaks_nothing():
    swarm = links.swarm_of(replace(status(), tokens_per_second=1e308))
    trial = Trial(GPU, [Sample(4, 1.0)])
    speed = pace.pace_of(SPEC, swarm, trial)
    traffic = pace.traffic_of(SPEC, swarm, speed, 0, private_data=False)
    says(pace.step_finding(SPEC, trial, speed), "warning", "in one round of")
    says(pace.traffic_finding(traffic), "note", "one other member (nobody is there now)")


def test_the_members():
    some = {"/ip4/192.0.2.1/tcp/7412": True, "/ip4/192.0.2.2/tcp/4001": False}
    says(links.reach_finding(some, "192.168.1.5"), "ok", "1 of 2", "whose address is private")
    assert "private" not in links.reach_finding(some, "8.8.8.8").found
    says(links.reach_finding(dict.fromkeys(some, False), ""), "no", "0 of 2", "ports 4001, 7412")
    says(links.reach_finding({}, ""), "note", "no address of a member")


def test_the_worst_finding_is_the_verdict_and_only_a_no_is_refused():
    ok, note, warning, no = (DoctorFinding("x", v, "found", "mend it") for v in ("ok", "note", "warning", "no"))
    assert [verdict_of(some) for some in ([ok, note], [ok, warning], [warning, no, ok])] == ["ok", "warning", "no"]
    for finding in (ok, note, warning):
        finding.require()
    with pytest.raises(PeerError, match="^found: mend it$"):
        no.require()


def test_the_disk_of_a_store_that_is_not_there_is_that_of_the_nearest_folder(tmp_path: Path):
    space = disk_space(tmp_path / "home" / "runs" / "x" / "store")
    assert (space.folder, space.is_writable, space.used) == (tmp_path, True, 0) and space.free > 0
    store = tmp_path / "store"
    (store / "blobs" / "ab").mkdir(parents=True)
    (store / "blobs" / "ab" / "blob").write_bytes(bytes(1234))
    assert disk_space(store).used == 1234
    (tmp_path / "file").write_text("")
    space = disk_space(tmp_path / "file" / "runs")
    assert not space.is_writable and not space.free
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "store"]


async def test_only_an_address_of_tcp_that_somebody_listens_at_is_reached():
    key = identity("ada").key
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    there = address_of(key).replace("4001", str(port))
    async with server:
        assert await dial([there, there, "/p2p-circuit", "nonsense"]) == {there.split("/p2p/")[0]: True}
    assert await dial([there]) == {there.split("/p2p/")[0]: False}


async def test_a_name_that_is_no_name_of_a_host_is_not_reached(monkeypatch: pytest.MonkeyPatch):
    async def open_connection(*_: object) -> None:
        "a..example".encode("idna")

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    there = address_of(identity("ada").key)
    assert await dial([there]) == {there.split("/p2p/")[0]: False}
