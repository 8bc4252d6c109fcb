"""The command that starts a Python process of ours, which loads no code from the current folder.

`python -m` looks there first, before the standard library, and Python 3.10 knows no PYTHONSAFEPATH. The folder may be
one that a stranger filled.
"""

from __future__ import annotations

import sys

START = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""A program that runs a module as `python -m` does; "" in the path is the current folder."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in this Python, with these arguments."""
    return [sys.executable, "-c", START, module, *arguments]
