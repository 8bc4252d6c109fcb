"""Stake: the work of a peer that was accepted long enough ago to have been audited. It decides where claims cannot.

Keys cost nothing, and claims cost nothing. Stake costs time: a newcomer with the largest claims would outweigh
everybody in a few rounds if fresh claims counted, and audits need that long. A pure function of a branch of the chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from protocol.ids import PeerKey, Round
from protocol.ledger.verdicts import VerdictWalk
from protocol.record_node import RecordNode

STAKE_ROUNDS = 64
"""Rounds in which accepted windows are stake, after the hold. Then they count no more: only recent work decides."""


UNSEEN_ROUNDS = 8
"""Newest rounds whose lists of contributors draw no audits. With a third of the stake, one coalition has all of their
turns and those of the two next rounds in 1 of 59,000 rounds."""


@dataclass(frozen=True, slots=True)
class StakeRule:
    """The run's rule: the hold in rounds (spec: `credit.hold_rounds`), and the founders' stake."""

    hold_rounds: int = 12
    founders: tuple[PeerKey, ...] = ()
    founder_windows: int = 0
    """Stake of each founder at the genesis. It counts as if accepted in a round just before it, without a hold."""

    def stakes(self, node: RecordNode) -> dict[PeerKey, int]:
        """Return the stake, in windows, of every key that has some in the round after a record.

        Those are the weighed windows of the STAKE_ROUNDS rounds that end `hold_rounds` before it, on its branch.
        Windows that a verdict voids do not count. Nor do windows from before a decision that cost the key its stake.
        Banned keys have none.
        """
        newest = node.height - self.hold_rounds
        oldest = newest - STAKE_ROUNDS
        found: dict[PeerKey, int] = {}
        penalties = node.penalties
        if oldest < 0:
            honest = [key for key in self.founders if not penalties.of(key).stakeless_until]
            found.update((key, self.founder_windows) for key in honest if self.founder_windows)
        verdicts = VerdictWalk(self.hold_rounds)
        for above in node.branch():
            if above.height <= oldest or above.certificate is None:
                break
            if above.height <= newest:
                for key, windows in above.weighed.items():
                    round_ = Round(above.height - 1)
                    if penalties.is_stake(key, round_) and not verdicts.is_voided(above.digest, round_, key):
                        found[key] = found.get(key, 0) + windows
            verdicts.pass_record(above.certificate.record.body)
        for key in node.directives.banned:
            found.pop(key, None)
        return found

    def present(self, node: RecordNode, *, drawn: bool = False) -> set[PeerKey]:
        """Return the keys that contributed in the `hold_rounds` rounds (at least one) that end with a record.

        Founders count as contributors just before the first round. For keys to be `drawn` as auditors and jurors the
        newest rounds do not count: UNSEEN_ROUNDS, or half of the hold. Authors of the newest records know who proposes
        next, and with which seed. Their lists would let them choose among draws.
        """
        hold = max(1, self.hold_rounds)
        unseen = min(UNSEEN_ROUNDS, hold // 2) if drawn else 0
        found = {key for above in islice(node.branch(), unseen, hold) for key in above.weighed}
        if node.height < hold:
            found.update(self.founders)
        return found


def is_majority(stakes: Mapping[PeerKey, int], signers: set[PeerKey], others: set[PeerKey]) -> bool | None:
    """Return whether the signers have more stake than the others; None while nobody of either has any.

    A key in both counts as a signer.
    """
    signed = sum(stakes.get(key, 0) for key in signers)
    against = sum(stakes.get(key, 0) for key in others - signers)
    return signed > against if signed or against else None
