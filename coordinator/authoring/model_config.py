"""The model of a plan: from a transformers config.json, a run.toml's [model] table, or a number of parameters.

The result is the [model] table to write, and the layout of the parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.authoring.errors import AuthoringError
from coordinator.authoring.toml_file import read_text, tomllib
from coordinator.regular_file import read_regular
from protocol.errors import SpecError, os_reason
from protocol.layout import Layout
from protocol.spec import AdapterSettings, explain

LEAST_VOCABULARY, MOST_VOCABULARY = 257, 2**24
"""Limits of a run's tokenizer, as in [data]."""
FROM_TOKENIZER = ("bos_token_id", "eos_token_id")
"""Fields that a run.toml leaves out, because they come from the run's tokenizer."""
LEAST_PARAMETERS = 200_000
"""Parameters of the smallest Llama that `llama_of` can make, approximately."""
MAX_SETTINGS = 4 * 1024 * 1024
"""Bytes of a config.json: usual ones have thousands."""


class ModelFileError(AuthoringError):
    """A file that holds no model, or none that can be trained."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the fields of a model's JSON file, such as config.json, unchanged. Raises ModelFileError."""
    try:
        given = json.loads(read_regular(path, MAX_SETTINGS))
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {os_reason(e)}: take another copy of the model") from None
    except (ValueError, RecursionError) as e:
        raise ModelFileError(f"{path}: not a JSON file: {e}: take another copy of the model") from None
    if not isinstance(given, dict):
        raise ModelFileError(f"{path}: not a model's settings: take another copy of the model")
    return given


@dataclass(frozen=True)
class ModelConfig:
    """A [model] table with the vocabulary, window limit and layout that follow from it."""

    table: dict[str, Any]
    vocabulary: int
    positions: int | None
    """The longest possible window; None if there is no limit."""
    layout: Layout
    """That of the trained parameters."""
    whole: Layout
    """That of all parameters."""
    adapter: AdapterSettings | None = None
    frozen_bytes: int = 0
    """Bytes of a frozen base on a peer's GPU."""

    @property
    def frozen(self) -> int:
        """Parameters of a frozen base; 0 without an adapter."""
        return 0 if self.adapter is None else self.whole.numel


def read_model(path: Path) -> ModelConfig:
    """Return the model of a config.json, or of a run.toml. Raises ModelFileError; SpecError for the model."""
    given, vocabulary = _given(path)
    adapter = given.pop("adapter", None) if path.suffix == ".toml" else None
    model = model_of(given, vocabulary, path)
    if adapter is None:
        return model
    try:
        return with_adapter(model, AdapterSettings.model_validate(adapter), path)
    except ValidationError as e:
        raise ModelFileError(explain(e, f"{path}: model.adapter")) from None


def model_of(given: dict[str, Any], vocabulary: int | None, path: Path) -> ModelConfig:
    """Return the model of a config that was read from `path`.

    `vocabulary` is the size of the run's tokenizer, if the file states it. Raises ModelFileError, and SpecError for the
    model.
    """
    from protocol.model import build_model, model_layout, plain_config

    asked = {"vocab_size": vocabulary} | given if vocabulary else dict(given)
    try:
        whole = plain_config(asked)
        layout = model_layout(build_model(whole, device="meta"))
        table = {
            k: _without_nulls(v)
            for k, v in given.items()
            # A field that the full config does not have is about storage, or an alias of another field.
            if v is not None and k not in FROM_TOKENIZER and (k in whole or _matters(k, asked, whole))
        }
        again = plain_config({"vocab_size": whole["vocab_size"]} | table)
    except KeyError:
        raise ModelFileError(f"{path}: its model_type has no vocab_size: take a language model over text") from None
    except SpecError as e:
        raise SpecError(f"{path}: {e}") from None
    lost = sorted(k for k in whole if whole[k] != again.get(k) and k not in FROM_TOKENIZER)
    if lost:
        raise ModelFileError(
            f"{path}: {', '.join(lost)}: null here is not the type's default, and TOML has no null: give a value"
        )
    if not LEAST_VOCABULARY <= whole["vocab_size"] <= MOST_VOCABULARY:
        raise ModelFileError(
            f"{path}: vocab_size: {whole['vocab_size']} tokens: a run's tokenizer has {LEAST_VOCABULARY} to "
            f"{MOST_VOCABULARY:,}"
        )
    positions = [whole[f] for f in ("max_position_embeddings", "n_positions") if type(whole.get(f)) is int]
    return ModelConfig(table, whole["vocab_size"], min(positions, default=None), layout, layout)


