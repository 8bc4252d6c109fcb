"""Imports of large libraries without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Import without garbage collection, and leave what the imports made out of later ones.

    torch and transformers make a million objects that live as long as the process. To visit them again and again took
    more than a fifth of the time of a trainer's and a node's imports. Peer and coordinator share this package alone.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
