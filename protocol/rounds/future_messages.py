"""Messages of a round that has not begun here, because we still apply the previous one: kept, then replayed."""

from __future__ import annotations

from protocol.ids import PeerKey
from protocol.messages import RoundRecord, ShardAttestation, Signed, UpdateHeader, Vote

RoundMessage = Signed[UpdateHeader] | Signed[RoundRecord] | Signed[Vote] | Signed[ShardAttestation]

MAX_ROUNDS_AHEAD = 4
"""Rounds ahead of our own from which messages are kept."""

PER_AUTHOR = 6
ATTESTATIONS_PER_AUTHOR = 12
"""Attestations of shards, counted apart from the rest: they never push out a header or a vote."""

MAX_BYTES = 32 * 1024 * 1024
MAX_STRANGER_BYTES = 8 * 1024 * 1024
"""Size of all messages above which nothing of strangers is kept."""


class FutureMessages:
    """The messages that wait for their round: bounded per author, in authors and in bytes.

    A message that does not fit is dropped: it will be repeated.
    """

    def __init__(self, max_authors: int):
        self._max_authors = max_authors
        self._kept: dict[PeerKey, list[RoundMessage]] = {}
        self._strangers: dict[PeerKey, None] = {}
        """Authors that make room for others."""

        self._bytes = 0

    def grow(self, max_authors: int) -> None:
        self._max_authors = max(self._max_authors, max_authors)

    def keep(self, message: RoundMessage, *, trusted: bool) -> None:
        """Keep a message for later if there is room. `trusted`: its author is a member, or the chain knows its work.

        A stranger's header displaces a stranger without one: its author is admitted, and other keys cost nothing.
        """
        mine = self._kept.get(message.author)
        if mine is None:
            displaces = trusted or isinstance(message.body, UpdateHeader)
            if len(self._kept) >= self._max_authors and not (displaces and self._drop_a_stranger(any_=trusted)):
                return
            mine = self._kept[message.author] = []
        if trusted:
            self._strangers.pop(message.author, None)
        else:
            self._strangers[message.author] = None
        room = MAX_BYTES if trusted else MAX_STRANGER_BYTES
        if any(m.digest == message.digest for m in mine) or self._bytes + len(message.encoded) > room:
            return
        attests = isinstance(message.body, ShardAttestation)
        alike = [m for m in mine if isinstance(m.body, ShardAttestation) == attests]
        if len(alike) >= (ATTESTATIONS_PER_AUTHOR if attests else PER_AUTHOR):
            mine.remove(alike[0])
            self._bytes -= len(alike[0].encoded)
        mine.append(message)
        self._bytes += len(message.encoded)

    def _drop_a_stranger(self, *, any_: bool) -> bool:
        author = next((a for a in self._strangers if any_ or not self._has_header(a)), None)
        if author is None:
            return False
        del self._strangers[author]
        self._bytes -= sum(len(m.encoded) for m in self._kept.pop(author, ()))
        return True

    def _has_header(self, author: PeerKey) -> bool:
        return any(isinstance(m.body, UpdateHeader) for m in self._kept.get(author, ()))

    def pop(self, number: int) -> list[RoundMessage]:
        """Return the messages of round `number`, headers first, attestations last; forget those of earlier rounds."""
        now: list[RoundMessage] = []
        for author, messages in list(self._kept.items()):
            now += [m for m in messages if m.body.round == number]
            later = [m for m in messages if m.body.round > number]
            if later:
                self._kept[author] = later
            else:
                del self._kept[author]
        self._strangers = {author: None for author in self._strangers if author in self._kept}
        self._bytes = sum(len(m.encoded) for messages in self._kept.values() for m in messages)
        order = {UpdateHeader: 0, RoundRecord: 1, Vote: 2, ShardAttestation: 3}
        return sorted(now, key=lambda m: order[type(m.body)])

    def sizes(self) -> dict[str, tuple[int, int]]:
        count = sum(len(m) for m in self._kept.values())
        top = self._max_authors * (PER_AUTHOR + ATTESTATIONS_PER_AUTHOR)
        return {"future messages": (count, top), "future bytes": (self._bytes, MAX_BYTES)}
