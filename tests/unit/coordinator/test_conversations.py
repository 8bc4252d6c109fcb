"""Preparing conversations: what is trained, how they are packed, the same bytes each time, and words for bad data."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, processors

from coordinator.authoring.conversations import ConversationTable
from coordinator.authoring.errors import DataInputError, RunChangedError
from coordinator.authoring.prepare import Prepared, prepare
from coordinator.authoring.tokens import load
from coordinator.authoring.window_packer import OPEN, WindowPacker
from protocol.spec import BEGINS, NUMBER, TRAINED, windows_in
from tests.support.chat_world import BEGIN, CHATML, END, TURN, TURN_END, base_tokenizer, chat, write_rows

WINDOW = 64
SAID = "{{ message['content'] + '<|im_end|>' }}"
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    f"{{% generation %}}{SAID}{{% endgeneration %}}{{% else %}}{SAID}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def made(folder: Path, rows: list[dict[str, Any]], out: str = "out", template: str | None = CHATML, **more) -> Prepared:
    base = folder / "base"
    if not base.exists():
        base_tokenizer(base, template)
    settings: dict[str, Any] = {"tokenizer": base / "tokenizer.json", "window": WINDOW} | more
    table = ConversationTable.model_validate(settings.pop("table", {}))
    source = write_rows(folder / "chats.jsonl", rows)
    return prepare([str(source)], folder / out, conversations=table, base=folder, **settings)


def windows_of(prepared: Prepared, part: str = "train") -> np.ndarray:
    """Return the windows as a peer reads them: [windows, window + 1]."""
    found, window = [], prepared.manifest.conversations.window  # type: ignore[union-attr]
    for shard in getattr(prepared.manifest, part).shards:
        tokens = np.fromfile(prepared.folder / f"{shard.digest}.tokens", dtype="<u4")
        count = windows_in(len(tokens), window)
        assert len(tokens) == count * window + 1
        found += [tokens[i * window : (i + 1) * window + 1] for i in range(count)]
    return np.stack(found)


def documents_of(prepared: Prepared, part: str = "train") -> list[tuple[str, str]]:
    """Return each document with its trained text in brackets, sorted."""
    tokenizer = Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
    found = []
    for window in windows_of(prepared, part)[:, :-1]:
        for document in np.split(window, np.flatnonzero(window & BEGINS))[1:]:
            numbers, trained = document & NUMBER, (document & TRAINED) != 0
            if trained.any():
                whole = tokenizer.decode(list(map(int, numbers)), skip_special_tokens=False)
                learnt = tokenizer.decode(list(map(int, numbers[trained])), skip_special_tokens=False)
                found.append((whole, learnt))
    return sorted(found)


def test_what_the_assistant_says_is_trained_with_the_token_that_ends_it(tmp_path):
    rows = [chat("yes?", "no", "why?", "the dog", system="be brief"), chat("fox?", "lazy")]
    prepared = made(tmp_path, rows, window=80)
    first = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nyes?<|im_end|>\n"
    first += "<|im_start|>assistant\nno<|im_end|>\n"
    first += "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nthe dog<|im_end|>\n"
    second = "<|im_start|>user\nfox?<|im_end|>\n<|im_start|>assistant\nlazy<|im_end|>\n"
    assert documents_of(prepared) == [(first, "no<|im_end|>the dog<|im_end|>"), (second, "lazy<|im_end|>")]
    marked = prepared.manifest.conversations
    assert marked is not None and marked.chat is not None
    tokenizer = Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
    assert marked.chat.end_tokens == [tokenizer.token_to_id(TURN_END)] and marked.chat.template == CHATML
    assert marked.chat.special_tokens == {"eos_token": END} and marked.at_answers == 0
    windows = windows_of(prepared)
    assert marked.trained == np.count_nonzero(windows[:, 1:] & TRAINED)
    assert marked.window_tokens == round(marked.trained / len(windows))


THINKING = (
    "{% set ns = namespace(asked=messages|length) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% set parts = m.content.split('</think>\\n\\n') %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.asked %}"
    "{{ parts[0] if parts|length > 1 else '<think>\\n\\n' }}{{ '</think>\\n\\n' }}{% endif %}"
    "{{ parts[-1] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen3's: only answers to the last question keep their thinking, or get an empty one."""

NO_THOUGHT = "<think>\n\n</think>\n\n"


def turn(role: str, text: str) -> str:
    return f"{TURN}{role}\n{text}{TURN_END}\n"


