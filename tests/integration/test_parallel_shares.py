"""A state that ranks hold together: every block has one owner, and files, digests, updates and rounds are as of one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from peer.training.inner_optimizer import ADAMW_MOMENTS
from peer.training.offload import Offload
from peer.training.parallel.ownership import BlockOwnership
from peer.training.parallel.sharded_file import ShardedFile
from peer.training.saved_state import POSITION
from peer.training.state_writer import StateWriter
from protocol.codec import make_codec
from protocol.ids import PeerKey, sha256
from protocol.layout import BLOCK, MOMENTUM, REFERENCE_NORMS, Layout, TensorSlice
from protocol.merkle import blob_digest
from protocol.outer import Contribution, apply
from protocol.spec import CodecSpec, OuterSpec
from protocol.state import checkpoint_chunks, state_digest, state_layout

LAYOUT = Layout.of(
    {"a.weight": (96, 100), "b.bias": (70,), "c.weight": (37, 4096), "d": (5,), "e.weight": (300, 300), "f": (4096,)}
)
CPU = torch.device("cpu")
shapes = st.dictionaries(
    st.text("abcdefg", min_size=1, max_size=3), st.integers(1, 5 * BLOCK).map(lambda n: (n,)), min_size=1
)


def noise(layout: Layout, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {t.name: torch.randn(t.shape, generator=made) * scale for t in layout.tensors}


def dealt(layout: Layout, ranks: int, stages: int = 1) -> BlockOwnership:
    each = ranks // stages
    of_stage = [list(range(s * each, (s + 1) * each)) for s in range(stages)]
    return BlockOwnership.of(layout, [i % stages for i in range(len(layout.tensors))], of_stage)


def names_of(layout: Layout) -> dict[str, str]:
    """Return the parameter of each of a state's tensors that belongs to one."""
    return {t.name: t.name.removeprefix(MOMENTUM) for t in layout.tensors if t.name != REFERENCE_NORMS}


def cut(layout: Layout, tensors: dict[str, Tensor], parts: tuple[TensorSlice, ...]) -> dict[str, Tensor]:
    """Return copies of these slices."""
    return {
        layout.tensors[p.index].name: tensors[layout.tensors[p.index].name].view(-1)[p.start : p.stop].clone()
        for p in parts
    }


