"""A run.toml for a run that continues from a trained model, for `cairn run init --from FOLDER`.

It is the template of `cairn run plan`, with the folder's config, weights and tokenizer filled in.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.authoring import tokens
from coordinator.authoring.errors import DataInputError
from coordinator.authoring.model_config import FROM_TOKENIZER, ModelFileError, model_of, with_adapter
from coordinator.authoring.plan import PlanInputs, plan
from coordinator.authoring.template import fill
from coordinator.authoring.weights import CONFIG, WeightsError, check, read_headers
from protocol.spec import AdapterSettings

TOKENIZER = "tokenizer.json"
LR_FACTOR = 0.1
"""Factor of the learning rate for new weights. Not measured; large steps would undo the training so far."""


@dataclass(frozen=True)
class DraftRunFile:
    """The text of a run.toml, with the run's name, the model's parameters and the tokenizer's size.

    `left_out` are fields of the folder's config that `transformers` does not know.
    """

    text: str
    name: str
    parameters: int
    vocabulary: int
    left_out: tuple[str, ...]


def run_file_from(folder: Path, out: Path, inputs: PlanInputs, adapter: AdapterSettings | None = None) -> DraftRunFile:
    """Return a run.toml to be written at `out`, for a run that begins with the model in `folder`.

    With `adapter` that is trained, and the model is its frozen base. The folder replaces the model of `inputs` and
    limits its window. Raises AuthoringError for an incomplete folder, SpecError for a config that is not of a causal
    language model, and PlanError.
    """
    found = read_headers(folder)
    given = _config(folder)
    left_out = _unknown(given)
    model = model_of({k: v for k, v in given.items() if k not in left_out}, None, folder / CONFIG)
    try:
        check(found, model.layout)
    except WeightsError as e:
        if not left_out:
            raise
        fields = ", ".join(left_out)
        raise WeightsError(
            f"{e} (of its fields, transformers does not know {fields}: one may decide a shape)"
        ) from None
    tokenizer = _tokenizer(folder)
    if tokenizer.size > model.vocabulary:
        raise DataInputError(
            f"{folder / TOKENIZER}: {tokenizer.size} tokens, but the model has {model.vocabulary}: take the model's "
            "own tokenizer"
        )
    window = inputs.window if model.positions is None else min(inputs.window, model.positions)
    if adapter is not None:
        model = with_adapter(model, adapter, folder / CONFIG)
    made = plan(replace(inputs, model=model.layout, frozen=model.frozen, window=window))
    table = model.table | {k: v for k in FROM_TOKENIZER if isinstance(v := given.get(k), int | list)}
    note = f"From {ascii(folder.name)}: it must stay the config of run.weights."
    if left_out:
        note += f" Left out, for transformers does not know them: {ascii(', '.join(left_out))}."
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{folder.name}-more").lstrip("._-")[:64] or "my-run"
    place = _place(folder, out)
    rate = f"# Here a tenth of that, for the weights are trained.\nlr = {float(f'{made.lr * LR_FACTOR:.2g}')}"
    lines = {
        "by": f"continuing from {ascii(folder.name)}, by `cairn run init`",
        "name": f"name = {_text(name)}",
        "weights": f"weights = {_text(place)}",
        "vocabulary": f"#vocabulary = {tokenizer.size}",
        "tokenizer": f"tokenizer = {_text(f'{place}/{TOKENIZER}')}",
        "end_of_text": f"end_of_text = {_text(tokenizer.end)}",
        "lr": rate if adapter is None else f"lr = {made.lr}",
    }
    text = fill(made, table, tokenizer.size, note, lines, adapter)
    return DraftRunFile(text, name, model.whole.numel, tokenizer.size, left_out)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json unchanged. Raises ModelFileError."""
    path = folder / CONFIG
    try:
        given = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise ModelFileError(f"{path}: not a config that can be read: {e}: take another copy of the model") from None
    if not isinstance(given, dict):
        raise ModelFileError(f"{path}: not a model's config: take another copy of the model")
    if "quantization_config" in given:
        raise WeightsError(f"{path}: quantised weights cannot be trained: take the model that they were made from")
    return given


def _unknown(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields that authors added to a config of a known type, and that its code does not use.

    A field that decides a shape is noticed when the weights are compared. Fields that would load code are not returned,
    so they are refused as everywhere.
    """
    from transformers import CONFIG_MAPPING

    from protocol.errors import SpecError
    from protocol.model import plain_config

    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return ()
    defaults = CONFIG_MAPPING[kind]()
    known = {*defaults.to_dict(), *defaults.attribute_map, "model_type", "auto_map", "trust_remote_code"}
    left_out: list[str] = []
    for field in sorted(given.keys() - known):
        try:
            plain_config({"model_type": kind, field: given[field]})
        except SpecError:
            left_out.append(field)
    return tuple(left_out)


def _tokenizer(folder: Path) -> tokens.RunTokenizer:
    """Return the folder's tokenizer with its own end-of-text token. Raises DataInputError."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise DataInputError(
            f"{path}: no such file: make it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        end = json.loads((folder / "tokenizer_config.json").read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError):
        end = None
    if isinstance(end, dict):
        end = end.get("content")
    return tokens.load(path, end if isinstance(end, str) else None)


def _place(folder: Path, out: Path) -> str:
    """Return the path of a folder for a run.toml at `out`: relative if the folder is below it, else absolute."""
    folder, beside = folder.resolve(), out.resolve().parent
    return os.path.relpath(folder, beside) if beside in folder.parents else str(folder)
