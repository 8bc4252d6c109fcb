"""The state digest is the digest of the checkpoint file, and the file is safetensors."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from protocol.errors import MalformedError
from protocol.layout import MOMENTUM, REFERENCE_NORMS, Layout
from protocol.merkle import CHUNK, blob_digest
from protocol.plain_text import is_plain
from protocol.spec import OuterSpec
from protocol.state import checkpoint_chunks, state_digest, state_layout, state_leaves, tensors_from_checkpoint
from tests.support.codec_cases import noise, same_bits

# Tensors within a chunk, across chunks, ending exactly at a boundary (CHUNK / 4 = 65,536 coordinates).
LAYOUT = Layout.of({"a": (65_536 - 3,), "b": (3,), "c": (300, 1000), "d": (), "e": (65_536 * 2,), "f": (5, 5)})


def file_of(layout, tensors) -> bytes:
    return b"".join(checkpoint_chunks(layout, tensors))


def test_the_state_digest_is_the_blob_digest_of_its_checkpoint():
    tensors = noise(LAYOUT)
    data = file_of(LAYOUT, tensors)
    assert len(data) == LAYOUT.checkpoint_size
    assert state_digest(LAYOUT, tensors) == blob_digest(data)


def test_chunks_are_those_of_the_blob():
    tensors = noise(LAYOUT)
    sizes = [len(c) for c in checkpoint_chunks(LAYOUT, tensors)]
    assert sizes[:-1] == [CHUNK] * (len(sizes) - 1) and 0 < sizes[-1] <= CHUNK
    assert len(state_leaves(LAYOUT, tensors)) == len(sizes)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_does_not_change_the_digest(threads):
    tensors = noise(LAYOUT)
    assert state_digest(LAYOUT, tensors, threads) == state_digest(LAYOUT, tensors)


def test_one_bit_of_one_tensor_changes_the_digest():
    tensors = noise(LAYOUT)
    before = state_digest(LAYOUT, tensors)
    tensors["d"].view(1).view(torch.int32)[0] ^= 1
    assert state_digest(LAYOUT, tensors) != before


def test_minus_zero_is_not_zero_in_a_digest():
    assert state_digest(LAYOUT, noise(LAYOUT) | {"b": torch.zeros(3)}) != state_digest(
        LAYOUT, noise(LAYOUT) | {"b": -torch.zeros(3)}
    )


def test_a_checkpoint_is_a_safetensors_file():
    tensors = noise(LAYOUT)
    loaded = load(file_of(LAYOUT, tensors))
    assert loaded.keys() == tensors.keys()
    assert all(loaded[n].shape == tensors[n].shape and same_bits(loaded[n], tensors[n]) for n in tensors)


def test_a_checkpoint_gives_its_tensors_back_from_a_read_only_map(tmp_path):
    tensors = noise(LAYOUT)
    path = tmp_path / "checkpoint"
    path.write_bytes(file_of(LAYOUT, tensors))
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert Layout.from_checkpoint(data[: len(LAYOUT.checkpoint_header())]) == LAYOUT
        back = tensors_from_checkpoint(LAYOUT, data)
    assert all(back[n].shape == tensors[n].shape and same_bits(back[n], tensors[n]) for n in tensors)
    back["a"].add_(1)  # memory of their own: the map is closed


@settings(deadline=None, max_examples=25)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5).filter(lambda n: is_plain(n) and n != "__metadata__"),
        st.tuples(st.integers(1, 90_000)),
        min_size=1,
        max_size=4,
    )
)
def test_any_layout_makes_the_round_trip(shapes):
    layout = Layout.of(shapes)
    tensors = noise(layout)
    data = file_of(layout, tensors)
    assert state_digest(layout, tensors) == blob_digest(data)
    back = tensors_from_checkpoint(layout, data)
    assert all(same_bits(back[n], tensors[n]) for n in tensors)
    assert load(data).keys() == tensors.keys()


def test_checkpoints_of_other_models_and_sizes_are_refused():
    data = file_of(LAYOUT, noise(LAYOUT))
    other = Layout.of({t.name + "x": t.shape for t in LAYOUT.tensors})
    for layout, bad in ((LAYOUT, data[:-1]), (LAYOUT, data + b"\0"), (LAYOUT, b""), (other, data)):
        with pytest.raises(MalformedError):
            tensors_from_checkpoint(layout, bad)


def test_tensors_that_do_not_fit_the_layout_are_refused():
    for wrong in ({"b": torch.zeros(4)}, {"b": torch.zeros(3).half()}, {"c": torch.zeros(1000, 300).T}):
        with pytest.raises(MalformedError):
            list(checkpoint_chunks(LAYOUT, noise(LAYOUT) | wrong))
    with pytest.raises(MalformedError, match="'a' .* missing"):
        state_digest(LAYOUT, {})


def test_the_outer_step_keeps_what_it_needs_in_the_state():
    assert state_layout(LAYOUT, OuterSpec(clip="none")) == LAYOUT
    with_norms = state_layout(LAYOUT, OuterSpec())
    assert with_norms.of_model() == LAYOUT and with_norms.numel == LAYOUT.numel + len(LAYOUT.tensors)
    assert {t.name for t in with_norms.tensors} == {REFERENCE_NORMS, *(t.name for t in LAYOUT.tensors)}
    with_momentum = state_layout(LAYOUT, OuterSpec(optimizer="nesterov", clip="none"))
    assert with_momentum.of_model() == LAYOUT
    assert {t.name for t in with_momentum.tensors} == {p + t.name for t in LAYOUT.tensors for p in ("", MOMENTUM)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_state_on_a_gpu_has_the_digest_it_has_in_memory():
    layout = Layout.of({t.name: t.shape for t in LAYOUT.tensors} | {"big": (40, 1024, 1024)})
    tensors = noise(layout)
    assert state_digest(layout, {n: t.cuda() for n, t in tensors.items()}) == state_digest(layout, tensors)