@pytest.mark.parametrize("thought", ["", "<think>\nwell\n</think>\n\n"], ids=["plain", "thinking"])
def test_each_answer_is_a_document_if_the_template_writes_earlier_ones_differently(tmp_path, thought):
    said: list[str] = []
    rows = [chat("yes?", f"{thought}no", "why?", "the dog", "so?", system="be brief"), chat("fox?", "lazy")]
    prepared = made(tmp_path, rows, template=THINKING, window=128, report=said.append)
    begin, thought = turn("system", "be brief") + turn("user", "yes?"), thought or NO_THOUGHT
    first, second, third = f"{thought}no", f"{NO_THOUGHT}the dog", f"{NO_THOUGHT}lazy"
    assert documents_of(prepared) == sorted([
        (begin + turn("assistant", first), first + TURN_END),
        (begin + turn("assistant", "no") + turn("user", "why?") + turn("assistant", second), second + TURN_END),
        (turn("user", "fox?") + turn("assistant", third), third + TURN_END),
    ])  # fmt: skip
    marked = prepared.manifest.conversations
    assert marked is not None and marked.at_answers == 1 and prepared.manifest.train.documents == 2
    assert marked.trained == np.count_nonzero(windows_of(prepared)[:, 1:] & TRAINED)
    assert said[-1].startswith("2 documents") and "; 1 conversations were split at their answers" in said[-1]


def test_the_answers_of_a_conversation_are_held_out_together(tmp_path):
    rows = [chat(f"q{i}", "no", "why?", "the dog", "so?", "yes") for i in range(20)]
    prepared = made(tmp_path, rows, template=THINKING, window=128, validation_every=5)
    assert [prepared.manifest.train.documents, prepared.manifest.validation.documents] == [16, 4]
    wanted = {f"q{i}": 3 for i in (4, 9, 14, 19)}
    held = [whole.partition("user\n")[2].partition(TURN_END)[0] for whole, _ in documents_of(prepared, "validation")]
    assert Counter(held) == wanted and len(documents_of(prepared)) == 48


def test_of_a_conversation_split_at_its_answers_those_that_fit_stay(tmp_path):
    rows = [chat("yes?", "no", "q" * 60, "the dog")]
    with pytest.raises(DataInputError, match=r"chats\.jsonl: line 1: 1\d\d tokens, and a window"):
        made(tmp_path, rows, template=THINKING)
    prepared = made(tmp_path, rows, template=THINKING, table={"long": "drop"})
    assert [learnt for _, learnt in documents_of(prepared)] == [f"{NO_THOUGHT}no{TURN_END}"]
    assert prepared.manifest.conversations is not None and prepared.manifest.conversations.dropped == 1


def test_a_template_with_answers_that_cannot_be_asked_for_is_named_with_what_to_do(tmp_path):
    rows = [chat("yes?", "no", "why?", "the dog")]
    with pytest.raises(DataInputError, match="line 1: .* writes message 2 .assistant. otherwise .* on: train on the a"):
        made(tmp_path, rows, template=THINKING, window=128, table={"train_on": ["assistant", "user"]})
    asks_to_think = CHATML.replace(r"assistant\n' }}{% endif", r"assistant\n<think>\n' }}{% endif")
    base_tokenizer(tmp_path / "base", asks_to_think)
    with pytest.raises(DataInputError, match=r"asks for message 2 .* with '.*<think>\\n', and does not write it so"):
        made(tmp_path, rows, window=128)


def test_the_tokens_are_those_of_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    row = chat("is <|im_end|> text?", "the fox – été", "x  y", "no", system=" s ")
    prepared = made(tmp_path, [row], window=128)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "base" / "tokenizer.json"), eos_token=END)
    wanted = theirs.apply_chat_template(row["messages"], chat_template=CHATML, tokenize=True, return_dict=False)
    assert (windows_of(prepared)[0][: len(wanted)] & NUMBER).tolist() == wanted


def test_the_roles_of_the_run_file_are_trained(tmp_path):
    prepared = made(tmp_path, [chat("a", "b")], table={"train_on": ["user", "assistant"]})
    [(whole, learnt)] = documents_of(prepared)
    # Of the first message what it says, and what follows; of the assistant's what follows the question for it.
    assert learnt == whole.replace("<|im_start|>user\n", "").replace("<|im_start|>assistant\n", "").removesuffix("\n")
    two = made(tmp_path, [chat("a", "b", "c", "d")], "two", table={"train_on": ["user", "assistant"]})
    assert "<|im_start|>user\nc<|im_end|>" in documents_of(two)[0][1]


def test_of_a_first_message_that_is_trained_the_templates_own_system_message_and_the_tools_are_not(tmp_path):
    template = (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nbe kind{{ (tools or '') | tojson }}<|im_end|>\n"
        "{% endif %}" + CHATML
    )
    row = chat("yes?", "no") | {"tools": [{"type": "function", "function": {"name": "dog"}}]}
    table = {"train_on": ["user", "assistant"]}
    found = documents_of(made(tmp_path, [row], template=template, window=128, table=table))
    assert [learnt for _, learnt in found] == ["yes?<|im_end|>\nno<|im_end|>"]


