"""Logging to a rotating file and to the terminal."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path

from protocol.errors import CairnError

QUIET = ("hivemind", "transformers", "urllib3", "asyncio", "grpc", "uvicorn.access", "uvicorn.error", "httpx", "fsspec")


def set_up_logging(file: Path, *, terminal: logging.Handler | None = None) -> None:
    """Log to `file` (10 MB, three kept) and to the terminal.

    Cairn's own loggers log from INFO, libraries from WARNING. Raises CairnError if the folder cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        to_file = logging.handlers.RotatingFileHandler(file, maxBytes=10**7, backupCount=3)
    except OSError as e:
        raise CairnError(
            f"{file.parent} cannot be written to ({(e.strerror or str(e)).lower()}): name another folder with --home, "
            "or mend this one"
        ) from None
    # On a full disk logging would print a traceback for each line; the line itself still shows in the terminal.
    logging.raiseExceptions = False
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    shown = terminal or logging.StreamHandler()
    shown.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.getLogger().handlers.clear()
    logging.basicConfig(level=logging.INFO, handlers=[to_file, shown])
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
