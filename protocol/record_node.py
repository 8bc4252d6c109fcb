"""One record in the chain's tree: its place, its certificate, and the paths up from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice

from protocol import vrf
from protocol.audit_penalties import AuditPenalties
from protocol.directives import ActiveDirectives
from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import AuditDecision, Certificate, Directive, RoundRecord, Signed
from protocol.update_weights import AuthorHistory

SNAPSHOT_EVERY = 32
"""Number of rounds after which a record keeps the histories of all authors; those between keep only their changes."""

HISTORY_BYTES = 128
"""Memory that an author costs in a snapshot, about: its place in a dict. Anybody can make keys."""

PENALTY_BYTES = 64
"""Memory that a penalized key costs in each record that changes penalties, about: all share what the dict refers to."""

DECODED = 5
"""Memory of a certificate as a multiple of its bytes, about: 4.5 was measured with 256 contributors."""

NEWCOMER = AuthorHistory()


class RecordNode:
    """A record and the records built on it. The root of the tree has no parent and no certificate."""

    __slots__ = (
        "digest", "parent", "height", "weight", "certificate", "contributors", "histories", "is_snapshot",
        "children", "size", "directives", "weighed", "announced", "latest", "penalties", "seed",
    )  # fmt: skip

    def __init__(
        self,
        digest: Digest,
        parent: RecordNode | None = None,
        certificate: Certificate | None = None,
        max_windows: int = 0,
        hold_rounds: int = 0,
        bar_rounds: int = 0,
    ):
        """Make the root, if there is no parent. `max_windows`: the largest claim of an update.

        `hold_rounds`: rounds in which a verdict on an update counts. `bar_rounds`: those of a first conviction.
        """
        self.digest = digest
        self.parent = parent
        self.certificate = certificate
        self.children: list[RecordNode] = []
        self.height = 0
        """The round that follows: 0 for the genesis, r + 1 for a record of round r."""
        self.weight = 0
        """Windows accepted from the genesis up to it, as weighed, without those that records up to it void."""
        self.contributors = 0
        """Number of updates that its record lists."""
        self.size = 0
        """Bytes of the certificate."""
        self.directives = ActiveDirectives()
        self.seed = first_seed(digest)
        """The seed of the next round's turns and committees, of this record's audits that are always due, and of its
        parent's others.

        It is made of the outputs of all authors up to here, which they cannot choose (`vrf`).
        """
        self.penalties = AuditPenalties()
        """The penalties in force in the round that follows."""
        self.weighed: dict[PeerKey, int] = {}
        """The windows that its record accepts, as weighed, by contributor."""
        self.histories: dict[PeerKey, AuthorHistory] = {}
        """Histories of this record's contributors; in a snapshot, of all authors so far."""
        self.is_snapshot = False
        self.announced: dict[PeerKey, int] = {}
        """Ends of the windows of headers that came by themselves and name this record as their parent, by author."""
        self.latest: dict[PeerKey, int] | None = None
        """The result of `latest_messages`, which the chain keeps up to date at forks that are open; None elsewhere."""
        if parent is not None and certificate is not None:
            record = certificate.record
            self.height = parent.height + 1
            self.seed = next_seed(parent.seed, record.body)
            self.weight = parent.weight + record.body.progress
            self.contributors = len(record.body.updates)
            self.size = len(record.encoded) + sum(len(v.encoded) for v in certificate.votes)
            self.size += 32 * len(certificate.shards)
            self.directives = parent.directives.after(record.body)
            self.weighed = dict(zip(record.body.contributors, record.body.weighed, strict=True))
            self.histories = {
                u.author: parent.history(u.author).after(
                    record.body.round, u.body.end_window, u.body.windows, self.weighed[u.author], max_windows
                )
                for u in record.body.updates
            }
            self.penalties = parent.penalties
            if record.body.directive is not None and (pardons := record.body.directive.body.pardons):
                self.penalties = self.penalties.pardoned(pardons)
            for decision in record.body.decisions:
                self.penalties = self.penalties.after(decision, record.body.round, bar_rounds)
            convicted = {d.author for d in record.body.decisions if d.convicted}
            voided = parent.voided_after(record.body.directive, record.body.decisions, hold_rounds)
            for author in voided.keys() | convicted:
                self.histories[author] = self.history(author).as_newcomer()
        if self.height % SNAPSHOT_EVERY == 0:
            self.make_snapshot()

    @property
    def memory(self) -> int:
        """Bytes that it costs, about: its certificate, the histories of a snapshot, and penalties that it changes."""
        total = DECODED * self.size + (HISTORY_BYTES * len(self.histories) if self.is_snapshot else 0)
        if self.parent is not None and self.penalties is not self.parent.penalties:
            total += PENALTY_BYTES * len(self.penalties.by_key)
        return total

    def branch(self) -> Iterator[RecordNode]:
        """Yield the node, its parent, and so on to the root."""
        node: RecordNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def voided_after(
        self, directive: Signed[Directive] | None, decisions: Collection[AuditDecision], hold_rounds: int
    ) -> dict[PeerKey, int]:
        """Return the windows, as weighed, that a next record with these voids, by author.

        A verdict voids the update that it names, and a conviction all updates of its author, in the `hold_rounds`
        records that end with this one. Windows that a record of this branch has voided are not voided again.
        """
        verdicts = _verdicts(directive)
        convicted = {d.author for d in decisions if d.convicted}
        found: dict[PeerKey, int] = {}
        if not verdicts and not convicted:
            return found
        void_verdicts, void_authors = set[tuple[Digest, PeerKey]](), set[PeerKey]()
        for above in islice(self.branch(), hold_rounds):
            for author, windows in above.weighed.items():
                name = above.digest, author
                is_new = author not in void_authors and name not in void_verdicts
                if is_new and (author in convicted or name in verdicts):
                    found[author] = found.get(author, 0) + windows
            if above.certificate is not None:
                body = above.certificate.record.body
                void_verdicts |= _verdicts(body.directive)
                void_authors.update(d.author for d in body.decisions if d.convicted)
        return found

    def latest_messages(self, *, beside: RecordNode | None = None) -> dict[PeerKey, int]:
        """Return the keys that are for this record, each with the end of its windows in its newest message here.

        They are those that voted for it, the contributors of all records built on it, and those that announced an
        update here. Their headers name a record here as the parent, so nobody can list them unless they are for it.
        `beside`: leave out what is built on this child.
        """
        if self.latest is not None and beside is None:
            return self.latest
        found: dict[PeerKey, int] = {}
        for vote in () if self.certificate is None else self.certificate.votes:
            note_message(found, vote.author, self.histories[vote.author].end_window)
        todo: list[RecordNode] = [self]
        while todo:
            node = todo.pop()
            for key, end in node.announced.items():
                note_message(found, key, end)
            for child in node.children:
                child.count_in(found)
                if child is beside:
                    continue
                if child.latest is None:
                    todo.append(child)
                    continue
                for key, end in child.latest.items():
                    note_message(found, key, end)
        return found

    def count_in(self, latest: dict[PeerKey, int]) -> None:
        """Count the contributors of this record as being for an ancestor with these latest messages."""
        for key in self.weighed:
            note_message(latest, key, self.histories[key].end_window)

    def recount_without(self, key: PeerKey, end: int) -> bool:
        """Count a key's messages again after one with this end has left. Return whether its newest is older now."""
        latest = self.latest
        if latest is None or latest.get(key) != end:
            return False
        del latest[key]
        votes = () if self.certificate is None else self.certificate.votes
        if any(vote.author == key for vote in votes):
            note_message(latest, key, self.histories[key].end_window)
        todo: list[RecordNode] = [self]
        while todo:
            node = todo.pop()
            if key in node.announced:
                note_message(latest, key, node.announced[key])
            for child in node.children:
                if key in child.weighed:
                    note_message(latest, key, child.histories[key].end_window)
                if child.latest is None:
                    todo.append(child)
                elif key in child.latest:
                    note_message(latest, key, child.latest[key])
        return latest.get(key, -1) < end

    def history(self, author: PeerKey) -> AuthorHistory:
        """Return the history of an author up to here."""
        for node in self.branch():
            if (found := node.histories.get(author)) is not None:
                return found
            if node.is_snapshot:
                break
        return NEWCOMER

    def make_snapshot(self) -> None:
        """Keep the histories of all authors up to here."""
        maps: list[dict[PeerKey, AuthorHistory]] = []
        for node in self.branch():
            maps.append(node.histories)
            if node.is_snapshot:
                break
        self.histories = {author: history for each in reversed(maps) for author, history in each.items()}
        self.is_snapshot = True

    def become_root(self) -> None:
        """Detach the node from its parent, and drop its certificate."""
        self.make_snapshot()
        self.parent = self.certificate = None
        self.size = 0


def _verdicts(directive: Signed[Directive] | None) -> set[tuple[Digest, PeerKey]]:
    return set() if directive is None else {(v.record, v.peer) for v in directive.body.verdicts}


def first_seed(genesis: Digest) -> bytes:
    """Return the seed after the genesis."""
    return sha256(b"cairn/v1/seed", genesis)


def next_seed(before: bytes, record: RoundRecord) -> bytes:
    """Return the seed after a record, from the one after its parent."""
    return sha256(b"cairn/v1/seed", before, vrf.output(record.proof))


def note_message(latest: dict[PeerKey, int], key: PeerKey, end: int) -> None:
    """Count a message of a key, with the end of its windows, among the newest ones."""
    latest[key] = max(end, latest.get(key, 0))