def test_a_role_that_no_message_has_is_told(tmp_path):
    with pytest.raises(DataInputError, match="train_on: no message has the role 'users': there are assistant, user"):
        made(tmp_path, [chat("q", "a")], table={"train_on": ["assistant", "users"]})


def test_a_template_may_end_the_whole_conversation_with_a_token_of_its_own(tmp_path):
    # As Phi-3's: each message ends with its own token, and eos_token comes last.
    ends = "{% endfor %}{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    template = CHATML.replace("{% endfor %}", ends)
    base_tokenizer(tmp_path / "base", template)
    ids = Tokenizer.from_file(str(tmp_path / "base" / "tokenizer.json"))
    end = ids.token_to_id(TURN_END)
    (tmp_path / "base/generation_config.json").write_text(json.dumps({"eos_token_id": [end, 1_000_000]}))
    prepared = made(tmp_path, [chat("q", "a", "r", "b")])
    ((whole, learnt),) = documents_of(prepared)
    assert whole.endswith(f"b{TURN_END}\n{END}") and learnt == f"a{TURN_END}b{TURN_END}\n{END}"
    assert prepared.manifest.conversations is not None and prepared.manifest.conversations.chat is not None
    assert prepared.manifest.conversations.chat.end_tokens == sorted([end, ids.token_to_id(END)])


def test_a_template_may_put_other_spaces_into_an_answer(tmp_path):
    spaced = r"(message['content'] | replace('</think>', '\n</think>\n\n'))"
    template = CHATML.replace("message['content']", spaced)
    ((_, learnt),) = documents_of(made(tmp_path, [chat("q", "<think>so</think>yes")], template=template, window=128))
    assert learnt == f"<think>so\n</think>\n\nyes{TURN_END}"
    joined = CHATML.replace("message['content']", r"(message['content'] | replace('\n', ' '))")
    with pytest.raises(DataInputError, match="leaves out or changes the text of message 2"):
        made(tmp_path / "joined", [chat("q", "if x:\n  y")], template=joined)


def test_a_template_may_mark_itself_what_the_model_says(tmp_path):
    marks = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content | upper | lower }}"
        "{{ eos_token }}{% endgeneration %}{% else %}Q:{{ m.content }}{% endif %}{% endfor %}"
    )
    prepared = made(tmp_path, [chat("who", "fox", "and", "dog")], template=marks)
    whole = "Q:whoA:fox<|endoftext|>Q:andA:dog<|endoftext|>"
    assert documents_of(prepared) == [(whole, "fox<|endoftext|>dog<|endoftext|>")]


@pytest.mark.parametrize("kind", ["messages", "pair", "lists", "parquet", "gz"])
def test_every_form_of_a_conversation_gives_the_same_tokens(tmp_path, kind):
    reference = made(tmp_path, [chat("q", "a")] * 3, "reference")
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = {"pair": {"prompt": "q", "completion": "a"}, "lists": {"prompt": [question], "completion": [answer]}}
    row = rows.get(kind, {"messages": [question, answer | {"name": None}]})
    if kind == "parquet":
        path = tmp_path / "chats.parquet"
        pq.write_table(pa.table({"messages": [row["messages"]] * 3, "other": [1, 2, 3]}), path)
        found = prepare(
            [str(path)], tmp_path / "out", tokenizer=tmp_path / "base" / "tokenizer.json", window=WINDOW,
            conversations=ConversationTable(),
        )  # fmt: skip
    else:
        found = made(tmp_path, [row] * 3)
    assert found.manifest.train == reference.manifest.train


def test_of_a_prompt_that_is_text_nothing_is_trained_either(tmp_path):
    rows = [{"prompt": "q", "completion": "a"}]
    found = documents_of(made(tmp_path, rows, table={"train_on": ["user", "assistant"]}))
    assert [learnt for _, learnt in found] == [f"a{TURN_END}"]


TOOLS = """
{% for m in messages %}{{ "<|im_start|>" + m.role + "\n" }}{{ m.content or "" }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}{{ "<|im_end|>\n" }}
{%- endfor %}{% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
""".strip()


