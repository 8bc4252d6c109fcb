"""A small base model in a folder that transformers loads: trained here on the shipped addresses, which it completes."""

from __future__ import annotations

import importlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.corpus import ADDRESSES, HELD_OUT_EVERY
from benchmarks.convergence.setting import llama
from coordinator.authoring.prepare import prepare
from coordinator.authoring.tokens import byte_level_bpe
from peer.training.data import WindowReader
from peer.training.inner_optimizer import InnerOptimizer
from peer.training.schedule import factor
from protocol.assignment import windows_of
from protocol.ids import PeerKey
from protocol.model import build_model, plain_config
from protocol.spec import DataSpec, InnerSpec, Schedule

END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class BaseModel:
    """The sizes of a base model and of its training: `steps` of `batch` windows, of every `every`-th address."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    window: int
    steps: int
    batch: int
    lr: float = 0.01
    every: int = 1

    @property
    def config(self) -> dict[str, Any]:
        """The config without defaults."""
        sizes = llama(self.hidden, self.intermediate, self.layers, self.heads, self.window)
        return sizes | {"vocab_size": self.vocabulary, "bos_token_id": 0, "eos_token_id": 0}


def addresses(*, held_out: bool) -> Iterator[dict[str, Any]]:
    """Yield the addresses that are held out, or the others: president, year, text."""
    with lzma.open(ADDRESSES, "rt", encoding="utf-8") as file:
        for i, line in enumerate(file):
            if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out:
                yield json.loads(line)


def make_base(size: BaseModel, folder: Path, seed: int = 0) -> float:
    """Train a base model and write its folder: config, weights, tokenizer, chat template. Return its last loss."""
    # A plain import would have the type checker read hundreds of models.
    tokenizer_class = importlib.import_module("transformers").PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    texts = [a["text"] for a in addresses(held_out=False)][:: size.every]
    tokenizer = byte_level_bpe(texts, size.vocabulary, (END, TURN, TURN_END))
    tokenizer.save(str(folder / "tokenizer.json"))
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    prepared = prepare([str(text)], folder / "prepared", tokenizer=folder / "tokenizer.json")
    manifest = prepared.manifest
    shards = [s.model_dump() for s in manifest.train.shards]
    data = DataSpec.model_validate({"window": size.window, "dtype": manifest.dtype, "train": shards})
    reader = WindowReader(data, prepared.blobs)
    model = build_model(plain_config(size.config), seed=seed)
    constant = Schedule(kind="constant")
    inner = InnerOptimizer(InnerSpec(lr=size.lr, batch=size.batch, schedule=constant), model, torch.device("cpu"))
    total = size.steps * size.batch * size.window
    falls = Schedule(kind="cosine", warmup_tokens=total // 25, total_tokens=total, min_ratio=0.1)
    loss = float("nan")
    for step in range(size.steps):
        inner.set_rate(factor(falls, (step + 0.5) / size.steps * total))
        chosen = windows_of(seed, PeerKey(bytes(32)), step * size.batch, size.batch, reader.total)
        result = inner.forward_backward(reader.read(chosen))
        if result is None or not result.is_finite:
            raise FloatingPointError("the base model's training diverged")
        inner.optimizer_step(result)
        loss = result.loss
    model.eval()
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer_class(tokenizer_object=tokenizer, eos_token=END, chat_template=CHATML).save_pretrained(folder)
    return loss
