"""`resolve`: from a run.toml to a signed run spec and the files of all blobs that it names.

The first call in a working folder begins the run: it writes data/, genesis.safetensors, base/ for a run that trains an
adapter, then run.json and spec.signed.
Every later call returns the same spec, and refuses a run.toml or data that differ: a run's spec never changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from coordinator import durable
from coordinator.authoring.data_check import check_tokenizer, check_vocabulary, check_windows, data_warnings
from coordinator.authoring.errors import AuthoringError, DataInputError, RunChangedError, RunFileError
from coordinator.authoring.prepare import Prepared, load_prepared, prepare
from coordinator.authoring.runfile import RunFile, differences
from protocol.envelope import open_envelope
from protocol.errors import ProtocolError, SpecError, os_reason
from protocol.identity import Identity
from protocol.ids import Digest
from protocol.layout import Layout
from protocol.merkle import leaves_of, read_chunks, tree_hash
from protocol.spec import (
    KIND,
    MAX_SPEC,
    AdapterSpec,
    BlobRef,
    ConversationSpec,
    DataSpec,
    ModelSpec,
    RunSpec,
    explain,
    parse_spec,
    sign_spec,
)

SPEC, RUN, DATA, GENESIS, BASE = "spec.signed", "run.json", "data", "genesis.safetensors", "base"
BASE_FOLDER = "base-folder"
"""A file with the path of the folder that the base was made from. An exported adapter names it."""

Report = Callable[[str], None]
Attention = Literal["document", "window"]


@dataclass(frozen=True)
class RunModel:
    """A run's model: its full config, the layout of what is trained, and that of all its parameters.

    `base`: the layout of a frozen base's file.
    """

    config: dict[str, Any]
    layout: Layout
    whole: Layout
    base: Layout | None = None


@dataclass(frozen=True)
class ResolvedRun:
    """A run that can be served: its spec, the signed envelope's exact bytes, and the files of its blobs.

    `begins`: it has begun now, in a folder that held none.
    """

    spec: RunSpec
    spec_envelope: bytes
    blobs: dict[Digest, Path]
    begins: bool = field(default=False, compare=False)


def resolve(
    run_file: RunFile,
    workdir: Path,
    owner: Identity,
    report: Report = lambda line: None,
    held: Callable[[Digest], bool] = lambda blob: False,
) -> ResolvedRun:
    """Begin or continue the run of a run.toml in a folder.

    `held` returns whether the coordinator's store has a blob. A run that has begun does not need the file of such a
    blob any more, and `ResolvedRun.blobs` may be without it.

    Raises RunFileError, SpecError or DataInputError for errors in the files, RunChangedError if the run began with
    other files, and AuthoringError for the folder. Each message begins with the name of the file.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise AuthoringError(f"{workdir}: cannot be made: {os_reason(e)}") from None
    if (workdir / SPEC).exists():
        return _continued(run_file, workdir, owner, report, held)
    # Before documents are prepared, which may take hours.
    check_weights(run_file)
    check_tokenizer(run_file)
    prepared = prepare_data(run_file, workdir / DATA, report, replace=True)
    check_windows(run_file, prepared.manifest)
    for warning in data_warnings(run_file, prepared.manifest):
        report(warning)
    model = _model(run_file, prepared)
    genesis, adapter = _genesis(run_file, model, workdir, report)
    data = _data_spec(run_file, prepared, _attention(model.config, prepared, report))
    spec = _spec(run_file, owner, model, prepared, genesis, adapter, data)
    envelope = sign_spec(owner, spec).encoded
    try:
        if adapter is not None and run_file.weights is not None:
            durable.replace(workdir / BASE_FOLDER, os.fsencode(run_file.weights.resolve()))
        durable.replace(workdir / RUN, json.dumps(run_file.model_dump(mode="json"), indent=1).encode())
        durable.replace(workdir / SPEC, envelope)  # last, since this file begins the run
    except OSError as e:
        raise AuthoringError(f"{workdir}: cannot be written to: {os_reason(e)}") from None
    report(f"run {spec.run_id.short} ({spec.name}) begins")
    return ResolvedRun(spec, envelope, prepared.blobs | _weights_of(spec, workdir), begins=True)


def _weights_of(spec: RunSpec, workdir: Path) -> dict[Digest, Path]:
    """Return the files of the genesis checkpoint, and of the base if the run has one."""
    files = {spec.genesis.name: workdir / GENESIS}
    if (adapter := spec.model.adapter) is not None:
        files[adapter.base.name] = workdir / BASE / f"{adapter.base.digest}.safetensors"
    return files


