"""The fate of our own newest update, for people: accepted or not, and why as far as this peer can tell. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import PeerKey, Round
from protocol.messages import Certificate
from protocol.rounds.round_state import RoundState


@dataclass(frozen=True, slots=True)
class UpdateFate:
    """The fate of an update. `accepted` is None while its round is undecided; `reason` says why it was not accepted."""

    round: Round
    accepted: bool | None = None
    reason: str = ""


def fate_of(certificate: Certificate, me: PeerKey, open_round: RoundState | None) -> UpdateFate:
    """Return the fate of our update of the round that a certificate decides, once it was announced.

    `open_round` is what we saw of a round. It gives the reason if it is the same one.
    """
    body = certificate.record.body
    if me in body.contributors:
        return UpdateFate(body.round, True)
    reason = "the others decided the round without it"
    if open_round is not None and open_round.parent == body.parent and open_round.announced_at is not None:
        proposal = open_round.proposals.get(certificate.record.digest)
        if proposal is not None:
            early = proposal.seen - open_round.announced_at
            if early < 0:
                reason = f"announced {-early:.1f} s after the record was proposed"
            else:
                reason = f"too few had fetched it when the record was proposed, {early:.1f} s after it was announced"
    return UpdateFate(body.round, False, reason)
