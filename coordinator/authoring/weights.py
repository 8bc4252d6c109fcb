"""Trained weights for the start of a run: a Hugging Face folder of safetensors.

`read_headers` and `check` read headers only, so that a mistake shows before hours of work; `read` checks every value.
Pickles (`pytorch_model.bin`) are never read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coordinator.authoring.chat_template import GENERATION_CONFIG
from coordinator.authoring.errors import AuthoringError
from coordinator.quiet_transformers import quiet_transformers
from protocol.errors import SpecError
from protocol.layout import Layout, is_outer_tensor
from protocol.plain_text import one_line

MODEL, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MAX_INDEX = 64 * 1024 * 1024
MAX_FILES = 10_000
FLOATS = ("F32", "F16", "BF16")
MAX_VALUE = 1e6
"""Maximum absolute value of a weight, far above those of any sound model."""

ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""A model's name on a hub, which may be a path as well."""

BATCH = 2**24
"""Values checked at a time."""


class WeightsError(AuthoringError):
    """A folder without weights, or with those of another model."""


@dataclass(frozen=True, slots=True)
class PretrainedWeights:
    """The headers of a folder's safetensors: type and shape of each tensor."""

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, tuple[str, tuple[int, ...]]]

    @property
    def numel(self) -> int:
        """Number of values in the files."""
        return sum(math.prod(shape) for _, shape in self.tensors.values())


