"""Files that are mapped, not read into memory, and that hold no descriptor open.

A committee member reads a slice of every update, a trainer up to a thousand reduced shards, and a process may have
about as many files open. A round's reduced shards together can be as large as the model.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

# Python's own mmap keeps a duplicate of the file's descriptor; `trackfd=False` is new in 3.13.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def mapped_file(path: Path) -> memoryview:
    """Return a file's bytes, read-only and valid as long as they are held, even if the file is removed meanwhile.

    Later writes to the file show in them. Raises OSError.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return memoryview(b"")  # an empty file cannot be mapped
        at = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if at in (None, _FAILED):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    held = (ctypes.c_char * size).from_address(at)
    # Not at the process's end: a thread may still read it.
    weakref.finalize(held, _libc.munmap, at, size).atexit = False
    return memoryview(held).cast("B").toreadonly()


def mapped_files(paths: Iterable[Path]) -> tuple[memoryview, ...]:
    """Return `mapped_file` of each path. Raises OSError."""
    return tuple(map(mapped_file, paths))
