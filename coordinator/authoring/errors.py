"""Errors in a run owner's files. Each message names the file, the place in it, and the remedy."""

from __future__ import annotations

from coordinator.errors import CoordinatorError


class AuthoringError(CoordinatorError):
    """The root: something in the owner's files must be corrected."""


class DataInputError(AuthoringError):
    """Documents, a tokenizer or a prepared folder that cannot be read or used."""


class RunFileError(AuthoringError):
    """A run.toml that is not valid."""


class RunChangedError(AuthoringError):
    """A run.toml, or its data, that is no longer what the run began with."""
