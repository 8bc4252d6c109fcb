"""A record whose mean is reduced, and what its committees say of each part: data and pure rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from protocol.ids import Digest, PeerKey
from protocol.messages import ShardAttestation, Signed


class Slate:
    """The words on the parts of one record's mean. The first word of each committee member on each part counts.

    A part is agreed on when more than half of its committee name one digest. Bounded by the committees' seats.
    """

    __slots__ = ("committees", "words", "parts", "open", "hopeless")

    def __init__(self, committees: tuple[tuple[PeerKey, ...], ...]):
        self.committees = committees
        self.words: tuple[dict[PeerKey, Signed[ShardAttestation]], ...] = tuple({} for _ in committees)
        self.parts: list[Digest | None] = [None] * len(committees)
        """The digest of each part that is agreed on."""
        self.open = len(committees)
        """Parts that are not agreed on."""
        self.hopeless: int | None = None
        """A part that its committee cannot agree on any more."""

    def seats(self, author: PeerKey, part: int) -> bool:
        """Whether the author is in the part's committee."""
        return part < len(self.committees) and author in self.committees[part]

    def duties(self, author: PeerKey) -> list[int]:
        """Parts on which the author has a seat and has said nothing."""
        return [i for i, seated in enumerate(self.committees) if author in seated and author not in self.words[i]]

    def hear(self, word: Signed[ShardAttestation]) -> bool:
        """Take the first word of a member on a part. True when the part is agreed on by it."""
        part = word.body.part
        seated, said = self.committees[part], self.words[part]
        said[word.author] = word
        if self.parts[part] is not None:
            return False
        counts = Counter(w.body.blob for w in said.values() if w.body.blob is not None)
        blob, most = counts.most_common(1)[0] if counts else (None, 0)
        if 2 * most > len(seated):
            self.parts[part] = blob
            self.open -= 1
            return True
        if 2 * (most + len(seated) - len(said)) <= len(seated):
            self.hopeless = part
        return False

    def lacking(self, part: int) -> set[PeerKey]:
        """Authors whose updates more than half of a part's committee cannot get, or use."""
        counts = Counter(author for w in self.words[part].values() for author in w.body.lacking)
        return {author for author, count in counts.items() if 2 * count > len(self.committees[part])}

    def lacking_to(self, member: PeerKey) -> set[PeerKey]:
        """Authors whose updates one member cannot get, by its own words."""
        return {author for said in self.words if member in said for author in said[member].body.lacking}

    def silent(self) -> set[PeerKey]:
        """Members who said nothing on a part that is not agreed on."""
        found: set[PeerKey] = set()
        for seated, said, part in zip(self.committees, self.words, self.parts, strict=True):
            if part is None:
                found |= {author for author in seated if author not in said}
        return found

    def signers(self, part: int, blob: Digest) -> tuple[PeerKey, ...]:
        """Who has signed this digest of a part, by ascending key."""
        return tuple(a for a in self.committees[part] if a in self.words[part] and self._names(a, part, blob))

    def _names(self, author: PeerKey, part: int, blob: Digest) -> bool:
        return self.words[part][author].body.blob == blob

    def said(self) -> Iterator[Signed[ShardAttestation]]:
        """Every word that counts, part by part."""
        for words in self.words:
            yield from words.values()
