"""Run specs: one canonical form, bounded, and an error with field and remedy for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol.envelope import open_envelope, seal
from protocol.errors import MalformedError, ProtocolError, SignatureError, SpecError
from protocol.ids import MAX_COUNT, RunId
from protocol.layout import MAX_NUMEL, MOMENTUM
from protocol.ledger.credits import CreditRule
from protocol.merkle import blob_digest
from protocol.messages import MAX_CONTRIBUTORS
from protocol.plain_text import is_plain
from protocol.rounds.policy import RoundPolicy
from protocol.spec import (
    KIND,
    MAX_PROBLEMS_SHOWN,
    MAX_SPEC,
    RunSpec,
    explain,
    is_total_reached,
    open_spec,
    parse_spec,
    sign_spec,
    windows_in,
)
from tests.support.cpu_time import is_done_within
from tests.support.specs import OWNER, TINY_LLAMA, TINY_LLAMA_TENSORS, digest, identity, spec_fields, tiny_spec

GOOD = tiny_spec().canonical()


def with_config(**config: Any) -> dict[str, Any]:
    return {"model": {"config": TINY_LLAMA | config, "tensors": list(TINY_LLAMA_TENSORS)}}


def table(name: str, **changes: Any) -> dict[str, Any]:
    """Return the tiny spec with some changed fields of one table; None removes a field."""
    fields = spec_fields().get(name, {}) | changes
    return {name: {k: v for k, v in fields.items() if v is not None}}


SHARD = {"digest": digest("shard").hex(), "size": 20_000, "tokens": 10_000}
WIDE = {"dtype": "uint32", "train": [SHARD | {"size": 40_000}], "validation": []}
CHAT = {"template": "{{ messages }}", "end_tokens": [1], "special_tokens": {"eos_token": "</s>"}}
MARKED = {"window_tokens": 10, "attention": "document", "chat": CHAT}


def test_a_window_of_conversations_counts_as_its_trained_tokens():
    plain, marked = tiny_spec(), tiny_spec(**table("data", conversations=MARKED, **WIDE))
    assert b"conversations" not in plain.canonical() and parse_spec(marked.canonical()) == marked
    assert (plain.data.window_tokens, marked.data.window_tokens) == (16, 10)
    assert marked.max_update_windows == 16_384 // 10 and plain.max_update_windows == 16_384 // 16
    policy, credit = RoundPolicy.of(marked), CreditRule.of(marked)
    assert policy.target_windows == 103 and policy.window_tokens == credit.window_tokens == 10
    assert credit.micro_credits(10**9) == 6 * 28_832 * 10**10 // 10**9


def test_a_spec_survives_its_canonical_form():
    spec = tiny_spec()
    assert parse_spec(GOOD) == spec
    assert parse_spec(GOOD).canonical() == GOOD
    assert spec.run_id == RunId(blob_digest(GOOD))


FLOATS = st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not 2**53 <= abs(x) < 1e21)
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_COUNT + 1, MAX_COUNT - 1)
    | FLOATS
    | st.text(max_size=20).filter(is_plain)
)
CONFIGS = st.dictionaries(
    st.text(max_size=8).filter(lambda k: is_plain(k) and k not in ("model_type", "auto_map")),
    PLAIN | st.lists(PLAIN, max_size=3),
    max_size=4,
)


@given(
    seed=st.integers(0, MAX_COUNT - 1),
    lr=st.floats(1e-9, 10),
    seconds=st.floats(1, 86_400),
    k=st.integers(64, 4096),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}", fullmatch=True),
    config=CONFIGS,
)
def test_every_valid_spec_survives_its_canonical_form(
    seed: int, lr: float, seconds: float, k: int, name: str, config: dict
):
    spec = tiny_spec(
        seed=seed,
        name=name,
        codec={"k": k},
        **table("inner", lr=lr),
        **table("round", max_seconds=seconds),
        **with_config(**config | {"trust_remote_code": False}),
    )
    again = parse_spec(spec.canonical())
    assert again.canonical() == spec.canonical()
    assert again == spec


def test_every_field_counts_for_the_run_id():
    changes = [
        {"name": "other"},
        {"seed": 2},
        {"owner": identity("other").key.hex()},
        {"genesis": {"digest": digest("other").hex(), "size": 1}},
        with_config(hidden_size=33),
        table("data", window=32),
        table("inner", lr=0.002),
        {"codec": {"kind": "int8"}},
        {"outer": {"momentum": 0.5}},
        table("round", max_seconds=31),
        {"admission": {"seconds": 61}},
        {"credit": {"flops_per_parameter_token": 7}},
        {"credit": {"hold_rounds": 13}},
        {"credit": {"max_teraflops_per_second": 1}},
        {"checkpoint": {"every": 11}},
        {"codec": {"kind": "sign", "beta": 0}},
        {"codec": {"kind": "sign", "beta": 0}, "audit": {"replayable": True}},
    ]
    ids = {tiny_spec().run_id} | {tiny_spec(**change).run_id for change in changes}
    assert len(ids) == 1 + len(changes)


def problems(**changes: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(spec_fields(**changes))
    return explain(caught.value, "run.toml").splitlines()


def test_a_replayable_run_holds_credit_for_as_long_as_a_conviction_takes():
    (line,) = problems(codec={"kind": "sign", "beta": 0}, audit={"replayable": True}, credit={"hold_rounds": 3})
    assert "credit.hold_rounds of 4 or more" in line


REPLAYABLE = {"codec": {"kind": "sign", "beta": 0}, "audit": {"replayable": True}}
DROPOUT = {
    "config": TINY_LLAMA | {"resid_pdrop": 0.1, "attention_dropout": 0.0, "inner": {"router_jitter_noise": 0.01}},
    "tensors": [("a", [1])],
}


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"owner": None}, "owner", "is missing"),
        ({"owner": "abc"}, "owner", "should match"),
        ({"name": ""}, "name", "at least 1 character"),
        ({"name": "a\nb"}, "name", "should match"),
        ({"name": "a\n"}, "name", "should match"),
        ({"nmae": "x"}, "nmae", "correct its spelling"),
        ({"version": 2}, "version", "less than or equal to 1"),
        ({"version": 0}, "version", "greater than or equal to 1"),
        ({"seed": 2**53}, "seed", "less than or equal to"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"total_tokens": 2**53}, "total_tokens", "less than or equal to"),
        ({"model": {"tensors": [("a", [1])]}}, "model.config", "is missing"),
        ({"model": {"config": {}, "tensors": [("a", [1])]}}, "model.config", "write model_type"),
        ({"model": {"config": TINY_LLAMA}}, "model.tensors", "is missing"),
        ({"model": {"config": TINY_LLAMA, "tensors": []}}, "model.tensors", "at least 1 item"),
        ({"model": {"config": TINY_LLAMA, "tensors": [("a", [0])]}}, "model.tensors.0.1.0", "or equal to 1"),
        ({"model": {"config": TINY_LLAMA, "tensors": [("b", [1]), ("a", [1])]}}, "model", "each tensor once"),
        ({"model": {"config": TINY_LLAMA, "tensors": [("a", [MAX_NUMEL]), ("b", [1])]}}, "model", "at most"),
        ({"model": {"config": TINY_LLAMA, "tensors": [("a", [1]), (MOMENTUM + "a", [1])]}}, "model", "beside the mod"),
        (with_config(auto_map={"AutoModel": "evil.Model"}), "model.config", "auto_map"),
        (with_config(text_config={"auto_map": {}}), "model.config", "text_config.auto_map"),
        (with_config(text_config={"attribute_map": {"a": "auto_map"}}), "model.config", "text_config.attribute_map"),
        (with_config(text_config={"num_labels": 10**6}), "model.config", "text_config.num_labels"),
        (with_config(text_config={"_auto_class": "a"}), "model.config", "text_config._auto_class"),
        (with_config(hidden_act="\x1b]0;a\x07"), "model.config", "not printable"),
        (with_config(text_config={"num_hidden_layers": 10**6}), "model.config", "at most 10,000 layers"),
        (with_config(trust_remote_code=True), "model.config", "trust_remote_code"),
        (with_config(rope={"theta": float("nan")}), "model.config", "rope.theta is nan"),
        (with_config(big=2**53), "model.config", "big is beyond"),
        (with_config(big=-(2**53)), "model.config", "big is beyond"),
        (with_config(big=1e20), "model.config", "big is beyond"),
        (with_config(text="\ud800"), "model.config", "text is not Unicode"),
        (with_config(raw=b"\xff"), "model.config", "raw is a bytes"),
        (with_config(table={1: 2}), "model.config", "table.1 is not a field's name"),
        ({"data": None}, "data", "is missing"),
        (table("data", window=7), "data.window", "greater than or equal to 8"),
        (table("data", dtype="int8"), "data.dtype", "'uint16' or 'uint32'"),
        (table("data", train=[]), "data.train", "at least 1 item"),
        (table("data", train=[SHARD | {"size": 20_001}]), "data", "20000 bytes, not 20001"),
        (table("data", validation=[SHARD | {"tokens": 9_999}]), "data", "validation.0"),
        (table("data", train=[SHARD | {"tokens": 16, "size": 32}]), "the spec", "less than one window"),
        (table("data", addresses=["http://\x1b[2J"]), "data.addresses.0", "cannot be shown"),
        (table("data", addresses=["http://\u202egnp.exe"]), "data.addresses.0", "cannot be shown"),
        (table("data", addresses=["x" * 1025]), "data.addresses.0", "at most 1024"),
        (table("data", conversations=MARKED), "data", "marked tokens are uint32"),
        (table("data", conversations=MARKED, **WIDE | {"window": 8}), "data", "more than the 8 tokens of a window"),
        (table("data", conversations=MARKED | {"window_tokens": 0}), "data.conversations.window_tokens", "equal to 1"),
        (table("data", conversations=MARKED | {"attention": "none"}), "data.conversations.attention", "'document'"),
        (table("data", conversations=MARKED | {"chat": CHAT | {"template": "x" * 65_537}}),
         "data.conversations.chat.template", "at most 65536"),
        (table("data", conversations=MARKED | {"chat": CHAT | {"generation": {"custom_generate": 1}}}),
         "data.conversations.chat.generation.custom_generate.[key]", "do_sample"),
        (table("inner", lr=0), "inner.lr", "greater than 0"),
        (table("inner", lr=float("nan")), "inner.lr", "finite"),
        (table("inner", lr="fast"), "inner.lr", "valid number"),
        (table("inner", betas=[0.9, 1.0]), "inner.betas.1", "less than 1"),
        (table("inner", betas=[0.9]), "inner.betas.1", "is missing"),
        (table("inner", schedule={"kind": "cosine"}), "the spec", "inner.schedule.total_tokens must be set"),
        ({"codec": {"k": 63}}, "codec.k", "greater than or equal to 64"),
        ({"codec": {"kind": "zip"}}, "codec.kind", "'sign', 'sparse', 'int8' or 'none'"),
        ({"outer": {"weight_cap": 0}}, "outer.weight_cap", "greater than 0"),
        (table("round", target_tokens=None), "round.target_tokens", "is missing"),
        (table("round", target_tokens=0), "round.target_tokens", "greater than or equal to 1"),
        (table("round", member_seconds=0.9), "round", "at least twice heartbeat_seconds"),
        (table("round", max_update_tokens=63), "the spec", "must allow one inner step"),
        (table("round", max_members=MAX_CONTRIBUTORS + 1), "round.max_members", "less than or equal to"),
        (table("round", max_seconds=float("inf")), "round.max_seconds", "finite"),
        ({"admission": {"mode": "allow", "allow": ["me"]}}, "admission.allow.0", "should match"),
        ({"audit": {"replayable": "maybe"}}, "audit.replayable", "valid boolean"),
        (REPLAYABLE | {"codec": {"kind": "int8", "beta": 0}}, "the spec", 'needs codec.kind = "sign": set that'),
        (REPLAYABLE | {"codec": {"kind": "sign", "beta": 0.5}}, "the spec", "needs codec.beta = 0: set that"),
        (REPLAYABLE | {"codec": {}}, "the spec", "needs codec.beta = 0: set that"),
        (REPLAYABLE | table("round", exchange="reduce"), "the spec", 'needs round.exchange = "gather": set that'),
        (REPLAYABLE | table("round", exchange="auto"), "the spec", "or audit.replayable = false"),
        (REPLAYABLE | {"codec": {"kind": "sparse"}}, "the spec", 'codec.kind = "sign", codec.beta = 0: set that'),
        (REPLAYABLE | {"model": DROPOUT}, "the spec", "model.resid_pdrop = 0, model.inner.router_jitter_noise"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every", "greater than or equal to 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_field_and_what_to_do(changes: dict[str, Any], field: str, remedy: str):
    (line,) = problems(**changes)
    assert line.startswith(f"run.toml: {field}: ")
    assert remedy in line


def test_each_of_several_mistakes_has_a_line():
    lines = problems(owner=None, codec={"k": 1}, checkpoint={"every": 0})
    assert [line.split(": ")[1] for line in lines] == ["owner", "codec.k", "checkpoint.every"]


def test_errors_are_fit_for_a_terminal_whatever_the_spec_says():
    evil = "\x1b[2J\u202e\nok: all is well" + "x" * 10_000
    lines = problems(**{evil: evil, "codec": {"kind": evil}, "name": evil})
    assert len(lines) == 3
    for line in lines:
        assert line.isprintable()
        assert len(line) < 400


def test_the_first_mistake_in_a_list_ends_its_check():
    (line,) = problems(admission={"allow": ["?"] * 10_000})
    assert "admission.allow.0" in line


def test_many_mistakes_are_counted_not_listed():
    lines = problems(**{f"field{i}": i for i in range(1000)})
    assert len(lines) == MAX_PROBLEMS_SHOWN + 1
    assert f"{1000 - MAX_PROBLEMS_SHOWN} more problems" in lines[-1]


def _config(text: bytes) -> bytes:
    assert GOOD.count(b'"hidden_size":32') == 1
    return GOOD.replace(b'"hidden_size":32', b'"hidden_size":' + text)


HOSTILE = {
    "nothing": b"",
    "not JSON": b"\xff\xfe",
    "null": b"null",
    "cut off": GOOD[:-1],
    "white space": GOOD + b"\n",
    "other order": json.dumps(json.loads(GOOD)).encode(),
    "a field twice": GOOD.replace(b'"seed":1', b'"seed":1,"seed":1'),
    "text for a number": GOOD.replace(b'"seed":1', b'"seed":"1"'),
    "true for 1": GOOD.replace(b'"seed":1', b'"seed":true'),
    "1.0 for 1": GOOD.replace(b'"seed":1', b'"seed":1.0'),
    "a default left out": GOOD.replace(
        b'"admission":{"allow":[],"founders":[],"mode":"open","seconds":86400,"work_bits":0},', b""
    ),
    "NaN": _config(b"NaN"),
    "overflow to infinity": _config(b"1e999"),
    "large integer": _config(b"9" * 30),
    "long integer": _config(b"9" * 5_000),
    "very long integer": _config(b"9" * 1_000_000),
    "deep lists": _config(b"[" * 300_000 + b"]" * 300_000),
    "lists as deep as parses": _config(b"[" * 150 + b"]" * 150),
    "deep tables": _config(b'{"a":' * 150 + b"1" + b"}" * 150),
    "lone surrogate": _config(b'"\\ud800"'),
    "a long name over many values": _config(b'{"' + b"k" * 400_000 + b'":[' + b"1," * 300_000 + b"1]}"),
    "many unknown fields": b"{" + b",".join(b'"k%d":1' % i for i in range(80_000)) + b"}",
    "many wrong keys": GOOD.replace(b'"allow":[]', b'"allow":[' + b",".join([b'"zz"'] * 99_999) + b"]"),
    "many wrong tensors": GOOD.replace(b'"tensors":[', b'"tensors":[' + b"[1,2]," * 100_000),
    "many shapes": b'{"model":{"tensors":[' + b"[]," * 340_000 + b"[]]}}",
    "many lengths": b'{"model":{"tensors":[["a",[' + b"0," * 500_000 + b"0]]]}}",
    "many shards": b'{"data":{"train":[' + b"{}," * 60_000 + b"{}]}}",
    "many keys in each table": b"{%s}"
    % b",".join(
        b'"%s":{%s}' % (name, b",".join(b'"%d":0' % i for i in range(10_000)))
        for name in (b"data", b"inner", b"codec", b"outer", b"round", b"admission", b"credit", b"audit", b"checkpoint")
    ),
    "an address with a query": GOOD.replace(b'"addresses":[]', b'"addresses":["http://a.example/?x="]'),
    "too large": GOOD.replace(b'"hidden_size":32', b'"hidden_size":"' + b"x" * MAX_SPEC + b'"'),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_bytes_are_a_spec_error_soon(kind: str):
    data = HOSTILE[kind]
    assert data != GOOD

    def refused() -> None:
        with pytest.raises(SpecError) as caught:
            parse_spec(data)
        assert len(str(caught.value)) < 10_000

    assert is_done_within(5, refused)


MEMORY = """
import re, sys
from protocol.errors import SpecError
from protocol.spec import parse_spec
data = sys.stdin.buffer.read()
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
try:
    parse_spec(b"{}")