def read_headers(folder: Path, named: str = "") -> PretrainedWeights:
    """Read the headers of the files in a folder; `named` is how a person wrote it. Raises WeightsError."""
    if not folder.is_dir():
        name = named or str(folder)
        hub = ON_HUB.fullmatch(name) and not folder.parent.is_dir()
        fetch = f". If that is a model on the hub: `hf download {name} --local-dir DIR`, then name DIR" if hub else ""
        raise WeightsError(f"{folder}: no such folder: name a model's folder, with {CONFIG} and {MODEL}{fetch}")
    if (folder / "adapter_config.json").exists():
        raise WeightsError(f"{folder}: an adapter, not a whole model: merge it into its model first, and save that")
    if not (folder / CONFIG).is_file():
        raise WeightsError(f"{folder / CONFIG}: no such file: name a model's folder, with {CONFIG} and {MODEL}")
    if (folder / INDEX).is_file():
        files = _indexed(folder)
    elif (folder / MODEL).is_file():
        files = (folder / MODEL,)
    else:
        pickled = next((p for pattern in PICKLES for p in sorted(folder.glob(pattern))), None)
        if pickled is not None:
            raise WeightsError(
                f"{folder}: {pickled.name} is a pickle, which can run code when it is read, and there is no {MODEL}: "
                "convert it where you trust it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        raise WeightsError(f"{folder}: no {MODEL} in it: name a model's folder (`cairn export` makes one)")
    _check_generation(folder)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        for name, kind in _header(file).items():
            if name in tensors:
                raise WeightsError(f"{file}: {name[:120]} is in another file too: take another copy of the model")
            tensors[name] = kind
    return PretrainedWeights(folder, files, tensors)


def check(found: PretrainedWeights, layout: Layout) -> None:
    """Raise WeightsError if the headers cannot belong to a model with this layout.

    The files of many models have other names and shapes than the model itself (experts one by one, no prefix); `read`
    compares these. Files with fewer values than the model are always refused.
    """
    wanted = {t.name: t.shape for t in layout.tensors}
    strange = sorted(found.tensors.keys() - wanted.keys())
    missing = sorted(wanted.keys() - found.tensors.keys())
    if any(map(is_outer_tensor, strange)):
        raise WeightsError(f"{found.folder}: a run's state, not a model: make a model of it with `cairn export` first")
    for name, shape in wanted.items():
        kind, has = found.tensors.get(name, ("F32", shape))
        if kind not in FLOATS:
            raise WeightsError(
                f"{found.folder}: {name} is {kind}: want {', '.join(FLOATS)}: take the model unquantised"
            )
        if has != shape:
            raise WeightsError(
                f"{found.folder}: {name} is {list(has)}, and {list(shape)} in [model]: write their own config"
            )
    if found.numel < layout.numel:
        raise WeightsError(
            f"{found.folder}: {found.numel:,} values, but the model has {layout.numel:,} parameters"
            + (f" ({len(missing)} tensors are missing, the first is {missing[0]})" if missing else "")
            + ": write the config of these weights in [model], or take a whole copy of them"
        )


def read(folder: Path, config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the weights as parameters of the model with this config: contiguous, by their layout names.

    No tensor may be missing or left over, and every value must be finite and at most MAX_VALUE. Raises WeightsError,
    and SpecError for the config.
    """
    from safetensors import SafetensorError
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from protocol.model import build_model, model_layout, parameters_of

    empty = build_model(config, device="meta")
    layout = model_layout(empty)
    check(read_headers(folder), layout)
    try:
        # The library's reader knows the names that each model's files have had over time; `info` lists what it drew.
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, config=empty.config, dtype=dtype, local_files_only=True, use_safetensors=True,
                trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        why = " ".join(str(e).split())[:300]
        raise WeightsError(f"{folder}: not weights of the model in [model]: {why}: write their config there") from None
    model, info = loaded
    for key, what in (
        ("missing_keys", "missing from the files"),
        ("unexpected_keys", "no tensors of this model"),
        ("mismatched_keys", "of another shape in this model"),
    ):
        names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in info[key])
        if names:
            raise WeightsError(
                f"{folder}: {len(names)} tensors are {what}, the first is {names[0][:120]}: write the config of these "
                "weights in [model], or take a whole copy of them"
            )
    if model_layout(model) != layout:
        raise WeightsError(
            f"{folder}: the files hold separately what the config ties together: write tie_word_embeddings = false"
        )
    # Some models load single tensors in fp32 all the same.
    tensors = {name: p.to(dtype).contiguous() for name, p in parameters_of(model).items()}
    for name, tensor in tensors.items():
        _check_values(folder, name, tensor)
    return tensors


def other_settings(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the fields in which the folder's own config differs from `config`: often intended, sometimes a mistake."""
    from protocol.model import plain_config

    try:
        own = plain_config(json.loads((folder / CONFIG).read_bytes()))
    except (OSError, ValueError, SpecError, AttributeError, RecursionError):
        return []
    ignored = ("bos_token_id", "eos_token_id", "pad_token_id")
    return sorted(k for k in own.keys() | config.keys() if own.get(k) != config.get(k) and k not in ignored)


def _check_values(folder: Path, name: str, tensor: Tensor) -> None:
    for batch in tensor.view(-1).split(BATCH):
        largest = float(batch.abs().max())  # NaN if any value is
        if not largest <= MAX_VALUE:
            what = "is not finite" if not math.isfinite(largest) else f"holds {largest:.3g}, beyond {MAX_VALUE:g}"
            raise WeightsError(f"{folder}: {name} {what}: these weights are damaged; take another copy of them")


def _check_generation(folder: Path) -> None:
    """Raise WeightsError for settings of generation at which the loading of the weights would fail."""
    from transformers.generation.configuration_utils import GenerationConfig

    try:
        with quiet_transformers():
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        pass  # there is none, or no JSON: the weights load without it
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        why = one_line(str(e), 200)
        raise WeightsError(
            f"{folder / GENERATION_CONFIG}: transformers cannot use it: {why}: take another copy of it, or remove it"
        ) from None


def _indexed(folder: Path) -> tuple[Path, ...]:
    """Return the files that an index names, all in the folder itself. Raises WeightsError."""
    index = folder / INDEX
    try:
        if index.stat().st_size > MAX_INDEX:
            raise WeightsError(f"{index}: larger than {MAX_INDEX >> 20} MiB: take another copy of the model")
        named = json.loads(index.read_bytes())["weight_map"].values()
        names = sorted({str(n) for n in named})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WeightsError(f"{index}: cannot be read as an index: take another copy of the model") from None
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(f"{index}: names {name[:80]!r}: want .safetensors files in the folder itself")
        if not (folder / name).is_file():
            raise WeightsError(f"{folder / name}: is missing, and {INDEX} names it: take a whole copy of the model")
    if not 1 <= len(names) <= MAX_FILES:
        raise WeightsError(f"{index}: names {len(names)} files: take another copy of the model")
    return tuple(folder / n for n in names)


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {name: (str(s.get_dtype()), tuple(s.get_shape())) for name, s in slices.items()}
    except (OSError, SafetensorError) as e:
        why = " ".join(str(e).split())[:200]
        raise WeightsError(f"{file}: not a safetensors file that can be read: {why}: take another copy of it") from None
