"""The errors of a peer, apart from those of other peers' messages: one tree, worded for the volunteer who runs it."""

from __future__ import annotations

from protocol.errors import CairnError


class PeerError(CairnError):
    """The root of a peer's own failures."""


class NotInSwarm(PeerError):
    """libp2p's daemon is not running yet, or is being started again: no peer is at fault."""


class ChannelError(PeerError):
    """The channel between node and trainer broke: closed, silent for too long, or a line that is no message."""


class TrainerDied(PeerError):
    """The trainer's process ended, or could not start: the message has its return code and last words."""


class TrainingError(PeerError):
    """The trainer cannot do what it was asked to (device, memory, data, a state that does not match)."""


class SavedStateError(PeerError):
    """A saved trainer state that cannot be used: damaged, of another run, peer or model, or not writable."""


class AuditError(PeerError):
    """A check of an update that cannot be made: what it needs is not there, or its process failed."""


class AuditTimeout(AuditError):
    """A check that took too long."""


class UncheckableUpdate(AuditError):
    """A check that says nothing about this update, however often it is made."""
