"""The tokenizer of a run: trained on its documents (byte-level BPE), or an existing tokenizer.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from coordinator.authoring.chat_template import end_of_text_beside
from coordinator.authoring.documents import TextSegment
from coordinator.authoring.errors import DataInputError
from protocol.errors import os_reason
from protocol.plain_text import one_line
from protocol.spec import MAX_TOKENIZER, Section

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[EOS]", "<|eot_id|>")
MIN_VOCABULARY = 257  # every byte, and the end of text
SAMPLE = 256 * 1024 * 1024
"""Maximum number of characters on which a tokenizer is trained."""

LONGEST = 1000
"""Maximum number of characters of a word on which a tokenizer is trained: the time grows with its square."""

BATCH = 1024 * 1024
"""Characters encoded at a time."""

LONG_WORD = re.compile(rf"((?<!\S)\S{{{LONGEST},}})")
CANNOT_ENCODE = "the tokenizer cannot encode these documents"


class SpelledToken(Section):
    """A special token that documents of plain text spell out, and their number."""

    text: str
    documents: int


@dataclass(frozen=True)
class RunTokenizer:
    """A tokenizer, its file's exact bytes, and the token that ends a document."""

    tokenizer: Tokenizer
    file: bytes
    end: str
    end_id: int
    spelled: Counter[str] = field(default_factory=Counter, compare=False)
    """Documents in which a special token is spelled out, by its text: they are encoded as text."""

    @property
    def size(self) -> int:
        """The number of token ids: one more than the highest."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, segments: Iterable[TextSegment]) -> Iterator[tuple[np.ndarray, bool]]:
        """Yield the tokens of each segment in order: a uint32 array [n], and whether it ends a document.

        The end token follows the last segment of a document. Text that looks like a special token is encoded as text.
        """
        batch: list[TextSegment] = []
        size = 0
        for segment in self.watch(segments):
            batch.append(segment)
            size += len(segment.text)
            if size >= BATCH:
                yield from self._encoded(batch)
                batch, size = [], 0
        yield from self._encoded(batch)

    def watch(self, segments: Iterable[TextSegment]) -> Iterator[TextSegment]:
        """Yield the segments, and count documents in `spelled`."""
        found: set[str] = set()
        for segment in segments:
            found.update(self.special_in(segment.text))
            if segment.last:
                self.spelled.update(found)
                found.clear()
            yield segment

    def special_in(self, text: str) -> set[str]:
        """Return the special tokens that a text spells out."""
        return {t for opening, texts in self._openings.items() if opening in text for t in texts if t in text}

    @property
    def most_spelled(self) -> SpelledToken | None:
        """The special token that most documents spell out."""
        return most_of(self.spelled, self.end)

    @cached_property
    def _openings(self) -> dict[str, list[str]]:
        """The special tokens by their first two characters, few of which occur in ordinary text."""
        openings: dict[str, list[str]] = {}
        for token in self.tokenizer.get_added_tokens_decoder().values():
            if token.special and token.content:
                openings.setdefault(token.content[:2], []).append(token.content)
        return openings

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoding]:
        """Return the encodings of rendered conversations, in which special tokens are recognised.

        A post-processor that trims offsets would say that a token of spaces has no place in the text.
        """
        tokenizer, processor = self.tokenizer, self.tokenizer.post_processor
        tokenizer.encode_special_tokens, tokenizer.post_processor = False, None  # type: ignore[assignment]
        try:
            with _library_errors(CANNOT_ENCODE):
                return tokenizer.encode_batch(list(texts), add_special_tokens=False)
        finally:
            tokenizer.encode_special_tokens, tokenizer.post_processor = True, processor

    @cached_property
    def begin_id(self) -> int | None:
        """The token that the tokenizer itself writes before a text, as its model always saw it; None for none."""
        with _library_errors(CANNOT_ENCODE):
            encoding = self.tokenizer.encode("a")
        return encoding.ids[0] if encoding.special_tokens_mask[:1] == [1] else None

    @property
    def begin(self) -> str:
        """The text of the token `begin_id`, or ""."""
        return "" if self.begin_id is None else self.tokenizer.id_to_token(self.begin_id) or ""

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The numbers of the special tokens."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def _encoded(self, batch: Sequence[TextSegment]) -> Iterator[tuple[np.ndarray, bool]]:
        with _library_errors(CANNOT_ENCODE):
            encodings = self.tokenizer.encode_batch_fast([p.text for p in batch], add_special_tokens=False)
        for segment, encoding in zip(batch, encodings, strict=True):
            ids = [*encoding.ids, self.end_id] if segment.last else encoding.ids
            yield np.array(ids, dtype=np.uint32), segment.last


def most_of(spelled: Counter[str], end: str) -> SpelledToken | None:
    """Return the special token that most documents spell out, and of equals another than `end`; None without one."""
    text = max(spelled, key=lambda t: (spelled[t], t != end, t), default=None)
    return None if text is None else SpelledToken(text=text, documents=spelled[text])


def train(segments: Iterable[TextSegment], vocabulary: int) -> RunTokenizer:
    """Train a byte-level BPE of at most `vocabulary` tokens on the first SAMPLE characters.

    The same text gives the same tokenizer, whatever the number of threads. Raises DataInputError.
    """
    if vocabulary < MIN_VOCABULARY:
        raise DataInputError(
            f"a vocabulary of {vocabulary}: at least {MIN_VOCABULARY} are needed, one for each byte and the end of text"
        )
    tokenizer = byte_level_bpe(_sample(segments), vocabulary, [END_OF_TEXT])
    return _made(tokenizer, tokenizer.to_str().encode(), END_OF_TEXT, "the trained tokenizer")


def byte_level_bpe(texts: Iterable[str], vocabulary: int, special: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE of at most `vocabulary` tokens, `special` ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def vocabulary_of(path: Path) -> dict[str, int]:
    """Return the tokens of a tokenizer.json with their numbers. Raises DataInputError."""
    return _read(path)[0].get_vocab(with_added_tokens=True)


def load(path: Path, end: str | None) -> RunTokenizer:
    """Load a tokenizer.json. `end` names its end-of-text token.

    By default it is the eos_token of the tokenizer_config.json beside it, or else a special token of a usual name.
    Gemma's "</s>" is no special one, but a tag of HTML. Raises DataInputError.
    """
    tokenizer, file = _read(path)
    if end is None:
        special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        usual = next((t for t in KNOWN_ENDS if t in special), "")
        if not (end := end_of_text_beside(path) or usual):
            raise DataInputError(
                f"{path}: it is not clear which token ends a document (none of {', '.join(KNOWN_ENDS)} is a special "
                "token of it): name it as end_of_text (`cairn data prepare --end-of-text`)"
            )
    return _made(tokenizer, file, end, str(path))


def _read(path: Path) -> tuple[Tokenizer, bytes]:
    """Return the tokenizer in a file, and the file's bytes. Raises DataInputError."""
    try:
        if path.stat().st_size > MAX_TOKENIZER:
            raise DataInputError(f"{path}: a tokenizer of more than {MAX_TOKENIZER >> 20} MiB")
        file = path.read_bytes()
    except OSError as e:
        raise DataInputError(f"{path}: the tokenizer cannot be read: {os_reason(e)}") from None
    with _library_errors(f"{path}: not a tokenizer.json that the tokenizers library reads"):
        return Tokenizer.from_str(file.decode()), file


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Raise what tokenizers raises, plain Exceptions and Rust's panics, as DataInputError that begins with `what`."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise DataInputError(f"{what}: {one_line(str(e), 300)}: take another tokenizer.json") from None


def open_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json, without the padding and truncation that it may ask for.

    Raises DataInputError.
    """
    tokenizer, _ = _read(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _made(tokenizer: Tokenizer, file: bytes, end: str, where: str) -> RunTokenizer:
    end_id = tokenizer.token_to_id(end)
    if end_id is None:
        raise DataInputError(f"{where}: it has no token {end!r}: name the one that ends a document as end_of_text")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return RunTokenizer(tokenizer, file, end, end_id)


def _sample(segments: Iterable[TextSegment]) -> Iterator[str]:
    """Yield at most SAMPLE characters, or a segment more, with every word cut at LONGEST characters."""
    left = SAMPLE
    for segment in segments:
        for part in LONG_WORD.split(segment.text):
            step = LONGEST if LONG_WORD.fullmatch(part) else max(1, len(part))
            yield from (part[at : at + step] for at in range(0, len(part), step))
        left -= len(segment.text)
        if left <= 0:
            return
