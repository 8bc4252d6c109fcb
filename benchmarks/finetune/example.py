"""Write a small base model and conversations into a folder, for the guide to fine-tuning (docs/finetuning.md)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.finetune.base import BaseModel, make_base
from benchmarks.finetune.chat import write_conversations

SIZE = BaseModel(128, 344, 2, 4, 1024, 128, steps=160, batch=16)


def main() -> int:
    """Write FOLDER/base, FOLDER/conversations.jsonl and FOLDER/held-out.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune.example", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    from transformers.utils import logging

    logging.disable_progress_bar()
    loss = make_base(SIZE, folder / "base")
    rows, _ = write_conversations(folder)
    print(f"base model      {folder / 'base'}  (training loss {loss:.2f})")
    print(f"conversations   {rows}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
