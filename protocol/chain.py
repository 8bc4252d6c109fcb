"""The chain: a bounded tree of certified records since the genesis, and the fork choice over it.

A record of round r names its parent, the record of round r - 1, by its certificate's digest, which also covers the
reduced shards if there are any. The parent of round 0 is `genesis_digest(run)`. The
weight of a record is the number of windows accepted from the genesis up to it. The head is the heaviest record (ties:
the smaller digest) among the descendants of the newest finalized record. After a rollback it also descends from the
record to which the run was rolled back, by records that carry that directive.

Only certificates from `MessageDecoder` may be added: it checks signatures, admissions and the number of votes. Here
is checked what depends on the place in the tree.
"""

from __future__ import annotations

from collections import OrderedDict

from protocol.directives import starts_rollback_branch
from protocol.errors import ChainError, FinalizedConflict, UnknownParent
from protocol.ids import Digest, RunId
from protocol.messages import Certificate, Directive, Finalization, Rollback, RoundRecord, Signed
from protocol.tree import SNAPSHOT_EVERY, Anchor, ChainLimits, RecordNode, Tree, genesis_digest


class Chain(Tree):
    """The tree, its head, and what is final. Every method is cheap in the number of peers and of records.

    >>> chain = Chain(run, genesis_state, ChainLimits(max_update_windows=64, max_members=256))
    """

    def __init__(self, run: RunId, genesis_state: Digest, limits: ChainLimits, *, anchor: Anchor | None = None):
        super().__init__(run, anchor or Anchor(genesis_digest(run), 0, 0, genesis_state, {}))
        self.limits = limits
        self._bytes = 0
        self._quarantined: set[Digest] = set()
        self._invalid: OrderedDict[Digest, None] = OrderedDict()
        self._newest_directive = self._root.directives.newest
        self._finalization: Signed[Finalization] | None = None
        self._pending_finalization: Signed[Finalization] | None = None

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def finalization(self) -> Signed[Finalization] | None:
        """The newest final whose record is in the tree (or was, when limits have passed it)."""
        return self._finalization

    @property
    def pending_finalization(self) -> Signed[Finalization] | None:
        """A newer final whose record is not in the tree yet: it must be asked for, however light its branch is."""
        return self._pending_finalization

    @property
    def newest_directive(self) -> Signed[Directive] | None:
        """The owner's newest directive so far, whether or not a record carries it."""
        return self._newest_directive

    @property
    def rollback(self) -> Rollback | None:
        """The newest finalization so far."""
        return self._rollback

    @property
    def required_ancestor(self) -> Digest | None:
        """The newest record that no branch can leave: a final one, or the one that the run was rolled back to."""
        if self._finalization is not None:
            return self._finalization.body.record
        back = self._rollback
        return None if back is None or back.record not in self._nodes else back.record

    @property
    def is_missing_required_ancestor(self) -> bool:
        """Return whether a record that all must descend from is missing.

        It is then fetched, however light its branch.
        """
        back = self._rollback
        behind = back is not None and back.record not in self._nodes and self._root.height < back.round
        return self._pending_finalization is not None or behind

    @property
    def is_rolled_back_past_root(self) -> bool:
        """Return whether the run was rolled back beyond this tree, which must then be loaded again."""
        back = self._rollback
        if back is None or self._root.height < back.round:
            return False
        return self._root.digest != back.record and self._root.directives.epoch < back.epoch

    def epoch(self, parent: Digest) -> int:
        """Return the number of rollbacks on the branch of a record; updates of the next round must name it."""
        epoch, back = self._node(parent).directives.epoch, self._rollback
        return epoch if back is None or back.record != parent else max(epoch, back.epoch)

    def directive_to_include(self, parent: Digest) -> Signed[Directive] | None:
        """Return the directive that a record after this one should carry, if any."""
        newest, standing = self._newest_directive, self._node(parent).directives
        if newest is None or newest.body.precedence <= standing.precedence:
            return None
        back = newest.body.rollback
        return newest if back == standing.rollback or (back is not None and back.record == parent) else None

    def validation_error(self, record: RoundRecord) -> str | None:
        """Why a record cannot follow its parent, as far as directives go; None when it can."""
        parent, back = self._node(record.parent), self._rollback
        if back is not None and parent.digest == back.record and not starts_rollback_branch(record, back):
            return "the run's owner has rolled the run back to before it"
        windows, members = self.limits.round_limits(parent.directives)
        if len(record.updates) > members:
            return "it has more contributors than the run's max_members"
        for u in record.updates:
            if u.body.windows > windows:
                return f"peer {u.author.short} claims {u.body.windows} windows in one update: too many"
        return parent.directives.validation_error(record)

    def is_reduced_after(self, parent: Digest) -> bool:
        """Return whether the round after a record is reduced, not gathered."""
        return self.limits.reduce_plan.is_reduced(self._node(parent).contributors)

    # -- writing ---------------------------------------------------------------------------------------------

    def add(self, certificate: Certificate) -> bool:
        """Put an opened certificate in its place. False when its record is here already.

        Raises UnknownParent, or ChainError when it breaks a rule of the chain: its source, or its makers, are at fault.
        """
        record, digest = certificate.record, certificate.digest
        body = record.body
        if digest in self._nodes:
            return False
        if body.run != self.run:
            raise ChainError(f"record {digest.short} is of another run")
        if digest in self._invalid or body.parent in self._invalid:
            raise ChainError(f"record {digest.short} has, or is built on, an update that broke the codec's rules")
        parent = self._nodes.get(body.parent)
        if parent is None:
            raise UnknownParent(f"the parent {body.parent.short} of record {digest.short} is not known here")
        if body.directive is not None:
            self.add_directive(body.directive)  # the owner's word, whatever becomes of the record
        self._check_rivals(body, digest, parent)
        if body.round != parent.height:
            raise ChainError(f"record {digest.short}: round {body.round} after round {parent.height - 1}")
        if parent is self._root and self._root_state not in (None, body.base_state):
            raise ChainError(f"record {digest.short} starts from another state than the run's")
        self._check_updates(certificate, parent)
        if (flaw := self.limits.reduce_plan.validation_error(certificate, parent.contributors)) is not None:
            raise ChainError(f"record {digest.short}: {flaw}")
        link = RecordNode(digest, parent, parent.height + 1, parent.weight + body.windows, certificate)
        link.size = len(record.encoded) + sum(len(v.encoded) for v in certificate.votes) + 32 * len(certificate.shards)
        link.next_windows = {u.author: u.body.end_window for u in body.updates}
        if link.height % SNAPSHOT_EVERY == 0:
            link.next_windows = self._next_windows_at(link)
            link.is_snapshot = True
        parent.children.append(link)
        self._nodes[link.digest] = link
        self._bytes += link.size
        if self._pending_finalization is not None and self._pending_finalization.body.record == link.digest:
            awaited, self._pending_finalization = self._pending_finalization, None
            self.add_finalization(awaited)
        if (back := self._rollback) is not None and link.digest == back.record:
            self._drop_branches_beside(link)
            self._choose_head()
        elif self._better(link, self._head) and not self._is_on_quarantined_branch(link):
            self._move_head(link)
        self._enforce_limits()
        return link.digest in self._nodes

    def add_finalization(self, final: Signed[Finalization]) -> bool:
        """Take the owner's final (opened). True when it is newer than what was known.

        A final for a record that is not here yet is remembered, and takes effect when the record comes.
        So is one that contradicts an older final: its record can never come. Raises ChainError when it names a wrong
        round for its record.
        """
        body = final.body
        if self._newest_directive is not None and body.epoch < self._newest_directive.body.epoch:
            return False  # its record was rolled back, or is before the record that all descend from
        if self._finalization is not None and _rank(body) <= _rank(self._finalization.body):
            return False
        link = self._nodes.get(body.record)
        if link is None:
            if self._pending_finalization is None or _rank(body) > _rank(self._pending_finalization.body):
                self._pending_finalization = final
                return True
            return False
        if link.height != body.round + 1:
            raise ChainError(f"the owner's final names round {body.round} for a record of round {link.height - 1}")
        self._finalization = final
        if self._pending_finalization is not None and _rank(self._pending_finalization.body) <= _rank(body):
            self._pending_finalization = None
        self._drop_branches_beside(link)
        self._choose_head()
        self._enforce_limits()
        return True

    def add_directive(self, directive: Signed[Directive]) -> bool:
        """Take the owner's word (opened), from wherever it came. True when it is newer than what was known.

        A rollback takes effect at once: what was built on the record that the run goes on from leaves the tree.
        """
        before, body = self._newest_directive, directive.body
        if before is not None and body.precedence <= before.body.precedence:
            return False
        back = body.rollback
        link = None if back is None else self._nodes.get(back.record)
        if back is not None and link is not None and link.height != back.round:
            raise ChainError(f"the owner's rollback names round {back.round} for a record of round {link.height - 1}")
        self._newest_directive = directive
        if back is None or (before is not None and before.body.rollback == back):
            return True
        if self._finalization is not None and self._finalization.body.epoch < back.epoch:
            self._finalization = None
        if self._pending_finalization is not None and self._pending_finalization.body.epoch < back.epoch:
            self._pending_finalization = None
        if link is not None:
            self._drop_branches_beside(link)
        beyond = [x for x in self._nodes.values() if x.height == back.round + 1 and x is not self._root]
        for child in beyond:
            if child.certificate is None or not starts_rollback_branch(child.certificate.record.body, back):
                self._drop(child)
        self._choose_head()
        return True

    def quarantine(self, record: Digest) -> None:
        """Leave a record, and what is built on it, out of the fork choice (its blobs cannot be had yet)."""
        self._node(record)
        self._quarantined.add(record)
        self._choose_head()

    def release(self, record: Digest) -> None:
        """Release a quarantined record, so that it competes again."""
        if record in self._quarantined:
            self._quarantined.discard(record)
            self._choose_head()

    def is_quarantined(self, record: Digest) -> bool:
        """Return whether the record itself is quarantined."""
        return record in self._quarantined

    def best_descendant(self, record: Digest) -> Digest:
        """Return the heaviest descendant of a record, or itself, without quarantined ones."""
        return self._best_after(self._node(record)).digest

    def head_if_released(self, record: Digest) -> Digest | None:
        """Return the head without the quarantine of this record; None if it is the same."""
        link = self._node(record)
        up = link.parent
        while up is not None and self._main_chain.get(up.height) is not up:
            if up.digest in self._quarantined:
                return None
            up = up.parent
        best = self._best_after(link)
        return best.digest if self._better(best, self._head) else None

    def mark_invalid(self, record: Digest) -> None:
        """Drop a record that lists an update which breaks the codec's rules, with all that is built on it, for good."""
        self._invalid[record] = None
        while len(self._invalid) > self.limits.max_side_records:
            self._invalid.popitem(last=False)
        link = self._nodes.get(record)
        if link is not None and link is not self._root:
            self._drop(link)
            self._choose_head()

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def _rollback(self) -> Rollback | None:
        return None if self._newest_directive is None else self._newest_directive.body.rollback

    def _check_rivals(self, body: RoundRecord, digest: Digest, parent: RecordNode) -> None:
        """Raise RivalOfFinal for a record that no branch can have any more."""
        final = None if self._finalization is None else self._nodes.get(self._finalization.body.record)
        if final is not None and parent.height < final.height:
            raise FinalizedConflict(f"record {digest.short} is a rival of records that the owner has signed as final")
        if parent.digest not in self._nodes:
            raise FinalizedConflict(f"record {digest.short} is of rounds that the owner has rolled back")
        if (back := self._rollback) is None:
            return
        known = back.record in self._nodes
        if parent.height < back.round and digest != back.record and (known or parent.height + 1 == back.round):
            raise FinalizedConflict(
                f"record {digest.short} is a rival of the one that the owner has rolled the run back to"
            )
        if parent.height == back.round and not starts_rollback_branch(body, back) or self.is_rolled_back_past_root:
            raise FinalizedConflict(f"record {digest.short} is of rounds that the owner has rolled back")

    def _drop_branches_beside(self, link: RecordNode) -> None:
        """Nothing beside the way to a record can win any more."""
        on_way = {link.digest}
        up = link.parent
        while up is not None:
            on_way.add(up.digest)
            for child in list(up.children):
                if child.digest not in on_way:
                    self._drop(child)
            up = up.parent
        self._quarantined -= on_way

    def _check_updates(self, certificate: Certificate, parent: RecordNode) -> None:
        record, name = certificate.record, certificate.digest.short
        if (flaw := self.validation_error(record.body)) is not None:
            raise ChainError(f"record {name}: {flaw}")
        if record.author not in record.body.contributors:
            raise ChainError(f"record {name} is by {record.author.short}, who has no update in it")
        for u in record.body.updates:
            if u.body.first_window < self.next_window(u.author, parent.digest):
                raise ChainError(f"peer {u.author.short} claims windows from {u.body.first_window} on a second time")

    def _better(self, a: RecordNode, b: RecordNode) -> bool:
        return a.weight > b.weight or (a.weight == b.weight and a.digest < b.digest)

    def _is_on_quarantined_branch(self, link: RecordNode) -> bool:
        if not self._quarantined:
            return False
        up: RecordNode | None = link
        while up is not None:
            if up.digest in self._quarantined:
                return True
            up = up.parent
        return False

    def _choose_head(self) -> None:
        """Compute the fork choice again: the tree has lost records, or some were quarantined."""
        floor = self.required_ancestor
        self._move_head(self._best_after(self._root if floor is None else self._nodes.get(floor, self._root)))

    def _best_after(self, start: RecordNode) -> RecordNode:
        best, todo = start, [start]
        while todo:
            link = todo.pop()
            if link.digest in self._quarantined and link is not start:
                continue
            if self._better(link, best):
                best = link
            todo.extend(link.children)
        return best

    def _move_head(self, link: RecordNode) -> None:
        for height in range(link.height + 1, self._head.height + 1):
            self._main_chain.pop(height, None)
        self._head = link
        up: RecordNode | None = link
        while up is not None and self._main_chain.get(up.height) is not up:
            self._main_chain[up.height] = up
            up = up.parent

    def _drop(self, link: RecordNode) -> int:
        """Forget a record and all that is built on it. The caller sees to the head."""
        if link.parent is not None:
            link.parent.children.remove(link)
        todo, count = [link], 0
        while todo:
            gone = todo.pop()
            todo.extend(gone.children)
            del self._nodes[gone.digest]
            self._quarantined.discard(gone.digest)
            self._bytes -= gone.size
            if self._main_chain.get(gone.height) is gone:
                del self._main_chain[gone.height]
            count += 1
        return count

    def _enforce_limits(self) -> None:
        limits = self.limits
        length = self._head.height - self._root.height
        while len(self) - length > limits.max_side_records:
            tips = (x for x in self._nodes.values() if not x.children and self._main_chain.get(x.height) is not x)
            self._drop(min(tips, key=lambda x: (x.weight, x.digest)))
        while (len(self) > limits.max_records or self._bytes > limits.max_bytes) and length > limits.min_main_records:
            self._advance_root()
            length -= 1

    def _advance_root(self) -> None:
        new = self._main_chain[self._root.height + 1]
        for child in list(self._root.children):
            if child is not new:
                self._drop(child)
        new.next_windows = self._next_windows_at(new)
        new.is_snapshot = True
        self._bytes -= new.size
        new.size = 0
        new.parent = None
        new.certificate = None
        del self._nodes[self._root.digest]
        del self._main_chain[self._root.height]
        self._root = new
        states = {c.certificate.record.body.base_state for c in new.children if c.certificate is not None}
        self._root_state = states.pop() if len(states) == 1 else None


def _rank(final: Finalization) -> tuple[int, int]:
    """Return the order of finalizations: by epoch, then by round."""
    return final.epoch, final.round
