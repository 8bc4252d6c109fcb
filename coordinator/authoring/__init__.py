"""How a run comes to be: from a person's files to a signed run spec and the blobs that it names.

Here live the preparation of data (documents to token shards), the reading of run.toml, the genesis checkpoint, and
`resolve`, which puts them together. Nothing here serves anything or knows of a swarm: what comes out are files and
bytes.
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