def check_weights(run_file: RunFile, config: dict[str, Any] | None = None, layout: Layout | None = None) -> list[str]:
    """Return lines about the initial weights, from their headers; none if the weights are drawn.

    A layout, if given, is compared with the headers. Raises AuthoringError, and SpecError if what makes a frozen base
    of them is not installed.
    """
    if run_file.weights is None:
        return []
    from protocol.adapter import missing_package

    if missing := missing_package(run_file.model.adapter):
        raise SpecError(f"{run_file.path}: model.adapter: {missing}")
    from coordinator.authoring.weights import WeightsError, check, other_settings, read_headers

    try:
        found = read_headers(run_file.weights, run_file.run.weights)
        if layout is not None:
            check(found, layout)
    except WeightsError as e:
        raise WeightsError(f"{run_file.path}: run.weights: {e}") from None
    lines = [f"initial weights: {run_file.run.weights}, {len(found.tensors)} tensors in {len(found.files)} file(s)"]
    if config is not None and (others := other_settings(found.folder, config)):
        lines.append(f"note: [model] differs from the config of these weights in {', '.join(others)}")
    return lines


def _genesis(run_file: RunFile, model: RunModel, workdir: Path, report: Report) -> tuple[BlobRef, AdapterSpec | None]:
    """Write the genesis checkpoint, and the base if the run trains an adapter."""
    from coordinator.authoring.genesis import write_adapter_genesis, write_genesis
    from coordinator.authoring.weights import WeightsError

    drawn = f"drawing initial weights: {model.layout.numel:,} parameters"
    for line in check_weights(run_file, model.config, model.whole) or [drawn]:
        report(line)
    config, seed, outer, path = model.config, run_file.run.seed, run_file.outer, workdir / GENESIS
    try:
        if (settings := run_file.model.adapter) is None or run_file.weights is None:
            return write_genesis(config, seed, outer, path, run_file.weights), None
        report(f"drawing an adapter of {model.layout.numel:,} parameters; the weights are its frozen base")
        return write_adapter_genesis(config, settings, seed, outer, path, run_file.weights, workdir / BASE)
    except WeightsError as e:
        raise WeightsError(f"{run_file.path}: run.weights: {e}") from None


def _continued(
    run_file: RunFile, workdir: Path, owner: Identity, report: Report, held: Callable[[Digest], bool]
) -> ResolvedRun:
    """Return the run that began here. Raises RunChangedError if the files have changed since.

    The documents, and the folder of the weights, may be gone.
    """
    try:
        sent = (workdir / SPEC).read_bytes()
        envelope = open_envelope(sent, KIND, limit=MAX_SPEC + 1024)
        spec = parse_spec(envelope.payload)
        before = RunFile.model_validate_json((workdir / RUN).read_bytes()).model_dump(mode="json")
    except (OSError, ProtocolError, SpecError, ValidationError) as e:
        raise AuthoringError(
            f"{workdir}: the run that began here cannot be read ({' '.join(str(e).split())[:200]}): restore {SPEC} and "
            f"{RUN} from a copy, or begin a new run in another folder"
        ) from None
    remedy = "put it back, or give the run a new name and a new folder"
    if owner.key != spec.owner_key or envelope.author != owner.key:
        raise RunChangedError(
            f"{workdir}: the run that began here is owned by {spec.owner[:8]}, this is key {owner.key.short}: use the "
            "owner's key file, or begin a new run in another folder"
        )
    changed = list(differences(before, run_file.model_dump(mode="json")))
    if changed:
        raise RunChangedError(
            f"{run_file.path}: changed since the run began: {'; '.join(changed)}: {remedy}. If you changed nothing, "
            "this Cairn has another default: write the former value into the file"
        )
    blobs: dict[Digest, Path] = {}
    try:
        prepared = prepare_data(run_file, workdir / DATA, report, replace=False)
    except RunChangedError as e:
        raise RunChangedError(f"{run_file.path}: the data changed since the run began: {e}") from None
    except DataInputError as e:
        if not all(held(ref.name) for ref in (spec.tokenizer, *spec.data.train, *spec.data.validation)):
            raise
        report(f"{e}. The run goes on with the data that it began with, which the coordinator's store has")
    else:
        marked = spec.data.conversations
        if (
            _data_spec(run_file, prepared, marked.attention if marked else "window") != spec.data
            or prepared.manifest.tokenizer != spec.tokenizer
        ):
            raise RunChangedError(f"{prepared.folder}: holds other data than the run began with: {remedy}")
        blobs = prepared.blobs
    refs = [spec.genesis, *([spec.model.adapter.base] if spec.model.adapter else [])]
    files = _weights_of(spec, workdir)
    wanted = {ref.name: files[ref.name] for ref in refs if not held(ref.name)}
    if any(not _is_blob(files[ref.name], ref) for ref in refs if ref.name in wanted):
        report("writing the initial weights again: a file is missing or damaged")
        model = model_of(run_file, spec.model.config)
        if _genesis(run_file, model, workdir, report) != (spec.genesis, spec.model.adapter):
            why = "this version of torch draws" if run_file.weights is None else f"{run_file.weights} now holds"
            raise AuthoringError(
                f"{workdir / GENESIS}: missing or damaged, and {why} other weights: restore the file from a copy"
            )
    return ResolvedRun(spec, sent, blobs | wanted)


