"""Evaluates an archived checkpoint: its validation loss, and texts that it generates."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coordinator.errors import CoordinatorError
from coordinator.export import CONFIG, GENERATION, MODEL, held_layout
from coordinator.model_card import Origin
from coordinator.quiet_transformers import quiet_transformers
from protocol.adapter import build_run_model, load_base
from protocol.errors import SpecError
from protocol.layout import is_outer_tensor
from protocol.marked_tokens import IGNORED, inputs_of
from protocol.model import build_model, load_state, model_layout
from protocol.packed_sequences import documents_apart
from protocol.spec import NUMBER, DataSpec, ModelSpec, windows_in

BATCH = 16
"""Most windows that are evaluated at once."""

LOGITS_BYTES = 256 * 1024 * 1024
"""Approximate maximum of memory for the logits of a batch."""


def load_archived(folder: Path, device: str = "cpu") -> torch.nn.Module:
    """Load the model in an archived folder, in evaluation mode. Raises CoordinatorError for anything else.

    The folder may be a stranger's. Of its config only fields of the model are used: others name code to fetch.
    """
    from safetensors import SafetensorError
    from transformers.generation.configuration_utils import GenerationConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from coordinator.authoring.model_config import read_settings
    from coordinator.authoring.pretrained import unknown_fields

    if not (folder / CONFIG).is_file() or not (folder / MODEL).is_file():
        raise CoordinatorError(
            f"{folder} is not an archived checkpoint: it has no {CONFIG} and {MODEL}; "
            "name a folder like checkpoints/round-000030 of a coordinator"
        )
    given = read_settings(folder / CONFIG)
    if given.get("quantization_config") is not None:
        raise CoordinatorError(f"{folder}: its weights are quantised: take the model that they were made from")
    left_out = unknown_fields(given)
    try:
        empty: Any = build_model({k: v for k, v in given.items() if k not in left_out}, device="meta")
    except SpecError as e:
        raise CoordinatorError(f"{folder / CONFIG}: {e}") from None
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=empty.config,
                generation_config=GenerationConfig(),  # so the folder's is not read
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        raise CoordinatorError(f"{folder} does not load: {' '.join(str(e).split())[:300]}") from None
    model, said = loaded
    # A state has the outer step's tensors beside the model.
    strange = sorted(k for k in said["unexpected_keys"] if not is_outer_tensor(k))
    if any(".lora_A." in k for k in strange):
        raise CoordinatorError(f"{folder} holds an adapter, not a whole model: `cairn export --merge` makes one of it")
    if missing := sorted(said["missing_keys"]) + strange:
        raise CoordinatorError(f"{folder}: its tensors are not its config's: {', '.join(missing)[:300]}")
    model.to(torch.device(device))
    return model.eval()


def end_tokens(folder: Path) -> list[int]:
    """Return the tokens that end an answer of the model in a folder. Raises CoordinatorError."""
    from coordinator.authoring.model_config import read_settings

    path = folder / (GENERATION if (folder / GENERATION).is_file() else CONFIG)
    end = read_settings(path).get("eos_token_id")
    ends: list[Any] = end if isinstance(end, list) else [end] * (end is not None)
    if not all(type(e) is int and 0 <= e <= NUMBER for e in ends):
        raise CoordinatorError(f"{path}: its eos_token_id is no token's number: take another copy of the model")
    return ends


def load_checkpoint(
    checkpoint: Path, config: Mapping[str, Any], origin: Origin, device: str = "cpu"
) -> torch.nn.Module:
    """Load the model of a state's file, in evaluation mode. Raises CoordinatorError, and SpecError for the config."""
    from safetensors.torch import load_file

    model = build_model(config, device=device)
    layout = model_layout(model)
    held_layout(checkpoint, layout, origin)
    state = load_file(checkpoint)
    load_state(model, {t.name: state[t.name] for t in layout.tensors})
    return model.eval()


