"""The errors of the protocol: one tree, each message saying what is wrong and, where there is one, the remedy."""


class CairnError(Exception):
    """An expected failure, worded for a person. Command lines print it as one line, without a traceback."""


class ProtocolError(CairnError):
    """Bytes or values that break the protocol: the sender is at fault, not this process."""


class MalformedError(ProtocolError):
    """Bytes that do not parse: wrong size, order, range or form."""


class SignatureError(ProtocolError):
    """A signature that does not verify, or is by the wrong key or for another purpose."""


class AdmissionError(ProtocolError):
    """A peer without a valid admission to this run, or a message that only the run's owner may sign."""


class ChainError(ProtocolError):
    """A record or certificate that cannot be part of the chain."""


class UnknownParent(ChainError):
    """The certificate's parent is not in the tree: ask its source for what comes before it, unless too old."""


class FinalizedConflict(ChainError):
    """The certificate contradicts a finalization, a rollback or a ban that its source does not know yet."""


class CodecError(ProtocolError):
    """An encoded update that does not decode under the run's codec and layout."""


class LedgerRuleError(ProtocolError):
    """An entry that the ledger's rules do not allow: the message says which rule."""


class SpecError(CairnError):
    """A run spec that is not valid: the message names the field and what to write there."""


class IdentityError(CairnError):
    """A key file that cannot be made, read or trusted."""


def os_reason(e: OSError) -> str:
    """Return the system's own words for its error, as the end of a sentence: "no space left on device"."""
    return (e.strerror or str(e)).lower()
