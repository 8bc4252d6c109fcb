"""The guides work: an owner and a volunteer follow docs/owner.md and docs/volunteer.md word by word.

An owner who fine-tunes follows docs/finetuning.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cairn.demo.processes import free_ports
from tests.support.guides import Reader

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

MEMBER = ["--listen", "/ip4/127.0.0.1/tcp/0", "--device", "cpu", "--threads", "1"]


def test_an_owner_and_a_volunteer_get_from_a_corpus_to_a_model_by_the_guides(tmp_path: Path):
    grpc, page, swarm = free_ports(3)
    serving = ["--grpc", f"127.0.0.1:{grpc}", "--page", f"127.0.0.1:{page}", "--swarm", f"/ip4/127.0.0.1/tcp/{swarm}"]
    options = {"coordinator serve": serving, "peer join": MEMBER}
    with (
        Reader("owner.md", tmp_path / "owner", options) as owner,
        Reader("volunteer.md", tmp_path / "volunteer", options) as volunteer,
    ):
        owner.follow("Rehearse on one machine")
        invite = owner.home / ".cairn/coordinated/rehearsal/invite"
        volunteer.placeholders["INVITE"] = invite.read_text().strip()
        volunteer.follow("Join")
        (run,) = os.listdir(volunteer.home / ".cairn/runs")
        volunteer.placeholders["RUN"] = run
        # Only then credits are sure to be there, all of them settled.
        volunteer.follow("When the run is over")
        volunteer.follow("What is a credit?")
        owner.follow("Use the model", "Plan the real run")
        assert owner.blocks + volunteer.blocks == [], "no section of theirs was left out"
        owner.stop()
    for reader, model in ((owner, "my-model"), (volunteer, "my-model")):
        assert (reader.clone / model / "model.safetensors").stat().st_size > 500_000


def test_an_owner_fine_tunes_a_base_model_by_the_guide(tmp_path: Path):
    grpc, page, swarm = free_ports(3)
    serving = ["--grpc", f"127.0.0.1:{grpc}", "--page", f"127.0.0.1:{page}", "--swarm", f"/ip4/127.0.0.1/tcp/{swarm}"]
    with Reader("finetuning.md", tmp_path / "owner", {"coordinator serve": serving, "peer join": MEMBER}) as owner:
        owner.follow(*dict.fromkeys(block.section for block in owner.blocks))
        owner.stop()
    assert (owner.clone / "try/adapter/adapter_model.safetensors").stat().st_size > 100_000
    assert (owner.clone / "try/merged/model.safetensors").stat().st_size > 2_000_000
