"""The chain: a bounded tree of certified records since the genesis, and the fork choice over it.

A record of round r names its parent, the record of round r - 1, by its certificate's digest, which also covers the
reduced shards if there are any. The parent of round 0 is `genesis_digest(run)`. The weight of a record is the number of
windows accepted from the genesis up to it, as weighed (`update_weights.py`), without those that records up to it void.

Fork choice. It goes down from the newest finalized record. After a rollback that is the record to which the run was
rolled back, and then records that carry that directive. Among records with the same parent it chooses the one with the
most stake behind it. Stake is measured at the parent, which both sides know, so neither speed nor claims help. Each key
counts once, where its newest message is, however many records it signs (LMD-GHOST: Sompolinsky and Zohar 2015, Buterin
et al. 2020, arXiv 2003.03052). Of one key's messages the one whose windows end later is newer: its count of windows
never restarts, whichever branch it is on. Heights would not do: a key that left a longer branch would still count
there. Ties: more keys, then more weight, then the smaller digest.

In names the root is at the top: `above` are ancestors.

This order of messages has a limit. A key that moves to another branch keeps counting on the old one until its windows
on the new one end later. Meanwhile a coalition with less than half of the stake may make the old branch win. In a
replayable run an honest trainer's windows never end earlier, unless its saved state is lost. With error feedback they
may (`peer.training.windows`), above all after a split in which it announced more windows than one update may claim. It
claims them again, one update after the other, so that none is lost.

Finalization and rollback. The head always descends from the record of the newest finalization, or, without one, from
the record to which the run was rolled back (`required_ancestor`). A finalization whose record has not arrived is
pending: its record is fetched, however light the branch. A rollback takes effect as soon as its directive arrives, in
a record or alone. Of the records built on the one that it names, only a branch whose first record carries the
directive stays. It begins a new epoch, and finalizations of an earlier epoch lose their force. So a finalization that
is held was signed with knowledge of the newest rollback, and decides alone.

Bans. A directive that bans takes effect as soon as it arrives, in a record or alone. Records after the required
ancestor leave the tree if they had no quorum without the banned, with all that is built on them. The banned count at no
fork.

Only certificates from `MessageDecoder` may be added: it checks signatures, admissions and the number of votes. This
module checks the rules that depend on the place in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from protocol.audits import AuditRule, AuditSeeds, audit_seed
from protocol.bounded import BoundedDict
from protocol.carried_reports import CarriedReports
from protocol.directives import ActiveDirectives, starts_rollback_branch
from protocol.errors import ChainError, FinalizedConflict, UnknownParent
from protocol.ids import Digest, PeerKey, Round, RunId, sha256
from protocol.messages import (
    AuditDecision,
    Certificate,
    Directive,
    Finalization,
    Rollback,
    RoundRecord,
    Signed,
    UpdateHeader,
    quorum,
)
from protocol.path_below import PathBelow
from protocol.rebase_rule import rebase_refusal
from protocol.record_node import RecordNode, note_message
from protocol.reduce_plan import GATHER, ReducePlan
from protocol.spec import is_total_reached
from protocol.stake import STAKE_ROUNDS, StakeRule, is_majority
from protocol.update_weights import countable, weigh

WITHOUT_BANNED = "without the peers whom the run's owner has banned it had no quorum"

MAX_CACHED_STAKES = 16
"""Number of records whose stakes are cached, besides one per side record, since each may begin a fork."""


OLD_ROUNDS = 16
"""Nobody needs to push a record that many rounds behind the head to others: they ask for what is missing."""


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """The limits of a certificate, and of the tree in memory."""

    max_update_windows: int
    max_members: int
    max_records: int = 4096
    max_bytes: int = 512 * 1024 * 1024
    max_side_records: int = 256
    """Records that are not on the head's path: those whose voters have the least stake are dropped first."""

    min_main_records: int | None = None
    """Records on the head's path that no limit drops, however large they are.

    None: as many as stake needs before a fork, and max_side_records more, which is how old a fork may be. A fork that
    is older than that counts less stake here than in a larger tree.
    """

    reduce_plan: ReducePlan = GATHER
    window_tokens: int = 1
    """Tokens that one window counts as: directives speak of tokens."""

    total_windows: int = 0
    """The run's: no record follows one with this weight. 0: it has no end."""

    stake: StakeRule = StakeRule()
    audit: AuditRule = AuditRule()
    replay_batch: int | None = None
    """Windows of one inner step, in a run whose updates are replayable; None in others."""

    @property
    def main_records(self) -> int:
        """The records on the head's path that no limit drops."""
        if self.min_main_records is not None:
            return self.min_main_records
        return self.stake.hold_rounds + STAKE_ROUNDS + self.max_side_records

    def round_limits(self, active: ActiveDirectives) -> tuple[int, int]:
        """Return the maximum windows of an update, and the maximum contributors, in the next round."""
        changes = active.changes
        tokens, members = changes.max_update_tokens, changes.max_members
        windows = self.max_update_windows if tokens is None else max(1, tokens // self.window_tokens)
        return windows, self.max_members if members is None else members


def genesis_digest(run: RunId) -> Digest:
    """Return the parent of round 0: a fixed function of the run."""
    return Digest(sha256(b"cairn/v1/genesis", run))


class Chain:
    """The tree of records, its head, and what is finalized.

    Adding a record takes time by its contributors and by the forks below the newest final record. Reading is cheap, but
    for `stakes`, `signers` and `count_backed`, which walk many records.

    >>> chain = Chain(run, genesis_state, ChainLimits(max_update_windows=64, max_members=256))
    """

    def __init__(self, run: RunId, genesis_state: Digest, limits: ChainLimits):
        self.run = run
        self.genesis = genesis_digest(run)
        self.limits = limits
        self._root = RecordNode(self.genesis)
        self._root_state: Digest | None = genesis_state
        """State after the root, where it is known: children must name it as their base."""
        self._nodes: dict[Digest, RecordNode] = {self.genesis: self._root}
        self._head = self._root
        self._main_chain: dict[int, RecordNode] = {0: self._root}
        """The path from the root to the head, by height."""
        self._below = PathBelow()
        """The path from the genesis to the root, without the root."""
        self._bytes = 0
        self._quarantined: set[Digest] = set()
        self._stakes: BoundedDict[Digest, Mapping[PeerKey, int]] = BoundedDict(
            MAX_CACHED_STAKES + limits.max_side_records
        )
        self._audit_stakes: BoundedDict[Digest, Mapping[PeerKey, int]] = BoundedDict(
            MAX_CACHED_STAKES + limits.stake.hold_rounds
        )
        self._reports: tuple[RecordNode, CarriedReports] | None = None
        self._invalid: BoundedDict[Digest, None] = BoundedDict(limits.max_side_records)
        self._dropped_twins: BoundedDict[Digest, None] = BoundedDict(limits.max_side_records)
        """Records that `_drop_lone_twins` dropped: they are ignored until something is built on them."""
        self._built_on_twins: BoundedDict[Digest, None] = BoundedDict(limits.max_side_records)
        """Records that brought such a record back: each does so once, or replays would drop twins without end."""
        self._newest_directive: Signed[Directive] | None = None
        self._banned: frozenset[PeerKey] = frozenset()
        """The keys that the owner bans by that directive, whether or not a record carries it."""
        self._finalization: Signed[Finalization] | None = None
        self._pending_finalization: Signed[Finalization] | None = None

    # -- records ---------------------------------------------------------------------------------------------

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
        """Return the windows accepted from the genesis up to a record, without voided ones. Raises ChainError."""
        return self._node(record).weight

    def certificate(self, record: Digest) -> Certificate:
        """Return a record's certificate. Raises ChainError for the root, and for a record that is not in the tree."""
        certificate = self._node(record).certificate
        if certificate is None:
            raise ChainError(f"record {record.short} is where this tree begins: its certificate is not in memory")
        return certificate

    def parent(self, record: Digest) -> Digest:
        """Return the parent of a record. Raises ChainError for the root."""
        return self.certificate(record).record.body.parent

    def next_window(self, author: PeerKey, at: Digest) -> int:
        """Return the end of the author's accepted windows up to a record; later ones must not start before it."""
        return self._node(at).history(author).end_window

    def weights(self, parent: Digest, updates: Sequence[Signed[UpdateHeader]]) -> tuple[int, ...]:
        """Return the `weights` of a record that lists these updates after `parent`. Raises ChainError."""
        node = self._node(parent)
        most, _ = self.limits.round_limits(node.directives)
        weighed = weigh([(u.body.windows, node.history(u.author)) for u in updates], node.height, most)
        return () if all(w == u.body.windows for w, u in zip(weighed, updates, strict=True)) else weighed

    def countable(self, parent: Digest, author: PeerKey) -> int:
        """Return the most windows that an author's claim counts for while peers decide when to end the round."""
        node = self._node(parent)
        most, _ = self.limits.round_limits(node.directives)
        return countable(node.history(author), node.height, tuple(node.weighed.values()), most)

    def voided(self, parent: Digest, directive: Signed[Directive] | None, decisions: Collection[AuditDecision]) -> int:
        """Return the `voided` of a record with these after `parent`. Raises ChainError."""
        return sum(self._node(parent).voided_after(directive, decisions, self.limits.stake.hold_rounds).values())

    def stakes(self, record: Digest) -> Mapping[PeerKey, int]:
        """Return the stake, in windows, of every key that has some in the round after a record. Raises ChainError."""
        return self._stakes_at(self._node(record))

    def audit_stakes(self, record: Digest) -> Mapping[PeerKey, int]:
        """Return the stakes that draw audits, auditors and juries for a record's updates. Raises ChainError.

        They are those at its parent, of the keys that are present there. A key that has left audits nothing and answers
        no accusation, though it has stake for up to STAKE_ROUNDS more. Keys that only the record itself lists do not
        count: its author, who knows its seed, chooses them.
        """
        return self._audit_stakes_at(self._node(record))

    def count_backed(self, path: Sequence[Digest]) -> int:
        """Return how many of these records, in order and each the parent of the next, the owner may finalize.

        A record's signers must have more stake, at its parent, than the others that contributed in the hold rounds
        before it. Founders count as contributors just before the first round. While none of them has any, most of the
        keys must be for it. A record counts only with all before it. Otherwise a coalition could
        certify a branch longer than the hold in a second: at its end nobody else has stake. Raises ChainError.
        """
        return self.count_followed(path, self._is_backed)

    def count_followed(self, path: Sequence[Digest], has_enough: Callable[[Digest, set[PeerKey]], bool]) -> int:
        """Return how many of these records, in order, have enough signers (see `signers`), each with all before it.

        Raises ChainError.
        """
        nodes = [self._node(record) for record in path]
        newest: dict[PeerKey, int] = {}
        """The last place on the path at which a key is for the record."""
        for i, node in enumerate(nodes):
            beyond = nodes[i + 1] if i + 1 < len(nodes) else None
            for key in node.latest_messages(beside=beyond):
                newest[key] = i
        for i, record in enumerate(path):
            if not has_enough(record, {key for key, last in newest.items() if last >= i}):
                return i
        return len(nodes)

    def _is_backed(self, record: Digest, signers: set[PeerKey]) -> bool:
        parent, rule, banned = self._node(record).parent, self.limits.stake, self._banned
        if parent is None:
            raise ChainError(f"record {record.short} is where this tree begins: its signers are not in memory")
        earlier = rule.present(parent)
        decided = is_majority(self._stakes_at(parent), signers - banned, earlier - banned)
        if decided is not None:
            return decided
        earlier -= banned
        return 2 * len(earlier & signers) > len(earlier) or not earlier

    def keys_for(self, record: Digest) -> set[PeerKey]:
        """Return the keys that voted for a record, or contributed or announced after it. Raises ChainError."""
        return set(self._node(record).latest_messages())

    def directives(self, record: Digest) -> ActiveDirectives:
        """Return the directives in force in the round after a record."""
        return self._node(record).directives

    def seed(self, record: Digest) -> bytes:
        """Return the seed (32 bytes) of the draws after a record: see `RecordNode.seed`. Raises ChainError."""
        return self._node(record).seed

    def audit_seeds(self, record: Digest) -> AuditSeeds:
        """Return the seeds of the audits of a record on the head's path. Raises ChainError."""
        node = self._node(record)
        after = self._main_chain.get(node.height + 1)
        return AuditSeeds(node.seed, after.seed if after is not None and after.parent is node else None)

    def audit_seed(self, record: Digest, update: Signed[UpdateHeader]) -> bytes | None:
        """Return the seed that draws the audit of an update of a record on the head's path; None before it comes.

        Raises ChainError.
        """
        body = self.certificate(record).record.body
        return audit_seed(update, body, self.audit_seeds(record), self.audit_stakes(record), self.limits.audit)

    def is_ancestor(self, ancestor: Digest, record: Digest) -> bool:
        """Return whether `ancestor` is the record or comes before it; False if either is not in the tree."""
        a, b = self._nodes.get(ancestor), self._nodes.get(record)
        return a is not None and b is not None and self._descends(b, a)

    def announce(self, header: Signed[UpdateHeader]) -> None:
        """Count a header that arrived on its own as being for its parent, even if no record lists it.

        Without this, a peer that proposes several records in a row decides which keys are for them. Only authors with
        stake count, and only the first header of each: one could move the head by each of many.
        """
        node, key = self._nodes.get(header.body.parent), header.author
        if node is None or key in node.announced or key not in self._stakes_at(node):
            return
        end = header.body.end_window
        note_message(node.announced, key, end)
        for above in self._undecided(node):
            if above.latest is not None:
                note_message(above.latest, key, end)
        if node is not self._head:
            self._choose_head()

    def common_ancestor(self, a: Digest, b: Digest) -> Digest:
        """Return the newest record that both descend from."""
        other = self._node(b)
        return next(node.digest for node in self._node(a).branch() if self._descends(other, node))

    def branch_start(self, record: Digest) -> Digest:
        """Return the first record after the newest fork on the way to a record; without a fork, the record itself.

        Quarantined branches are no fork. Raises ChainError.
        """
        for node in self._undecided(self._node(record)):
            beside = () if node.parent is None else node.parent.children
            if any(c is not node and c.digest not in self._quarantined for c in beside):
                return node.digest
        return record

    def path(self, after: Digest, to: Digest) -> tuple[Certificate, ...]:
        """Return the certificates after one record up to a descendant of it, oldest first. Raises ChainError."""
        start = self._node(after)
        found: list[Certificate] = []
        for node in self._node(to).branch():
            if node is start:
                return tuple(reversed(found))
            if node.certificate is None or node.height <= start.height:
                break
            found.append(node.certificate)
        raise ChainError(f"record {to.short} does not descend from {after.short}")

    def ancestors(self, record: Digest) -> Iterator[Digest]:
        """Return the record, its parent, and so on to the root."""
        return (node.digest for node in self._node(record).branch())

    def ancestor_at(self, record: Digest, height: int) -> Digest | None:
        """Return the record on the path to `record` after which round `height` comes; None if it is not in the tree."""
        node = self._nodes.get(record)
        if node is None or not self._root.height <= height <= node.height:
            return None
        if self._is_on_main_chain(node):
            return self._main_chain[height].digest
        return next(n.digest for n in node.branch() if n.height == height)

    def main_chain_at(self, height: int) -> Digest | None:
        """Return the record on the head's path after which round `height` comes."""
        node = self._main_chain.get(height)
        return None if node is None else node.digest

    def main_chain_after(self, record: Digest, limit: int) -> tuple[Certificate, ...] | None:
        """Return at most `limit` certificates after a record, oldest first; None if it is not on the head's path."""
        node = self._nodes.get(record)
        if node is None or not self._is_on_main_chain(node):
            return None
        return self.path(record, self._main_chain[min(self._head.height, node.height + limit)].digest)

    def locator(self) -> tuple[Digest, ...]:
        """Return digests on the head's path, newest first: ten in a row, then gaps that double, the root last.

        Another node finds in them the newest record that both have (Bitcoin's block locator).
        """
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

        At most `count` of them, and `size` bytes when there is more than one. Raises UnknownParent when the newest of
        these records is older than this tree: see `older_records_after`.
        """
        newest = next((self._nodes[digest] for digest in have if digest in self._nodes), None)
        if newest is None and self._root.digest != self.genesis:
            raise UnknownParent("the records asked for are older than what is kept in memory")
        start = next(node for node in (newest or self._root).branch() if self._is_on_main_chain(node))
        found: list[Certificate] = []
        total = 0
        height = start.height + 1
        while (node := self._main_chain.get(height)) is not None and len(found) < count:
            total += node.size
            if (found and total > size) or node.certificate is None:
                break
            found.append(node.certificate)
            height += 1
        return tuple(found), height in self._main_chain

    def has_seen(self, record: Digest) -> bool:
        """Return whether a record is in the tree, or was before the root advanced beyond it."""
        return record in self or self.is_below_root(record)

    def is_old(self, record: Digest) -> bool:
        """Return whether a record is OLD_ROUNDS or more behind the head, or on the path below the root."""
        if record in self:
            return self.height(record) + OLD_ROUNDS <= self.height(self.head)
        return self.is_below_root(record)

    def is_below_root(self, record: Digest) -> bool:
        """Return whether a record is on the path that the tree has dropped at its root."""
        return self._below.height(record) is not None

    def round_of(self, record: Digest) -> Round | None:
        """Return the round of a record that `has_seen` knows; None for others, and for the genesis."""
        node = self._nodes.get(record)
        height = self._below.height(record) if node is None else node.height
        return Round(height - 1) if height else None

    def older_records_after(self, have: Iterable[Digest], *, count: int) -> tuple[tuple[Round, Digest], ...]:
        """Return the round and name of the records up to the root that a `locator` does not have, oldest first.

        At most `count` of them. Their certificates are not in memory, but on disk. There are none when the newest
        record that both have is in this tree: then `certificates_after` has what follows it. Nor are there for one that
        knows no record of ours: a newcomer names the genesis.
        """
        start, have = 0, tuple(have)
        for digest in have:
            if digest in self._nodes:
                return ()
            if (height := self._below.height(digest)) is not None:
                start = height
                break
        if have and not start and self.genesis not in have:
            return ()
        first, last = start + 1, min(start + count, self._root.height)
        return tuple(
            (Round(height - 1), self._below.at(height) if height < len(self._below) else self._root.digest)
            for height in range(first, last + 1)
        )

    # -- the owner's signatures ------------------------------------------------------------------------------

    @property
    def finalization(self) -> Signed[Finalization] | None:
        """The newest finalization whose record is in the tree, or has been, if the root has advanced beyond it."""
        return self._finalization

    @property
    def newest_directive(self) -> Signed[Directive] | None:
        """The owner's newest directive so far, whether or not a record carries it."""
        return self._newest_directive

    def is_banned(self, key: PeerKey) -> bool:
        """Return whether the newest directive bans a peer. Records before that may still list its updates."""
        return key in self._banned

    @property
    def rollback(self) -> Rollback | None:
        """The newest rollback that the owner has ordered, whether or not its record is in the tree."""
        return None if self._newest_directive is None else self._newest_directive.body.rollback

    @property
    def required_ancestor(self) -> Digest | None:
        """The newest record that all branches descend from: finalized, or the one that the run was rolled back to."""
        if self._finalization is not None:
            return self._finalization.body.record
        rollback = self.rollback
        return None if rollback is None or rollback.record not in self._nodes else rollback.record

    @property
    def fork_choice_root(self) -> Digest:
        """The record from which fork choice starts: the required ancestor, or the root if the tree begins after it."""
        return self._floor().digest

    @property
    def is_missing_required_ancestor(self) -> bool:
        """Return whether a record that all must descend from is missing.

        It is then fetched, however light its branch.
        """
        rollback = self.rollback
        behind = rollback is not None and rollback.record not in self._nodes and self._root.height < rollback.round
        return self._pending_finalization is not None or behind

    @property
    def is_rolled_back_past_root(self) -> bool:
        """Return whether the run was rolled back beyond this tree, which must then be loaded again."""
        rollback = self.rollback
        if rollback is None or self._root.height < rollback.round:
            return False
        return self._root.digest != rollback.record and self._root.directives.epoch < rollback.epoch

    def epoch(self, parent: Digest) -> int:
        """Return the number of rollbacks on the branch of a record; updates of the next round must name it."""
        epoch, rollback = self._node(parent).directives.epoch, self.rollback
        return epoch if rollback is None or rollback.record != parent else max(epoch, rollback.epoch)

    def directive_to_include(self, parent: Digest) -> Signed[Directive] | None:
        """Return the directive that a record after this one should carry, if any."""
        newest, active = self._newest_directive, self._node(parent).directives
        if newest is None or newest.body.precedence <= active.precedence:
            return None
        rollback = newest.body.rollback
        return newest if rollback == active.rollback or (rollback is not None and rollback.record == parent) else None

    def record_refusal(self, record: RoundRecord) -> str | None:
        """Return the rule of the tree by which a record may not follow its parent. None when it may."""
        parent, rollback = self._node(record.parent), self.rollback
        if rollback is not None and parent.digest == rollback.record and not starts_rollback_branch(record, rollback):
            return "the run's owner has rolled the run back to before it"
        if is_total_reached(self.limits.total_windows, parent.weight):
            return "the run has all its tokens before it"
        windows, members = self.limits.round_limits(parent.directives)
        if len(record.updates) > members:
            return "it has more contributors than the run's max_members"
        # In a reduced round nobody knows which author a blob names before a committee has read it.
        is_reduced = self.is_reduced_after(record.parent)
        if not is_reduced and len({u.body.blob for u in record.updates}) < len(record.updates):
            return "it lists one blob twice"
        for u in record.updates:
            if u.body.windows > windows:
                return f"peer {u.author.short} claims {u.body.windows} windows in one update: too many"
        if self._is_cut_by_ban(parent.height + 1, record.contributors):
            return WITHOUT_BANNED
        if record.weights != self.weights(record.parent, record.updates):
            return "it weighs an update otherwise than the rule of the run does"
        if record.voided != self.voided(record.parent, record.directive, record.decisions):
            return "it does not void the windows that its decisions and verdicts do"
        for author in record.contributors:
            if parent.penalties.is_barred(author, Round(parent.height)):
                return f"it lists an update of {author.short}, who is barred after a conviction"
        if record.reports or record.decisions:
            if (reason := self._reports_after(parent).record_refusal(record)) is not None:
                return reason
        return parent.directives.record_refusal(record)

    def rebase_refusal(self, header: Signed[UpdateHeader], parent: Digest) -> str | None:
        """Return why no record after `parent` may list a header, by its `rebase_window`. Raises ChainError."""
        continues = header.author in self._node(parent).weighed
        return rebase_refusal(header.body, self.limits.replay_batch, continues=continues)

    def reports_after(self, parent: Digest) -> CarriedReports:
        """Return the rules for work reports in a record after this one. Raises ChainError."""
        return self._reports_after(self._node(parent))

    def is_barred(self, author: PeerKey, parent: Digest) -> bool:
        """Return whether no record after this one may list an update of a key. Raises ChainError."""
        return self._node(parent).height < self.barred_until(author, parent)

    def barred_until(self, author: PeerKey, record: Digest) -> Round:
        """Return the first round in which a record may list a key again; 0: no bar, or a pardon. Raises ChainError."""
        return self._node(record).penalties.of(author).barred_until

    def is_reduced_after(self, parent: Digest) -> bool:
        """Return whether the round after a record is reduced, not gathered."""
        return self.limits.reduce_plan.is_reduced(self._node(parent).contributors)

    # -- writing ---------------------------------------------------------------------------------------------

    def add(self, certificate: Certificate) -> bool:
        """Put a verified certificate in its place. Return whether it was new, and is in the tree now.

        Return False if its record is in the tree already, or if limits drop it at once. If the held certificate of the
        same record is missing some of its votes, they are added there.

        Raises UnknownParent, or ChainError when it breaks a rule of the chain: its source, or an author, is at fault.
        """
        record, digest = certificate.record, certificate.digest
        body = record.body
        if digest in self._nodes:
            self.add_votes(certificate)
            return False
        if digest in self._dropped_twins and not self.is_missing_required_ancestor:
            return False
        if body.run != self.run:
            raise ChainError(f"record {digest.short} is of another run")
        if digest in self._invalid or body.parent in self._invalid:
            raise ChainError(f"record {digest.short} has, or is built on, an update that broke the codec's rules")
        parent = self._nodes.get(body.parent)
        if parent is None:
            if body.parent in self._dropped_twins and digest not in self._built_on_twins:
                del self._dropped_twins[body.parent]  # somebody built on it: it may come again
                self._built_on_twins[digest] = None
            raise UnknownParent(f"the parent {body.parent.short} of record {digest.short} is not known here")
        if body.directive is not None:
            self.add_directive(body.directive)  # it counts, whatever becomes of the record
        self._check_rivals(body, digest, parent)
        if body.round != parent.height:
            raise ChainError(f"record {digest.short}: round {body.round} after round {parent.height - 1}")
        if parent is self._root and self._root_state not in (None, body.base_state):
            raise ChainError(f"record {digest.short} starts from another state than the run's")
        self._check_updates(certificate, parent)
        if (flaw := self.limits.reduce_plan.record_refusal(certificate, parent.contributors)) is not None:
            raise ChainError(f"record {digest.short}: {flaw}")
        max_windows, _ = self.limits.round_limits(parent.directives)
        hold_rounds, bar_rounds = self.limits.stake.hold_rounds, self.limits.audit.bar_rounds
        node = RecordNode(digest, parent, certificate, max_windows, hold_rounds, bar_rounds)
        self._drop_lone_twins(node, parent)
        parent.children.append(node)
        self._nodes[node.digest] = node
        self._bytes += node.memory
        for above in self._undecided(parent):
            if above.latest is not None:
                node.count_in(above.latest)
        if self._pending_finalization is not None and self._pending_finalization.body.record == node.digest:
            awaited, self._pending_finalization = self._pending_finalization, None
            self.add_finalization(awaited)
        if (rollback := self.rollback) is not None and node.digest == rollback.record:
            self._drop_branches_beside(node)
            self._choose_head()
        elif parent is self._head:
            self._move_head(node)
        else:
            self._choose_head()
        self._enforce_limits()
        return node.digest in self._nodes

    def add_votes(self, certificate: Certificate) -> bool:
        """Add the votes of a verified certificate, whose record is in the tree. Return whether any of them is new."""
        node = self._node(certificate.digest)
        held = node.certificate
        if held is None:
            return False
        votes = {v.author: v for v in (*certificate.votes, *held.votes)}
        if len(votes) == len(held.votes):
            return False
        node.certificate = replace(held, votes=tuple(votes[key] for key in sorted(votes)))
        if node.latest is not None:
            for key in votes:
                note_message(node.latest, key, node.histories[key].end_window)
        if node.parent is not None and len(node.parent.children) > 1:
            self._choose_head()
        return True

    def add_finalization(self, finalization: Signed[Finalization]) -> bool:
        """Add a finalization. Return True when it is newer than every other so far.

        One for a record that is not here yet is remembered, and takes effect when the record comes. One that
        contradicts an older finalization is remembered, too, although its record can never come. Raises ChainError when
        it names a wrong round for its record.
        """
        body = finalization.body
        if self._newest_directive is not None and body.epoch < self._newest_directive.body.epoch:
            return False  # its record was rolled back, or is before the record that all descend from
        if self._finalization is not None and body.precedence <= self._finalization.body.precedence:
            return False
        node = self._nodes.get(body.record)
        if node is None:
            if self._pending_finalization is None or body.precedence > self._pending_finalization.body.precedence:
                self._pending_finalization = finalization
                return True
            return False
        if node.height != body.round + 1:
            raise ChainError(
                f"the owner's finalization names round {body.round} for a record of round {node.height - 1}"
            )
        self._finalization = finalization
        if self._pending_finalization is not None and self._pending_finalization.body.precedence <= body.precedence:
            self._pending_finalization = None
        self._drop_branches_beside(node)
        self._choose_head()
        self._enforce_limits()
        return True

    def add_directive(self, directive: Signed[Directive]) -> bool:
        """Add a directive from any source. Return True when it is newer than every other so far.

        A rollback takes effect at once: what was built on the record that the run goes on from leaves the tree. So does
        a ban: what had no quorum without the banned leaves it, unless it is final.
        """
        before, body = self._newest_directive, directive.body
        if before is not None and body.precedence <= before.body.precedence:
            return False
        rollback = body.rollback
        node = None if rollback is None else self._nodes.get(rollback.record)
        if rollback is not None and node is not None and node.height != rollback.round:
            raise ChainError(
                f"the owner's rollback goes on with round {rollback.round} after a record of round {node.height - 1}"
            )
        self._newest_directive, self._banned = directive, frozenset(body.banned)
        if rollback is None or (before is not None and before.body.rollback == rollback):
            self._drop_banned()
            return True
        if self._finalization is not None and self._finalization.body.epoch < rollback.epoch:
            self._finalization = None
        if self._pending_finalization is not None and self._pending_finalization.body.epoch < rollback.epoch:
            self._pending_finalization = None
        if node is not None:
            self._drop_branches_beside(node)
        beyond = [x for x in self._nodes.values() if x.height == rollback.round + 1 and x is not self._root]
        for child in beyond:
            if child.certificate is None or not starts_rollback_branch(child.certificate.record.body, rollback):
                self._drop(child)
        self._drop_banned()
        self._choose_head()
        return True

    def quarantine(self, record: Digest) -> None:
        """Leave a record, and what is built on it, out of the fork choice: its blobs are not available yet."""
        self._node(record)
        self._quarantined.add(record)
        self._choose_head()

    def release(self, record: Digest) -> None:
        """End the quarantine of a record, so that it competes again. The round machine decides when."""
        if record in self._quarantined:
            self._quarantined.discard(record)
            self._choose_head()

    def is_quarantined(self, record: Digest) -> bool:
        """Return whether the record itself is quarantined."""
        return record in self._quarantined

    def best_descendant(self, record: Digest) -> Digest:
        """Return the record that fork choice leads to from a record, without quarantined branches."""
        return self._best_after(self._node(record)).digest

    def head_if_released(self, record: Digest) -> Digest | None:
        """Return the head without the quarantine of this record; None if it is the same."""
        if record not in self._quarantined:
            return None
        self._quarantined.discard(record)
        floor = self._floor()
        best = self._best_after(floor)
        self._quarantined.add(record)
        return best.digest if best is not self._head and self._descends(best, self._node(record)) else None

    def forget(self, record: Digest) -> None:
        """Drop a branch from its first record on. It may come again."""
        node = self._node(record)
        if node is not self._root:
            self._drop(node)
            self._choose_head()

    def mark_invalid(self, record: Digest) -> None:
        """Drop a record that lists an update which breaks the codec's rules, with all that is built on it, for good."""
        self._invalid[record] = None
        node = self._nodes.get(record)
        if node is not None and node is not self._root:
            self._drop(node)
            self._choose_head()

    # -- inside ----------------------------------------------------------------------------------------------

    def _node(self, record: Digest) -> RecordNode:
        node = self._nodes.get(record)
        if node is None:
            raise ChainError(f"record {record.short} is not in the tree")
        return node

    def _is_on_main_chain(self, node: RecordNode) -> bool:
        return self._main_chain.get(node.height) is node

    def _descends(self, node: RecordNode, ancestor: RecordNode) -> bool:
        for above in node.branch():
            if above.height <= ancestor.height:
                return above is ancestor
            if self._is_on_main_chain(above):
                return self._is_on_main_chain(ancestor)
        return False

    def _check_rivals(self, body: RoundRecord, digest: Digest, parent: RecordNode) -> None:
        """Raise FinalizedConflict for a record that contradicts the newest finalization, rollback or ban."""
        finalized = None if self._finalization is None else self._nodes.get(self._finalization.body.record)
        # The finalized record, and those before it, are in the tree: any other of these rounds is a rival.
        if finalized is not None and parent.height < finalized.height:
            raise FinalizedConflict(f"record {digest.short} is a rival of records that the owner has signed as final")
        if parent.digest not in self._nodes:  # the directive that this record carries has dropped its parent
            raise FinalizedConflict(f"record {digest.short} is of rounds that the owner has rolled back, or banned")
        if self._is_cut_by_ban(parent.height + 1, body.contributors):
            raise FinalizedConflict(f"record {digest.short}: {WITHOUT_BANNED}")
        if (rollback := self.rollback) is None:
            return
        # Until the rollback's record arrives, an earlier record may turn out to be its ancestor.
        is_here = rollback.record in self._nodes
        if (
            parent.height < rollback.round
            and digest != rollback.record
            and (is_here or parent.height + 1 == rollback.round)
        ):
            raise FinalizedConflict(
                f"record {digest.short} is a rival of the one that the owner has rolled the run back to"
            )
        # After it, only a record that carries the directive; and nothing, if the whole tree was rolled back.
        if (
            parent.height == rollback.round and not starts_rollback_branch(body, rollback)
        ) or self.is_rolled_back_past_root:
            raise FinalizedConflict(f"record {digest.short} is of rounds that the owner has rolled back")

    def _drop_branches_beside(self, node: RecordNode) -> None:
        """Drop every record that neither comes before this one nor descends from it: none of them can win any more."""
        on_branch = set[Digest]()
        for above in node.branch():
            on_branch.add(above.digest)
            above.latest, above.announced = None, {}  # no fork is open here
        for above in islice(node.branch(), 1, None):
            for child in [c for c in above.children if c.digest not in on_branch]:
                self._drop(child)
        self._quarantined -= on_branch

    def _is_cut_by_ban(self, height: int, contributors: Collection[PeerKey]) -> bool:
        """Return whether a record beyond the required ancestor had no quorum without those that are banned now.

        That is a function of its contributors, whoever voted: the banned could certify it with half of the others.
        Records up to a finalization or rollback whose record is awaited stay: which of them lead to it is not known.
        """
        newest, pending = self._newest_directive, self._pending_finalization
        if newest is None or not self._banned:
            return False
        if pending is not None and height <= pending.body.round + 1:
            return False
        rollback = newest.body.rollback
        if rollback is not None and height <= rollback.round and rollback.record not in self._nodes:
            return False
        n, banned = len(contributors), len(self._banned.intersection(contributors))
        return banned > 0 and 2 * (quorum(n) - banned) <= n - banned

    def _drop_banned(self) -> None:
        todo = list(self._floor().children)
        while todo:
            node = todo.pop()
            if self._is_cut_by_ban(node.height, node.weighed):
                self._drop(node)
            else:
                todo += node.children
        self._choose_head()

    def _check_updates(self, certificate: Certificate, parent: RecordNode) -> None:
        record, name = certificate.record, certificate.digest.short
        if (flaw := self.record_refusal(record.body)) is not None:
            raise ChainError(f"record {name}: {flaw}")
        if record.author not in record.body.contributors:
            raise ChainError(f"record {name} is by {record.author.short}, who has no update in it")
        for u in record.body.updates:
            if u.body.first_window < self.next_window(u.author, parent.digest):
                raise ChainError(f"peer {u.author.short} claims windows from {u.body.first_window} on a second time")
            if (flaw := self.rebase_refusal(u, parent.digest)) is not None:
                raise ChainError(f"record {name}: the update of {u.author.short}: {flaw}")

    def _reports_after(self, parent: RecordNode) -> CarriedReports:
        # Kept for the newest parent: each report that comes asks for it, and draws are made once.
        if self._reports is None or self._reports[0] is not parent:
            rules = CarriedReports(parent, self.limits.stake.hold_rounds, self.limits.audit, self._audit_stakes_at)
            self._reports = parent, rules
        return self._reports[1]

    def _stakes_at(self, node: RecordNode) -> Mapping[PeerKey, int]:
        found = self._stakes.get(node.digest)
        if found is None:
            found = self.limits.stake.stakes(node)
        self._stakes.renew(node.digest, found)
        return found

    def _audit_stakes_at(self, node: RecordNode) -> Mapping[PeerKey, int]:
        found = self._audit_stakes.get(node.digest)
        if found is None:
            if node.parent is None:
                raise ChainError(f"record {node.digest.short} is where this tree begins")
            present = self.limits.stake.present(node.parent, drawn=True)
            found = {key: stake for key, stake in self._stakes_at(node.parent).items() if key in present}
            self._audit_stakes[node.digest] = found
        return found

    def _drop_lone_twins(self, node: RecordNode, parent: RecordNode) -> None:
        """Drop other records of the same round that the same author certified alone, and that nothing is built on.

        One key can make any number of them. The head stays, and what others have built on.
        """
        if len(node.weighed) > 1:
            return
        for other in [c for c in parent.children if c.weighed.keys() == node.weighed.keys()]:
            if not other.children and other is not self._head:
                self._drop(other)
                self._dropped_twins[other.digest] = None

    def _floor(self) -> RecordNode:
        """Return the record from which fork choice starts."""
        required = self.required_ancestor
        return self._root if required is None else self._nodes.get(required, self._root)

    def _undecided(self, node: RecordNode) -> Iterator[RecordNode]:
        """Yield a record and those before it, as far as fork choice decides."""
        floor = self._floor()
        for above in node.branch():
            if above is floor:
                return
            yield above

    def _choose_head(self) -> None:
        """Compute the fork choice again."""
        self._move_head(self._best_after(self._floor()))

    def _best_after(self, start: RecordNode) -> RecordNode:
        node = start
        while True:
            competing = [child for child in node.children if child.digest not in self._quarantined]
            if not competing:
                return node
            preferred = competing if len(competing) == 1 else self._preferred(node, competing)
            if len(preferred) > 1:
                # Each tip is found once, and not again on the way down: ties above ties would double the work.
                tips = [(self._best_after(child), child) for child in preferred]
                return min(tips, key=lambda found: (-found[0].weight, found[1].digest))[0]
            node = preferred[0]

    def _preferred(self, fork: RecordNode, competing: list[RecordNode]) -> list[RecordNode]:
        """Return the records that most stake at the fork, and then most keys, are for, of those that compete."""
        newest: dict[PeerKey, int] = {}
        for child in competing:
            child.latest = child.latest_messages()
            for key, end in child.latest.items():
                note_message(newest, key, end)
        stakes, banned = self._stakes_at(fork), self._banned
        best: list[RecordNode] = []
        most = (-1, -1)
        for child in competing:
            latest = child.latest_messages()
            keys = [key for key, end in latest.items() if end == newest[key] and key not in banned]
            has = (sum(stakes.get(key, 0) for key in keys), len(keys))
            if has > most:
                best, most = [], has
            if has == most:
                best.append(child)
        return best

    def _move_head(self, node: RecordNode) -> None:
        for height in range(node.height + 1, self._head.height + 1):
            self._main_chain.pop(height, None)
        self._head = node
        for above in node.branch():
            if self._is_on_main_chain(above):
                break
            self._main_chain[above.height] = above

    def _drop(self, node: RecordNode) -> None:
        """Forget a record and all that is built on it. The caller chooses a new head."""
        if node.parent is not None:
            node.parent.children.remove(node)
            gone = dict(node.latest_messages())
            node.count_in(gone)
            for above in self._undecided(node.parent):
                if above.latest is not None:
                    gone = {key: end for key, end in gone.items() if above.recount_without(key, end)}
                if not gone:
                    break
        todo = [node]
        while todo:
            dropped = todo.pop()
            todo.extend(dropped.children)
            del self._nodes[dropped.digest]
            self._stakes.pop(dropped.digest, None)
            self._quarantined.discard(dropped.digest)
            self._bytes -= dropped.memory
            if self._is_on_main_chain(dropped):
                del self._main_chain[dropped.height]

    def _enforce_limits(self) -> None:
        limits = self.limits
        while len(self) - (self._head.height - self._root.height) > limits.max_side_records:
            tips = (x for x in self._nodes.values() if not x.children and not self._is_on_main_chain(x))
            self._drop(min(tips, key=self._importance))
            self._choose_head()
        length = self._head.height - self._root.height
        while (len(self) > limits.max_records or self._bytes > limits.max_bytes) and length > limits.main_records:
            self._advance_root()
            length -= 1

    def _importance(self, tip: RecordNode) -> tuple[int, int, int, Digest]:
        """Return the order in which tips of side branches are dropped: those without stake never displace others."""
        stakes, votes = self._stakes_at(self._head), () if tip.certificate is None else tip.certificate.votes
        return sum(stakes.get(v.author, 0) for v in votes), len(votes), tip.weight, tip.digest

    def _advance_root(self) -> None:
        new = self._main_chain[self._root.height + 1]
        for child in list(self._root.children):
            if child is not new:
                self._drop(child)
        self._bytes -= new.memory
        self._below.append(self._root.digest)
        new.become_root()
        del self._nodes[self._root.digest]
        del self._main_chain[self._root.height]
        self._root = new
        states = {c.certificate.record.body.base_state for c in new.children if c.certificate is not None}
        self._root_state = states.pop() if len(states) == 1 else None