def prepare_data(run_file: RunFile, folder: Path, report: Report = lambda line: None, *, replace: bool) -> Prepared:
    """Return the prepared data that a run file names, or prepare its documents in a folder.

    Raises DataInputError, and RunChangedError if the folder has other data and `replace` is not given.
    """
    data = run_file.data
    try:
        if run_file.prepared is not None:
            return load_prepared(run_file.prepared)
        return prepare(
            data.sources,
            folder,
            field=data.field,
            vocabulary=data.vocabulary,
            tokenizer=run_file.tokenizer,
            end_of_text=data.end_of_text,
            validation_every=data.validation_every,
            validation=data.validation,
            shard_tokens=data.shard_tokens,
            window=data.window,
            conversations=data.conversations,
            base=run_file.folder,
            replace=replace,
            report=report,
        )
    except DataInputError as e:
        raise DataInputError(f"{run_file.path}: data: {e}") from None


def _model(run_file: RunFile, prepared: Prepared) -> RunModel:
    """Return the run's model, with the fields of the tokenizer filled in."""
    manifest = prepared.manifest
    check_vocabulary(run_file, manifest.vocabulary)
    end = manifest.end_of_text_id
    return model_of(run_file, {"vocab_size": manifest.vocabulary, "bos_token_id": end, "eos_token_id": end})


def model_of(run_file: RunFile, from_data: dict[str, Any]) -> RunModel:
    """Return a run's model; `from_data` fills fields that [model] leaves out.

    Raises SpecError, and RunFileError if a window does not fit the model's positions.
    """
    from protocol.adapter import base_file_layout, base_layout, build_adapted, check_targets
    from protocol.model import build_model, model_layout, plain_config

    adapter, base = run_file.model.adapter, None
    try:
        config = plain_config(from_data | run_file.model.config)
        plain = build_model(config, device="meta")
        whole = model_layout(plain)
        if adapter is not None:
            check_targets(plain, adapter.targets)
        adapted = None if adapter is None else build_adapted(config, adapter)
        layout = whole if adapted is None else model_layout(adapted)
        if adapted is not None and base_layout(adapted) != whole:
            raise SpecError("model.adapter: peft renames parameters of this model: name other targets")
        if adapted is not None and adapter is not None:
            base = base_file_layout(adapted, adapter)
    except SpecError as e:
        raise SpecError(f"{run_file.path}: {e}") from None
    for name in ("max_position_embeddings", "n_positions"):
        most = config.get(name)
        if type(most) is int and most < run_file.data.window:
            raise RunFileError(
                f"{run_file.path}: data.window: {run_file.data.window} tokens do not fit model.{name} = {most}: make "
                "one smaller or the other larger"
            )
    return RunModel(config, layout, whole, base)


def _attention(config: dict[str, Any], prepared: Prepared, report: Report) -> Attention:
    """Return how far a token sees in windows of conversations."""
    from coordinator.authoring.attention import keeps_documents_apart

    if prepared.manifest.conversations is None or keeps_documents_apart(config):
        return "document"
    report(
        f"note: {config['model_type']} cannot keep the documents of a window apart: each is trained after those before "
        "it in its window"
    )
    return "window"


def _data_spec(run_file: RunFile, prepared: Prepared, attention: Attention) -> DataSpec:
    manifest = prepared.manifest
    marked = manifest.conversations
    return DataSpec(
        window=run_file.data.window,
        dtype=manifest.dtype,
        train=manifest.train.shards,
        validation=manifest.validation.shards,
        addresses=run_file.data.addresses,
        conversations=marked
        and ConversationSpec(window_tokens=marked.window_tokens, attention=attention, chat=marked.chat),
    )


def _spec(
    run_file: RunFile, owner: Identity, model: RunModel, prepared: Prepared, genesis: BlobRef,
    adapter: AdapterSpec | None, data: DataSpec,
) -> RunSpec:  # fmt: skip
    tensors = [(t.name, list(t.shape)) for t in model.layout.tensors]
    sections = ("inner", "codec", "outer", "round", "admission", "credit", "audit", "checkpoint")
    try:
        return RunSpec(
            name=run_file.run.name,
            owner=str(owner.key),
            seed=run_file.run.seed,
            total_tokens=run_file.run.total_tokens,
            model=ModelSpec(config=model.config, tensors=tensors, adapter=adapter),
            genesis=genesis,
            tokenizer=prepared.manifest.tokenizer,
            data=data,
            **{name: getattr(run_file, name) for name in sections},
        )
    except ValidationError as e:
        raise RunFileError(explain(e, str(run_file.path))) from None


def _is_blob(path: Path, ref: BlobRef) -> bool:
    """Return whether a file holds exactly this blob."""
    if not path.is_file() or path.stat().st_size != ref.size:
        return False
    with path.open("rb") as file:
        return tree_hash(leaves_of(read_chunks(file))) == ref.name
