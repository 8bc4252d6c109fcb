"""The chain: a bounded tree of certified records since the genesis, and the fork choice over it.

A record of round r names its parent, the record of round r - 1 by its certificate's digest (which binds what is
applied: the parts, where there are any); the parent of round 0 is `genesis_digest(run)`. The
weight of a record is the number of windows accepted from the genesis up to it. The head is the heaviest record
(ties: the smaller digest) among those that descend from the newest record that the owner signed as final.

Whoever adds certificates must have opened them with `messages.Opener`: signatures, admissions and the number of votes
are checked there. Here is checked what depends on the place in the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from protocol.errors import ChainError, RivalOfFinal, UnknownParent
from protocol.exchange import GATHER, Exchange
from protocol.ids import Digest, PeerKey, Round, RunId, sha256
from protocol.messages import Certificate, Final, Signed

FLATTEN = 32
"""Every so many rounds a record keeps a whole map of next windows; those between keep only what they changed."""


def genesis_digest(run: RunId) -> Digest:
    """The parent of round 0: a fixed function of the run."""
    return Digest(sha256(b"cairn/v1/genesis", run))


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """What a certificate may hold, and how much of the tree is kept in memory."""

    max_update_windows: int
    max_members: int
    max_records: int = 4096
    max_bytes: int = 256 * 1024 * 1024
    max_side: int = 256
    """Records that are not on the head's path: the lightest branches go first."""

    keep_at_least: int = 64
    """Records on the head's path that no limit drops."""

    exchange: Exchange = GATHER


@dataclass(frozen=True, slots=True)
class Anchor:
    """A place to start a tree from when what came before is not kept: a record, or the genesis."""

    record: Digest
    height: int
    weight: int
    state: Digest | None
    """State after the record, where known: children must name it as their base."""

    next_windows: Mapping[PeerKey, int]
    contributors: int = 0
    """Of the record; 0 for the genesis. How the next round is exchanged may follow from it."""


class _Link:
    """One record in the tree."""

    __slots__ = (
        "digest", "parent", "height", "weight", "certificate", "contributors", "ends", "flat", "children", "size",
    )  # fmt: skip

    def __init__(self, digest: Digest, parent: _Link | None, height: int, weight: int, certificate: Certificate | None):
        self.digest = digest
        self.parent = parent
        self.height = height
        """The round that follows: 0 for the genesis, r + 1 for a record of round r."""
        self.weight = weight
        self.certificate = certificate
        self.contributors = 0 if certificate is None else len(certificate.record.body.updates)
        self.ends: dict[PeerKey, int] = {}
        self.flat = False
        self.children: list[_Link] = []
        self.size = 0