def test_a_special_token_that_a_message_spells_out_is_told(tmp_path):
    rows = [chat("q", "a"), chat(f"say {TURN_END}", f"no {TURN} and {TURN_END}"), chat(TURN_END, "b")]
    marked = made(tmp_path, rows).manifest.conversations
    assert marked is not None and "messages of 2 conversations spell out '<|im_end|>', which became" in marked.fates
    thinking = chat("q", "a")
    thinking["messages"][1]["thought"] = f"well {TURN_END}"  # a template may write any field
    marked = made(tmp_path, [thinking], "thinking").manifest.conversations
    assert marked is not None and "messages of 1 conversations spell out '<|im_end|>', which became" in marked.fates
    plain = made(tmp_path, [chat("q", "a <| b")], "plain").manifest.conversations
    assert plain is not None and "spell" not in plain.fates


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_tool_call_is_trained_as_the_template_writes_it_and_its_answer_is_not(tmp_path, kind):
    calls = [{"function": {"name": name, "arguments": {key: value}}} for name, key, value in
             (("fox", "the", "quick"), ("dog", "lazy", "brown"))]  # fmt: skip
    row = {"messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "no"}, {"role": "assistant", "content": "a"},
    ]}  # fmt: skip
    if kind == "jsonl":
        found = made(tmp_path, [row] * 3, template=TOOLS, window=256)
    else:
        base_tokenizer(tmp_path / "base", TOOLS)
        path = tmp_path / "chats.parquet"
        pq.write_table(pa.Table.from_pylist([row] * 3), path)  # each argument of one call is null in the other
        found = prepare(
            [str(path)], tmp_path / "out", tokenizer=tmp_path / "base" / "tokenizer.json", window=256,
            conversations=ConversationTable(), base=tmp_path,
        )  # fmt: skip
    written = [json.dumps(call["function"]) for call in calls]
    for whole, learnt in documents_of(found):
        assert all(f"<call>{text}</call>" in whole for text in written) and "null" not in whole
        assert all(text in learnt for text in written) and learnt.endswith("a<|im_end|>") and "no" not in learnt


def test_a_template_that_asks_whether_the_content_is_none_gets_the_call_with_its_nulls(tmp_path):
    template = TOOLS.replace(
        '{{ m.content or "" }}', "{% if m.content is none %}[call]{% else %}{{ m.content }}{% endif %}"
    )
    call = {"function": {"name": "fox", "arguments": {"the": None}}}
    row = {"messages": [
        {"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": None, "tool_calls": [call]},
    ]}  # fmt: skip
    for whole, learnt in documents_of(made(tmp_path, [row] * 3, template=template, window=256)):
        assert learnt == f"[call]<call>{json.dumps(call['function'])}</call><|im_end|>" and learnt in whole


def test_a_call_in_a_template_that_writes_earlier_messages_otherwise_is_refused_in_a_line(tmp_path):
    template = TOOLS.replace('"<|im_start|>" + m.role', '("" if loop.last else "!!") + "<|im_start|>" + m.role')
    asks_long = template.replace("assistant\n", "assistant\n" + "x" * 200)
    assert len({TOOLS, template, asks_long}) == 3
    row = chat("q", "a")
    row["messages"][1] = {"role": "assistant", "tool_calls": [{"function": {"name": "dog", "arguments": {}}}]}
    with pytest.raises(DataInputError, match=r"writes message 2 \(assistant\) otherwise"):
        made(tmp_path, [row], template=asks_long, window=256)


def test_a_template_that_leaves_out_a_call_is_refused(tmp_path):
    call = {"type": "function", "function": {"name": "fox", "arguments": {}}}
    row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    plain = CHATML.replace("message['content']", "(message['content'] or '')")
    with pytest.raises(DataInputError, match=r"line 1: the chat template leaves out .* the call of 'fox' of message 2"):
        made(tmp_path, [row], template=plain)


def test_a_template_that_leaves_out_the_tools_is_refused(tmp_path):
    row = GOOD | {"tools": [{"type": "function", "function": {"name": "fox", "parameters": {}}}]}
    with pytest.raises(DataInputError, match=r"line 1: the chat template leaves out the tool 'fox': name one that"):
        made(tmp_path, [row])
    asks = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "fox", "arguments": {}}}]}
    called = row | {"messages": [USER | {"content": "the fox"}, asks]}  # so the text has its name all the same
    with pytest.raises(DataInputError, match=r"line 1: the chat template leaves out the tool 'fox'"):
        made(tmp_path / "called", [called], template=TOOLS)
    shown = "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}" + CHATML
    ((whole, learnt),) = documents_of(made(tmp_path / "shown", [row], template=shown, window=256))
    assert whole.startswith('{"name": "fox"') and learnt == "a<|im_end|>"


@pytest.mark.parametrize("marks", [True, False], ids=["marked", "plain"])
def test_of_a_message_with_the_weight_0_nothing_is_trained(tmp_path, marks):
    row = chat("q", "bad", "r", "good")
    row["messages"][1]["weight"], row["messages"][3]["weight"] = 0, 1
    ((whole, learnt),) = documents_of(made(tmp_path, [row], template=MARKED if marks else CHATML))
    assert "bad" in whole and learnt == "good<|im_end|>"


