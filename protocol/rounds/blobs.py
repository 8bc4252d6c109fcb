"""The blobs that are held, requested, or known to be invalid, and the time to request one again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from protocol.bounded import BoundedDict
from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate, RoundRecord, Signed, UpdateHeader
from protocol.rounds.actions import Action, CancelFetch, FetchBlob, FetchShard
from protocol.rounds.deadlines import Deadlines

if TYPE_CHECKING:
    from protocol.rounds.exchange import Exchange
    from protocol.rounds.round_state import RoundState


@dataclass(frozen=True, slots=True)
class UpdateBlob:
    """The blob of somebody's update."""

    kind: ClassVar[str] = "update"
    phrase: ClassVar[str] = "an update"
    header: Signed[UpdateHeader]

    @property
    def round(self) -> int:
        return self.header.body.round

    @property
    def responsible(self) -> PeerKey:
        """The peer that must be able to give the blob."""
        return self.header.author

    def describe(self, record: Digest) -> str:
        """Return a phrase for people, given the record that lists the update."""
        return f"the update of {self.header.author.short} that record {record.short} lists"

    def fetch(self, blob: Digest, holders: tuple[PeerKey, ...]) -> Action:
        return FetchBlob(blob, self.header.author, holders)

    def belongs_to(self, certificate: Certificate) -> bool:
        """Return whether the certificate may list the update: not one on another branch."""
        return self.header.body.parent == certificate.record.body.parent

    def first_holders(self, blob: Digest, exchange: Exchange | None) -> Iterable[PeerKey]:
        """Return the peers to ask before all others: who announced the blob, of whom one is its author."""
        return (self.header.author, *(() if exchange is None else exchange.announcers(blob)))

    def other_holders(self, round_: RoundState) -> Iterable[PeerKey]:
        """Return the peers to ask after those that voted for the certificate."""
        return (*round_.votes, *round_.headers)

    def is_contradicted(self, *, announced: bool, attested: bool) -> bool:
        """Return whether the blob was seen as a shard only: anybody can sign a good update's digest as one."""
        return attested and not announced


@dataclass(frozen=True, slots=True)
class ShardBlob:
    """The blob of one shard of the mean of a record's updates."""

    kind: ClassVar[str] = "shard"
    phrase: ClassVar[str] = "a shard of a mean"
    header: ClassVar[None] = None
    record: Signed[RoundRecord]
    index: int

    @property
    def round(self) -> int:
        return self.record.body.round

    @property
    def responsible(self) -> PeerKey:
        """The proposer of the record answers for its shards."""
        return self.record.author

    def describe(self, record: Digest) -> str:
        """Return a phrase for people, given the record's name on the chain."""
        return f"shard {self.index} of the mean of record {record.short}"

    def fetch(self, blob: Digest, holders: tuple[PeerKey, ...]) -> Action:
        return FetchShard(blob, self.record, self.index, holders)

    def belongs_to(self, certificate: Certificate) -> bool:
        """Return whether the certificate is one of this record."""
        return self.record.digest == certificate.record.digest

    def first_holders(self, blob: Digest, exchange: Exchange | None) -> Iterable[PeerKey]:
        """Return the peers that have signed the digest, or voted for the record."""
        return () if exchange is None else exchange.shard_holders(self.record, self.index, blob)

    def other_holders(self, round_: RoundState) -> Iterable[PeerKey]:
        """Return no other peer: announcing an update does not take its shards."""
        return ()

    def is_contradicted(self, *, announced: bool, attested: bool) -> bool:
        """Return whether the blob was announced as an update: anybody can announce a good shard's digest."""
        return announced


BlobRole = UpdateBlob | ShardBlob
"""The use of a blob in a round: it is somebody's update, or a shard of a record's mean."""


def applied_blobs(certificate: Certificate) -> dict[Digest, BlobRole]:
    """Return the blobs that make the state after a certificate's record: its shards if it has any, else its updates."""
    record = certificate.record
    if certificate.shards:
        return {blob: ShardBlob(record, i) for i, blob in enumerate(certificate.shards)}
    return {u.body.blob: UpdateBlob(u) for u in record.body.updates}


@dataclass(slots=True)
class _Request:
    under_way: bool
    tries: int
    retry: float

    def is_due(self, deadlines: Deadlines) -> bool:
        """Return whether the time of the next try has come."""
        return deadlines.due("blob retry", self.retry)


