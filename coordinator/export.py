"""Exports a checkpoint as a folder that Hugging Face's libraries load, written whole or not at all.

OUT/model.safetensors        the model's tensors, fp32; a tied one once; no momentum of the outer optimizer
    config.json              with architectures and dtype
    generation_config.json
    tokenizer.json           the run's, byte for byte
    tokenizer_config.json
    README.md                the model card: run, round, tokens, loss

The checkpoint is read once, a chunk at a time, so it may be larger than memory. Its digest is checked. Of a run that
trains an adapter, `adapter_export` writes the adapter alone, or merged into its base.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator import durable
from coordinator.errors import CoordinatorError
from coordinator.model_card import Origin, model_card, tokenizer_settings
from protocol.errors import MalformedError, os_reason
from protocol.ids import Digest
from protocol.layout import Layout, checkpoint_header_size
from protocol.merkle import leaf_hash, leaves_of, read_chunks, tree_hash
from protocol.spec import ChatSpec

MODEL, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
GENERATION = "generation_config.json"
FRACTIONS = ("temperature", "top_p", "min_p", "repetition_penalty")
"""Its fields that are no whole numbers."""
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
TOKENIZER_CONFIG, CARD = "tokenizer_config.json", "README.md"
WRITTEN = {MODEL, CONFIG, TOKENIZER, GENERATION, ADAPTER, ADAPTER_CONFIG, TOKENIZER_CONFIG, CARD}
"""All that an export writes, and so all that it replaces."""
SPARE = 64 * 1024 * 1024
"""Bytes of free space that are required beside the weights."""


class ExportError(CoordinatorError):
    """A checkpoint that cannot be exported, or a folder that cannot be written."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The written folder, the number of the model's parameters, and the bytes of its weights."""

    folder: Path
    parameters: int
    size: int


def export(
    checkpoint: Path,
    config: Mapping[str, Any],
    tokenizer: Path,
    origin: Origin,
    out: Path,
    *,
    chat: ChatSpec | None = None,
    force: bool = False,
) -> Exported:
    """Write the model of a checkpoint file to the folder `out`.

    Args:
        checkpoint: a state's canonical file (`protocol.state`).
        config: the model's config as the run spec has it.
        tokenizer: the run's tokenizer.json.
        origin: what is known of the checkpoint. With a `state`, the file must be the blob of that digest.
        chat: how the model is asked, if it was trained on conversations.
        force: replace a model that is in `out` already.

    Raises ExportError, in one line with the remedy; SpecError for the config.
    """
    layout, made, whole = model_files(config)
    held = held_layout(checkpoint, layout, origin)
    size = 4 * layout.numel
    with new_folder(out, size, force=force) as draft:
        digest = _write_weights(checkpoint, held, draft / MODEL, {"format": "pt"} | origin.metadata())
        check_digest(checkpoint, digest, origin.state)
        card = model_card(origin, digest, layout.numel, made, config)
        write_texts(draft, model_texts(whole, chat) | tokenizer_texts(tokenizer, config, chat) | {CARD: card})
    return Exported(out, layout.numel, size)


def held_layout(checkpoint: Path, layout: Layout, origin: Origin) -> Layout:
    """Return the layout of a state, whose model must have this layout. Raises ExportError."""
    held = read_layout(checkpoint)
    if held.of_model() != layout:
        raise ExportError(
            f"{checkpoint}: a checkpoint of another model than that of run {origin.name!r}: name the run that it is "
            "of, by its folder or with --spec"
        )
    return held


def check_digest(file: Path, digest: Digest, wanted: Digest | None) -> None:
    """Raise ExportError unless the digest of a file that was read is the wanted one, if that is known."""
    if wanted is not None and digest != wanted:
        raise ExportError(
            f"{file}: damaged: its digest is {digest.short}, and should be {wanted.short}: take another copy of it"
        )


