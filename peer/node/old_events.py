"""Names of the round machine's events as the node uses them."""

from __future__ import annotations

from protocol.rounds.events import Applied as StateReached
from protocol.rounds.events import ApplyFailed as MoveFailed
from protocol.rounds.events import BlobBad as BlobInvalid
from protocol.rounds.events import BlobHeld, Event, Leave, Tick, UpdateReady
from protocol.rounds.events import BlobMissing as BlobUnavailable
from protocol.rounds.events import CertificateHeard as CertificateReceived
from protocol.rounds.events import ChainHeard as ChainReceived
from protocol.rounds.events import ChainSilent as ChainUnanswered
from protocol.rounds.events import Heard as MessageReceived
from protocol.rounds.events import PartLacking as ShardUnavailable
from protocol.rounds.events import PartReduced as ShardReduced
from protocol.rounds.events import Progress as TrainingProgress
from protocol.rounds.policy import Facts as LocalStatus
from protocol.rounds.policy import Policy as RoundPolicy

__all__ = [
    "BlobHeld",
    "BlobInvalid",
    "BlobUnavailable",
    "CertificateReceived",
    "ChainReceived",
    "ChainUnanswered",
    "Event",
    "Leave",
    "LocalStatus",
    "MessageReceived",
    "MoveFailed",
    "RoundPolicy",
    "ShardReduced",
    "ShardUnavailable",
    "StateReached",
    "Tick",
    "TrainingProgress",
    "UpdateReady",
]
