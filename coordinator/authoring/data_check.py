"""Checks of a run's tokenizer and documents against its model, weights and length, before hours of preparing."""

from __future__ import annotations

from coordinator.authoring import tokens
from coordinator.authoring.errors import DataInputError, RunFileError
from coordinator.authoring.prepare import TOKENIZER, Manifest, load_prepared
from coordinator.authoring.runfile import RunFile
from protocol.spec import windows_in

GOOD_PASSES = 4
"""Passes over the same text that teach about as much as new text (Muennighoff et al. 2023, arXiv 2305.16264)."""


def check_tokenizer(run_file: RunFile) -> None:
    """Raise RunFileError if the tokenizer has more tokens than the model, or is not that of the run's weights.

    Tokens with the same number must be the same; more of them may have been added. Weights without a tokenizer.json
    go with any. Raises DataInputError for a tokenizer or a prepared folder that cannot be read.
    """
    own = None if run_file.weights is None else run_file.weights / TOKENIZER
    if own is not None and not own.is_file():
        own = None
    if run_file.tokenizer is None:
        check_vocabulary(run_file, run_file.data.vocabulary or 0)
        if own is not None:
            raise RunFileError(
                f"{run_file.path}: data.vocabulary: these run.weights know the tokens of their own tokenizer only: "
                f'write tokenizer = "{own}" instead'
            )
        return
    try:
        if run_file.prepared is not None:
            load_prepared(run_file.prepared)
        given = tokens.vocabulary_of(run_file.tokenizer)
        names = {} if own is None else {number: token for token, number in tokens.vocabulary_of(own).items()}
    except DataInputError as e:
        raise DataInputError(f"{run_file.path}: data: {e}") from None
    check_vocabulary(run_file, max(given.values(), default=-1) + 1)
    for token, number in given.items():
        if names.get(number, token) != token:
            field = "tokenizer" if run_file.prepared is None else "prepared"
            raise RunFileError(
                f"{run_file.path}: data.{field}: not the tokenizer of run.weights: token {number} is {token[:40]!r}, "
                f"and {names[number][:40]!r} there: use {own}"
            )


def check_vocabulary(run_file: RunFile, size: int) -> None:
    """Raise RunFileError if [model] has a smaller vocabulary than a tokenizer of this size."""
    vocabulary = run_file.model.config.get("vocab_size")
    if type(vocabulary) is int and vocabulary < size:
        raise RunFileError(
            f"{run_file.path}: model.vocab_size: {vocabulary} is less than the tokenizer's {size} tokens: remove the "
            "line, and it is filled in"
        )


def check_windows(run_file: RunFile, manifest: Manifest) -> None:
    """Raise RunFileError if no shard holds a window, no update a step, or windows have another size."""
    packed = manifest.conversations
    if packed is not None and packed.window != run_file.data.window:
        raise RunFileError(
            f"{run_file.path}: data.window: these conversations were packed into windows of {packed.window} tokens: "
            "write that, or prepare them again"
        )
    if packed is not None and run_file.round.max_update_tokens < (step := run_file.inner.batch * packed.window_tokens):
        raise RunFileError(
            f"{run_file.path}: round.max_update_tokens: must allow one inner step, batch windows of "
            f"{packed.window_tokens} trained tokens = {step}"
        )
    if not any(windows_in(s.tokens, run_file.data.window) for s in manifest.train.shards):
        raise RunFileError(
            f"{run_file.path}: data.window: {run_file.data.window} tokens, but the documents have only "
            f"{manifest.train.tokens}: add documents or make it smaller"
        )


def spelled_warning(spelled: tokens.SpelledToken | None, documents: int, end: str) -> str:
    """Return a warning if some of these documents spell out a special token, else "". `end` ends a document."""
    if spelled is None:
        return ""
    remedy = "give conversations as messages, with [data.conversations] (`cairn data prepare --window`)"
    if spelled.text == end:
        remedy = "give each document a file or a row of its own"
    return (
        f"warning: {spelled.documents:,} of {documents:,} documents spell out {spelled.text!r}, which stays text and "
        f"does not become the tokenizer's special token: {remedy}"
    )


def data_warnings(run_file: RunFile, manifest: Manifest) -> list[str]:
    """Return the warnings about prepared data."""
    passes = passes_warning(run_file, manifest.trained)
    return [w for w in (passes, spelled_warning(manifest.spelled, manifest.documents, manifest.end_of_text)) if w]


def passes_warning(run_file: RunFile, trained_on: int) -> str:
    """Return a warning if the planned tokens are many passes over this number of tokens of text, else ""."""
    planned = run_file.run.total_tokens
    if planned <= GOOD_PASSES * trained_on:
        return ""
    return (
        f"warning: {planned:,} tokens planned on {trained_on:,} tokens of text: {planned / trained_on:.0f} passes. "
        f"Beyond about {GOOD_PASSES} a model learns its text by heart: add documents, or plan fewer (run.total_tokens)"
    )
