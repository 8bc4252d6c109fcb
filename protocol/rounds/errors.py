"""The error of a round machine that contradicts itself."""

from __future__ import annotations


class InvariantError(RuntimeError):
    """A bug of the round machine, not of a peer or a user: a state that its rules exclude."""
