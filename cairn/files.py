"""Files that commands write for people."""

from __future__ import annotations

import os
from pathlib import Path

from protocol.errors import CairnError


def write_whole(path: Path, text: str) -> None:
    """Write the whole file or nothing. Raises CairnError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as e:
        partial.unlink(missing_ok=True)
        raise CairnError(f"{path}: cannot be written: {(e.strerror or str(e)).lower()}: name another place") from None
