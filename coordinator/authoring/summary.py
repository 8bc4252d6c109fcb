"""A summary of a run.toml before the run begins, for `cairn run validate FILE`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from coordinator.admission import cost_to_attackers
from coordinator.authoring import tokens
from coordinator.authoring.data_check import (
    check_tokenizer,
    check_windows,
    data_warnings,
    passes_warning,
    spelled_warning,
)
from coordinator.authoring.documents import DocumentFile, read_documents
from coordinator.authoring.errors import DataInputError
from coordinator.authoring.memory import eight_bit_saving, training_memory
from coordinator.authoring.plan import rounds_caution
from coordinator.authoring.prepare import Prepared, check_held_out, find_documents, temporary_folder
from coordinator.authoring.resolve import RunModel, check_weights, model_of, prepare_data
from coordinator.authoring.runfile import REPLAYABLE_HOLD_ROUNDS, RunFile, kept_checkpoints, load_run
from protocol.adapter import held_bytes
from protocol.codec import make_codec
from protocol.spec import AdapterSettings, windows_in
from protocol.state import state_layout
from protocol.training_memory import model_bytes, round_bytes
from protocol.units import byte_size

SAMPLED = 4096
"""Maximum number of segments (of at most 256 Ki characters) that are read from each file."""

COUNTED = 2**20
"""Bytes of text that are prepared, for exact numbers."""

MOST_PER_TOKEN = 32
"""More bytes than a token of ordinary text has on average: a larger corpus has a window."""


def validate(path: Path) -> list[str]:
    """Check a run.toml, its model and its data; return the lines of a summary for people.

    Only the headers of initial weights are read. A small corpus is prepared, and removed again; of a large one the
    numbers of tokens are estimates, and the lines say so. Conversations are prepared whole. Raises the errors of
    `load_run` and `resolve`.
    """
    run_file = load_run(path)
    check_tokenizer(run_file)
    vocabulary, counts_as, data_lines = _data(run_file)
    model = model_of(run_file, {"vocab_size": vocabulary})
    config, layout, adapter = model.config, model.layout, run_file.model.adapter
    weights = check_weights(run_file, config, model.whole)
    frozen = 0 if adapter is None else held_bytes(config, adapter, "cuda")
    update = make_codec(run_file.codec, layout).size
    round_, inner = run_file.round, run_file.inner
    step = inner.batch * counts_as
    memory = training_memory(layout, config, inner, run_file.data.window, frozen)
    state = model_bytes(layout, config, inner)
    saved = eight_bit_saving(layout, config, inner, run_file.audit, memory)
    less = f"; {byte_size(saved)} less with --moments 8bit" if saved else ""
    lines = [
        f"{path} is a valid run file: {run_file.run.name}",
        f"model: {config['model_type']}, {layout.numel:,} parameters in {len(layout.tensors)} tensors; "
        f"a checkpoint is {byte_size(state_layout(layout, run_file.outer).checkpoint_size)}",
        *([] if adapter is None else [_adapter_line(adapter, model)]),
        *weights,
        *data_lines,
        f"inner step: {inner.batch} windows of {counts_as} tokens = {step:,} tokens",
        f"round: ends at {round_.target_tokens:,} tokens of all peers together "
        f"({round_.target_tokens / step:.1f} inner steps), or after {round_.max_seconds:g} s",
        f"update: {byte_size(update)} ({8 * update / layout.numel:.3f} bits a parameter, {run_file.codec.kind}); each "
        "round a peer sends its own and fetches every other contributor's: with 16 peers "
        f"{byte_size(15 * update)} down",
        f"memory: {byte_size(memory)} or more on each GPU, estimated for one window at a time "
        f"({byte_size(state)} of it weights, gradients and moments"
        f"{f'; {byte_size(frozen)} the frozen base' if frozen else ''}{less}), and of the machine's memory "
        f"{byte_size(round_bytes(layout, run_file.outer))} for the state between rounds",
        *([] if adapter is None else [dtypes_line(adapter, config, memory - frozen)]),
    ]
    if run_file.audit.replayable:
        lines.append("audits: updates are replayable; there is no error feedback, and a missed round costs its work")
        if round_.max_update_tokens >= round_.target_tokens:
            lines.append(
                f"warning: one update may claim {round_.max_update_tokens / round_.target_tokens:.1f} times what all "
                "peers together train in a round, and nobody can replay that in time to convict a liar: set "
                "round.max_update_tokens near what one machine trains in a round"
            )
        hold, every, keep = run_file.credit.hold_rounds, run_file.checkpoint.every, run_file.checkpoint.keep
        if hold < REPLAYABLE_HOLD_ROUNDS:
            lines.append(
                f"warning: credit settles after {hold} rounds, and a conviction may take longer: set "
                f"credit.hold_rounds = {REPLAYABLE_HOLD_ROUNDS}, or leave it out"
            )
        checkpoint = state_layout(layout, run_file.outer).checkpoint_size
        lines.append(f"checkpoints: each member keeps {keep}, {byte_size(keep * checkpoint)}, for replays")
        if keep * every < hold:
            lines.append(
                f"warning: members keep what a replay needs for {keep * every} rounds, and credit is held for {hold}: "
                "late jurors have nothing to replay from. Set checkpoint.keep = "
                f"{kept_checkpoints(hold, every)}, or leave it out"
            )
    elif run_file.admission.mode != "allow":
        lines.append(
            "audits: none that convict. Strangers may join, and nobody can tell who claims work that was not done: "
            "audit.replayable = true changes that, for a few per cent of loss"
        )
    if run_file.run.total_tokens:
        rounds = math.ceil(run_file.run.total_tokens / round_.target_tokens)
        lines.append(f"length: {run_file.run.total_tokens:,} tokens, about {rounds:,} rounds")
        if caution := rounds_caution(rounds):
            lines.append(f"warning: {caution}")
    else:
        lines.append("length: without end (run.total_tokens is 0)")
    return [*lines, f"admission {cost_to_attackers(run_file.admission)}"]


def _adapter_line(adapter: AdapterSettings, model: RunModel) -> str:
    assert model.base is not None
    return (
        f"adapter: rank {adapter.rank}, alpha {adapter.alpha:g}, on a frozen base of {model.whole.numel:,} parameters "
        f"({adapter.dtype}), of which each peer fetches {byte_size(model.base.checkpoint_size)} once"
    )


def dtypes_line(adapter: AdapterSettings, config: dict[str, Any], other_bytes: int) -> str:
    """Tell the memory of a GPU for each dtype of the base, which decides whose cards suffice.

    `other_bytes`: without a base. A model without linear layers of torch has no smaller base than in bfloat16.
    """
    dtypes = ("bfloat16", "int8", "nf4")
    held = {d: held_bytes(config, adapter.model_copy(update={"dtype": d}), "cuda") for d in dtypes}
    each = ", ".join(
        f"{byte_size(other_bytes + n)} with {d}" for d, n in held.items() if d == dtypes[0] or n < held[dtypes[0]]
    )
    return f"cards: model.adapter.dtype decides which suffice: a GPU needs about {each}"


def _data(run_file: RunFile) -> tuple[int, int, list[str]]:
    """Return the size of the vocabulary, the tokens that a window counts as, and lines about the data.

    Raises AuthoringError.
    """
    if run_file.prepared is not None:
        return _counted(run_file, prepare_data(run_file, run_file.folder, replace=False))
    data = run_file.data
    left_out: list[str] = []
    try:
        sources, held_out = find_documents(data.sources, data.validation, run_file.folder, left_out.append)
    except DataInputError as e:
        raise DataInputError(f"{run_file.path}: data: {e}") from None
    if data.conversations is not None:
        return _prepared(run_file, left_out)
    try:
        run = None if run_file.tokenizer is None else tokens.load(run_file.tokenizer, data.end_of_text)
        text = _sample(sources, data.field, run)
        others = _sample(held_out, data.field, run)
        if text.complete:
            check_held_out(data.validation_every, text.documents)
        vocabulary = (data.vocabulary or 0) if run is None else run.size
    except DataInputError as e:
        raise DataInputError(f"{run_file.path}: data: {e}") from None
    if not text.size:
        raise DataInputError(f"{run_file.path}: data.source: no text in these documents")
    if text.complete and others.complete and text.size + others.size <= max(COUNTED, MOST_PER_TOKEN * data.window):
        return _prepared(run_file, left_out)
    trained_on = int(text.size / _bytes_per_token(vocabulary))
    lines = [
        f"data: {len(sources)} files{'' if text.complete else ', of which the beginnings were read'}; "
        f"{'about' if text.complete else 'more than'} {trained_on // data.window:,} windows (estimated: "
        f"`cairn data prepare` counts them); vocabulary {vocabulary:,}"
    ]
    if text.complete and (warning := passes_warning(run_file, trained_on)):
        lines.append(warning)
    if run is not None and (warning := spelled_warning(run.most_spelled, text.documents + others.documents, run.end)):
        lines.append(warning)
    return vocabulary, data.window, lines + left_out


def _prepared(run_file: RunFile, left_out: list[str]) -> tuple[int, int, list[str]]:
    """Return the same as `_data`, of data that are prepared for it. Raises AuthoringError."""
    with temporary_folder() as folder:
        vocabulary, counts_as, lines = _counted(run_file, prepare_data(run_file, folder, replace=False))
    return vocabulary, counts_as, lines + left_out


def _counted(run_file: RunFile, prepared: Prepared) -> tuple[int, int, list[str]]:
    """Return the same as `_data`, of data that are prepared. Raises RunFileError."""
    manifest = prepared.manifest
    check_windows(run_file, manifest)
    train, validation = (
        sum(windows_in(s.tokens, run_file.data.window) for s in split.shards)
        for split in (manifest.train, manifest.validation)
    )
    lines = [
        f"data: {train:,} windows to train on, {validation:,} to validate on, from "
        f"{manifest.documents:,} documents; vocabulary {manifest.vocabulary:,}"
    ]
    if (packed := manifest.conversations) is not None:
        lines.append(
            f"conversations: {packed.trained:,} trained tokens; a window counts as {packed.window_tokens:,} of its "
            f"{packed.window:,}; {packed.fates}"
        )
    lines += data_warnings(run_file, manifest)
    return manifest.vocabulary, packed.window_tokens if packed else run_file.data.window, lines


@dataclass(frozen=True)
class _Text:
    """The sampled text of files: bytes of UTF-8, documents, and whether that is all of it."""

    size: int
    documents: int
    complete: bool


def _sample(sources: list[DocumentFile], field: str, run: tokens.RunTokenizer | None) -> _Text:
    """Read the beginnings of files, watched by the tokenizer if there is one already. Raises DataInputError."""
    size, documents, complete = 0, 0, True
    for source in sources:
        segments = read_documents(source, field)
        beginning = islice(segments, SAMPLED)
        for segment in beginning if run is None else run.watch(beginning):
            size += len(segment.text.encode())
            documents += segment.last
        complete = complete and next(segments, None) is None
    return _Text(size, documents, complete)


def _bytes_per_token(vocabulary: int) -> float:
    """Estimate the bytes per token of English under byte-level BPE: about 3.0 at 1,024 tokens, 4.5 from 8,192 on."""
    return min(4.5, max(1.0, 3.0 + 0.5 * (math.log2(max(2, vocabulary)) - 10)))
