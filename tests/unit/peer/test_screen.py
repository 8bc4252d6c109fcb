"""A screen finds noise, reversed signs, and work on another state than the round's; honest updates pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from peer.auditor.job import SCREENED_BACK, ScreenJob
from peer.auditor.screen import chosen_blocks, compare_blobs, compare_signs, screen, signs
from protocol.codec import make_codec
from protocol.layout import BLOCK, Layout, TensorShape
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
        others = [u for u in self.updates[-1] if not torch.equal(u, update)]
        last = torch.stack([update, *others[: PEERS - 1]])
        earlier = [self.updates[-1 - back] for back in SCREENED_BACK]
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


@pytest.mark.parametrize("clones", [2, 5, 11])
def test_one_work_under_many_keys_is_found_and_makes_no_honest_update_strange(clones):
    rounds = Rounds(clones, 1)
    honest, work = rounds.updates[0], rounds.honest(rounds.random())
    same = [torch.where(rounds.share(0.02), -work, work) for _ in range(clones)]
    for first, strange in ((honest, set()), (torch.stack(same), {"apart"})):
        scores = compare_signs(torch.cat([first, torch.stack(same) if first is honest else honest]), [])
        assert {s.name for s in scores if s.value < s.threshold} - {"agreement"} == strange
    (agreement, _) = compare_signs(torch.cat([honest, torch.stack(same)]), [])
    assert agreement.value >= agreement.threshold


def test_without_earlier_rounds_an_update_is_compared_with_its_own_alone():
    rounds = Rounds(1, 1)
    assert [s.name for s in compare_signs(rounds.updates[0], [])] == ["agreement", "apart"]


def test_updates_without_any_sign_agree_by_chance():
    for found in compare_signs(torch.zeros(3, 10, dtype=torch.int8), []):
        assert found.value == 0.5 >= found.threshold


def test_the_tensors_of_the_vocabulary_are_compared_only_if_there_are_no_others():
    layout = Layout((TensorShape("a", (64, 8)), TensorShape("b", (32, 8)), TensorShape("c", (8, 32))))
    assert chosen_blocks(layout, 64, 1, Random(1)) != list(layout.full_slices[1:])
    assert chosen_blocks(layout, 64, 9999, Random(1)) == list(layout.full_slices[1:])
    assert chosen_blocks(Layout(layout.tensors[:1]), 64, 9999, Random(1)) == list(layout.full_slices[:1])


def test_of_a_large_model_only_some_blocks_are_compared_and_nobody_knows_which():
    layout = Layout.of({"a": (BLOCK,), "b": (3 * BLOCK + 5,), "c": (4096, 4096), "d": (64, 8 * BLOCK)})
    every = [chosen_blocks(layout, 64, 4 * BLOCK, Random(seed)) for seed in range(20)]
    assert len(set(map(tuple, every))) == 20
    for blocks in every:
        assert sum(b.numel for b in blocks) == 4 * BLOCK and len(set(blocks)) == len(blocks)
        assert all(b.index != 3 and b.start % BLOCK == 0 and b.stop <= layout.tensors[b.index].numel for b in blocks)


def test_each_value_is_as_likely_to_be_compared():
    layout = Layout.of({"a": (BLOCK,), "b": (8 * BLOCK,), "c": (BLOCK // 2,)})
    every = [chosen_blocks(layout, None, BLOCK, Random(seed)) for seed in range(900)]
    drawn = Counter((b.index, b.start) for blocks in every for b in blocks)
    usual = [count for (index, _), count in drawn.items() if index < 2]
    assert len(usual) == 9 and min(usual) > 0.7 * max(usual)
    assert 0.3 * max(usual) < drawn[2, 0] < 0.7 * max(usual)  # a block of half as many values


class Scripted(Random):
    """Draws these values in turn."""

    def __init__(self, places: Iterable[int]):
        self.places = iter(places)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return next(self.places)


def test_an_update_that_fails_by_few_values_is_compared_in_more():
    layout = Layout.of({"a": (64 * BLOCK,)})
    codec, generator = make_codec(CodecSpec(kind="sign"), layout), torch.Generator().manual_seed(1)
    direction = torch.randn(64 * BLOCK, generator=generator)
    updates = [direction + torch.randn(64 * BLOCK, generator=generator) for _ in range(4)]
    strange = updates[0].clone()
    strange[: 4 * BLOCK] *= -1  # the blocks that are drawn first
    few, many = range(0, 4 * BLOCK, BLOCK), range(0, 64 * BLOCK, 4 * BLOCK)

    def failed(first: Tensor, places: Iterable[int]) -> bool:
        blobs = [bytes(codec.encode({"a": values.clone()})) for values in (first, *updates[1:])]
        return any(s.value < s.threshold for s in compare_blobs(codec, None, blobs, [], Scripted(places)))

    assert not failed(updates[0], few)  # no more are drawn
    assert not failed(strange, [*few, *many])
    assert failed(-updates[0], [*few, *many])


@pytest.mark.parametrize("codec", [{"kind": "sign"}, {"kind": "sparse"}])
def test_signs_are_read_from_the_blobs_of_any_codec(tmp_path: Path, codec):
    spec = make_spec(codec=codec)
    made = make_codec(spec.codec, spec.model.layout)
    generator = torch.Generator().manual_seed(1)
    values = [{t.name: torch.randn(t.shape, generator=generator) for t in made.layout.tensors} for _ in range(3)]
    blobs = [bytes(made.encode({n: v.clone() for n, v in one.items()})) for one in values]
    every = made.layout.full_slices
    (found, *_), flat = signs(made, blobs, every), [values[0][t.name].flatten() for t in made.layout.tensors]
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
    assert [s.name for s in scores] == ["agreement", "apart", "fresh"]