def test_what_a_tool_says_may_be_written_as_json(tmp_path):
    template = CHATML.replace(
        "message['content']", "(message['content'] | tojson if message['role'] == 'tool' else message['content'])"
    )
    row = {"messages": [USER, {"role": "tool", "content": '{"fox": "dog"}\n'}, {"role": "assistant", "content": "a"}]}
    ((whole, learnt),) = documents_of(made(tmp_path, [row], template=template))
    assert '"{\\"fox\\": \\"dog\\"}\\n"' in whole and learnt == "a<|im_end|>"


def test_arguments_that_a_template_would_put_in_quotes_are_refused(tmp_path):
    def row(arguments: Any) -> dict[str, Any]:
        calls = [{"function": {"name": "fox", "arguments": arguments}}]
        return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": calls}]}

    with pytest.raises(DataInputError, match=r"line 1: message 2 calls a tool with arguments that are text, .* object"):
        made(tmp_path, [row('{"the": "dog"}')], template=TOOLS, window=256)
    with pytest.raises(DataInputError, match="line 1: text with half a surrogate pair"):
        made(tmp_path, [row({"the": "\ud800"})], template=TOOLS, window=256)
    joined = TOOLS.replace("call.function | tojson", "call.function.name + call.function.arguments")
    ((_, learnt),) = documents_of(made(tmp_path / "text", [row('{"the": "dog"}')], template=joined, window=256))
    assert learnt == '<call>fox{"the": "dog"}</call><|im_end|>'


@pytest.mark.parametrize("marks", [True, False], ids=["marked", "plain"])
def test_of_a_prompt_nothing_is_trained(tmp_path, marks):
    prompt = chat("q", "fox")["messages"] + [{"role": "user", "content": "and"}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "dog"}]}
    ((whole, learnt),) = documents_of(made(tmp_path, [row], template=MARKED if marks else CHATML))
    assert "fox" in whole and learnt == "dog<|im_end|>"


def test_spaces_are_trained_though_a_tokenizer_trims_its_offsets(tmp_path):
    path = base_tokenizer(tmp_path / "base")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(path))
    answer = "fox\n        dog  \n\n  lazy"
    ((_, learnt),) = documents_of(made(tmp_path, [chat("q", answer)]))
    assert learnt == f"{answer}<|im_end|>"


def test_a_word_after_a_space_of_the_template_is_trained(tmp_path):
    said = "{{ m.content }}{{ eos_token }}"
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}" + said + "{% endgeneration %}"
        "{% else %}Q: {{ m.content }}{% endif %}{% endfor %}"
    )
    ((whole, learnt),) = documents_of(made(tmp_path, [chat("who", "fox")], template=template))
    assert whole == f"Q: whoA: fox{END}" and learnt.lstrip() == f"fox{END}"


def test_plain_text_lies_beside_conversations_and_is_trained_whole(tmp_path):
    text = "the quick brown fox " * 60
    prepared = made(tmp_path, [{"text": text}, chat("q", "a"), {"text": "lazy"}])
    documents = documents_of(prepared)
    learnt = [trained for whole, trained in documents if "<|im_start|>" not in whole]
    assert "azy<|endoftext|>" in learnt or "lazy<|endoftext|>" in [w for w, _ in documents]
    pieces = [whole for whole, _ in documents if "im_start" not in whole and "quick" in whole]
    parts = [said for whole, said in documents if "im_start" not in whole and "quick" in whole]
    untrained = len(text + END) - sum(map(len, parts))
    assert len(pieces) > 2 and 1 <= untrained <= len("the "), "the text's first token"
    for window in windows_of(prepared)[:, :-1]:
        for document in np.split(window, np.flatnonzero(window & BEGINS))[1:]:
            assert not document[0] & TRAINED  # nothing is before it


@pytest.mark.parametrize("named", [True, False])
def test_a_document_begins_once_with_the_token_that_the_tokenizer_writes_first(tmp_path, named):
    path = base_tokenizer(tmp_path / "base", "{{ bos_token }}" + CHATML, begins=True)
    if named:
        config = path.with_name("tokenizer_config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": BEGIN}))
    text = "the quick brown fox " * 60
    prepared = made(tmp_path, [{"text": text}, chat("fox?", "lazy"), {"text": "yes"}])
    conversation = turn("user", "fox?") + turn("assistant", "lazy")
    found = documents_of(prepared)
    assert [d for d in found if TURN in d[0]] == [(BEGIN + conversation, "lazy" + TURN_END)]
    assert (f"{BEGIN}yes{END}", f"yes{END}") in found
    parts = [(whole, learnt) for whole, learnt in found if TURN not in whole and "yes" not in whole]
    begun = [(whole, learnt) for whole, learnt in parts if BEGIN in whole]
    assert len(parts) > 2 and [whole for whole, _ in begun] == [BEGIN + learnt for _, learnt in begun]
    assert len(begun) == 1 and sum(len(learnt) for _, learnt in parts) == len(text + END)


