"""The chain's tree of records, to be read: its limits, one record in it, where it may start from, the ways in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from protocol.directives import ActiveDirectives
from protocol.errors import ChainError, UnknownParent
from protocol.ids import Digest, PeerKey, Round, RunId, sha256
from protocol.messages import Certificate
from protocol.reduce_plan import GATHER, ReducePlan

SNAPSHOT_EVERY = 32
"""Number of rounds after which a record keeps a full map of next windows; those between keep only their changes."""


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """The limits of a certificate, and of the tree in memory."""

    max_update_windows: int
    max_members: int
    max_records: int = 4096
    max_bytes: int = 256 * 1024 * 1024
    max_side_records: int = 256
    """Records that are not on the head's path: the lightest branches go first."""

    min_main_records: int = 64
    """Records on the head's path that no limit drops."""

    reduce_plan: ReducePlan = GATHER
    window_tokens: int = 1
    """Tokens of one: directives speak of tokens."""

    def round_limits(self, standing: ActiveDirectives) -> tuple[int, int]:
        """Return the maximum windows of an update, and the maximum contributors, in the next round."""
        changes = standing.changes
        tokens, members = changes.max_update_tokens, changes.max_members
        windows = self.max_update_windows if tokens is None else max(1, tokens // self.window_tokens)
        return windows, self.max_members if members is None else members


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

    standing: ActiveDirectives = ActiveDirectives()
    """The owner's directives in force."""


class RecordNode:
    """One record in the tree."""

    __slots__ = (
        "digest", "parent", "height", "weight", "certificate", "contributors", "next_windows", "is_snapshot",
        "children", "size", "directives",
    )  # fmt: skip

    def __init__(
        self, digest: Digest, parent: RecordNode | None, height: int, weight: int, certificate: Certificate | None
    ):
        self.digest = digest
        self.parent = parent
        self.height = height
        """The round that follows: 0 for the genesis, r + 1 for a record of round r."""
        self.weight = weight
        self.certificate = certificate
        self.contributors = 0 if certificate is None else len(certificate.record.body.updates)
        self.next_windows: dict[PeerKey, int] = {}
        self.is_snapshot = False
        self.children: list[RecordNode] = []
        self.size = 0
        self.directives = ActiveDirectives()
        if parent is not None and certificate is not None:
            self.directives = parent.directives.after(certificate.record.body)


def genesis_digest(run: RunId) -> Digest:
    """Return the parent of round 0: a fixed function of the run."""
    return Digest(sha256(b"cairn/v1/genesis", run))


class Tree:
    """Records by their place: one of the tips is the head, and the way to it is at hand by height."""

    def __init__(self, run: RunId, anchor: Anchor):
        self.run = run
        self.genesis = genesis_digest(run)
        self._root_state = anchor.state
        self._root = RecordNode(anchor.record, None, anchor.height, anchor.weight, None)
        self._root.contributors = anchor.contributors
        self._root.next_windows = dict(anchor.next_windows)
        self._root.is_snapshot = True
        self._root.directives = anchor.standing
        self._nodes: dict[Digest, RecordNode] = {anchor.record: self._root}
        self._head = self._root
        self._main_chain: dict[int, RecordNode] = {self._root.height: self._root}

    def __len__(self) -> int:
        """Return the number of records in memory, without the root."""
        return len(self._nodes) - 1

    def __contains__(self, record: object) -> bool:
        return record in self._nodes

    @property
    def head(self) -> Digest:
        """The record that fork choice prefers; the root when there is none."""
        return self._head.digest

    @property
    def root(self) -> Digest:
        """The oldest record in memory (its certificate is not): the genesis until limits drop what is old."""
        return self._root.digest

    def height(self, record: Digest) -> Round:
        """Return the round that follows a record: 0 after the genesis. Raises ChainError when it is not in the tree."""
        return Round(self._node(record).height)

    def weight(self, record: Digest) -> int:
        """Windows accepted from the genesis up to a record."""
        return self._node(record).weight

    def certificate(self, record: Digest) -> Certificate:
        """Raise ChainError for the root and for what is not in the tree."""
        certificate = self._node(record).certificate
        if certificate is None:
            raise ChainError(f"record {record.short} is where this tree begins: its certificate is not in memory")
        return certificate

    def parent(self, record: Digest) -> Digest:
        """Raise ChainError for the root."""
        return self.certificate(record).record.body.parent

    def next_window(self, author: PeerKey, at: Digest) -> int:
        """Return the end of the author's accepted windows up to a record; later ones must not start before it."""
        link: RecordNode | None = self._node(at)
        while link is not None:
            end = link.next_windows.get(author)
            if end is not None:
                return end
            if link.is_snapshot:
                return 0
            link = link.parent
        return 0

    def directives(self, record: Digest) -> ActiveDirectives:
        """Return the directives in force in the round after a record."""
        return self._node(record).directives

    def is_ancestor(self, ancestor: Digest, record: Digest) -> bool:
        """Return whether `ancestor` is the record or comes before it; False if either is not in the tree."""
        a, b = self._nodes.get(ancestor), self._nodes.get(record)
        return a is not None and b is not None and self._descends(b, a)

    def common_ancestor(self, a: Digest, b: Digest) -> Digest:
        """Return the newest record that both descend from."""
        x, y = self._node(a), self._node(b)
        while x is not y:
            if x.height >= y.height:
                x = self._parent_of(x)
            else:
                y = self._parent_of(y)
        return x.digest

    def path(self, after: Digest, to: Digest) -> tuple[Certificate, ...]:
        """Certificates after one record up to another that descends from it, oldest first. Raises ChainError."""
        stop, link = self._node(after), self._node(to)
        found: list[Certificate] = []
        while link is not stop and link.height > stop.height:
            if link.certificate is None:
                break
            found.append(link.certificate)
            link = self._parent_of(link)
        if link is not stop:
            raise ChainError(f"record {to.short} does not descend from {after.short}")
        return tuple(reversed(found))

    def ancestors(self, record: Digest) -> Iterator[Digest]:
        """Yield the record, its parent, and so on to the root."""
        link: RecordNode | None = self._node(record)
        while link is not None:
            yield link.digest
            link = link.parent

    def ancestor_at(self, record: Digest, height: int) -> Digest | None:
        """Return the record on the path to `record` after which round `height` comes; None if it is not in the tree."""
        link = self._nodes.get(record)
        if link is None or not self._root.height <= height <= link.height:
            return None
        if self._main_chain.get(link.height) is link:
            return self._main_chain[height].digest
        while link.height > height:
            link = self._parent_of(link)
        return link.digest

    def main_chain_at(self, height: int) -> Digest | None:
        """Return the record on the head's path after which round `height` comes."""
        link = self._main_chain.get(height)
        return None if link is None else link.digest

    def locator(self) -> tuple[Digest, ...]:
        """Digests on the head's path, newest first: ten in a row, then gaps that double, the root last."""
        found: list[Digest] = []
        height, gap = self._head.height, 1
        while height > self._root.height:
            found.append(self._main_chain[height].digest)
            if len(found) >= 10:
                gap *= 2
            height -= gap
        found.append(self._root.digest)
        return tuple(found)

    def certificates_after(
        self, have: Iterable[Digest], *, count: int = 64, size: int = 2 * 1024 * 1024
    ) -> tuple[tuple[Certificate, ...], bool]:
        """Return the head's certificates that a `locator` does not have, oldest first, and whether there are more.

        At most `count` of them, and `size` bytes when there is more than one. Raises UnknownParent when the asker's
        newest known record is older than this tree: older certificates are on disk.
        """
        start = None
        for digest in have:
            link = self._nodes.get(digest)
            if link is not None:
                while self._main_chain.get(link.height) is not link:
                    link = self._parent_of(link)
                start = link
                break
        if start is None:
            if self._root.digest != self.genesis:
                raise UnknownParent("the records asked for are older than what is kept in memory")
            start = self._root
        found: list[Certificate] = []
        total = 0
        height = start.height + 1
        while (link := self._main_chain.get(height)) is not None and len(found) < count:
            total += link.size
            if (found and total > size) or link.certificate is None:
                break
            found.append(link.certificate)
            height += 1
        return tuple(found), height in self._main_chain

    def anchor(self, record: Digest, state: Digest | None) -> Anchor:
        """Return the data from which a tree can start later without the records before this one."""
        link = self._node(record)
        return Anchor(
            record, link.height, link.weight, state, self._next_windows_at(link), link.contributors, link.directives
        )

    # -- inside ----------------------------------------------------------------------------------------------

    def _node(self, record: Digest) -> RecordNode:
        link = self._nodes.get(record)
        if link is None:
            raise ChainError(f"record {record.short} is not in the tree")
        return link

    def _parent_of(self, link: RecordNode) -> RecordNode:
        if link.parent is None:
            raise ChainError("the tree begins after the records that were asked for")
        return link.parent

    def _descends(self, link: RecordNode, ancestor: RecordNode) -> bool:
        up: RecordNode | None = link
        while up is not None and up.height > ancestor.height:
            if self._main_chain.get(up.height) is up:
                return self._main_chain.get(ancestor.height) is ancestor
            up = up.parent
        return up is ancestor

    def _next_windows_at(self, link: RecordNode) -> dict[PeerKey, int]:
        maps: list[dict[PeerKey, int]] = []
        up: RecordNode | None = link
        while up is not None:
            maps.append(up.next_windows)
            if up.is_snapshot:
                break
            up = up.parent
        whole: dict[PeerKey, int] = {}
        for ends in reversed(maps):
            whole.update(ends)
        return whole
