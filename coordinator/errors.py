"""The coordinator's errors. Each says what happened and names the remedy."""

from __future__ import annotations

from protocol.errors import CairnError


class CoordinatorError(CairnError):
    """An expected failure of the coordinator."""


class PortTakenError(CoordinatorError):
    """An address to listen on that cannot be had."""


class CertificateFileError(CoordinatorError):
    """A TLS certificate or key that cannot be made, read or trusted."""


class LedgerError(CoordinatorError):
    """A ledger that cannot be opened or written."""


class LedgerConflictError(LedgerError):
    """The chain says otherwise than what the ledger has settled. Never papered over."""


class RefusedError(CoordinatorError):
    """A request that is well-formed and not granted: not admitted, wrong code, wrong clock."""


class TooManyError(CoordinatorError):
    """A caller, or all of them together, asked for more than is given."""


class UnknownRunError(CoordinatorError):
    """A request for a run that this coordinator does not serve."""
