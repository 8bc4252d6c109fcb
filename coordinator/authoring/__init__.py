"""The making of a run: from a person's files to a signed run spec and the blobs that it names.

This package prepares data (documents to token shards), reads run.toml, and writes the genesis checkpoint; `resolve`
combines them. It serves nothing and knows of no swarm: its results are files and bytes.
"""

from coordinator.authoring.errors import AuthoringError, DataInputError, RunChangedError, RunFileError
from coordinator.authoring.prepare import Manifest, Prepared, load_prepared, prepare
from coordinator.authoring.resolve import ResolvedRun, resolve
from coordinator.authoring.runfile import RunFile, load_run
from coordinator.authoring.summary import validate

__all__ = [
    "AuthoringError",
    "DataInputError",
    "Manifest",
    "Prepared",
    "ResolvedRun",
    "RunChangedError",
    "RunFile",
    "RunFileError",
    "load_prepared",
    "load_run",
    "prepare",
    "resolve",
    "validate",
]
