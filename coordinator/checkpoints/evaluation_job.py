"""The evaluation of one archived state, as a separate process: its validation loss, then a few texts.

Job: spec (canonical JSON), folder, shards, windows, most (or null), seconds, threads, memory (bytes), device, prompts,
sample_tokens, temperature, seed, base (the file of a frozen base model, or null). Rows: {"loss": number or null (not
finite), "windows", "seconds", "device"}, then {"prompt", "text", "temperature"} for each text.
"""

from __future__ import annotations

import math
import os
import time
import unicodedata
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.checkpoints.job import Row, bound_memory, serve_job
from coordinator.errors import CoordinatorError
from protocol.quiet_imports import quiet_imports
from protocol.spec import NUMBER, TRAINED, ChatSpec, DataSpec, RunSpec, parse_spec

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from coordinator.authoring.chat_template import ChatTemplate

PROMPT_TOKENS = 16
PROMPTS = 3
"""Number of validation windows whose beginnings are continued if the owner names no prompts."""

FREE_SHARE = 0.8
"""A GPU with a smaller share of free memory has other work."""

MAX_TEXT = 1000
"""Maximum number of characters of a text."""


def do_job(job: Row, say: Callable[[Row], None]) -> None:
    """Evaluate as a job says, and call `say` with each row. Raises CairnError, and OSError."""
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    with quiet_imports():
        import torch

        import_module("coordinator.checkpoints.evaluation")  # transformers

    torch.set_num_threads(job["threads"])
    spec = parse_spec(job["spec"].encode())
    device = free_device(job["device"], 4 * model_parameters(spec))
    if device == "cpu":
        bound_memory(job["memory"])
    try:
        evaluate(job, spec, device, say)
    except RuntimeError as e:
        # OutOfMemoryError is one, and so is torch's error when the system gives it no memory.
        if "memory" not in str(e).lower():
            raise
        if device == "cpu":
            why = f"({job['memory'] / 1e9:.1f} GB) does not suffice for it: allow more ([evaluation] memory)"
        else:
            why = f'of {device} does not suffice for it: write [evaluation] device = "cpu" in coordinator.toml, or '
            why += "free that GPU"
        raise CoordinatorError(f"the memory {why}") from None


def evaluate(job: Row, spec: RunSpec, device: str, say: Callable[[Row], None]) -> None:
    """Evaluate a job's state on a device, and call `say` with each row. Raises CairnError, and OSError."""
    from coordinator.checkpoints.evaluation import load_adapted, load_archived, measure

    began = time.monotonic()
    folder = Path(job["folder"])
    shards = [Path(p) for p in job["shards"]]
    if job["base"] is None:
        model = load_archived(folder, device)
    else:
        model = load_adapted(folder / "model.safetensors", spec.model, Path(job["base"]), device)
    if shards:
        windows, most, seconds = job["windows"], job["most"], job["seconds"]
        found = measure(model, spec.data, shards, max_windows=windows, most=most, seconds=seconds)
        loss = found.loss if math.isfinite(found.loss) else None
        took = round(time.monotonic() - began, 1)
        say({"loss": loss, "windows": found.windows, "seconds": took, "device": device})
    if job["sample_tokens"]:
        for row in _samples(job, model, spec.data, folder, shards):
            say(row)


def model_parameters(spec: RunSpec) -> int:
    """Return the parameters of a run's model, with those of a frozen base."""
    return spec.model.layout.numel + (spec.model.adapter.parameters if spec.model.adapter else 0)


def free_device(name: str, size: int) -> str:
    """Return the device: "auto" is an unused GPU with room for a model of `size` bytes, else the CPU."""
    import torch

    if name != "auto" or not torch.cuda.is_available():
        return "cpu" if name == "auto" else name
    found = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        if free >= max(FREE_SHARE * total, 2 * size + 2 * 2**30):
            found.append((free, f"cuda:{i}"))
    return max(found)[1] if found else "cpu"


