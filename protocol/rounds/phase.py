"""The phases of the round machine, and every transition between them: data that docs/rounds.md draws."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class InvariantError(RuntimeError):
    """A bug of the round machine, not of a peer or a user: a state that its rules exclude."""


class Phase(str, Enum):
    """The phase of a machine. Heartbeats carry the value, except for `LEFT`."""

    JOINING = "joining"
    """It collects what the other members have. The trainer holds no state."""

    SYNCING = "syncing"
    """The trainer holds no state of the chain: a `SyncState` is due or under way."""

    TRAINING = "training"
    """The trainer holds the state that the open round starts from. Nothing is announced yet."""

    PAUSED = "paused"
    """As `TRAINING`, but the owner wants no update, or audits bar this peer: the trainer makes no steps."""

    EXCHANGING = "exchanging"
    """Our update of the open round is announced."""

    RESTING = "resting"
    """The user wants the devices for a while. Once the round of our last update is decided, the machine observes."""

    LEAVING = "leaving"
    """The user wants to stop: the round of the last update is awaited for a short time."""

    LEFT = "left"
    """Goodbye is said. The machine is silent."""

    OBSERVING = "observing"
    """It follows certificates and never trains."""

    def __str__(self) -> str:
        return self.value


JOINED = "a member past joining whose head we know, or the time for joining is over"
STATE_REACHED = "`StateReached`"
STATE_LOST = "`SyncFailed`, a contradicted state, or the record of the state left the chain"
ANNOUNCED = "own header broadcast, or received from before a crash"
DECIDED = "the next round begins, or the open round begins again on another branch"
PAUSE = "a directive pauses or ends the run, or bans this peer; or an audit bars it"
RESUMED = "a directive ends the pause, or the bar ends"
REST = "`Rest`"
WOKEN = "`Resume`"
LEAVE = "`Leave`"
GOODBYE = "the last update is decided, or the time for leaving is over"

TRANSITIONS: Mapping[Phase, Mapping[Phase, str]] = {
    Phase.JOINING: {
        Phase.SYNCING: JOINED,
        Phase.RESTING: REST,
        Phase.LEAVING: LEAVE,
    },
    Phase.SYNCING: {
        Phase.TRAINING: STATE_REACHED,
        Phase.PAUSED: STATE_REACHED,
        Phase.EXCHANGING: STATE_REACHED,
        Phase.RESTING: REST,
        Phase.LEAVING: LEAVE,
    },
    Phase.TRAINING: {
        Phase.EXCHANGING: ANNOUNCED,
        Phase.PAUSED: PAUSE,
        Phase.SYNCING: STATE_LOST,
        Phase.RESTING: REST,
        Phase.LEAVING: LEAVE,
    },
    Phase.PAUSED: {
        Phase.TRAINING: RESUMED,
        Phase.EXCHANGING: ANNOUNCED,
        Phase.SYNCING: STATE_LOST,
        Phase.RESTING: REST,
        Phase.LEAVING: LEAVE,
    },
    Phase.EXCHANGING: {
        Phase.TRAINING: DECIDED,
        Phase.PAUSED: DECIDED,
        Phase.SYNCING: STATE_LOST,
        Phase.RESTING: REST,
        Phase.LEAVING: LEAVE,
    },
    Phase.RESTING: {
        Phase.JOINING: WOKEN,
        Phase.SYNCING: WOKEN,
        Phase.TRAINING: WOKEN,
        Phase.PAUSED: WOKEN,
        Phase.EXCHANGING: WOKEN,
        Phase.LEAVING: LEAVE,
        Phase.LEFT: LEAVE,
    },
    Phase.LEAVING: {
        Phase.LEFT: GOODBYE,
    },
    Phase.OBSERVING: {
        Phase.LEFT: LEAVE,
    },
    Phase.LEFT: {},
}
"""The only transitions that there are: from, to, and the cause of each."""


def phase_of(
    *,
    left: bool,
    observer: bool,
    leaving: bool,
    resting: bool,
    joined: bool,
    holds_state: bool,
    announced: bool,
    paused: bool,
) -> Phase:
    """Return the phase that these facts give; earlier arguments take precedence over later ones.

    A peer that is `resting` becomes an `observer` after its last update, until the rest ends.
    """
    if left:
        return Phase.LEFT
    if observer:
        return Phase.RESTING if resting else Phase.OBSERVING
    if leaving:
        return Phase.LEAVING
    if resting:
        return Phase.RESTING
    if not joined:
        return Phase.JOINING
    if not holds_state:
        return Phase.SYNCING
    if announced:
        return Phase.EXCHANGING
    return Phase.PAUSED if paused else Phase.TRAINING


def check_transition(before: Phase, after: Phase) -> None:
    """Raise `InvariantError` when the table has no such transition. Staying in a phase is always allowed."""
    if before is not after and after not in TRANSITIONS[before]:
        raise InvariantError(f"the round machine went from {before} to {after}, which its table does not have")
