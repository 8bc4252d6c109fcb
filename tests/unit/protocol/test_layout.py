"""Layouts and the canonical headers of checkpoints: one form, bounded before it is believed."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from protocol import layout as layout_module
from protocol.errors import MalformedError
from protocol.layout import (
    BLOCK,
    MAX_DIMENSIONS,
    MAX_HEADER,
    MAX_NUMEL,
    MAX_TENSOR_NAME,
    MAX_TENSORS,
    MOMENTUM,
    REFERENCE_NORMS,
    Layout,
    TensorShape,
    checkpoint_header_size,
    is_outer_tensor,
)
from protocol.merkle import CHUNK, MAX_BLOB
from protocol.plain_text import is_plain
from tests.support.long_cases import long_cases
from tests.support.specs import tiny_spec

NAMES = st.text(min_size=1, max_size=20).filter(lambda n: is_plain(n) and n != "__metadata__")
SHAPES = st.lists(st.integers(1, 9), max_size=4).map(tuple)
LAYOUTS = st.dictionaries(NAMES, SHAPES, min_size=1, max_size=8).map(Layout.of)


@given(LAYOUTS)
def test_a_header_gives_back_its_layout(layout: Layout):
    header = layout.checkpoint_header()
    assert checkpoint_header_size(header[:8]) == len(header)
    assert len(header) % CHUNK == 0
    assert Layout.from_checkpoint(header) == layout
    assert Layout.from_checkpoint(header + b"tensors") == layout
    assert Layout.from_checkpoint(memoryview(header)) == layout  # type: ignore[arg-type]


@given(LAYOUTS)
def test_a_checkpoint_loads_as_safetensors_with_every_value_in_place(layout: Layout):
    values = {t.name: np.arange(t.numel, dtype="<f4").reshape(t.shape) + i for i, t in enumerate(layout.tensors)}
    file = layout.checkpoint_header() + b"".join(values[t.name].tobytes() for t in layout.tensors)
    assert len(file) == layout.checkpoint_size
    loaded = safetensors.numpy.load(file)
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        assert loaded[name].dtype == np.float32
        np.testing.assert_array_equal(loaded[name], value)


@given(LAYOUTS, st.data())
def test_no_byte_of_a_header_can_change(layout: Layout, data: st.DataObject):
    header = bytearray(layout.checkpoint_header())
    text = len(header.rstrip(b" "))
    at = data.draw(st.one_of(st.integers(0, text - 1), st.integers(0, len(header) - 1)))
    header[at] ^= data.draw(st.integers(1, 255))
    try:
        read = Layout.from_checkpoint(bytes(header))
    except MalformedError:
        return
    # Another letter in a name or another digit may be another layout's header: then it is that one's, byte for byte.
    assert read != layout
    assert read.checkpoint_header() == bytes(header)


def test_a_layout_does_not_depend_on_the_order_in_which_it_was_found():
    a = Layout.of({"b": (2,), "a": (3, 4), "é": (), "z": (1,)})
    b = Layout.of({"z": (1,), "é": (), "a": (3, 4), "b": (2,)})
    assert a == b and a.digest == b.digest
    assert [t.name for t in a.tensors] == ["a", "b", "z", "é"]


def test_two_layouts_have_two_digests():
    layouts = [{"a": (2, 3)}, {"a": (3, 2)}, {"a": (6,)}, {"b": (2, 3)}, {"a": (2,), "b": (3,)}, {"a": ()}]
    assert len({Layout.of(shapes).digest for shapes in layouts}) == len(layouts)


def test_blocks_cover_each_tensor_by_itself():
    layout = Layout.of({"a": (BLOCK,), "b": (BLOCK + 1,), "c": (), "d": (2, 3)})
    assert [t.blocks for t in layout.tensors] == [1, 2, 1, 1]
    assert layout.blocks == 5
    assert layout.numel == BLOCK + BLOCK + 1 + 1 + 6


def test_the_outer_steps_tensors_go_in_and_come_out():
    layout = tiny_spec().model.layout
    state = layout.with_momentum().with_reference_norms()
    assert state.numel == 2 * layout.numel + len(layout.tensors)
    assert state.of_model() == layout
    assert {t.name for t in state.tensors} - {t.name for t in layout.tensors} == {
        REFERENCE_NORMS, *(MOMENTUM + t.name for t in layout.tensors)
    }  # fmt: skip
    assert not any(is_outer_tensor(t.name) for t in layout.tensors)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [("b", (1,)), ("a", (1,))],
        [("a", (1,)), ("a", (1,))],
        [("", (1,))],
        [("__metadata__", (1,))],
        [("a\n", (1,))],
        [("\u202egnp", (1,))],
        [("\ud800", (1,))],
        [("x" * (MAX_TENSOR_NAME + 1), (1,))],
        [("a", (0,))],
        [("a", (-1, -1))],
        [("a", (True,))],
        [("a", (1.0,))],
        [("a", (1,) * (MAX_DIMENSIONS + 1))],
        [("a", (MAX_NUMEL + 1,))],
        [("a", (2**38, 2**38, 2**38))],
        [("a", (2**37,)), ("b", (2**37,))],
    ],
)
def test_an_impossible_layout_is_refused(tensors: list):
    with pytest.raises(MalformedError):
        Layout(tuple(TensorShape(name, shape) for name, shape in tensors))


def test_the_largest_layout_fits_a_blob():
    layout = Layout.of({"a": (MAX_NUMEL,)})
    assert layout.checkpoint_size <= MAX_BLOB
    assert Layout.from_checkpoint(layout.checkpoint_header()) == layout


def _framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def _entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def _padded(entries: object) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    return _framed(text.ljust(CHUNK - 8))


def test_the_hostile_headers_below_differ_from_a_good_one_by_their_fault_alone():
    assert Layout.from_checkpoint(_padded({"a": _entry()})) == Layout.of({"a": (2,)})


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\x00" * 7,
        b"\x00" * 8,
        b"\xff" * 8,
        (MAX_HEADER + 1).to_bytes(8, "little"),
        MAX_HEADER.to_bytes(8, "little") + b"{",
        _framed(b""),
        _framed(b" " * (CHUNK - 8)),
        _framed(b"{}".ljust(CHUNK - 8)),
        _framed(b"null"),
        _framed(b"\xff\xfe"),
        _framed(json.dumps({"a": _entry()}, separators=(",", ":")).encode()),  # not padded
        _framed(json.dumps({"a": _entry()}).encode().ljust(CHUNK - 8)),  # other white space
        _padded({"__metadata__": {"format": "pt"}, "a": _entry()}),
        _padded({"a": _entry(dtype="BF16")}),
        _padded({"a": _entry(data_offsets=[8, 16])}),
        _padded({"a": _entry(data_offsets=[0, 2**63])}),
        _padded({"a": _entry(shape=[0], data_offsets=[0, 0])}),
        _padded({"a": _entry(shape=[-2])}),
        _padded({"a": _entry(shape=[2.0])}),
        _padded({"a": _entry(shape=[2**40, 2**40], data_offsets=[0, 0])}),
        _padded({"a": _entry(shape="2")}),
        _padded({"a": _entry(more=1)}),
        _padded({"b": _entry(), "a": _entry(data_offsets=[8, 16])}),
        _padded({"\ud800": _entry()}),
        _padded({"a\u202e": _entry()}),
        _framed(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],'
                b'"data_offsets":[8,16]}}'.ljust(CHUNK - 8)),
        _framed(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},}'.ljust(CHUNK - 8)),
        _framed(b'{"\\u0061":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(CHUNK - 8)),
        _framed(b'{"\\x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(CHUNK - 8)),
        _framed(b'{"a":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}'.ljust(CHUNK - 8)),
        _framed(b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,8]}}'.ljust(CHUNK - 8)),
        _framed(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'.ljust(CHUNK - 8)),
    ],
)  # fmt: skip
def test_a_hostile_header_is_malformed(start: bytes):
    with pytest.raises(MalformedError):
        Layout.from_checkpoint(start)


@given(st.binary(max_size=300))
def test_rubbish_is_malformed(text: bytes):
    with pytest.raises(MalformedError):
        Layout.from_checkpoint(_framed(text))


_ONE = b'"a":{"dtype":"F32","shape":['
_REST = b'],"data_offsets":[0,8]}'
_LARGE: dict[str, Callable[[], bytes]] = {
    "deep lists": lambda: b"[" * (MAX_HEADER - 8),
    "one long number": lambda: b"{" + _ONE + b"9" * (MAX_HEADER - 100) + _REST + b"}",
    "many long numbers": lambda: b"{" + _ONE + b",".join([b"9" * 4000] * 1000) + _REST + b"}",
    "many dimensions": lambda: b"{" + _ONE + b"1," * (MAX_HEADER // 2 - 100) + b"1" + _REST + b"}",
    "one long name": lambda: b'{"' + b"a" * (MAX_HEADER - 100) + b'":{"dtype":"F32","shape":[2' + _REST + b"}",
    "many small lists": lambda: b"{" + b'"a":[[],' * (MAX_HEADER // 8 - 1),
    "many tensors": lambda: (
        b"{" + b",".join(b'"%07d":{"dtype":"F32","shape":[1%s' % (i, _REST) for i in range(MAX_TENSORS + 1)) + b"}"
    ),
}


@pytest.mark.parametrize("kind", [*(k for k in _LARGE if k != "many tensors"), *long_cases("many tensors")])
def test_the_worst_header_costs_little_time_and_memory(kind: str):
    start = _framed(_LARGE[kind]())
    tracemalloc.start()
    try:
        began = time.process_time()
        with pytest.raises(MalformedError):
            Layout.from_checkpoint(start)
        assert time.process_time() - began < 10  # "many long numbers" took 176 s as JSON
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_HEADER  # "many small lists" would take 20 times as much
    finally:
        tracemalloc.stop()


def test_the_largest_number_of_tensors_is_accepted_and_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout_module, "MAX_TENSORS", 3)
    for count, accepted in ((3, True), (4, False)):
        entries = {str(i): _entry(data_offsets=[8 * i, 8 * i + 8]) for i in range(count)}
        if accepted:
            assert len(Layout.from_checkpoint(_padded(entries)).tensors) == count
        else:
            with pytest.raises(MalformedError):
                Layout.from_checkpoint(_padded(entries))
