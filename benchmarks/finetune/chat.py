"""Conversations made of the shipped addresses: the user gives a sentence, and the answer goes on from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.finetune.base import addresses

SENTENCE = re.compile(r"(?<=[.?!])\s+")
LONGEST = 160
"""Characters of a sentence that a conversation uses at most."""


def conversations(*, held_out: bool, every: int = 3) -> Iterator[dict[str, Any]]:
    """Yield rows with `messages`, one for every `every`-th pair of short sentences of each address."""
    for address in addresses(held_out=held_out):
        sentences = [s for s in SENTENCE.split(" ".join(address["text"].split())) if 20 <= len(s) <= LONGEST]
        for asked, answer in list(zip(sentences, sentences[1:], strict=False))[::every]:
            yield {
                "messages": [
                    {"role": "user", "content": f"Go on: {asked}"},
                    {"role": "assistant", "content": f"{address['president']} said: {answer}"},
                ]
            }


def write_conversations(folder: Path, every: int = 3) -> tuple[Path, Path]:
    """Write the conversations to train on and those that are held out as JSONL; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "conversations.jsonl", folder / "held-out.jsonl"
    for path, held_out in zip(paths, (False, True), strict=True):
        rows = conversations(held_out=held_out, every=every)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths
