"""The packages of a wheel: all of Cairn under one name.

The repository has `cairn`, `peer`, `coordinator`, `protocol` and `examples` side by side. So general a name could be
another package's, and pip writes the files of one over those of the other. In a wheel they are in `cairn/packages`;
`cairn/__init__.py` says where they are.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup

INSIDE = ("peer", "coordinator", "protocol", "examples")


def folders(*names: str) -> list[str]:
    """Return these folders and those in them, as dotted names. Some have files, but no module."""
    return find_namespace_packages(include=[p for name in names for p in (name, f"{name}.*")], exclude=["*__pycache__"])


if sys.platform == "win32":  # or pip fails later, at a dependency, with that one's words
    sys.exit("Cairn does not run on Windows, nor does libp2p's daemon: install it in WSL2 (`wsl --install`)")

HERE = Path(__file__).resolve().parent


def refuse(path: Path, *paths: Path) -> None:
    sys.exit(
        f"{path} has to be replaced, and this user may not do that: perhaps it is root's, after `sudo pip install`. "
        f"Remove it: sudo rm -rf {shlex.join(map(str, (path, *paths)))}"
    )


if left := [p for kind in ("build", "build/*", "*.egg-info") for p in HERE.glob(kind) if not os.access(p, os.W_OK)]:
    refuse(*left)
# Files that a build before this one left there, and that are gone from the sources, would be in the wheel.
if (HERE / "build" / "lib").exists():
    try:
        shutil.rmtree(HERE / "build" / "lib")
    except OSError:
        refuse(HERE / "build")

setup(
    packages=[*folders("cairn"), *(f"cairn.packages.{name}" for name in folders(*INSIDE))],
    package_dir={f"cairn.packages.{name}": name for name in INSIDE},
)