def test_a_template_without_a_first_token_gets_none(tmp_path):
    base_tokenizer(tmp_path / "base", begins=True)
    [(whole, _)] = documents_of(made(tmp_path, [chat("fox?", "lazy")]))
    assert whole == turn("user", "fox?") + turn("assistant", "lazy")


def test_a_token_that_a_tokenizer_writes_after_a_text_begins_none(tmp_path):
    path = base_tokenizer(tmp_path / "base")
    assert load(path, END).begin_id is None
    tokenizer = Tokenizer.from_file(str(path))
    ends = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 0)])
    tokenizer.post_processor = ends  # type: ignore[assignment]
    tokenizer.save(str(path))
    assert load(path, END).begin_id is None


def test_no_conversation_is_cut_and_no_window_is_without_a_trained_token(tmp_path):
    chance = random.Random(1)
    rows = [chat("q" * chance.randint(1, 20), "a" * chance.randint(1, 20)) for _ in range(300)]
    prepared = made(tmp_path, rows, validation_every=10)
    assert len(documents_of(prepared)) == 270 and len(documents_of(prepared, "validation")) == 30
    assert all("q<|im_end|>" in w and w.endswith("a<|im_end|>\n") for w, _ in documents_of(prepared))
    windows = windows_of(prepared)
    assert (windows[:, 1:] & TRAINED).any(1).all() and not (windows[:, -1] & TRAINED).any()
    assert (windows[:, 0] & BEGINS).all()
    full = prepared.manifest.train.tokens / sum(len(w) for w, _ in documents_of(prepared))
    assert full < 1.2, "windows are mostly padding"  # a character is at least a token here, but for special ones


def test_the_same_conversations_give_the_same_digests_and_a_change_is_named(tmp_path):
    rows = [chat(f"q{i}", f"a{i}") for i in range(40)]
    first = made(tmp_path, rows)
    other = made(tmp_path, rows, "other")
    assert other.manifest.train == first.manifest.train
    written = (first.folder / "manifest.json").stat().st_mtime_ns
    made(tmp_path, rows)
    assert (first.folder / "manifest.json").stat().st_mtime_ns == written
    config = json.loads((tmp_path / "base" / "tokenizer_config.json").read_text())
    config["chat_template"] = "New: " + CHATML
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RunChangedError, match="template was"):
        made(tmp_path, rows)
    with pytest.raises(RunChangedError, match="window was 64, is 80"):
        made(tmp_path, rows, "other", window=80)


def test_shards_end_between_windows(tmp_path):
    rows = [chat(f"question {i}", f"answer {i}") for i in range(60)]
    whole, parts = made(tmp_path, rows), made(tmp_path, rows, "parts", shard_tokens=3 * WINDOW + 5)
    shards = parts.manifest.train.shards
    assert len(shards) > 3 and all(s.tokens == 3 * WINDOW + 1 for s in shards[:-1])
    assert (windows_of(whole)[:, :-1] == windows_of(parts)[:, :-1]).all()


LONG = [("drop", 0, "dropped"), ("cut", 1, "cut"), ("split", 2, "split")]


@pytest.mark.parametrize(("long", "kept", "counted"), LONG)
def test_a_conversation_longer_than_a_window_is_treated_as_the_owner_says(tmp_path, long, kept, counted):
    rows = [chat("q", "a" * 50, "r", "b" * 50, "s", "c" * 5), chat("short", "yes")]
    with pytest.raises(DataInputError, match=r'chats\.jsonl: line 1: 1\d\d tokens, and a window .*long = "drop"'):
        made(tmp_path, rows)
    prepared = made(tmp_path, rows, table={"long": long})
    documents = [d for d in documents_of(prepared) if "short" not in d[0]]
    learnt = "".join(said for _, said in documents)
    if long == "split":  # all of the answers is trained, wherever a piece begins
        assert len(documents) >= kept
        assert [learnt.count(letter) for letter in "abc"] == [50, 50, 5]
    else:
        assert len(documents) == kept and "c" not in learnt
    assert getattr(prepared.manifest.conversations, counted) == 1


