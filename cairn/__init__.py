"""The front door: the command line, the local demo, and the wiring of `peer` and `coordinator` to each other.

This package is thin on purpose. A volunteer's node lives in `peer`, a run owner's service in `coordinator`, and the
rules that both must agree on in `protocol`. Commands import heavy libraries when they run, not at the top of a module.

In a checkout the four packages are side by side. A wheel has the others in `cairn/packages` (see `setup.py`), so that
no name but `cairn` is taken in anybody's environment. To import `cairn` makes them the first on the path, here and in
the processes that this one starts. So packages of the same names elsewhere, or in the current folder, do not matter.
"""

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
ROOT = _HERE / "packages" if (_HERE / "packages").is_dir() else _HERE.parent
"""The folder that has `peer`, `coordinator`, `protocol` and `examples`."""


def _put_first(root: str) -> None:
    if sys.path[:1] != [root]:
        sys.path.insert(0, root)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if inherited[0] != root:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, inherited)])
    # `python -m` would look in the current folder before that. Before 3.11, see `protocol.python_command`.
    os.environ["PYTHONSAFEPATH"] = "1"


_put_first(str(ROOT))

from protocol.version import RELEASE as __version__  # noqa: E402 - found by the path that was set above
