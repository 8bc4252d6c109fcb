"""How ranks meet: on which network interface, and for how long one waits for the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from peer.errors import TrainingError
from peer.training.parallel import group
from peer.training.parallel.group import RankGroup
from peer.training.parallel.parallel_dims import ParallelDims

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize("said", [None, "eth7"])
def test_ranks_listen_on_loopback_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said):
    seen = {}
    for name in NAMES:
        monkeypatch.setenv(name, said or "")
        if said is None:
            monkeypatch.delenv(name)

    def meets_nobody(*_, **__):
        seen.update({name: os.environ.get(name) for name in NAMES})
        raise RuntimeError("nobody came")

    monkeypatch.setattr(dist, "init_process_group", meets_nobody)
    other, *_ = next(rendezvous(f"file://{tmp_path}/meet", 1, 2))
    other.set("rank 1", "here")
    with pytest.raises(TrainingError, match="did not all meet"):
        RankGroup.join(ParallelDims(dp=2), 0, tmp_path / "meet", torch.device("cpu"))
    assert set(seen.values()) == ({said} if said else {"lo"} if os.uname().sysname == "Linux" else {"lo0"})


def test_a_rank_is_waited_for_longer_than_a_collective_may_take_unless_it_has_ended(tmp_path: Path, monkeypatch):
    def join(ended=str) -> None:
        RankGroup.join(ParallelDims(dp=2), 0, tmp_path / "meet", torch.device("cpu"), 0.0, ended)

    asked = []
    with pytest.raises(TrainingError, match="^rank 1 has ended$"):
        join(lambda: "rank 1 has ended" if asked.append(1) or len(asked) > 1 else "")
    assert len(asked) == 2
    monkeypatch.setattr(group, "MEETING_SECONDS", 0.0)
    with pytest.raises(TrainingError, match="did not all meet, for which they have 0 s"):
        join()
