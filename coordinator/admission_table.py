"""The admissions that the coordinator remembers, within bounds that nobody can use up. Pure: the time is an argument.

Keys cost nothing, so a table of keys fills. Here a key that is never seen in the swarm is forgotten after an hour. So
is one without work that is not seen in the hour after a restart. An address may add only a few keys a day. A full table
displaces its oldest idle key, and if there is none, a key whose work is old. A forgotten key has no name on the run
page until its next renewal; the admission that it holds stays valid, and so do its credits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coordinator.errors import TooManyError
from coordinator.ledger import AdmissionRow
from coordinator.limits import NetworkLimit, Rate, is_loopback
from coordinator.names import ChosenNames
from protocol.ids import PeerKey

MAX_ADMISSIONS = 100_000
UNSEEN_SECONDS = 3600.0
"""A key that was admitted this long ago and never seen in the swarm is forgotten."""

ABSENT_SECONDS = 30 * 86_400.0
"""A key without accepted work that was seen this long ago is forgotten."""

MAX_LOOKED_AT = 1000
"""Keys with accepted work that one newcomer's request looks at, to displace one."""

NEW_KEYS = 64
"""New keys that one IPv4 address or IPv6 /64 adds at once, and then in a day; a /56 and a /48 add more."""


class AdmissionTable:
    """The newest admission of each remembered peer.

    `has_credits` returns whether the chain has work of a peer that is not voided: time alone never removes such a peer.
    `has_recent_work` returns whether some of it is of the newest rounds: such a peer is never displaced.
    """

    def __init__(
        self, has_credits: Callable[[PeerKey], bool], has_recent_work: Callable[[PeerKey], bool], *,
        limit: int = MAX_ADMISSIONS,
    ):  # fmt: skip
        self._has_credits = has_credits
        self._has_recent_work = has_recent_work
        self._limit = limit
        self._rows: dict[PeerKey, AdmissionRow] = {}
        self.names = ChosenNames()
        self._new_keys = NetworkLimit(Rate(NEW_KEYS / 86_400, NEW_KEYS), callers=limit)

        # Each peer is in exactly one of these.
        self._unseen: dict[PeerKey, float] = {}
        """Peers not seen in the swarm since they were admitted or loaded, and when that was; the oldest first."""
        self._seen: dict[PeerKey, float] = {}
        """When peers were last seen in the swarm; the oldest first."""
        self._kept_for_credits: dict[PeerKey, None] = {}
        """Peers without a time limit until they are seen again; the first found first."""

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, peer: object) -> bool:
        return peer in self._rows

    def get(self, peer: PeerKey) -> AdmissionRow | None:
        return self._rows.get(peer)

    def load(self, rows: Iterable[AdmissionRow], now: float) -> None:
        """Take over stored admissions: each peer without credits has an hour from now to be seen."""
        for row in sorted(rows, key=lambda row: row.not_before):
            self._put(row)
            self._unseen[row.peer] = now

    def add(self, row: AdmissionRow, caller: str, now: float) -> list[AdmissionRow]:
        """Add or renew an admission; return those that were displaced for it.

        Raises TooManyError if `caller` (`limits.caller_of`) has added its share of new keys, or if all places are taken
        by peers that work.
        """
        if row.peer in self._rows:
            self._put(row)
            return []
        local = is_loopback(caller)  # the owner's own peers, or everybody behind a proxy
        if not local and (wait := self._new_keys.wait(caller, now)):
            raise TooManyError(
                f"this run admits {NEW_KEYS} new keys a day from one address, and your network has used its share: try "
                f"again in {max(1, round(wait / 60))} min, or start a peer that was admitted before (--home)"
            )
        displaced = self._displace() if len(self._rows) >= self._limit else []
        if not local:
            self._new_keys.count(caller, now)
        self._put(row)
        self._unseen[row.peer] = now
        return displaced

    def take_back(
        self,
        row: AdmissionRow,
        before: AdmissionRow | None,
        displaced: Iterable[AdmissionRow],
        caller: str,
        now: float,
    ) -> None:
        """Undo the last `add` of a peer, which could not be stored; `before` is what `get` returned before it.

        Displaced peers have an hour from now to be seen, as in `load`.
        """
        if self._rows.get(row.peer) is not row:
            return  # displaced meanwhile
        if before is not None:
            self._put(before)
            return
        self._forget(row.peer)
        if not is_loopback(caller):
            self._new_keys.give_back(caller)
        for old in displaced:
            if old.peer not in self._rows:
                self._put(old)
                self._unseen[old.peer] = now

    def note_seen(self, peers: Iterable[PeerKey], now: float) -> None:
        """Note that these peers are in the swarm."""
        for peer in peers:
            if peer in self._rows:
                for order in (self._unseen, self._seen, self._kept_for_credits):
                    order.pop(peer, None)
                self._seen[peer] = now

    def forget_absent(self, now: float) -> list[PeerKey]:
        """Forget the peers that were not seen for too long and have no credits; return them."""
        gone: list[PeerKey] = []
        for order, seconds in ((self._unseen, UNSEEN_SECONDS), (self._seen, ABSENT_SECONDS)):
            while order and now - order[peer := next(iter(order))] > seconds:
                gone += [row.peer for row in self._forget_unless_credited(peer)]
        return gone

    def _displace(self) -> list[AdmissionRow]:
        """Forget a peer without credits: the oldest never seen, else the one seen longest ago.

        If all have credits, forget one of which no work is of the newest rounds.
        """
        for order in (self._unseen, self._seen):
            while order:
                if gone := self._forget_unless_credited(next(iter(order))):
                    return gone
        for _ in range(min(len(self._kept_for_credits), MAX_LOOKED_AT)):
            peer = next(iter(self._kept_for_credits))
            if not self._has_recent_work(peer):
                return [self._forget(peer)]
            self._kept_for_credits[peer] = self._kept_for_credits.pop(peer)  # to the end
        raise TooManyError(
            f"this run remembers at most {self._limit} peers, and all work: try again in a few hours, or start one of "
            "these again (--home)"
        )

    def _forget_unless_credited(self, peer: PeerKey) -> list[AdmissionRow]:
        """Forget a peer and return it, unless it has credits."""
        if not self._has_credits(peer):
            return [self._forget(peer)]
        self._unseen.pop(peer, None)
        self._seen.pop(peer, None)
        self._kept_for_credits[peer] = None
        return []

    def _forget(self, peer: PeerKey) -> AdmissionRow:
        for order in (self._unseen, self._seen, self._kept_for_credits):
            order.pop(peer, None)
        self.names.set(peer, "")
        return self._rows.pop(peer)

    def _put(self, row: AdmissionRow) -> None:
        self._rows[row.peer] = row
        self.names.set(row.peer, row.name)
