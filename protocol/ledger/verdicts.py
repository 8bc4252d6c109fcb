"""The credits that verdicts void on a branch of the chain, for a walk from a record down to older ones."""

from __future__ import annotations

from protocol.ids import Digest, PeerKey, Round
from protocol.messages import RoundRecord


class VerdictWalk:
    """The verdicts that newer records carry. Call `pass_record` with each record from the newest on, then ask.

    A verdict counts if a record within `hold_rounds` rounds after the named one carries it, on this branch. Without a
    rollback `CreditFold` decides the same. After one it differs, because it counts final records on all branches, since
    credit outlives a rollback. So a verdict can be too late to void the credit, and still take the stake.
    """

    def __init__(self, hold_rounds: int):
        self._hold_rounds = hold_rounds
        self._carried: dict[tuple[Digest, PeerKey], Round] = {}

    def pass_record(self, record: RoundRecord) -> None:
        """Take in the verdicts of a record; an older one replaces a newer one, since the first that came counts."""
        if record.directive is not None:
            for v in record.directive.body.verdicts:
                self._carried[v.record, v.peer] = record.round

    def is_voided(self, record: Digest, round_: Round, peer: PeerKey) -> bool:
        """Return whether what a peer contributed to a record (certificate digest) of a round is void."""
        carried = self._carried.get((record, peer))
        return carried is not None and carried - round_ <= self._hold_rounds