def _samples(job: Row, model: torch.nn.Module, data: DataSpec, folder: Path, shards: list[Path]) -> Iterator[Row]:
    """Yield each prompt continued twice: greedily, and sampled at a temperature from a fixed seed.

    In a run of conversations a prompt is a user's message, and the model answers it.
    """
    from coordinator.authoring.tokens import open_tokenizer
    from coordinator.checkpoints.evaluation import continue_prompt

    tokenizer = open_tokenizer(folder / "tokenizer.json")
    tokens = min(job["sample_tokens"], data.window // 2)
    chat = None if data.conversations is None else data.conversations.chat
    ends = [] if chat is None else chat.end_tokens
    asked = _questions(job["prompts"], tokenizer, chat) if chat else _beginnings(job["prompts"], tokenizer)
    for shown, prompt in asked if job["prompts"] else _held_out(data, shards):
        prompt = prompt[-(data.window - tokens) :]
        for temperature in (0.0, job["temperature"]):
            ids = continue_prompt(model, prompt, tokens=tokens, temperature=temperature, seed=job["seed"], ends=ends)
            text = plain(added_text(tokenizer, prompt, ids))
            yield {"prompt": plain(shown or tokenizer.decode(prompt)), "text": text, "temperature": temperature}


def added_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """Return the text that a model added to a prompt. `ids`: of both, since a token may be half a character."""
    begun, text = tokenizer.decode(prompt), tokenizer.decode(ids)
    return text[len(begun) :] if text.startswith(begun) else tokenizer.decode(ids[len(prompt) :])


def _beginnings(prompts: list[str], tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Yield the tokens of texts to continue, each with the words to show ("": the tokens')."""
    for text in prompts:
        if ids := tokenizer.encode(text).ids:
            yield "", ids


def _questions(prompts: list[str], tokenizer: Tokenizer, chat: ChatSpec) -> Iterator[tuple[str, list[int]]]:
    """Yield the tokens after which the model answers each prompt."""
    template = run_template(chat)
    for text in prompts:
        yield text, question(text, tokenizer, template)


def run_template(chat: ChatSpec) -> ChatTemplate:
    """Return the chat template of a run: here of the owner's own, in `cairn generate` of one that its user names."""
    from coordinator.authoring.chat_template import ChatTemplate

    return ChatTemplate(chat.template, {**chat.special_tokens}, "the run's chat template")


def question(text: str, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    """Return the tokens after which a model answers a user's message. Raises DataInputError."""
    rendered = template.question([{"role": "user", "content": text}])
    return tokenizer.encode(rendered, add_special_tokens=False).ids


def _held_out(data: DataSpec, shards: list[Path]) -> Iterator[tuple[str, list[int]]]:
    """Yield the beginnings of held-out windows; of conversations up to the first trained token."""
    from coordinator.checkpoints.evaluation import ValidationWindows

    held = ValidationWindows(data, shards) if shards else []
    for i in range(min(PROMPTS, len(held))):
        window = held[(2 * i + 1) * len(held) // (2 * PROMPTS) if len(held) >= PROMPTS else i]
        if data.conversations is None:
            yield "", window[: min(PROMPT_TOKENS, data.window // 2)].tolist()
        elif (first := int((window & TRAINED != 0).argmax())) > 0:
            yield "", (window[:first] & NUMBER).tolist()


def plain(text: str, limit: int = MAX_TEXT) -> str:
    """Return text that strangers may have influenced without harmful characters, at most `limit` characters long.

    Control, format (for example those that change the direction) and private characters are removed; white space
    becomes single blanks and line ends.
    """
    kept: list[str] = []
    for c in text:
        kind = unicodedata.category(c)
        if c in "\n\t" or kind in ("Zs", "Zl", "Zp"):
            kept.append("\n" if c == "\n" else " ")
        elif kind[0] == "C":
            continue
        elif kind == "Mn" and len(kept) >= 4 and all(unicodedata.category(k) == "Mn" for k in kept[-4:]):
            continue  # piled-up accents would cover the lines around them
        else:
            kept.append(c)
    whole = "".join(kept)
    return whole if len(whole) <= limit else whole[: limit - 1] + "…"


if __name__ == "__main__":
    serve_job(do_job)