def test_a_mix_has_the_shares_of_trained_tokens_that_the_owner_says(tmp_path):
    (tmp_path / "old.txt").write_text("the lazy dog says yes and no. " * 400)
    write_rows(tmp_path / "more.jsonl", [chat("m", "n" * 9)] * 200)
    rows = [chat("q", "a" * 20) for _ in range(100)]
    mix = [{"source": "old.txt", "share": 0.3}, {"source": ["more.jsonl"], "share": 0.2}]
    prepared = made(tmp_path, rows, table={"mix": mix})
    marked = prepared.manifest.conversations
    assert marked is not None
    sizes = {"q": 0, "m": 0, "text": 0}
    for window in windows_of(prepared)[:, :-1]:
        for document in np.split(window, np.flatnonzero(window & BEGINS))[1:]:
            trained = np.count_nonzero(document & TRAINED)
            text = Tokenizer.from_file(str(prepared.folder / "tokenizer.json")).decode(
                list(map(int, document & NUMBER)), skip_special_tokens=False
            )
            sizes["text" if "user" not in text else "q" if "user\nq" in text else "m"] += trained
    assert sizes["text"] / marked.trained == pytest.approx(0.3, abs=0.02)
    assert sizes["m"] / marked.trained == pytest.approx(0.2, abs=0.02)
    few = [{"source": "old.txt", "share": 0.9}]
    with pytest.raises(DataInputError, match=r"old\.txt: a share of 0\.9 is .* tokens, and these documents have"):
        made(tmp_path, rows * 4, "few", table={"mix": few})


USER = {"role": "user", "content": "q"}
GOOD = chat("q", "a")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": "text"}, "line 2: 'messages' holds text: write a list"),
        ({"messages": []}, "line 2: 'messages' holds an empty list"),
        ({"messages": ["x"]}, "line 2: message 1 is text: write"),
        ({"messages": [{"content": "x"}]}, "line 2: message 1 has no role: there is 'content'"),
        ({"messages": [USER, {"role": "assistant", "content": 5}]}, "line 2: message 2: its content is a number"),
        ({"messages": [USER, {"role": "assistant"}]}, "line 2: message 2: its content is null"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "line 2: message 1: its content is a list"),
        ({"messages": [{"role": "gpt", "content": "x"}]}, "line 2: message 1 has the role 'gpt', which .* not name"),
        ({"messages": [USER]}, "line 2: nothing to train on: it has no message of assistant, or all .*: remove it, or"),
        ({"messages": None}, "line 2: neither 'messages', nor .*: there is 'messages', which is null: rename"),
        ({"conversations": [{"from": "human"}]}, "line 2: neither 'messages', nor .*: there is 'conversations'"),
        ({"prompt": "x", "completion": [USER]}, "line 2: 'prompt' and 'completion': write two texts, or two lists"),
        (GOOD | {"tools": "x"}, "line 2: 'tools' holds text: write a list"),
        ({"messages": [USER, {"role": "assistant", "content": "a", "weight": 0.5}]}, "line 2: .* weight is 0.5: write"),
        ({"messages": [USER, {"role": "assistant", "content": "a", "weight": 0}]}, "line 2: nothing to train on"),
    ],
)  # fmt: skip
def test_bad_conversations_are_named_with_file_line_and_remedy(tmp_path, row, says):
    with pytest.raises(DataInputError, match=rf"chats\.jsonl: {says}"):
        made(tmp_path, [GOOD, row])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (CHATML.replace("<|im_end|>\\n", "\\n"), "line 1: the chat template ends an answer with no special token"),
        ("{{ raise_exception('no system here') }}", r"line 1: the chat template refuses it: no system here \(.*base"),
        ("{{ messages[9].content }}", "line 1: the chat template refuses it: .*(has no|no element)"),
        ("{% for m in messages %}{{ m.content }", "tokenizer_config.json: not a chat template: line 1"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "tokenizer_config.json: not a chat template: its parts are nested"),
        ("{{ ''.__class__.__mro__ }}", "line 1: the chat template refuses it"),
        ("{% for m in messages %}{{ m.role }}{{ eos_token }}{% endfor %}", "line 1: .* leaves out or changes .* 1"),
        (CHATML.replace("message['content']", "(message['content'] if loop.last else message['content'] + '!')"),
         "line 1: the chat template writes message 2 .assistant. otherwise when it is the last"),
        (None, "line 1: a conversation, and the tokenizer has no chat template: name a file"),
    ],
)  # fmt: skip
def test_bad_templates_are_named_with_the_file_and_what_to_do(tmp_path, template, says):
    with pytest.raises(DataInputError, match=says):
        made(tmp_path, [chat("q", "a", "r", "b")], template=template)


def test_the_template_of_a_file_comes_before_the_tokenizer_s(tmp_path):
    (tmp_path / "mine.jinja").write_text("Mine: " + CHATML, encoding="utf-8-sig")  # as editors of Windows save it
    prepared = made(tmp_path, [GOOD], table={"chat_template": "mine.jinja"})
    assert prepared.manifest.conversations is not None and prepared.manifest.conversations.chat is not None
    assert prepared.manifest.conversations.chat.template.startswith("Mine: ")
    with pytest.raises(DataInputError, match=r"none\.jinja: the chat template cannot be read"):
        made(tmp_path, [GOOD], "other", table={"chat_template": "none.jinja"})


