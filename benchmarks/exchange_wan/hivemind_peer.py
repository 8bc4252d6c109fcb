"""One peer of the `hivemind` rows: `DecentralizedAverager` of hivemind 1.1.12, with its optimizer's time limits.

    python -m benchmarks.exchange_wan.hivemind_peer JOB.json NUMBER

Its search for a group takes seconds and may overlap training, so it comes before a round and is counted separately.
The round is its all-reduce, which all begin at the same instant. A search may leave a peer out: three of four form a
group, and the fourth searches for one. Then all stop after a while and search again, and the time counts with that
round's search.

`hivemind.Optimizer` gives its averagers limits that they do not have by themselves, and so it is here. A peer that
sends nothing for `matchmaking_time` has failed. One all-reduce may take as long as the whole step. Three settings are
not the optimizer's: a search waits for requests for 5 s instead of 15, a group may be without one peer, and each
peer states its bandwidth. A peer listens by TCP, and in the rows -quic by QUIC, too, as Cairn's do.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind import compression
from hivemind.averaging.control import AveragingStage
from hivemind.utils import get_dht_time

from benchmarks.exchange_wan.job import LOOK_SECONDS, Diary, Job, first_peer, publish
from benchmarks.exchange_wan.setting import Setting
from benchmarks.exchange_wan.values import fill, shares

PORT = 7440
MATCHMAKING = 5.0
"""The averager's default."""
NEXT_CHUNK_SECONDS = 15.0
"""As `hivemind.Optimizer` sets it by default. The limit of senders follows, and that of reducers is twice as long."""
STEP_SECONDS = 240.0
"""Of a step and its all-reduce. The optimizer's 60 would end the longest rows; its guide advises twice the need."""
SEARCH_SECONDS = 20.0
"""Seconds after which all stop a search."""
SETTLE_SECONDS = 3.0
"""Until the next begins: requests of the last one have timed out."""

COMPRESSIONS = {
    "none": compression.NoCompression,
    "fp16": compression.Float16Compression,
    "uint8": compression.Uniform8BitQuantization,
}


def main() -> int:
    job, number = Job.read(Path(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    diary, n = Diary(job, number), len(job.ips)
    ports = [f"tcp/{PORT}"] + [f"udp/{PORT}/quic-v1"] * job.options["quic"]
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{job.ips[number]}/{port}" for port in ports],
        initial_peers=first_peer(job.path) if number else [],
        start=True,
    )
    if not number:
        publish(job.path / "first-peer.json", json.dumps([str(a) for a in dht.get_visible_maddrs()]))
    layout = Setting(job.parameters, n).layout
    averager: Any = hivemind.DecentralizedAverager(
        [torch.zeros(t.shape) for t in layout.tensors],
        dht,
        start=True,
        prefix="exchange",
        target_group_size=n,
        min_group_size=max(2, n - 1),  # only one group is possible, and it may be without the dead peer
        min_matchmaking_time=MATCHMAKING,
        next_chunk_timeout=NEXT_CHUNK_SECONDS,
        sender_timeout=NEXT_CHUNK_SECONDS,
        allreduce_timeout=STEP_SECONDS,
        compression=COMPRESSIONS[job.options["compression"]](),
        bandwidth=100.0,
        allow_state_sharing=False,
    )
    diary.ready(-1)
    if not diary.wait(-1):  # everybody is in the DHT
        return 0
    round_number = 0
    while not diary.over:
        with averager.get_tensors() as tensors:
            for i, tensor in enumerate(tensors):
                fill(tensor.view(-1), number, 1000 * round_number + i)
        control = _group(averager, job, number, diary, round_number)
        if control is None:
            return 0
        diary.ready(round_number)
        if not diary.wait(round_number):
            control.allow_allreduce()
            return 0
        diary.say("announced", round_number)
        control.allow_allreduce()
        reason = ""
        try:
            gathered = control.result(timeout=STEP_SECONDS)
        except (Exception, concurrent.futures.CancelledError) as e:  # noqa: BLE001 - whatever its averager raises
            gathered, reason = None, f"{type(e).__name__}: {e}"
        at = time.monotonic()
        with averager.get_tensors() as tensors:
            each = [shares(t.view(-1), n, 1000 * round_number + i) for i, t in enumerate(tensors)]
        found = {which: sum(s[which] for s in each) / len(each) for which in each[0]}
        what = "done" if gathered is not None else "failed"
        diary.say(what, round_number, shares=found, ended=at, taking_part=len(gathered or ()), reason=reason[:200])
        round_number += 1
    averager.shutdown()
    dht.shutdown()
    return 0


def _group(averager: Any, job: Job, number: int, diary: Diary, round: int) -> Any:
    """Return a step in whose group all living peers wait for the trigger; None if it ends before.

    Peer 0 says when a search begins and whether it found all: they stay in step.
    """
    publish(job.path / f"filled-{number}-{round}", "")
    attempt, began = 0, 0.0
    while True:
        search, verdict = (job.path / f"{what}-{round}-{attempt}" for what in ("search", "verdict"))
        if not number:
            for p in (p for p in range(len(job.ips)) if not attempt):
                _await(job.path / f"filled-{p}-{round}", diary, job.path / f"dead-{p}")
            publish(search, repr(time.monotonic() + (SETTLE_SECONDS if attempt else LOOK_SECONDS)))
        if not _await(search, diary):
            return None
        at = float(search.read_text())
        began = began or at
        time.sleep(max(0.0, at - time.monotonic()))
        control = averager.step(
            scheduled_time=get_dht_time() + MATCHMAKING, timeout=STEP_SECONDS, require_trigger=True, wait=False
        )
        end = time.monotonic() + SEARCH_SECONDS
        matched = job.path / f"matched-{number}-{round}-{attempt}"
        while not verdict.exists() and not diary.over:
            if not matched.exists() and control.stage is AveragingStage.AWAITING_TRIGGER:
                publish(matched, "")
            if not number:
                living = [p for p in range(len(job.ips)) if not (job.path / f"dead-{p}").exists()]
                all_in = all((job.path / f"matched-{p}-{round}-{attempt}").exists() for p in living)
                if all_in or time.monotonic() > end:
                    publish(verdict, "all" if all_in else "")
            time.sleep(LOOK_SECONDS)
        if not diary.over and verdict.read_text():
            diary.say("matched", round, seconds=time.monotonic() - began)
            return control
        control.cancel()
        if diary.over:
            return None
        diary.say("unmatched", round, found=matched.exists())
        attempt += 1


def _await(file: Path, diary: Diary, or_else: Path | None = None) -> bool:
    """Until it is there, or the other one; False when it is all over."""
    while not file.exists() and not (or_else and or_else.exists()):
        if diary.over:
            return False
        time.sleep(LOOK_SECONDS)
    return True


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
