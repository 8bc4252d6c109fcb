"""Why a peer's work is not in a record, from the coordinator's observations. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.swarm import ReceivedHeartbeat
from protocol.ids import PeerKey
from protocol.ledger.credits import RoundCredits

_PRESENT = ("training", "exchanging", "joining", "syncing")


@dataclass(frozen=True, slots=True)
class NonParticipation:
    """A peer that is not in a round; `reason` is one of REASONS, `message` says it with its numbers."""

    peer: PeerKey
    reason: str
    message: str


REASONS = frozenset((
    "late", "not fetched", "silent", "left", "syncing", "behind", "other branch", "not received", "no window",
    "no announcement", "convicted",
))  # fmt: skip


CONVICTED = "convicted by this record: an earlier update was not trained as it claims"


def non_participants(
    credits: RoundCredits,
    inside: frozenset[PeerKey],
    before: frozenset[PeerKey],
    announced: Mapping[PeerKey, float],
    proposed: float | None,
    members: Mapping[PeerKey, ReceivedHeartbeat],
    member_seconds: float,
) -> list[NonParticipation]:
    """Return every peer that could have been in a round and is not, those that announced first.

    `inside` are the contributors of the round, `before` those of the round before it: a peer that fell silent since is
    reported once. `announced` says when updates for this round were received, `proposed` when the record was, None if
    that was not observed (unix seconds).
    """
    guilty = set(credits.convicted)
    found = [NonParticipation(peer, "convicted", CONVICTED) for peer in sorted(guilty)]
    found += [
        NonParticipation(peer, *_of_update(at, proposed))
        for peer, at in sorted(announced.items())
        if peer not in inside and peer not in guilty
    ]
    for peer in sorted(members.keys() | before):
        if peer in inside or peer in announced or peer in guilty:
            continue
        why = _of_peer(members.get(peer), credits, peer in before, member_seconds)
        if why is not None:
            found.append(NonParticipation(peer, *why))
    return found


def _of_update(at: float, proposed: float | None) -> tuple[str, str]:
    if proposed is not None and at > proposed:
        return "late", f"announced {at - proposed:.1f} s after the record was proposed"
    return "not fetched", "announced in time; the others could not fetch or use its update before they went on"


def _of_peer(
    h: ReceivedHeartbeat | None, credits: RoundCredits, missed: bool, member_seconds: float
) -> tuple[str, str] | None:
    if h is None:
        return ("left", "left, or fell silent, after the round before")
    beat = h.heartbeat
    if beat.phase == "leaving":
        return ("left", "left") if missed else None
    if h.seconds_since > member_seconds:
        return ("silent", f"nothing was received from it for {h.seconds_since:.0f} s") if missed else None
    if beat.phase not in _PRESENT:
        return None
    if beat.phase in ("joining", "syncing"):
        return "syncing", "was fetching the state of the run"
    if beat.round < credits.round:
        back = credits.round - beat.round
        return "behind", f"was {back} round{'s' * (back != 1)} behind"
    if beat.round == credits.round:
        if beat.head != credits.parent:
            return "other branch", "was on another branch of the chain"
        if beat.phase == "exchanging":
            return "not received", "says that it announced; the announcement did not come here"
        if not beat.windows:
            return "no window", "had no window done yet"
        return "no announcement", f"had {beat.windows} windows done, and did not announce before the others went on"
    return "no announcement", "did not announce before the others went on"
