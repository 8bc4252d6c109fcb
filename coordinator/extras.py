"""Optional dependencies, as remedies name them."""

DISTRIBUTION = "cairn-swarm"
"""The name of Cairn in pyproject.toml, and so for pip: `cairn` is another project there."""

REQUIREMENTS = {"demo": "matplotlib>=3.8,<4", "parquet": "pyarrow>=15", "postgres": "psycopg[binary]>=3.2,<4"}
"""The extras of pyproject.toml. A remedy must not name `cairn-swarm[...]`: Cairn is on no package index."""


def install(extra: str) -> str:
    """Return the commands that add the package of an extra to the environment of Cairn."""
    wanted = REQUIREMENTS[extra]
    return f"pip install '{wanted}' (installed by pipx: pipx inject {DISTRIBUTION} '{wanted}')"