class BlobTracker:
    """The blobs that one machine holds, has requested, or knows to be invalid.

    Bounded. It is harmless to forget the oldest: the next request is answered from the store.
    """

    def __init__(self, bound: int, retry_seconds: float):
        self._bound = bound
        self._retry = retry_seconds
        self._held: BoundedDict[Digest, PeerKey | None] = BoundedDict(bound)
        """The author that each blob names; None for a shard."""

        self._invalid: BoundedDict[Digest, None] = BoundedDict(bound)
        self._requests: dict[Digest, _Request] = {}
        self._retries: set[Digest] = set()
        """Those of `_requests` that wait for another try: few, and examined in every step."""

    def grow(self, bound: int) -> None:
        """Make room when the owner admits more members: a round must fit in whole."""
        self._bound = self._held.limit = self._invalid.limit = max(self._bound, bound)

    def is_invalid(self, blob: Digest) -> bool:
        return blob in self._invalid

    def holds_as(self, blob: Digest, role: BlobRole) -> bool:
        """Return whether a blob is held in a role."""
        return self.holds_shard(blob) if role.header is None else self.holds_update(role.header)

    def holds_shard(self, blob: Digest) -> bool:
        """Return whether a blob is held that passed every check of a shard."""
        return blob in self._held and self._held[blob] is None

    def holds_update(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether an update is held, and was made by who announced it."""
        return self._held.get(header.body.blob) == header.author

    def is_unusable(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether an update is known to be invalid, or to be another's."""
        blob = header.body.blob
        return blob in self._invalid or (blob in self._held and not self.holds_update(header))

    def hold(self, blob: Digest, author: PeerKey | None) -> None:
        """Note that the store has a blob. `author`: the one that it names."""
        self._requests.pop(blob, None)
        self._held.renew(blob, author)

    def reject(self, blob: Digest) -> None:
        self._requests.pop(blob, None)
        self._held.pop(blob, None)
        self._invalid[blob] = None

    def unavailable(self, blob: Digest, now: float) -> None:
        """Plan another try for a blob that nobody gave, after twice the pause each time."""
        request = self._requests.get(blob)
        if request is not None:
            request.under_way = False
            self._retries.add(blob)
            request.retry = now + self._retry * 2 ** min(request.tries, 4)
            request.tries += 1

    def request_again(self, blobs: Iterable[Digest], now: float) -> None:
        """Request these again if they are still needed: the driver was asked to stop with them."""
        for blob in blobs:
            if (request := self._requests.get(blob)) is not None:
                request.under_way = False
                self._retries.add(blob)
                request.retry = now

    def forget(self, blobs: Iterable[Digest]) -> list[Action]:
        """Return the actions that drop these blobs, which nobody needs any more."""
        actions: list[Action] = []
        for blob in blobs:
            if blob in self._held or blob in self._requests:
                self._held.pop(blob, None)
                self._requests.pop(blob, None)
                actions.append(CancelFetch(blob))
        return actions

    def request(
        self,
        needed: Mapping[Digest, BlobRole],
        holders: Callable[[Digest, BlobRole], tuple[PeerKey, ...]],
        deadlines: Deadlines,
    ) -> list[Action]:
        """Return the actions that request what is needed and not held, and drop requests that are not needed."""
        actions: list[Action] = []
        self._retries &= self._requests.keys()
        for blob in [b for b in self._requests if b not in needed]:
            del self._requests[blob]
            actions.append(CancelFetch(blob))
        for blob, role in needed.items():
            if blob in self._held or blob in self._invalid:
                continue
            request = self._requests.get(blob)
            if request is None:
                if len(self._requests) >= self._bound:
                    break
                request = self._requests[blob] = _Request(False, 0, deadlines.now)
            if not request.under_way and request.is_due(deadlines):
                request.under_way = True
                self._retries.discard(blob)
                actions.append(role.fetch(blob, holders(blob, role)))
        return actions

    def is_retry_due(self, deadlines: Deadlines) -> bool:
        """Return whether some blob is to be requested again now."""
        waiting = [self._requests[blob] for blob in self._retries if blob in self._requests]
        return any([request.is_due(deadlines) for request in waiting])  # a list: each deadline is registered

    def sizes(self) -> dict[str, tuple[int, int]]:
        return {
            "blobs held": (len(self._held), self._bound),
            "blobs invalid": (len(self._invalid), self._bound),
            "blobs requested": (len(self._requests), self._bound),
        }
