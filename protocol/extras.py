"""Optional dependencies, as remedies name them."""

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
    return (
        f"pip install '{wanted}' (installed by pipx: pipx inject {DISTRIBUTION} '{wanted}'; by uv tool, in the clone: "
        f"uv tool install --with '{wanted}' .)"
    )
