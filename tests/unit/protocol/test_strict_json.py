"""JSON by strangers: one meaning, bounded, and no error but MalformedError."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MalformedError
from protocol.strict_json import MAX_JSON_DEPTH, MAX_JSON_FIELDS, integer_field, read_json
from tests.support.cpu_time import is_done_within

LIMIT = 1024 * 1024


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"1 2", "is not JSON"),
        (b"Infinity", "not a finite number"),
        (b"[-Infinity]", "not a finite number"),
        (b"NaN", "not a finite number"),
        (b"1e999", "not a finite number"),
        (b"9" * 21, "more than 20 digits"),
        (b"9" * 500_000, "more than 20 digits"),
        (b'{"a": 1, "a": 1}', "'a' occurs twice"),
        (b'[{"\\u0061": 1, "a": 1}]', "'a' occurs twice"),
        (b'{"\\ud800": 1}', "is not Unicode text"),
        (b'["\\ud800"]', "is not Unicode text"),
        (b'"\xff"', "is not Unicode text"),
        (json.dumps("a").encode("utf-16"), "is not Unicode text"),
        (b"\xef\xbb\xbf1", "is not JSON"),
        (b"[" * 200_000, f"nested more than {MAX_JSON_DEPTH} deep"),
        (b"[" * 200_000 + b"]" * 200_000, f"nested more than {MAX_JSON_DEPTH} deep"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, f"nested more than {MAX_JSON_DEPTH} deep"),
        (b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1), f"nested more than {MAX_JSON_DEPTH} deep"),
        (b"{%s}" % b",".join(b'"%d":0' % i for i in range(MAX_JSON_FIELDS + 1)), "more than 1024 keys"),
        (b"1" * (LIMIT + 1), "larger than 1,048,576 bytes"),
    ],
)
def test_what_readers_disagree_about_is_refused_in_one_line(data: bytes, says: str):
    def refused() -> None:
        with pytest.raises(MalformedError, match=says):
            read_json(data, "a.json", LIMIT)

    assert is_done_within(2, refused)
    with pytest.raises(MalformedError) as caught:
        read_json(data, "a.json", LIMIT)
    assert str(caught.value).startswith("a.json") and str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def test_a_document_of_more_values_than_memory_should_hold_is_refused():
    with pytest.raises(MalformedError, match="more than 1,000,000 values"):
        read_json(b"[" + b"[]," * 600_000 + b"[]]", "a.json", 2**30)


PLAIN = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
VALUES = st.recursive(PLAIN | TEXT, lambda v: st.lists(v, max_size=4) | st.dictionaries(TEXT, v, max_size=4))


@given(VALUES, st.booleans())
def test_a_plain_value_is_read_as_it_was_written(value: object, ascii: bool):
    found = read_json(json.dumps(value, ensure_ascii=ascii).encode(), "a.json", LIMIT)
    assert repr(found) == repr(value)  # 1, 1.0 and True are equal


@given(st.binary(max_size=60) | st.text('{}[]",:\\u0d8e1.-+tfn ', max_size=60).map(str.encode))
def test_rubbish_is_malformed_or_a_value(data: bytes):
    try:
        read_json(data, "a.json", LIMIT)
    except MalformedError as e:
        assert str(e).isprintable()


@pytest.mark.parametrize("value", [None, True, False, 1.0, "1", " 2_0 ", -1, 11, [1]])
def test_an_integer_field_is_an_integer(value: object):
    with pytest.raises(MalformedError, match="round is not an integer from 0 to 10"):
        integer_field({"round": value}, "round", 10)
    assert [integer_field({"round": n}, "round", 10) for n in (0, 10)] == [0, 10]
