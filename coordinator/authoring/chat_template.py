"""The chat template of a run: conversations as text, with what is trained of it.

A template comes from the owner's own files, never from the network. It is rendered in jinja2's immutable sandbox, with
what `transformers` gives a template, so that a model is asked later in the form in which it was trained. One thing
differs: `strftime_now` gives a fixed day, since the same data must give the same digests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import ValidationError

from coordinator.authoring.errors import DataInputError
from protocol.spec import MAX_TEMPLATE, ChatSpec, explain

TOKENIZER_CONFIG, GENERATION_CONFIG, TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
GENERATION = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
MAX_CONFIG = 64 * 1024 * 1024
MAX_SETTING = 1_000_000
"""The largest number in a generation_config.json that is kept."""
FIXED_DAY = datetime(2024, 7, 26)
"""The day that a template gets as today: the one that Llama's own template has by default."""

ASSISTANT, TOOL_ROLES = "assistant", ("tool", "ipython")
WEIGHT = "weight"
_OPEN, _CLOSE, _PROBE = "\ufdd0", "\ufdd1", "\ufdd2"
"""Marks around the text that a template calls generated: code points that are no characters, and are removed again."""


@dataclass(frozen=True, slots=True)
class TrainedSpan:
    """A part of a rendered conversation that is trained: characters [start, end).

    `said` is the end of what the message itself says; what follows it, the template added.
    """

    start: int
    end: int
    said: int
    is_answer: bool


class _DiffersError(DataInputError):
    """The template writes a message differently from what it says, or once others follow."""


