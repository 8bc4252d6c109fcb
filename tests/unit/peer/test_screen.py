"""A screen finds noise, reversed signs, and work on another state than the round's; honest updates pass."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from peer.auditor.job import ScreenJob
from peer.auditor.screen import MEASURED_VALUES, chosen_tensors, compare_signs, screen, signs
from protocol.codec import make_codec
from protocol.layout import Layout, TensorShape
from protocol.spec import CodecSpec
from tests.support.coordinator_fakes import make_spec

VALUES = 20_000
PEERS = 6


class Rounds:
    """Rounds of honest updates: a part of their signs is the round's, and a part of that the round's before."""

    def __init__(self, seed: int, count: int):
        self.generator = torch.Generator().manual_seed(seed)
        direction, self.updates = self.random(), []
        for _ in range(count):
            direction = torch.where(self.share(0.5), direction, self.random())
            self.updates.append(torch.stack([self.honest(direction) for _ in range(PEERS)]))

    def random(self) -> Tensor:
        return (torch.randint(0, 2, (VALUES,), generator=self.generator) * 2 - 1).to(torch.int8)

    def share(self, part: float) -> Tensor:
        return torch.rand(VALUES, generator=self.generator) < part

    def honest(self, direction: Tensor) -> Tensor:
        return torch.where(self.share(0.4), direction, self.random())

    def failed(self, update: Tensor) -> set[str]:
        """Return the scores that an update of the last round fails beside five honest ones."""
        last = torch.cat([update[None], self.updates[-1][1:]])
        earlier = [self.updates[-1 - back].sum(0, dtype=torch.int16) for back in (1, 2, 4)]
        return {s.name for s in compare_signs(last, earlier) if s.value < s.threshold}


@pytest.mark.parametrize("seed", range(5))
def test_honest_updates_pass_and_each_fake_fails(seed):
    rounds = Rounds(seed, 6)
    for update in rounds.updates[-1]:
        assert not rounds.failed(update)
    assert "agreement" in rounds.failed(rounds.random())
    assert "agreement" in rounds.failed(-rounds.updates[-1][0])
    for back in (1, 2, 3, 4):
        old = rounds.updates[-1 - back][0]
        assert "fresh" in rounds.failed(old), f"a copy, or work on the state of {back} rounds before"


def test_without_earlier_rounds_only_the_agreement_is_measured():
    rounds = Rounds(1, 1)
    assert [s.name for s in compare_signs(rounds.updates[0], [])] == ["agreement"]


def test_updates_without_any_sign_agree_by_chance():
    (found,) = compare_signs(torch.zeros(3, 10, dtype=torch.int8), [])
    assert (found.value, found.threshold) == (0.5, 0.5)


def test_the_tensors_of_the_vocabulary_are_compared_only_if_there_are_no_others():
    layout = Layout((TensorShape("a", (64, 8)), TensorShape("b", (32, 8)), TensorShape("c", (8, 32))))
    codec = make_codec(CodecSpec(kind="sign"), layout)
    assert chosen_tensors(codec, 64, Random(1)) == [1, 2]
    assert chosen_tensors(make_codec(CodecSpec(kind="sign"), Layout(layout.tensors[:1])), 64, Random(1)) == [0]


def test_of_a_large_model_only_some_tensors_are_compared_and_nobody_knows_which():
    tensor = (128, 128)
    layout = Layout(tuple(TensorShape(f"t{i:02}", tensor) for i in range(16)))
    codec = make_codec(CodecSpec(kind="sign"), layout)
    chosen = {tuple(chosen_tensors(codec, None, Random(seed))) for seed in range(20)}
    assert all(sum(layout.tensors[i].numel for i in c) == MEASURED_VALUES for c in chosen) and len(chosen) > 3


@pytest.mark.parametrize("codec", [{"kind": "sign"}, {"kind": "sparse"}])
def test_signs_are_read_from_the_blobs_of_any_codec(tmp_path: Path, codec):
    spec = make_spec(codec=codec)
    made = make_codec(spec.codec, spec.model.layout)
    generator = torch.Generator().manual_seed(1)
    values = [{t.name: torch.randn(t.shape, generator=generator) for t in made.layout.tensors} for _ in range(3)]
    blobs = [bytes(made.encode({n: v.clone() for n, v in one.items()})) for one in values]
    every = list(range(len(made.layout.tensors)))
    found, flat = signs(made, blobs[0], every), [values[0][t.name].flatten() for t in made.layout.tensors]
    whole = torch.cat([flat[part.index][part.start : part.start + part.count * batch.width]
                       for batch in made.batches() for part in batch.segments])  # fmt: skip
    assert (found[found != 0] == whole.sign()[found != 0]).double().mean() > 0.99 and (found != 0).any()
    paths = []
    for i, blob in enumerate(blobs):
        paths.append(tmp_path / f"{i}.blob")
        paths[-1].write_bytes(blob)
    spec_path = tmp_path / "spec.json"
    spec_path.write_bytes(spec.canonical())
    scores = screen(ScreenJob(spec_path, tuple(paths), ((paths[1],),)), Random(1))
    assert [s.name for s in scores] == ["agreement", "fresh"]