class Chain:
    """The tree, its head, and what is final. Every method is cheap in the number of peers and of records.

    >>> chain = Chain(run, genesis_state, ChainLimits(max_update_windows=64, max_members=256))
    """

    def __init__(self, run: RunId, genesis_state: Digest, limits: ChainLimits, *, anchor: Anchor | None = None):
        self.run = run
        self.genesis = genesis_digest(run)
        self.limits = limits
        anchor = anchor or Anchor(self.genesis, 0, 0, genesis_state, {})
        self._root_state = anchor.state
        self._root = _Link(anchor.record, None, anchor.height, anchor.weight, None)
        self._root.contributors = anchor.contributors
        self._root.ends = dict(anchor.next_windows)
        self._root.flat = True
        self._links: dict[Digest, _Link] = {anchor.record: self._root}
        self._head = self._root
        self._main: dict[int, _Link] = {self._root.height: self._root}
        self._bytes = 0
        self._aside: set[Digest] = set()
        self._condemned: OrderedDict[Digest, None] = OrderedDict()
        self._final: Signed[Final] | None = None
        self._awaited: Signed[Final] | None = None

    # -- reading ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Records in memory, without the root."""
        return len(self._links) - 1

    def __contains__(self, record: object) -> bool:
        return record in self._links

    @property
    def head(self) -> Digest:
        """The record that fork choice prefers; the root when there is none."""
        return self._head.digest

    @property
    def root(self) -> Digest:
        """The oldest record in memory (its certificate is not): the genesis until limits drop what is old."""
        return self._root.digest

    @property
    def final(self) -> Signed[Final] | None:
        """The newest final whose record is in the tree (or was, when limits have passed it)."""
        return self._final

    @property
    def awaited(self) -> Signed[Final] | None:
        """A newer final whose record is not in the tree yet: it must be asked for, however light its branch is."""
        return self._awaited

    def height(self, record: Digest) -> Round:
        """The round that follows a record: 0 after the genesis. Raises ChainError when it is not in the tree."""
        return Round(self._link(record).height)

    def weight(self, record: Digest) -> int:
        """Windows accepted from the genesis up to a record."""
        return self._link(record).weight

    def certificate(self, record: Digest) -> Certificate:
        """Raises ChainError for the root and for what is not in the tree."""
        certificate = self._link(record).certificate
        if certificate is None:
            raise ChainError(f"record {record.short} is where this tree begins: its certificate is not in memory")
        return certificate

    def parent(self, record: Digest) -> Digest:
        """Raises ChainError for the root."""
        return self.certificate(record).record.body.parent

    def next_window(self, author: PeerKey, at: Digest) -> int:
        """The end of the author's windows that were accepted up to a record: what comes next must not start before."""
        link: _Link | None = self._link(at)
        while link is not None:
            end = link.ends.get(author)
            if end is not None:
                return end
            if link.flat:
                return 0
            link = link.parent
        return 0

    def reduces(self, parent: Digest) -> bool:
        """Whether the round after a record is reduced, not gathered (see `exchange`)."""
        return self.limits.exchange.reduces(self._link(parent).contributors)

    def is_ancestor(self, ancestor: Digest, record: Digest) -> bool:
        """Whether `ancestor` is the record or comes before it; False when either is not in the tree."""
        a, b = self._links.get(ancestor), self._links.get(record)
        return a is not None and b is not None and self._descends(b, a)

    def common_ancestor(self, a: Digest, b: Digest) -> Digest:
        """The newest record that both descend from."""
        x, y = self._link(a), self._link(b)
        while x is not y:
            if x.height >= y.height:
                x = self._up(x)
            else:
                y = self._up(y)
        return x.digest

    def path(self, after: Digest, to: Digest) -> tuple[Certificate, ...]:
        """Certificates after one record up to another that descends from it, oldest first. Raises ChainError."""
        stop, link = self._link(after), self._link(to)
        found: list[Certificate] = []
        while link is not stop and link.height > stop.height:
            if link.certificate is None:
                break
            found.append(link.certificate)
            link = self._up(link)
        if link is not stop:
            raise ChainError(f"record {to.short} does not descend from {after.short}")
        return tuple(reversed(found))

    def ancestors(self, record: Digest) -> Iterator[Digest]:
        """The record, its parent, and so on to the root."""
        link: _Link | None = self._link(record)
        while link is not None:
            yield link.digest
            link = link.parent

    def ancestor_at(self, record: Digest, height: int) -> Digest | None:
        """The record on the way to `record` after which round `height` comes; None when it is not in the tree."""
        link = self._links.get(record)
        if link is None or not self._root.height <= height <= link.height:
            return None
        if self._main.get(link.height) is link:
            return self._main[height].digest
        while link.height > height:
            link = self._up(link)
        return link.digest

    def on_main(self, height: int) -> Digest | None:
        """The record on the head's path after which round `height` comes."""
        link = self._main.get(height)
        return None if link is None else link.digest

    def locator(self) -> tuple[Digest, ...]:
        """Digests on the head's path, newest first: ten in a row, then gaps that double, the root last."""
        found: list[Digest] = []
        height, gap = self._head.height, 1
        while height > self._root.height:
            found.append(self._main[height].digest)
            if len(found) >= 10:
                gap *= 2
            height -= gap
        found.append(self._root.digest)
        return tuple(found)

    def after(
        self, have: Iterable[Digest], *, count: int = 64, size: int = 2 * 1024 * 1024
    ) -> tuple[tuple[Certificate, ...], bool]:
        """What a `locator` lacks of the head's path: certificates, oldest first, and whether there are more.

        At most `count` of them, and `size` bytes when there is more than one. Raises UnknownParent when the asker's
        newest known record is older than this tree: older certificates are on disk.
        """
        start = None
        for digest in have:
            link = self._links.get(digest)
            if link is not None:
                while self._main.get(link.height) is not link:
                    link = self._up(link)
                start = link
                break
        if start is None:
            if self._root.digest != self.genesis:
                raise UnknownParent("the records asked for are older than what is kept in memory")
            start = self._root
        found: list[Certificate] = []
        total = 0
        height = start.height + 1
        while (link := self._main.get(height)) is not None and len(found) < count:
            total += link.size
            if (found and total > size) or link.certificate is None:
                break
            found.append(link.certificate)
            height += 1
        return tuple(found), height in self._main

    def anchor(self, record: Digest, state: Digest | None) -> Anchor:
        """What a tree can be started from later without the records before this one."""
        link = self._link(record)
        return Anchor(record, link.height, link.weight, state, self._ends_at(link), link.contributors)

    # -- writing ---------------------------------------------------------------------------------------------

    def add(self, certificate: Certificate) -> bool:
        """Put an opened certificate in its place. False when its record is here already.

        Raises UnknownParent, or ChainError when it breaks a rule of the chain: its source, or its makers, are at fault.
        """
        record, digest = certificate.record, certificate.digest
        body = record.body
        if digest in self._links:
            return False
        if body.run != self.run:
            raise ChainError(f"record {digest.short} is of another run")
        if digest in self._condemned or body.parent in self._condemned:
            raise ChainError(f"record {digest.short} has, or is built on, an update that broke the codec's rules")
        parent = self._links.get(body.parent)
        if parent is None:
            raise UnknownParent(f"the parent {body.parent.short} of record {digest.short} is not known here")
        final = None if self._final is None else self._links.get(self._final.body.record)
        if final is not None and parent.height < final.height:
            raise RivalOfFinal(f"record {digest.short} is a rival of records that the owner has signed as final")
        if body.round != parent.height:
            raise ChainError(f"record {digest.short}: round {body.round} after round {parent.height - 1}")
        if parent is self._root and self._root_state not in (None, body.base_state):
            raise ChainError(f"record {digest.short} starts from another state than the run's")
        self._check_updates(certificate, parent)
        if (flaw := self.limits.exchange.flaw(certificate, parent.contributors)) is not None:
            raise ChainError(f"record {digest.short}: {flaw}")
        link = _Link(digest, parent, parent.height + 1, parent.weight + body.windows, certificate)
        link.size = len(record.sent) + sum(len(v.sent) for v in certificate.votes) + 32 * len(certificate.parts)
        link.ends = {u.author: u.body.end_window for u in body.updates}
        if link.height % FLATTEN == 0:
            link.ends = self._ends_at(link)
            link.flat = True
        parent.children.append(link)
        self._links[link.digest] = link
        self._bytes += link.size
        if self._awaited is not None and self._awaited.body.record == link.digest:
            awaited, self._awaited = self._awaited, None
            self.add_final(awaited)
        if self._better(link, self._head) and not self._set_aside(link):
            self._move_head(link)
        self._bound()
        return link.digest in self._links

    def add_final(self, final: Signed[Final]) -> bool:
        """Take the owner's final (opened). True when it is newer than what was known.

        A final for a record that is not here yet is remembered, and takes effect when the record comes.
        So is one that contradicts an older final: its record can never come. Raises ChainError when it names a wrong
        round for its record.
        """
        body = final.body
        if self._final is not None and body.round <= self._final.body.round:
            return False
        link = self._links.get(body.record)
        if link is None:
            if self._awaited is None or body.round > self._awaited.body.round:
                self._awaited = final
                return True
            return False
        if link.height != body.round + 1:
            raise ChainError(f"the owner's final names round {body.round} for a record of round {link.height - 1}")
        self._final = final
        if self._awaited is not None and self._awaited.body.round <= body.round:
            self._awaited = None
        # Nothing beside the way to the final can win any more.
        on_way = {link.digest}
        up = link.parent
        while up is not None:
            on_way.add(up.digest)
            for child in list(up.children):
                if child.digest not in on_way:
                    self._drop(child)
            up = up.parent
        self._aside -= on_way
        self._choose()
        self._bound()
        return True

    def set_aside(self, record: Digest) -> None:
        """Leave a record, and what is built on it, out of the fork choice (its blobs cannot be had yet)."""
        self._link(record)
        self._aside.add(record)
        self._choose()

    def take_back(self, record: Digest) -> None:
        """Let a record that was set aside compete again."""
        if record in self._aside:
            self._aside.discard(record)
            self._choose()

    def condemn(self, record: Digest) -> None:
        """Drop a record that lists an update which breaks the codec's rules, with all that is built on it, for good."""
        self._condemned[record] = None
        while len(self._condemned) > self.limits.max_side:
            self._condemned.popitem(last=False)
        link = self._links.get(record)
        if link is not None and link is not self._root:
            self._drop(link)
            self._choose()

    # -- inside ----------------------------------------------------------------------------------------------

    def _check_updates(self, certificate: Certificate, parent: _Link) -> None:
        record, name = certificate.record, certificate.digest.short
        if len(record.body.updates) > self.limits.max_members:
            raise ChainError(f"record {name} has more contributors than the run's max_members")
        if record.author not in record.body.contributors:
            raise ChainError(f"record {name} is by {record.author.short}, who has no update in it")
        for u in record.body.updates:
            if u.body.windows > self.limits.max_update_windows:
                raise ChainError(f"peer {u.author.short} claims {u.body.windows} windows in one update: too many")
            if u.body.first_window < self.next_window(u.author, parent.digest):
                raise ChainError(f"peer {u.author.short} claims windows from {u.body.first_window} on a second time")

    def _link(self, record: Digest) -> _Link:
        link = self._links.get(record)
        if link is None:
            raise ChainError(f"record {record.short} is not in the tree")
        return link

    def _up(self, link: _Link) -> _Link:
        if link.parent is None:
            raise ChainError("the tree begins after the records that were asked for")
        return link.parent

    def _descends(self, link: _Link, ancestor: _Link) -> bool:
        up: _Link | None = link
        while up is not None and up.height > ancestor.height:
            up = up.parent
        return up is ancestor

    def _ends_at(self, link: _Link) -> dict[PeerKey, int]:
        maps: list[dict[PeerKey, int]] = []
        up: _Link | None = link
        while up is not None:
            maps.append(up.ends)
            if up.flat:
                break
            up = up.parent
        whole: dict[PeerKey, int] = {}
        for ends in reversed(maps):
            whole.update(ends)
        return whole

    def _better(self, a: _Link, b: _Link) -> bool:
        return a.weight > b.weight or (a.weight == b.weight and a.digest < b.digest)

    def _set_aside(self, link: _Link) -> bool:
        if not self._aside:
            return False
        up: _Link | None = link
        while up is not None:
            if up.digest in self._aside:
                return True
            up = up.parent
        return False

    def _choose(self) -> None:
        """Fork choice from the start: used when the tree loses records, or some are set aside."""
        best = self._root
        if self._final is not None:
            best = self._links.get(self._final.body.record, self._root)
        todo = [best]
        while todo:
            link = todo.pop()
            if link.digest in self._aside and link is not best:
                continue
            if self._better(link, best):
                best = link
            todo.extend(link.children)
        self._move_head(best)

    def _move_head(self, link: _Link) -> None:
        for height in range(link.height + 1, self._head.height + 1):
            self._main.pop(height, None)
        self._head = link
        up: _Link | None = link
        while up is not None and self._main.get(up.height) is not up:
            self._main[up.height] = up
            up = up.parent

    def _drop(self, link: _Link) -> int:
        """Forget a record and all that is built on it. The caller sees to the head."""
        if link.parent is not None:
            link.parent.children.remove(link)
        todo, count = [link], 0
        while todo:
            gone = todo.pop()
            todo.extend(gone.children)
            del self._links[gone.digest]
            self._aside.discard(gone.digest)
            self._bytes -= gone.size
            if self._main.get(gone.height) is gone:
                del self._main[gone.height]
            count += 1
        return count

    def _bound(self) -> None:
        limits = self.limits
        length = self._head.height - self._root.height
        while len(self) - length > limits.max_side:
            tips = (x for x in self._links.values() if not x.children and self._main.get(x.height) is not x)
            self._drop(min(tips, key=lambda x: (x.weight, x.digest)))
        while (len(self) > limits.max_records or self._bytes > limits.max_bytes) and length > limits.keep_at_least:
            self._advance_root()
            length -= 1

    def _advance_root(self) -> None:
        new = self._main[self._root.height + 1]
        for child in list(self._root.children):
            if child is not new:
                self._drop(child)
        new.ends = self._ends_at(new)
        new.flat = True
        self._bytes -= new.size
        new.size = 0
        new.parent = None
        new.certificate = None
        del self._links[self._root.digest]
        del self._main[self._root.height]
        self._root = new
        states = {c.certificate.record.body.base_state for c in new.children if c.certificate is not None}
        self._root_state = states.pop() if len(states) == 1 else None
