"""Writes the test vectors: `python -m tests.vectors`, after a change of the protocol. Look at the difference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.vectors.made import VECTORS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "vectors"


def as_text(value: dict[str, Any]) -> str:
    """Return JSON with an item a line, and lists of numbers on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return re.sub(r"\[\s+([-\d.e+,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def main() -> None:
    for name, make in VECTORS.items():
        text = as_text(make())
        (FOLDER / name).write_text(text)
        print(f"{FOLDER / name}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
