"""Which blobs are held, asked for, or known to be bad; when to ask again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate, RoundRecord, Signed, UpdateHeader
from protocol.rounds.actions import Action, DropBlob, FetchBlob, FetchPart


@dataclass(frozen=True, slots=True)
class PartOf:
    """A part of the mean of a record's updates."""

    record: Signed[RoundRecord]
    index: int


Source = Signed[UpdateHeader] | PartOf
"""What a blob is: somebody's update, or a part."""


def contents(certificate: Certificate) -> dict[Digest, Source]:
    """The blobs that a certificate's record is applied with."""
    record = certificate.record
    if certificate.parts:
        return {blob: PartOf(record, i) for i, blob in enumerate(certificate.parts)}
    return {u.body.blob: u for u in record.body.updates}


@dataclass(slots=True)
class _Want:
    asked: bool
    tries: int
    retry: float


class Blobs:
    """Bounded: what is held or bad is forgotten oldest first; asked for again, it is found in the store."""

    def __init__(self, bound: int, retry_seconds: float):
        self._bound = bound
        self._retry = retry_seconds
        self._held: OrderedDict[Digest, None] = OrderedDict()
        self._bad: OrderedDict[Digest, None] = OrderedDict()
        self._wanted: dict[Digest, _Want] = {}
        self._waiting: set[Digest] = set()
        """Of these, those to be asked for again later: few, and looked at in every step."""

    def grow(self, bound: int) -> None:
        """The owner lets more members in: with room for fewer than a round has, it would never be held whole."""
        self._bound = max(self._bound, bound)

    def holds(self, blob: Digest) -> bool:
        return blob in self._held

    def is_bad(self, blob: Digest) -> bool:
        return blob in self._bad

    def hold(self, blob: Digest) -> None:
        self._wanted.pop(blob, None)
        self._held[blob] = None
        self._held.move_to_end(blob)
        while len(self._held) > self._bound:
            self._held.popitem(last=False)

    def condemn(self, blob: Digest) -> None:
        self._wanted.pop(blob, None)
        self._held.pop(blob, None)
        self._bad[blob] = None
        while len(self._bad) > self._bound:
            self._bad.popitem(last=False)

    def missing(self, blob: Digest, now: float) -> None:
        """Nobody gave it: ask again later, twice as late each time."""
        want = self._wanted.get(blob)
        if want is not None:
            want.asked = False
            self._waiting.add(blob)
            want.retry = now + self._retry * 2 ** min(want.tries, 4)
            want.tries += 1

    def ask_again(self, blobs: Iterable[Digest], now: float) -> None:
        """Whoever drives us was told to stop with these: when they are still needed, they are asked for anew."""
        for blob in blobs:
            if (want := self._wanted.get(blob)) is not None:
                want.asked = False
                self._waiting.add(blob)
                want.retry = now

    def forget(self, blobs: Iterable[Digest]) -> list[Action]:
        """Nobody needs these any more."""
        actions: list[Action] = []
        for blob in blobs:
            if blob in self._held or blob in self._wanted:
                self._held.pop(blob, None)
                self._wanted.pop(blob, None)
                actions.append(DropBlob(blob))
        return actions

    def want(
        self, needed: dict[Digest, Source], holders: Callable[[Digest, Source], tuple[PeerKey, ...]], now: float
    ) -> list[Action]:
        """Ask for what is needed and not held; stop asking for what is not needed any more."""
        actions: list[Action] = []
        self._waiting &= self._wanted.keys()
        for blob in [b for b in self._wanted if b not in needed]:
            del self._wanted[blob]
            actions.append(DropBlob(blob))
        for blob, source in needed.items():
            if blob in self._held or blob in self._bad:
                continue
            want = self._wanted.get(blob)
            if want is None:
                if len(self._wanted) >= self._bound:
                    break
                want = self._wanted[blob] = _Want(False, 0, now)
            if not want.asked and want.retry <= now:
                want.asked = True
                self._waiting.discard(blob)
                if isinstance(source, PartOf):
                    actions.append(FetchPart(blob, source.record, source.index, holders(blob, source)))
                else:
                    actions.append(FetchBlob(blob, source.body.blob_size, source.author, holders(blob, source)))
        return actions

    def next_retry(self) -> float | None:
        """When the next blob is asked for again."""
        return min((self._wanted[blob].retry for blob in self._waiting if blob in self._wanted), default=None)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """What is held, and its bound."""
        return {
            "blobs held": (len(self._held), self._bound),
            "blobs bad": (len(self._bad), self._bound),
            "blobs wanted": (len(self._wanted), self._bound),
        }
