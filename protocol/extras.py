"""Packages that may be missing or too old, and the remedies."""

import shlex
import sys

DISTRIBUTION = "cairn-swarm"
"""The name of Cairn in pyproject.toml, and so for pip: `cairn` is another project there."""

REQUIREMENTS = {
    "demo": "matplotlib>=3.8,<4",
    "lora": "peft>=0.18,<1",
    "parquet": "pyarrow>=15",
    "postgres": "psycopg[binary]>=3.2,<4",
    "qlora": "bitsandbytes>=0.48,<1",
}
"""The last package of each extra of pyproject.toml.

A remedy must not name `cairn-swarm[...]`: Cairn is on no package index."""


def install(extra: str) -> str:
    """Return the commands that add the package of an extra to the environment of Cairn."""
    wanted = REQUIREMENTS[extra]
    return f"{pip_install(wanted)} (installed by uv tool, in the clone: uv tool install --with '{wanted}' .)"


def pip_install(*wanted: str, upgrade: bool = False) -> str:
    """Return the command that adds packages to the environment of this process, which pipx may have made."""
    return shlex.join([sys.executable, "-m", "pip", "install", *["--upgrade"] * upgrade, *wanted])