def with_adapter(model: ModelConfig, adapter: AdapterSettings, path: Path) -> ModelConfig:
    """Return the model with an adapter, which is what is trained. Raises SpecError."""
    from protocol.adapter import build_adapted, check_targets, held_bytes
    from protocol.model import build_model, model_layout, plain_config

    try:
        config = plain_config({"vocab_size": model.vocabulary} | model.table)
        check_targets(build_model(config, device="meta"), adapter.targets)
        layout, held = model_layout(build_adapted(config, adapter)), held_bytes(config, adapter, "cuda")
        return replace(model, layout=layout, adapter=adapter, frozen_bytes=held)
    except SpecError as e:
        raise SpecError(f"{path}: {e}") from None


def _matters(field: str, asked: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Return whether a field changes the config. Raises SpecError if the config is invalid without it."""
    from protocol.model import plain_config

    return plain_config({k: v for k, v in asked.items() if k != field}) != whole


def _without_nulls(value: Any) -> Any:
    """Return the value without nulls, which TOML cannot express; `model_of` checks that the config stays equal."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value if v is not None] if isinstance(value, list) else value


def _given(path: Path) -> tuple[dict[str, Any], int | None]:
    """Return the config in a file, and the size of its run's vocabulary if the file states it."""
    text = read_text(path, ModelFileError, "give a config.json or a run.toml")
    vocabulary = None
    try:
        if path.suffix == ".toml":
            tables = tomllib.loads(text)
            found, data = tables.get("model"), tables.get("data")
            vocabulary = data.get("vocabulary") if isinstance(data, dict) else None
        else:
            found = json.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as e:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ModelFileError(f"{path}: not {kind} ({e}): give a transformers config.json or a run.toml") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        where = "no [model] table with a model_type" if path.suffix == ".toml" else "no model_type"
        raise ModelFileError(f"{path}: {where}: give a transformers config.json or a run.toml")
    return found, vocabulary if type(vocabulary) is int else None


def llama_of(parameters: int, window: int) -> dict[str, Any]:
    """Return the [model] table of a Llama with about `parameters` parameters and tied embeddings.

    `parameters` is at least LEAST_PARAMETERS.
    """
    vocabulary = 1024 if parameters < 10_000_000 else 8192 if parameters < 100_000_000 else 32_768
    # Beside the embeddings there are layers * 12 hidden^2; in published models hidden is about 96 times the layers.
    best = min(
        ((layers, hidden) for layers in range(2, 161) for hidden in _widths(layers)),
        key=lambda s: abs(llama_parameters(*s, vocabulary) / parameters - 1) + abs(math.log2(s[1] / s[0] / 96)) / 50,
    )
    layers, hidden = best
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _intermediate(hidden),
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // _head_size(hidden),
        "num_key_value_heads": hidden // _head_size(hidden),
        "max_position_embeddings": window,
        "tie_word_embeddings": True,
        "vocab_size": vocabulary,
    }


def llama_parameters(layers: int, hidden: int, vocabulary: int) -> int:
    """Return the number of parameters of a Llama in the shape that `llama_of` makes."""
    return vocabulary * hidden + layers * (4 * hidden**2 + 3 * hidden * _intermediate(hidden) + 2 * hidden) + hidden


def parameters_of_table(table: Mapping[str, Any]) -> int:
    """Return the number of parameters of a table that `llama_of` made."""
    return llama_parameters(table["num_hidden_layers"], table["hidden_size"], table["vocab_size"])


def _widths(layers: int) -> range:
    step = 64 if layers < 24 else 128
    return range(max(step, 32 * layers // step * step), 160 * layers + step, step)


def _head_size(hidden: int) -> int:
    return 128 if hidden >= 2048 and hidden % 128 == 0 else 64


def _intermediate(hidden: int) -> int:
    """Return 8/3 of the width, rounded up to a multiple of 64."""
    return -(-8 * hidden // (3 * 64)) * 64
