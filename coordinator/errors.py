"""The coordinator's errors. Each says what happened and names the remedy."""

from __future__ import annotations

from protocol.errors import CairnError


class CoordinatorError(CairnError):
    """An expected failure of the coordinator."""


class PortTakenError(CoordinatorError):
    """An address that is not available to listen on."""


class CertificateFileError(CoordinatorError):
    """A TLS certificate or key that cannot be made, read or trusted."""


class LedgerError(CoordinatorError):
    """A ledger that cannot be opened or written."""


class LedgerConflictError(LedgerError):
    """A contradiction between the chain and the posted rounds, which is never ignored."""


class OtherFinalizationError(LedgerConflictError):
    """A finalization that another coordinator signed with the run's key. The text may be shown to everybody."""


class RefusedError(CoordinatorError):
    """A well-formed request that is refused: not admitted, wrong code, wrong clock."""


class TooManyError(CoordinatorError):
    """A caller, or all of them together, exceeded a limit."""


class UnknownRunError(CoordinatorError):
    """A request for a run that this coordinator does not serve."""