class ChatTemplate:
    """A template with the special tokens that it is given. `name`: its file, for errors."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], name: str):
        if not 1 <= len(text) <= MAX_TEMPLATE:
            raise DataInputError(f"{name}: a chat template of {len(text):,} characters: write 1 to {MAX_TEMPLATE:,}")
        self.text, self.special_tokens, self.name = text, dict(special_tokens), name
        try:
            self._template = _environment().from_string(text)
        except TemplateSyntaxError as e:
            raise DataInputError(f"{name}: not a chat template: line {e.lineno}: {e.message}") from None
        except (RecursionError, SyntaxError):
            raise DataInputError(f"{name}: not a chat template: its parts are nested too deeply") from None
        self._marks = "endgeneration" in text

    def names_role(self, role: str) -> bool:
        """Return whether the template's text has a role in quotes."""
        return f"'{role}'" in self.text or f'"{role}"' in self.text

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], train_on: Sequence[str], where: str,
        given: int = 0,
    ) -> Iterator[tuple[str, list[TrainedSpan]]]:  # fmt: skip
        """Yield a conversation's text, and what is trained of it: the messages of the roles `train_on`.

        The first `given` messages are a prompt, of which nothing is trained, as of a message with the weight 0.

        A template that marks what the model says (`{% generation %}`) decides itself, if only the assistant is
        trained. Otherwise the conversation is rendered up to each trained message, and with it; each text must be the
        beginning of the next. A template may write answers differently once others follow, as Qwen3's does. If only
        the assistant is trained, each answer then has a text of its own, which ends with it. Raises DataInputError,
        which begins with `where`.
        """
        counted = [i for i, m in enumerate(messages) if i >= given and m.get(WEIGHT, 1)]
        answers = [i for i in counted if messages[i]["role"] == ASSISTANT]
        trained = [i for i in counted if messages[i]["role"] in train_on]
        marks = self._marks and list(train_on) == [ASSISTANT] and all(m.get(WEIGHT, 1) for m in messages)
        try:
            whole = self._trained(messages, tools, trained, where, given, marks=marks)
        except _DiffersError:
            if marks or trained != answers or not answers:
                raise
        else:
            yield whole
            return
        for i in answers:
            yield self._trained(messages[: i + 1], tools, [i], where, given)

    def _trained(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], trained: Sequence[int], where: str,
        given: int, *, marks: bool = False,
    ) -> tuple[str, list[TrainedSpan]]:  # fmt: skip
        """Return the text of messages, and the spans of those that are trained, by their places.

        With `marks` the template decides. Answers that are not trained may be changed or left out.
        """
        text, marked = self._render(messages, tools, where)
        bare = self._render(messages, (), where)[0] if tools else ""
        for name in _names(tools):
            if text.count(name) <= bare.count(name):  # messages may name it, too
                raise DataInputError(
                    f"{where}: the chat template leaves out the tool {name!r}: name one that shows tools "
                    f"(data.conversations.chat_template), correct {self.name}, or take the tools out"
                )
        for i, message in enumerate(messages):
            must_stay = i in trained or message["role"] != ASSISTANT
            said = [("the text", (message.get("content") or "").strip())]
            said += [(f"the call of {name!r}", name) for name in _called(message)]
            for what, there in said:
                as_json = (
                    message["role"] in TOOL_ROLES and i not in trained and _quoted(there) in text
                )  # as Llama 3 has it
                if must_stay and not as_json and _end_of(there, text) is None:
                    raise _DiffersError(
                        f"{where}: the chat template leaves out or changes {what} of message {i + 1} "
                        f"({message['role']}): correct {self.name}, or take such messages out"
                    )
            for arguments in _argument_texts(message):
                if i in trained and arguments not in text and _quoted(arguments) in text:
                    raise DataInputError(
                        f"{where}: message {i + 1} calls a tool with arguments that are text, which the chat template "
                        f"would write as text in quotes: write them as an object, or correct {self.name}"
                    )
        if marks:
            of_prompt = len(self._render(messages[:given], tools, where)[1]) if given else 0
            return text, marked[of_prompt:]
        spans: list[TrainedSpan] = []
        for i in trained:
            message = messages[i]
            is_answer = message["role"] == ASSISTANT
            if i:
                before = self._render(messages[:i], tools, where, ask=is_answer)[0]
            else:  # many templates cannot render no message, or write a system message of their own and the tools
                before = self._render([{**message, "content": _PROBE}], tools, where)[0].partition(_PROBE)[0]
            after = text if i == len(messages) - 1 else self._render(messages[: i + 1], tools, where)[0]
            begins = after.startswith(before)
            so_far = "" if begins or not (i and is_answer) else self._render(messages[:i], tools, where)[0]
            if so_far and after.startswith(so_far) and before.startswith(so_far):
                raise _DiffersError(
                    f"{where}: the chat template asks for message {i + 1} ({message['role']}) with "
                    f"{before[len(so_far) :][-80:]!r}, and does not write it so: begin answers as it asks for them, or "
                    f"name a template that marks them with {{% generation %}} ({self.name})"
                )
            said = _end_of((message.get("content") or "").strip(), after, len(before))
            end = None if said is None else self._end_of_message(after, text, said)
            if not begins or said is None or end is None:
                others = any(messages[j]["role"] != ASSISTANT for j in trained)
                raise _DiffersError(
                    f"{where}: the chat template writes message {i + 1} ({message['role']}) otherwise when it is the "
                    "last one than when others follow, so what the model would say is not what it would be trained "
                    f"on: {'train on the assistant alone, ' * others}name a template that marks it with "
                    f"{{% generation %}}, or cut the conversation there ({self.name})"
                )
            spans.append(TrainedSpan(len(before), end, said, is_answer))
        return text, spans

    def _end_of_message(self, after: str, text: str, said: int) -> int | None:
        """Return the end of a message, with which `after` ends; `text` goes on. None if `text` has it otherwise.

        Some templates, as Phi-3's, end each message with a token of its own, and the conversation with eos_token.
        """
        if text.startswith(after):
            return len(after)
        closed = after.rstrip().removesuffix(self.special_tokens.get("eos_token", ""))
        return len(closed) if closed[said:].strip() and text.startswith(closed) else None

    def question(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text after which the model answers. Raises DataInputError."""
        return self._render(messages, (), "the prompt", ask=True)[0]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], where: str, *, ask: bool = False
    ) -> tuple[str, list[TrainedSpan]]:
        """Return the text, and the spans that the template marks."""
        try:
            text = self._template.render(
                messages=[dict(m) for m in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=ask,
                **self.special_tokens,
            )
        except TemplateError as e:
            why = " ".join(str(e).split())[:300]
            raise DataInputError(f"{where}: the chat template refuses it: {why} ({self.name})") from None
        except Exception as e:  # noqa: BLE001 - a template computes with what it is given: any error may come
            why = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
            raise DataInputError(f"{where}: the chat template cannot render it: {why} ({self.name})") from None
        return _spans_of(text) if self._marks else (text, [])


def _end_of(said: str, text: str, start: int = 0) -> int | None:
    """Return the end of what a message says in a text from `start` on; None if it is not there.

    The text may have more spaces, as Qwen3's template puts them around thoughts, but no fewer lines.
    """
    if (at := text.find(said, start)) >= 0:
        return at + len(said)
    places = [i for i in range(start, len(text)) if not text[i].isspace()]
    letters = "".join(said.split())
    at = "".join(text[i] for i in places).find(letters) if letters else -1
    if at < 0:
        return None
    begin, end = places[at], places[at + len(letters) - 1] + 1
    has_all = end - begin >= len(said) and text.count("\n", begin, end) >= said.count("\n")
    return end if has_all else None


def _called(message: Mapping[str, Any]) -> list[str]:
    """Return the names of the functions that a message calls."""
    return _names(message.get("tool_calls"))


def _argument_texts(message: Mapping[str, Any]) -> list[str]:
    """Return the arguments of the calls of a message that are text instead of objects."""
    return [f["arguments"] for f in _functions(message.get("tool_calls")) if isinstance(f.get("arguments"), str)]


def _names(tools: Any) -> list[str]:
    """Return the names of tools, or of the functions that are called."""
    return [f["name"] for f in _functions(tools) if isinstance(f.get("name"), str)]


def _functions(tools: Any) -> list[dict[str, Any]]:
    """Return what tools, or calls of tools, say of their functions."""
    tools = [t for t in tools if isinstance(t, dict)] if isinstance(tools, list | tuple) else []
    return [t["function"] if isinstance(t.get("function"), dict) else t for t in tools]


def _quoted(text: str) -> str:
    """Return text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _spans_of(text: str) -> tuple[str, list[TrainedSpan]]:
    """Return the text without the signs around what is generated, and the spans between them."""
    parts, spans, at, start = [], [], 0, 0
    for part in re.split(f"([{_OPEN}{_CLOSE}])", text):
        if part == _OPEN:
            start = at
        elif part == _CLOSE:
            spans.append(TrainedSpan(start, at, start, True))
        else:
            parts.append(part)
            at += len(part)
    return "".join(parts), spans


class _GenerationTag(Extension):
    """The tag {% generation %} of transformers: what is in it, the model says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _environment() -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = FIXED_DAY.strftime
    return made


def load_template(file: Path | None, tokenizer: Path, end: str, begin: str) -> ChatTemplate | None:
    """Return the template in a file, or by default the one beside a tokenizer.json; None if there is none.

    `file` is Jinja, or a JSON file with a `chat_template`. Special tokens are those of the tokenizer_config.json beside
    the tokenizer; where it names none, `end` ends a document, and `begin`, unless it is "", begins one. Raises
    DataInputError.
    """
    beside = tokenizer.with_name(TOKENIZER_CONFIG)
    config = _json(beside) if beside.is_file() else {}
    special = {"eos_token": end} | ({"bos_token": begin} if begin else {})
    special |= {k: t for k in SPECIAL_TOKENS if (t := _token(config.get(k)))}
    if file is None and tokenizer.with_name(TEMPLATE).is_file():
        file = tokenizer.with_name(TEMPLATE)
    if file is not None and file.suffix != ".json":
        try:
            return ChatTemplate(file.read_text(encoding="utf-8-sig"), special, str(file))
        except (OSError, UnicodeDecodeError) as e:
            raise DataInputError(f"{file}: the chat template cannot be read: {e}") from None
    if file is not None and file != beside:
        config, beside = _json(file), file
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    if isinstance(found, str) and found:
        return ChatTemplate(found, special, str(beside))
    if file is not None:
        raise DataInputError(f"{file}: no chat_template in it: name a file that has one")
    return None


def generation_of(tokenizer: Path) -> dict[str, Any]:
    """Return the settings of the generation_config.json beside a tokenizer that are kept for the exported model."""
    path = tokenizer.with_name(GENERATION_CONFIG)
    config = _json(path) if path.is_file() else {}
    return {k: v for k in GENERATION if isinstance(v := config.get(k), bool | int | float) and 0 <= v <= MAX_SETTING}


def own_ends(tokenizer: Path) -> frozenset[int]:
    """Return the tokens at which the generation_config.json beside a tokenizer ends an answer."""
    path = tokenizer.with_name(GENERATION_CONFIG)
    ends = _json(path).get("eos_token_id") if path.is_file() else None
    ends = ends if isinstance(ends, list) else [ends]
    return frozenset(i for i in ends if isinstance(i, int) and not isinstance(i, bool))


def chat_spec(template: ChatTemplate, end_tokens: Sequence[int], tokenizer: Path) -> ChatSpec:
    """Return what the spec holds of a template. Raises DataInputError."""
    try:
        return ChatSpec(
            template=template.text,
            special_tokens=template.special_tokens,  # type: ignore[arg-type]
            end_tokens=list(end_tokens),
            generation=generation_of(tokenizer),  # type: ignore[arg-type]
        )
    except ValidationError as e:
        raise DataInputError(explain(e, template.name)) from None


def end_of_text_beside(tokenizer: Path) -> str:
    """Return the eos_token of the tokenizer_config.json beside a tokenizer, or "". Raises DataInputError."""
    beside = tokenizer.with_name(TOKENIZER_CONFIG)
    return _token(_json(beside).get("eos_token")) if beside.is_file() else ""


def _token(value: Any) -> str:
    """Return a token of a tokenizer_config.json: text, or an object with it; "" for anything else."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and 0 < len(value) <= 256 else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG:
            raise DataInputError(f"{path}: larger than {MAX_CONFIG >> 20} MiB: take another copy")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise DataInputError(f"{path}: cannot be read: {e}: take another copy") from None
    return value if isinstance(value, dict) else {}