except SpecError:
    before = peak()
try:
    parse_spec(data)
except SpecError:
    print(peak() - before)
"""


@pytest.mark.parametrize(
    "kind", ["many shapes", "many lengths", "many shards", "many keys in each table", "many unknown fields"]
)
def test_a_megabyte_of_mistakes_takes_a_bounded_memory(kind: str):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], input=HOSTILE[kind], capture_output=True, timeout=120, check=True
    )
    assert int(done.stdout) < 100 * 2**20


def test_the_largest_spec_is_checked_soon():
    data = tiny_spec(**with_config(numbers=[1.2345678901234567e-100] * 40_000)).canonical()
    assert 0.8 * MAX_SPEC < len(data) <= MAX_SPEC
    assert is_done_within(5, lambda: parse_spec(data))


@given(st.data())
def test_a_changed_byte_is_refused_or_is_another_run(data: st.DataObject):
    mutated = bytearray(GOOD)
    mutated[data.draw(st.integers(0, len(GOOD) - 1))] = data.draw(st.integers(0, 255))
    try:
        spec = parse_spec(bytes(mutated))
    except SpecError:
        return
    assert spec.canonical() == mutated
    assert (spec.run_id == tiny_spec().run_id) == (mutated == GOOD)


def test_a_signed_spec_opens_for_its_run():
    spec = tiny_spec()
    assert open_spec(sign_spec(OWNER, spec).encoded, spec.run_id) == spec


def test_only_the_owner_signs_a_spec():
    spec, stranger = tiny_spec(), identity("stranger")
    with pytest.raises(SpecError, match="owned by"):
        sign_spec(stranger, spec)
    forged = seal(stranger, KIND, spec.canonical())
    with pytest.raises(SignatureError, match="not signed by the owner"):
        open_spec(forged.encoded, spec.run_id)


def test_a_spec_of_another_run_is_refused_though_its_owner_signed_it():
    other = tiny_spec(seed=2)
    with pytest.raises(SpecError, match="not that of run"):
        open_spec(sign_spec(OWNER, other).encoded, tiny_spec().run_id)


def test_a_spec_signed_for_another_purpose_is_refused():
    spec = tiny_spec()
    with pytest.raises(SignatureError):
        open_spec(seal(OWNER, "finalization", spec.canonical()).encoded, spec.run_id)


def test_a_spec_that_nobody_would_read_is_not_signed():
    spec = tiny_spec(**with_config(numbers=[1.2345678901234567e-100] * 50_000))
    with pytest.raises(SpecError, match="peers read at most 1,048,576: shorten admission.allow"):
        sign_spec(OWNER, spec)


def test_the_largest_spec_fits_its_envelope():
    assert len(seal(OWNER, KIND, b"x" * MAX_SPEC).encoded) <= MAX_SPEC + 1024
    assert (
        open_envelope(seal(OWNER, KIND, b"x" * MAX_SPEC).encoded, KIND, limit=MAX_SPEC + 1024).payload
        == b"x" * MAX_SPEC
    )


@given(st.binary(max_size=200))
def test_rubbish_for_a_signed_spec_is_an_error_of_the_protocol(sent: bytes):
    with pytest.raises((ProtocolError, SpecError)):
        open_spec(sent, tiny_spec().run_id)


@given(tokens=st.integers(1, 10**6), window=st.integers(8, 4096))
def test_every_window_has_its_last_target_within_the_shard(tokens: int, window: int):
    count = windows_in(tokens, window)
    assert count * window + 1 <= max(tokens, 1)  # the last target of the last window
    assert (count + 1) * window + 1 > tokens  # one window more would not fit


@given(total=st.integers(0, 10**6), window=st.integers(8, 4096), weight=st.integers(0, 10**5))
def test_a_run_reaches_its_total_in_windows_and_in_tokens_at_once(total: int, window: int, weight: int):
    assert is_total_reached(-(-total // window), weight) == is_total_reached(total, weight * window)
    assert is_total_reached(total, total) == (total > 0) and not is_total_reached(total + 1, total)


def test_values_of_a_spec_never_change():
    spec = tiny_spec()
    with pytest.raises(ValidationError):
        spec.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        spec.round.target_tokens = 3  # type: ignore[misc]


def test_a_layout_that_the_model_lists_is_the_models():
    from protocol.model import build_model, model_layout

    assert model_layout(build_model(TINY_LLAMA, device="meta")) == tiny_spec().model.layout


def test_the_layout_refuses_what_a_header_would_refuse():
    with pytest.raises(MalformedError):
        tiny_spec().model.model_copy(update={"tensors": [("\ud800", [1])]}).layout  # noqa: B018
