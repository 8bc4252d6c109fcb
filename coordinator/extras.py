"""Optional dependencies, as remedies name them."""

DISTRIBUTION = "cairn-swarm"
"""The name of Cairn in pyproject.toml, and so for pip: `cairn` is another project there."""


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra of pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