@contextlib.contextmanager
def new_folder(out: Path, size: int, *, force: bool) -> Iterator[Path]:
    """Yield a draft to be filled with about `size` bytes, which becomes the folder `out` at the end of the block.

    Raises ExportError for a folder that may not be written to (without `force`: with a model in it), and for the disk.
    """
    _check_out(out, force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            _check_out(out, force)  # another export may have ended since
            yield from _filled(out, size)
    except OSError as e:
        raise ExportError(_disk_error(e, out)) from None


def _filled(out: Path, size: int) -> Iterator[Path]:
    """Yield a draft to be filled, and give it its name. Raises ExportError, and OSError."""
    draft = out.with_name(f".{out.name}.partial")  # one name, so that the next export takes away what a kill left
    try:
        shutil.rmtree(draft, ignore_errors=True)
        free = shutil.disk_usage(out.parent).free
        if free < size + SPARE:
            raise ExportError(
                f"{out.parent}: {(size + SPARE) / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free: make room, or "
                "name a folder on another disk"
            )
        draft.mkdir()
        yield draft
        for file in draft.iterdir():
            durable.sync(file)
        durable.sync(draft)
        _put_in_place(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock a file beside a folder, so that one export at a time writes there. Raises ExportError, and OSError."""
    path = out.with_name(f".{out.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_held = False
        if not is_held:
            raise ExportError(f"{out}: another export writes there: wait for its end, or name another folder")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write small files into a draft. Raises OSError."""
    for name, text in texts.items():
        durable.write(folder / name, text.encode())


def model_texts(whole: Mapping[str, Any], chat: ChatSpec | None) -> dict[str, str]:
    """Return the settings of a whole model as files: of a config.json's fields."""
    return {CONFIG: _json(whole)} | generation_texts(whole, chat)


def generation_texts(config: Mapping[str, Any], chat: ChatSpec | None) -> dict[str, str]:
    """Return the settings of `generate` as a file."""
    return {GENERATION: _json(_generation_settings(config, chat))}


def tokenizer_texts(tokenizer: Path, config: Mapping[str, Any], chat: ChatSpec | None) -> dict[str, str]:
    """Return the tokenizer as files. Raises CoordinatorError."""
    text = _read_tokenizer(tokenizer)
    return {TOKENIZER: text, TOKENIZER_CONFIG: _json(tokenizer_settings(text, tokenizer, config, chat))}


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def read_layout(checkpoint: Path) -> Layout:
    """Return the layout of a state, from its file's header and size alone. Raises ExportError."""
    try:
        with checkpoint.open("rb") as file:
            start = file.read(8)
            start += file.read(checkpoint_header_size(start) - 8)
            size = os.fstat(file.fileno()).st_size
        layout = Layout.from_checkpoint(start)
    except OSError as e:
        raise ExportError(f"{checkpoint}: cannot be read: {os_reason(e)}") from None
    except MalformedError as e:
        raise ExportError(f"{checkpoint}: {e}; name a checkpoint, or the folder of a run") from None
    if size != layout.checkpoint_size:
        raise ExportError(
            f"{checkpoint}: cut off: it has {size:,} bytes of {layout.checkpoint_size:,}: take another copy of it"
        )
    return layout


def model_files(config: Mapping[str, Any]) -> tuple[Layout, str, dict[str, Any]]:
    """Return the model's layout, its class name, and the config.json that loads it."""
    from protocol.model import build_model, model_layout

    model = build_model(config, device="meta")
    architecture = type(model).__name__
    whole: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[union-attr]
    whole = {k: v for k, v in whole.items() if not k.startswith("_")}
    # `dtype` was `torch_dtype` before transformers 4.56.
    return (
        model_layout(model),
        architecture,
        whole | {"architectures": [architecture], "dtype": "float32", "torch_dtype": "float32", "use_cache": True},
    )


def _generation_settings(whole: Mapping[str, Any], chat: ChatSpec | None) -> dict[str, Any]:
    """Return the generation_config.json of a model with this config. A conversation's answer ends at its own tokens."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version")
    fields = {k: whole[k] for k in names if whole.get(k) is not None}
    if chat is not None:
        end = fields.get("eos_token_id", [])
        fields["eos_token_id"] = [*chat.end_tokens, *(e for e in _listed(end) if e not in chat.end_tokens)]
        # Canonical JSON writes 2.0 as 2, which transformers refuses.
        kept = {k: float(v) if k in FRACTIONS else v for k, v in chat.generation.items()}
        fields = {"pad_token_id": chat.end_tokens[0]} | fields | kept
    return fields


def _listed(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]


def _write_weights(checkpoint: Path, held: Layout, target: Path, metadata: Mapping[str, str]) -> Digest:
    """Copy the model's tensors into a safetensors file; return the digest of the checkpoint that was read."""
    wanted = {t.name for t in held.of_model().tensors}
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    ranges: list[tuple[int, int]] = []  # byte ranges of the checkpoint's file, ascending
    at, to = len(held.checkpoint_header()), 0
    for t in held.tensors:
        if t.name in wanted:
            entries[t.name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [to, to + 4 * t.numel]}
            ranges.append((at, at + 4 * t.numel))
            to += 4 * t.numel
        at += 4 * t.numel
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    leaves: list[bytes] = []
    place, turn = 0, 0
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for chunk in _chunks(checkpoint):
            leaves.append(leaf_hash(chunk))
            end = place + len(chunk)
            while turn < len(ranges) and ranges[turn][0] < end:
                first, last = ranges[turn]
                file.write(memoryview(chunk)[max(first - place, 0) : min(last, end) - place])
                if last > end:
                    break
                turn += 1
            place = end
        file.flush()
        os.fsync(file.fileno())
    return tree_hash(leaves)


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from read_chunks(file)
    except OSError as e:
        raise ExportError(f"{path}: cannot be read: {os_reason(e)}") from None


def checkpoint_digest(path: Path) -> Digest:
    """Return the blob digest of a file. Raises ExportError."""
    return tree_hash(leaves_of(_chunks(path)))


def _check_out(out: Path, force: bool) -> None:
    """Raise ExportError if nothing may be written to `out`. Only a model is ever replaced, and nothing else with it."""
    if out.name in ("", "..") or out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ExportError(f"{out}: not a folder that can be made: name a new one")
    try:
        there = {p.name for p in out.iterdir()} if out.exists() else set()
    except OSError as e:
        raise ExportError(f"{out}: cannot be read: {os_reason(e)}") from None
    if not there:
        return
    if not ({CONFIG, MODEL} <= there or {ADAPTER_CONFIG, ADAPTER} <= there) or "cairn.json" in there:
        raise ExportError(f"{out}: is there already, and is no exported model: name another folder")
    if others := sorted(there - WRITTEN):
        listed = ", ".join(ascii(n)[1:-1][:80] for n in others[:3]) + ", …" * (len(others) > 3)
        raise ExportError(
            f"{out}: has more than a model, which would be lost: {listed}: move that away, or name another folder"
        )
    if not force:
        raise ExportError(f"{out}: is there already: name another folder, or --force to replace the model in it")


def _put_in_place(draft: Path, out: Path) -> None:
    """Give the whole folder its name; the model that it replaces is deleted afterwards."""
    old = out.with_name(f".{out.name}.old")
    replaced = out.exists() and any(out.iterdir())
    if replaced:
        shutil.rmtree(old, ignore_errors=True)
        os.rename(out, old)
    try:
        os.rename(draft, out)
    except OSError:
        if replaced:
            os.rename(old, out)
        raise
    durable.sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _read_tokenizer(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as e:
        why = os_reason(e) if isinstance(e, OSError) else "not UTF-8 text"
        raise ExportError(
            f"{path}: the run's tokenizer cannot be read: {why}: put the run's tokenizer.json there"
        ) from None


def _disk_error(e: OSError, out: Path) -> str:
    remedy = "make room, or name a folder on another disk" if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    why = os_reason(e)
    return f"{out}: cannot be written: {why}: {remedy or 'make its folder writable, or name another'}"
