"""Conversations and text as documents of marked tokens (`protocol.spec.DataSpec`), each with what is trained of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from coordinator.authoring.chat_template import ASSISTANT, WEIGHT, ChatTemplate, TrainedSpan
from coordinator.authoring.documents import (
    TEXT,
    DocumentFile,
    checked_text,
    kind_of,
    read_documents,
    read_rows,
    segments_of,
)
from coordinator.authoring.errors import DataInputError
from coordinator.authoring.tokens import BATCH, RunTokenizer
from protocol.spec import BEGINS, TRAINED, Section

ROLES = ("system", "developer", "user", ASSISTANT, "tool")
"""Roles that any template may know; another one must stand in the template."""

MESSAGES, PROMPT, COMPLETION, TOOLS = "messages", "prompt", "completion", "tools"
LONG = "write data.conversations.long = "


class MixedSource(Section):
    """[[data.conversations.mix]]: other documents, and their share of the trained tokens."""

    source: str | list[str]
    share: Annotated[float, Field(gt=0, lt=1)]

    @property
    def sources(self) -> list[str]:
        """`source` as a list."""
        return [self.source] if isinstance(self.source, str) else list(self.source)


class ConversationTable(Section):
    """[data.conversations]: its presence says that the documents are conversations, or text beside them."""

    chat_template: str | None = None
    train_on: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] = [ASSISTANT]
    long: Literal["refuse", "drop", "cut", "split"] = "refuse"
    mix: list[MixedSource] = []

    @field_validator("train_on")
    @classmethod
    def _names_the_assistant(cls, roles: list[str]) -> list[str]:
        if ASSISTANT not in roles:
            raise ValueError(f'must name "{ASSISTANT}", whose answers a model learns')
        return roles

    @field_validator("mix")
    @classmethod
    def _shares(cls, mix: list[MixedSource]) -> list[MixedSource]:
        if sum(m.share for m in mix) >= 1:
            raise ValueError("the shares must leave some for data.source: together less than 1")
        return mix


@dataclass(frozen=True, slots=True)
class MarkedDocument:
    """A piece of at most one window: marked tokens (uint32 [n]). `row`: the number of its row or text file."""

    tokens: np.ndarray
    row: int

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.tokens & TRAINED))


@dataclass
class Counts:
    """The fate of documents that were longer than a window, the tokens that end answers, and the roles of messages.

    `rows`: rows and text files so far. `at_answers`: conversations of which each answer became a document. `spelled`:
    conversations whose messages spell out a special token, by its text. `closing`: all special tokens after what an
    answer says.
    """

    rows: int = 0
    dropped: int = 0
    cut: int = 0
    split: int = 0
    at_answers: int = 0
    ends: set[int] = field(default_factory=set)
    closing: set[int] = field(default_factory=set)
    roles: set[str] = field(default_factory=set)
    spelled: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class ConversationReader:
    """Makes documents of marked tokens from files. `field`: the field of plain text in a row."""

    run: RunTokenizer
    template: ChatTemplate | None
    table: ConversationTable
    window: int
    field: str
    counts: Counts

    def documents(self, sources: Iterable[DocumentFile]) -> Iterator[MarkedDocument]:
        """Yield the pieces of the files' documents in order. Raises DataInputError."""
        for source in sources:
            if source.suffixes[0] in TEXT:
                yield from self._pieces_of_text(ids for ids, _ in self.run.encode(read_documents(source, self.field)))
            else:
                yield from self._of_rows(source)

    def _of_rows(self, source: DocumentFile) -> Iterator[MarkedDocument]:
        batch: list[_Rendered] = []
        size = 0
        for row in read_rows(source, [MESSAGES, PROMPT, COMPLETION, TOOLS, self.field]):
            found = messages_of(row.fields, row.where)
            if found is None:
                if self.field not in row.fields:
                    nulls = {k: ", which is null" for k, value in row.fields.items() if value is None}
                    there = ", ".join(f"{k!r}{nulls.get(k, '')}" for k in list(row.fields)[:10]) or "nothing"
                    raise DataInputError(
                        f"{row.where}: neither {MESSAGES!r}, nor {PROMPT!r} and {COMPLETION!r}, nor {self.field!r}: "
                        f"there is {there}: rename a field, or name that of plain text (data.field)"
                    )
                yield from self._encoded(batch)
                batch, size = [], 0
                if (text := row.text(self.field)).strip():
                    yield from self._pieces_of_text(ids for ids, _ in self.run.encode(segments_of(text)))
                continue
            for rendered in self._rendered(*found, row.fields.get(TOOLS) or [], row.where):
                batch.append(rendered)
                size += len(rendered.text)
                if size >= BATCH:
                    yield from self._encoded(batch)
                    batch, size = [], 0
        yield from self._encoded(batch)

    def _rendered(self, messages: list[dict[str, Any]], given: int, tools: Any, where: str) -> Iterator[_Rendered]:
        """Yield the documents of a conversation: itself, or one for each answer. Raises DataInputError.

        `given`: the number of its first messages that are a prompt.
        """
        template = self.template
        if template is None:
            raise DataInputError(
                f"{where}: a conversation, and the tokenizer has no chat template: name a file with one "
                "(data.conversations.chat_template)"
            )
        if not isinstance(tools, list):
            raise DataInputError(f"{where}: {TOOLS!r} holds {kind_of(tools)}: write a list")
        for number, message in enumerate(messages, 1):
            role = message["role"]
            if role not in ROLES and role not in self.table.train_on and not template.names_role(role):
                raise DataInputError(
                    f"{where}: message {number} has the role {role[:60]!r}, which {template.name} does not name: write "
                    f"one of {', '.join(ROLES)}"
                )
        self.counts.rows += 1
        self.counts.roles.update(m["role"] for m in messages)
        self.counts.spelled.update(set().union(*map(self.run.special_in, _texts([messages, tools]))))
        documents = template.rendered(messages, tools, self.table.train_on, where, given)
        for number, (text, spans) in enumerate(documents, 1):
            if not any(span.start < span.end for span in spans):
                raise DataInputError(
                    f"{where}: nothing to train on: it has no message of {' or '.join(self.table.train_on)}, or all "
                    "have the weight 0: remove it, or add the role to data.conversations.train_on"
                )
            yield _Rendered(self.counts.rows, number, where, checked_text(text, where), spans)

    def _encoded(self, batch: Sequence[_Rendered]) -> Iterator[MarkedDocument]:
        encodings = self.run.encode_rendered([b.text for b in batch])
        for rendered, encoding in zip(batch, encodings, strict=True):
            self.counts.at_answers += rendered.number == 2
            tokens = np.array(encoding.ids, dtype=np.uint32)
            starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
            special = np.isin(tokens, list(self.run.special_ids))
            for span in rendered.spans:
                inside = (starts >= span.start) & (ends <= span.end) & (ends > starts)
                for i in np.flatnonzero((starts < span.start) & (ends > span.start) & (ends <= span.end)):
                    # A word's token may begin with a space that the template wrote.
                    before, own = rendered.text[starts[i] : span.start], rendered.text[span.start : ends[i]]
                    inside[i] = not before.strip() and bool(own.strip())
                if span.is_answer:
                    closing = np.flatnonzero(inside & special & (starts >= span.said))
                    if not len(closing):
                        name = self.template.name if self.template else ""
                        raise DataInputError(
                            f"{rendered.where}: the chat template ends an answer with no special token of the "
                            f"tokenizer, so the model would never stop: let {name} write eos_token there"
                        )
                    self.counts.ends.add(int(tokens[closing[-1]]))
                    self.counts.closing.update(map(int, tokens[closing]))
                    inside[closing[-1] + 1 :] = False  # line ends between messages are the template's
                tokens[inside] |= TRAINED
            tokens[0] &= ~np.uint32(TRAINED)
            yield from self._fitted(tokens, rendered.row, rendered.where)

    def _fitted(self, tokens: np.ndarray, row: int, where: str) -> Iterator[MarkedDocument]:
        """Yield a conversation in pieces that fit into a window, as the table says. Raises DataInputError."""
        long, window, counts = self.table.long, self.window, self.counts
        if not (tokens & TRAINED).any():
            raise DataInputError(f"{where}: nothing to train on: its one token is the first: remove it")
        if len(tokens) <= window:
            yield _piece(tokens, row)
            return
        if long == "refuse":
            raise DataInputError(
                f'{where}: {len(tokens):,} tokens, and a window has {window:,}: {LONG}"drop" to leave out such '
                'conversations, "cut" to keep their beginnings or "split" to keep all in parts, or take a larger window'
            )
        if long == "drop":
            counts.dropped += 1
            return
        cut = tokens[:window] if long == "cut" else tokens
        # A piece's first token is not trained, so each begins with the last one of the piece before.
        pieces = [_piece(cut[at : at + window].copy(), row) for at in range(0, len(cut) - 1, window - 1)]
        kept = [p for p in pieces if p.trained]
        if not kept:
            counts.dropped += 1
        elif long == "cut":
            counts.cut += 1
        else:
            counts.split += 1
        yield from kept

    def _pieces_of_text(self, encoded: Iterable[np.ndarray]) -> Iterator[MarkedDocument]:
        """Yield a text in pieces of at most a window, of which every token but the first is trained.

        The tokenizer's own first token begins the text, if there is one.
        """
        self.counts.rows += 1
        row = self.counts.rows
        begin = self.run.begin_id
        held = np.array([] if begin is None else [begin], dtype=np.uint32)
        for ids in encoded:
            held = np.concatenate([held, ids | np.uint32(TRAINED)])
            while len(held) > self.window:
                yield _piece(held[: self.window].copy(), row)
                held = held[self.window - 1 :]  # a piece's first token is not trained: it is the last one before
        if len(held) > 1:
            yield _piece(held.copy(), row)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The text of a row's document, and the document's number in the row."""

    row: int
    number: int
    where: str
    text: str
    spans: list[TrainedSpan]


def _piece(tokens: np.ndarray, row: int) -> MarkedDocument:
    """Return a piece, whose first token begins it and is not trained: nothing comes before it."""
    tokens[0] = (tokens[0] & ~np.uint32(TRAINED)) | np.uint32(BEGINS)
    return MarkedDocument(tokens, row)


def messages_of(row: dict[str, Any], where: str) -> tuple[list[dict[str, Any]], int] | None:
    """Return the messages of a row, and how many of the first are its prompt; None if it holds none.

    `prompt` and `completion` are a user's and an assistant's text, or lists of messages. Raises DataInputError.
    """
    prompts = 0
    if row.get(MESSAGES) is not None:
        given = row[MESSAGES]
    elif row.get(PROMPT) is not None and row.get(COMPLETION) is not None:
        prompt, completion = row[PROMPT], row[COMPLETION]
        if isinstance(prompt, str) and isinstance(completion, str):
            given, prompts = [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}], 1
        elif isinstance(prompt, list) and isinstance(completion, list):
            given, prompts = prompt + completion, len(prompt)
        else:
            raise DataInputError(f"{where}: {PROMPT!r} and {COMPLETION!r}: write two texts, or two lists of messages")
    else:
        return None
    if not isinstance(given, list) or not given:
        what = "an empty list" if given == [] else kind_of(given)
        raise DataInputError(f"{where}: {MESSAGES!r} holds {what}: write a list of messages with role and content")
    return [_message(message, f"{where}: message {number}") for number, message in enumerate(given, 1)], prompts


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in lists and objects, however deep."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a message without fields that are null. Raises DataInputError unless it has a role and says something.

    Of a message that only calls tools the content is null, as templates expect.
    """
    if not isinstance(message, dict):
        raise DataInputError(f'{where} is {kind_of(message)}: write {{"role": ..., "content": ...}}')
    kept = {k: v for k, v in message.items() if v is not None}
    role, content = kept.get("role"), kept.get("content")
    if not isinstance(role, str) or not role:
        there = ", ".join(map(repr, list(message)[:10])) or "nothing"
        raise DataInputError(f"{where} has no role: there is {there}: write role and content")
    if kept.get(WEIGHT, 1) not in (0, 1):
        raise DataInputError(f"{where}: its weight is {repr(kept[WEIGHT])[:60]}: write 0 to train nothing of it, or 1")
    if content is None and isinstance(kept.get("tool_calls"), list):
        return kept | {"content": None}
    if not isinstance(content, str):
        raise DataInputError(f"{where}: its content is {kind_of(content)}: write text")
    checked_text(content, where)
    return kept