def load_adapted(checkpoint: Path, model: ModelSpec, base: Path, device: str = "cpu") -> torch.nn.Module:
    """Load the adapter of a state's file with its base, in evaluation mode, in fp32. Raises CairnError, and OSError."""
    from safetensors.torch import load_file

    assert model.adapter is not None
    built = build_run_model(model, device=device, exact=True)
    with open(base, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        load_base(built, model.adapter, data)
    state = load_file(checkpoint)
    load_state(built, {t.name: state[t.name] for t in model.layout.tensors if t.name in state})
    return built.eval()


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Mean cross-entropy in nats per trained token, not finite if the model's output is not, and number of windows."""

    loss: float
    windows: int


def measure(
    model: torch.nn.Module,
    data: DataSpec,
    shards: Sequence[Path],
    *,
    max_windows: int = 512,
    most: int | None = None,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ValidationResult:
    """Return the mean cross-entropy over at most `max_windows` evenly spaced validation windows.

    It is in nats per trained token. `shards` are files of `data.dtype` tokens, little endian, in the order of
    `data.validation`. `most` limits the number of the chosen windows, `seconds` the time (at least one batch is done).
    With either, any first part of the order of windows is spread evenly too. The order is the same each time, so that
    a slow machine judges all states by the same few windows. Raises CoordinatorError.
    """
    held = ValidationWindows(data, shards)
    n = min(max_windows, len(held))
    order = list(range(n)) if most is None and seconds is None else sorted(range(n), key=_reversed_bits)[:most]
    device = next(model.parameters()).device
    total, counted, done, until = 0.0, 0, 0, None if seconds is None else clock() + seconds
    batch = max(1, min(BATCH, LOGITS_BYTES // (4 * data.window * _vocabulary(model))))
    with torch.inference_mode():
        for i in range(0, n, batch):
            block = torch.from_numpy(np.stack([held[j * len(held) // n] for j in order[i : i + batch]])).to(device)
            inputs = inputs_of(block, data.conversations)
            with documents_apart(inputs.positions is not None):
                logits = model(**inputs.forward_arguments(), use_cache=False).logits
            total += float(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), inputs.targets.flatten(), ignore_index=IGNORED, reduction="sum"
                )
            )
            counted += int((inputs.targets != IGNORED).sum())
            done += len(block)
            if done == len(order) or (until is not None and clock() > until):
                break
    return ValidationResult(total / max(1, counted), done)


class ValidationWindows:
    """The windows of the validation shards, each of `data.window` + 1 tokens (int64). Raises CoordinatorError."""

    def __init__(self, data: DataSpec, shards: Sequence[Path]):
        dtype = np.dtype(data.dtype).newbyteorder("<")
        self._window = data.window
        try:
            self._tokens = [np.memmap(path, dtype=dtype, mode="r") for path in shards if path.stat().st_size]
        except (OSError, ValueError) as e:
            raise CoordinatorError(f"a validation shard cannot be read ({e}): prepare the data again") from None
        self._starts = np.cumsum([0, *(windows_in(len(t), data.window) for t in self._tokens)])
        if not len(self):
            raise CoordinatorError("the run has no validation data: hold some out in run.toml ([data] validation)")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        at = (index - int(self._starts[shard])) * self._window
        return self._tokens[shard][at : at + self._window + 1].astype(np.int64)


def continue_prompt(
    model: torch.nn.Module,
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float,
    seed: int,
    ends: Sequence[int] = (),
) -> list[int]:
    """Return the prompt and `tokens` tokens that the model adds, or fewer if it adds one of `ends`.

    `temperature` 0 is greedy. Settings that came with the model are not used. Raises CoordinatorError for more tokens
    than the model can read, and for a model whose output is not finite.
    """
    from transformers.generation.configuration_utils import GenerationConfig

    most = _positions(model)
    if most is not None and len(prompt) + tokens - 1 > most:  # the last token is not read
        remedy = "shorten the prompt" if len(prompt) > most else f"give --tokens {most + 1 - len(prompt)} or fewer"
        raise CoordinatorError(
            f"this model reads {most} tokens at most; the prompt has {len(prompt)}, with {tokens} to follow: {remedy}"
        )
    torch.manual_seed(seed)
    model.generation_config = GenerationConfig()  # type: ignore[assignment]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 50} if temperature > 0 else {"do_sample": False}
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            pad_token_id=0,
            eos_token_id=list(ends) or None,
            logits_processor=[_refuse_divergence],
            **sampling,
        )
    return out[0].tolist()


def _refuse_divergence(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the scores of the next token unchanged. Raises CoordinatorError unless the highest is finite."""
    if not bool(scores.amax(-1).isfinite().all()):  # NaN if any score is
        raise CoordinatorError("the model has diverged: its output is not finite; take an earlier checkpoint")
    return scores


def _positions(model: torch.nn.Module) -> int | None:
    """Return the most tokens that a model with a table of positions reads; None for one that computes positions."""
    names = (name.removesuffix(".weight") for name, _ in (*model.named_parameters(), *model.named_buffers()))
    if not any(name.endswith((".wpe", ".embed_positions")) for name in names):
        return None
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def _vocabulary(model: torch.nn.Module) -> int:
    return int(getattr(getattr(model, "config", None), "vocab_size", 0) or 1024)


def _reversed_bits(index: int) -> int:
    return int(f"{index:040b}"[::-1], 2)
