"""Files from the node: checkpoints and the updates of rounds, checked before they are used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peer.channel import RoundUpdates
from peer.training.saved_state import file_digest
from protocol.codec import make_codec
from protocol.errors import CodecError, MalformedError
from protocol.ids import Digest
from protocol.outer import Contribution
from protocol.spec import RunSpec
from protocol.state import state_layout


@dataclass(frozen=True, slots=True)
class RoundFiles:
    """Reads a run's files. Sizes in bytes: of every update, and of every checkpoint."""

    update_size: int
    checkpoint_size: int

    @classmethod
    def of(cls, spec: RunSpec) -> RoundFiles:
        """Return the reader of a run's files."""
        checkpoint = state_layout(spec.model.layout, spec.outer).checkpoint_size
        return cls(make_codec(spec.codec, spec.model.layout).size, checkpoint)

    def update(self, path: Path) -> bytes:
        """Return an update's bytes. Raises OSError, and CodecError before reading when the size is wrong."""
        if (size := path.stat().st_size) != self.update_size:
            raise CodecError(f"{path} has {size} bytes: an update of this run has {self.update_size}")
        return path.read_bytes()

    def contributions(self, update: RoundUpdates) -> list[Contribution]:
        """Return the updates of a round. Raises OSError and CodecError."""
        return [Contribution(u.author, u.windows, self.update(u.blob)) for u in update.updates]

    def check_checkpoint(self, path: Path, digest: Digest) -> None:
        """Raise MalformedError unless the file is the checkpoint with this digest. Raises OSError."""
        if (size := path.stat().st_size) != self.checkpoint_size:
            raise MalformedError(f"{path} is not a checkpoint of this run's model: it has {size} bytes")
        if (found := file_digest(path)) != digest:
            raise MalformedError(
                f"{path} is damaged or another state: its digest is {found.short}, the chain says {digest.short}; "
                "fetch it again"
            )