def test_a_template_knows_no_day_so_that_digests_stay(tmp_path):
    prepared = made(tmp_path, [GOOD], template="{{ strftime_now('%d %b %Y') }}" + CHATML)
    assert documents_of(prepared)[0][0].startswith("26 Jul 2024")


def test_a_packer_gives_back_each_document_once_and_fills_windows():
    chance, windows = random.Random(3), []
    packer = WindowPacker(100, 0, windows.append)
    sizes = [min(100, int(chance.lognormvariate(3, 0.8)) + 1) for _ in range(4 * OPEN)]
    for number, size in enumerate(sizes, 1):
        document = np.full(size, number, dtype=np.uint32)
        document[0] |= BEGINS
        packer.add(document)
    packer.finish()
    joined = np.concatenate(windows)
    assert [int(np.count_nonzero((joined & NUMBER) == n)) for n in range(1, len(sizes) + 1)] == sizes
    for window in windows:
        assert len(window) == 100
    for number, size in enumerate(sizes, 1):
        places = np.flatnonzero((joined & NUMBER) == number)
        assert places[-1] - places[0] == size - 1 and places[0] // 100 == places[-1] // 100
    assert packer.windows == len(windows) < 1.02 * sum(sizes) / 100 + 1


@pytest.mark.parametrize("answer", ["s", "d", "end", "im_end"])
def test_an_answer_may_be_a_part_of_the_token_that_ends_it(tmp_path, answer):
    assert [learnt for _, learnt in documents_of(made(tmp_path, [chat("yes?", answer)]))] == [f"{answer}{TURN_END}"]


def test_of_a_greeting_that_comes_first_nothing_before_it_is_trained(tmp_path):
    template = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nbe kind<|im_end|>\n{% endif %}" + CHATML
    rows = [{"messages": [{"role": "assistant", "content": "hello"}]}]
    assert [learnt for _, learnt in documents_of(made(tmp_path, rows, template=template))] == ["hello<|im_end|>"]


def test_a_mix_of_documents_that_are_trained_or_held_out_already_is_refused(tmp_path):
    held = write_rows(tmp_path / "held.jsonl", [chat("fox?", "lazy")])
    for source in ("held.jsonl", "chats.jsonl"):
        table = {"mix": [{"source": source, "share": 0.1}]}
        with pytest.raises(DataInputError, match="mix and among the other documents: name it once"):
            made(tmp_path, [chat("yes?", "no")], validation=[str(held)], table=table)
    write_rows(tmp_path / "more.jsonl", [chat("fox?", "lazy")])
    with pytest.raises(DataInputError, match="mix and among the other documents: name it once"):
        made(tmp_path, [chat("yes?", "no")], table={"mix": [{"source": "more.jsonl", "share": 0.1}] * 2})


def test_conversations_that_are_all_too_long_are_named_with_what_to_do(tmp_path):
    with pytest.raises(DataInputError, match="nothing of 3 conversations or answers fits into a window of 64"):
        made(tmp_path, [chat("q", "dog " * 99)] * 3, table={"long": "drop"}, validation_every=2)


def test_settings_of_generation_that_no_spec_holds_are_left_out(tmp_path):
    base_tokenizer(tmp_path / "base")
    settings = '{"temperature": Infinity, "top_p": 2e6, "top_k": 7, "do_sample": true}'
    (tmp_path / "base/generation_config.json").write_text(settings)
    marked = made(tmp_path, [chat("yes?", "no")]).manifest.conversations
    assert marked is not None and marked.chat is not None
    assert marked.chat.generation == {"do_sample": True, "top_k": 7}


def test_who_trains_on_no_answers_is_refused():
    with pytest.raises(ValueError, match='must name "assistant"'):
        ConversationTable.model_validate({"train_on": ["user"]})


@pytest.mark.parametrize("length", range(2 * WINDOW - 2, 2 * WINDOW + 3))
def test_every_token_of_a_long_text_is_kept_with_the_one_that_ends_it(tmp_path, length):
    made_of = [{"text": "x" * n} for n in range(length - 3, length + 1)]
    prepared = made(tmp_path, [*made_of, chat("yes?", "no")])
    found = documents_of(prepared)
    # Of each text all is trained but its first token; a piece begins with the last token of the one before.
    trained = sum(learnt.removesuffix(END).count("x") for _, learnt in found)
    assert trained == sum(len(row["text"]) - 1 for row in made_of)
    assert sum(learnt.endswith(END) for _, learnt in documents_of(prepared)) == len(made_of)
