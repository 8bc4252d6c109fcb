"""Files that are looked at where they lie, not read into memory, and do not stay open for it: a committee member looks
at a slice of every update, a trainer at up to a thousand parts, and a process may have about as many files open."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

# Python's own mmap keeps a duplicate of the file's descriptor, but for `trackfd=False`, which is new in 3.13.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def mapped_file(path: Path) -> memoryview:
    """A file's bytes, for as long as they are held, whoever removes the file meanwhile; not to be written. What others
    write to the file is seen. Raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return memoryview(b"")  # nothing cannot be mapped
        at = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if at in (None, _FAILED):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    held = (ctypes.c_char * size).from_address(at)
    # Not at the process's end: a thread may still look at it.
    weakref.finalize(held, _libc.munmap, at, size).atexit = False
    return memoryview(held).cast("B").toreadonly()