@given(shapes, st.integers(1, 9))
def test_every_coordinate_has_one_owner_and_ranks_hold_alike_many_blocks(found, ranks):
    layout = Layout.of(found)
    owned = dealt(layout, ranks)
    for index, tensor in enumerate(layout.tensors):
        at = 0
        for rank, part in owned.owners[index]:
            assert part in owned.parts[rank] and part.index == index and part.start == at < part.stop
            assert part.start % BLOCK == 0
            at = part.stop
        assert at == tensor.numel
    blocks = [sum(-(-p.numel // BLOCK) for p in owned.parts[r]) for r in range(ranks)]
    assert max(blocks) - min(blocks) <= 1 and sum(blocks) == layout.blocks
    for parts in owned.parts.values():
        assert len({p.index for p in parts}) == len(parts)  # at most one of a tensor


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (5, 1), (4, 2), (9, 3)])
@pytest.mark.parametrize("optimizer", ["plain", "nesterov"])
def test_a_file_by_many_ranks_has_the_bytes_and_the_digest_of_one(tmp_path: Path, ranks, stages, optimizer):
    layout = state_layout(LAYOUT, OuterSpec(optimizer=optimizer))
    state = noise(layout, 1)
    owned = dealt(LAYOUT, ranks, stages).within(layout, names_of(layout))
    file = ShardedFile(layout, owned)
    path = tmp_path / "state"
    path.touch()
    descriptor = os.open(path, os.O_WRONLY)
    reports = []
    for rank in reversed(range(ranks)):
        tensors = [state[layout.tensors[p.index].name].view(-1)[p.start : p.stop] for p in owned[rank]]
        reports.insert(0, file.report(rank, iter(tensors), descriptor))
        assert len(reports[0]) == file.report_size(rank) == len(file.report(rank, tensors))
    os.close(descriptor)
    assert path.read_bytes() == b"".join(checkpoint_chunks(layout, state))
    assert file.digest(reports) == state_digest(layout, state) == blob_digest(path.read_bytes())
    assert torch.equal(file.read_tensor(path, REFERENCE_NORMS, Tensor.clone), state[REFERENCE_NORMS])
    for rank in range(ranks):
        back = file.read(path, rank, Tensor.clone)
        expected = cut(layout, state, owned[rank])
        assert back.keys() == expected.keys() and all(torch.equal(back[n], expected[n]) for n in back)


@pytest.mark.parametrize("without", ["b.bias", "f"])
def test_ranks_save_moments_of_zeros_for_a_parameter_without_gradients(tmp_path: Path, without: str):
    ranks, values, owned, path = 2, noise(LAYOUT, 1), dealt(LAYOUT, 2), tmp_path / "state"
    moments = {f"{m}/{n}": v for m in ADAMW_MOMENTS for n, v in noise(LAYOUT, 2).items() if n != without}
    inner = SimpleNamespace(
        parameters=values, device=CPU, moments=lambda: (3, moments), moments_of=lambda name: ADAMW_MOMENTS
    )

    def file_of(layout: Layout) -> ShardedFile:
        return ShardedFile(layout, owned.within(layout, {t.name: t.name.partition("/")[2] for t in layout.tensors}))

    for rank in range(ranks):

        def owned_of(tensor_of, names=values, parts=owned.parts[rank]):
            for p in parts:
                name = LAYOUT.tensors[p.index].name
                if name in names:
                    tensor = values[name] if tensor_of(name) is None else tensor_of(name)
                    yield name, tensor.view(-1)[p.start : p.stop]

        outer = SimpleNamespace(
            replayable=True, offload=Offload(CPU), file_of=file_of, owned_of=owned_of,
            group=SimpleNamespace(world=ranks, rank=rank),
        )  # fmt: skip
        writer = StateWriter(LAYOUT, inner, outer, lambda: None)  # type: ignore[arg-type]
        writer.copy_state()
        writer.start_write(path)
        writer.wait()
    saved = load_file(path)
    assert saved.keys() == {f"{group}/{n}" for group in (POSITION, *ADAMW_MOMENTS) for n in values}
    for key, tensor in saved.items():
        group, _, name = key.partition("/")
        expected = values[name] if group == POSITION else moments.get(key, torch.zeros_like(tensor))
        assert torch.equal(tensor, expected), key


def test_a_file_of_too_few_tensors_is_not_reported():
    state, file = noise(LAYOUT, 1), ShardedFile(LAYOUT, {0: LAYOUT.full_slices})
    values = [state[t.name].view(-1) for t in LAYOUT.tensors]
    for few in (values[:-1], [*values[:-1], values[-1][:-1]]):
        with pytest.raises(ValueError, match=f"to {file.size} of its file"):
            file.report(0, few)


@settings(max_examples=15, deadline=None)
@given(shapes, st.integers(1, 5))
def test_the_digest_of_any_model_is_that_of_one_process(found, ranks):
    layout = Layout.of(found)
    state, owned = noise(layout, 2), dealt(layout, ranks)
    file = ShardedFile(layout, owned.parts)
    reports = [file.report(r, cut(layout, state, owned.parts[r]).values()) for r in range(ranks)]
    assert file.digest(reports) == state_digest(layout, state)


@pytest.mark.parametrize("spec", [CodecSpec(kind="sparse", k=64), CodecSpec(kind="sign"), CodecSpec(kind="int8"),
                                  CodecSpec(kind="none")], ids=lambda s: s.kind)  # fmt: skip
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (5, 1), (4, 2)])
@pytest.mark.parametrize("optimizer", ["plain", "nesterov"])
def test_updates_and_rounds_by_parts_are_those_of_the_whole_bit_for_bit(spec, ranks, stages, optimizer):
    outer = OuterSpec(optimizer=optimizer, lr=0.7, clip="median")
    codec = make_codec(spec, LAYOUT)
    layout = state_layout(LAYOUT, outer)
    owned = dealt(LAYOUT, ranks, stages)
    names = names_of(layout)
    state = noise(layout, 1)
    state[REFERENCE_NORMS].abs_()
    by_parts = {n: t.clone() for n, t in state.items()}
    contributions = []
    for n in range(3):
        learnt, whole = noise(LAYOUT, 10 + n, 0.01 * (n + 1)), noise(LAYOUT, 10 + n, 0.01 * (n + 1))
        blob = codec.encode(whole)
        joined = bytearray(codec.header.ljust(codec.size, b"\0"))
        for rank in range(ranks):
            for part in owned.parts[rank]:
                flat = learnt[LAYOUT.tensors[part.index].name].view(-1)[part.start : part.stop]
                at, size = codec.encoded_range(part)
                joined[at : at + size] = codec.encode_blocks(part.index, part.start // BLOCK, flat)
        assert joined == blob
        assert all(torch.equal(learnt[name], whole[name]) for name in whole)
        contributions.append(Contribution(PeerKey(sha256(bytes([n]))), n + 1, bytes(blob)))
    apply(state, contributions, codec, outer)
    for rank in range(ranks):
        share = cut(layout, by_parts, owned.within(layout, names)[rank])
        share[REFERENCE_NORMS] = by_parts[REFERENCE_NORMS].clone()
        apply(share, contributions, codec, outer, slices=owned.parts[rank])
        expected = cut(layout, state, owned.within(layout, names)[rank])
        expected[REFERENCE_NORMS] = state[REFERENCE_NORMS]
        assert all(torch.equal(share[n], expected[n]) for n in expected)
    into = noise(LAYOUT, 5)
    expected = {n: t.clone() for n, t in into.items()}
    codec.add_to(contributions[0].blob, expected)
    for rank in range(ranks):
        share = cut(LAYOUT, into, owned.parts[rank])
        codec.add_to(contributions[0].blob, share, owned.parts[rank])
        want = cut(LAYOUT, expected, owned.parts[rank])
        assert all(torch.equal(share[n], want[n]) for n in want)
