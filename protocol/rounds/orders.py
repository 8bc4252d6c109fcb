"""What the run's owner orders (docs/control.md): taken from wherever it comes, passed on, and followed.

What all must agree on (who is banned, the policy of a round, which branch counts) follows from the chain's records.
The rest each peer does by the newest word that it has heard: it rests while the run is paused, it leaves when the run
has ended or it is banned itself, and it hears no more of those who are.
"""

from __future__ import annotations

from protocol.errors import ChainError
from protocol.ids import PeerKey
from protocol.messages import Directive, Heartbeat, Signed
from protocol.rounds.actions import Broadcast, Finished, KeepDirective, Send
from protocol.rounds.context import Context
from protocol.rounds.deciding import Deciding
from protocol.rounds.policy import Policy
from protocol.rounds.position import Position

FEW = 32
"""Among so many members everyone passes a newer word on; among more, about eight of them."""


class Orders:
    """The owner's newest word at one machine."""

    def __init__(self, context: Context, deciding: Deciding, position: Position):
        self._c = context
        self._deciding = deciding
        self._position = position
        self._told: dict[PeerKey, float] = {}
        """When a peer that knows another word than we is told of ours."""
        self._since: float | None = None
        """When we heard that we are to leave."""
        self._leave_from = 0.0
        """Not before: the word that was kept of an earlier life may not be the newest any more."""

    @property
    def word(self) -> Directive:
        """The newest."""
        return self._c.word

    @property
    def rests(self) -> bool:
        """Whether nothing is to be trained here: the run is paused or has ended, or we are banned."""
        return self._c.rests

    @property
    def afresh(self) -> bool:
        """Whether what the trainer has learnt is of rounds that were rolled back, and is still to go."""
        return self._position.afresh

    @property
    def policy(self) -> Policy:
        """Of the open round."""
        return self._c.policy

    def is_banned(self, key: PeerKey) -> bool:
        return self._c.is_banned(key)

    def take(self, word: Signed[Directive], source: PeerKey | None = None) -> bool:
        """The owner's word, heard from anybody. True when it is newer than what was known."""
        before = self._c.chain.newest
        try:
            if not self._c.chain.take(word):
                return False
        except ChainError as e:
            self._c.report("error", "directive", str(e), source)
            return False
        self.took(before)
        return True

    def took(self, before: Signed[Directive] | None) -> None:
        """The chain has a newer word than before: from a message, or from a record."""
        c, word = self._c, self._c.chain.newest
        if word is None:
            return
        self._leave_from = 0.0
        c.emit(KeepDirective(word))
        if len(c.members) <= FEW or c.members.is_my_turn(word.digest, 0):
            c.emit(Broadcast(word))
        was, now = (None if before is None else before.body), word.body
        if now.rollback is not None and (was is None or was.rollback != now.rollback):
            self._rolled_back()
        for key in [m.key for m in c.members if c.is_banned(m.key)]:
            c.members.dismiss(key)
            c.report("info", "banned", f"the run's owner has banned {key.short}{_because(now)}", key)
        if not c.rests:
            self._since, self._deciding.finished = None, self._deciding.reached_total or c.chain.is_stranded
        b = self._deciding.ballot
        if b is not None:
            for key in [k for k in b.headers if c.is_banned(k)]:
                b.exclude(key)
            if was is not None and was.order != "running" and not c.rests and b.announced is None:
                b.began = c.now  # the pause was no part of the round
        if (was is None or was.order == "running") and now.order == "paused":
            self._report_pause(now)
        elif was is not None and was.order != "running" and now.order == "running":
            c.report("info", "resumed", "the run goes on: its owner has said so")

    def begin(self) -> None:
        """At the start: what was kept of an earlier life holds. Who was sent away hears first whether it still is."""
        self._leave_from = self._c.now + self._c.policy.member_seconds
        if self._c.word.order == "paused":
            self._report_pause(self._c.word)

    def _report_pause(self, word: Directive) -> None:
        text = f"paused by the run's owner{_because(word)}: nothing is trained until the run goes on"
        self._c.report("warning", "paused", text)

    def _rolled_back(self) -> None:
        c, p, d, back = self._c, self._position, self._deciding, self._c.chain.rollback
        if back is None:
            return
        text = f"the run's owner has rolled the run back to round {back.round}, record {back.record.short}"
        if c.chain.is_stranded:
            text += ": that is further back than is remembered here"
            c.report("warning", "rollback", text + (". Start the coordinator again" if c.observer else ""))
            c.emit(Finished(text, True, True))
            return
        c.report("warning", "rollback", text)
        p.rolled_back()
        if d.ballot is not None and d.ballot.parent in c.chain and d.ballot.epoch != c.chain.epoch(d.ballot.parent):
            d.reopen()

    def tell(self, source: PeerKey, beat: Heartbeat) -> None:
        """A heartbeat shows what its author knows of the owner's words: ours, if it does not have it for a while."""
        c, word, member = self._c, self._c.chain.newest, self._c.members.get(source)
        if member is not None and beat.sequence <= member.beat.sequence:
            return  # a replay: anybody could have its author sent the word again and again
        if word is None or beat.directive_sequence == word.body.sequence:
            self._told.pop(source, None)
            return
        due = self._told.get(source)
        if due is None:
            while len(self._told) >= 2 * c.policy.max_members:
                del self._told[next(iter(self._told))]
            self._told[source] = c.now + c.policy.heartbeat_seconds
        elif due <= c.now and (len(c.members) <= FEW or c.members.is_my_turn(word.digest, beat.sequence)):
            self._told[source] = c.now + 4 * c.policy.heartbeat_seconds
            c.emit(Send(source, (word,)))

    def advance(self) -> None:
        """Leave, when that is ordered: not before the open round is decided that we have announced in."""
        c, d, word = self._c, self._deciding, self._c.word
        if d.finished or c.now < self._leave_from or not (word.order == "ended" or c.is_banned(c.me)):
            return
        self._since = c.now if self._since is None else self._since
        if d.working and d.ballot is not None and d.ballot.announced is not None and c.now < self._until:
            return
        if self._position.busy and c.now < self._until:
            return
        d.finished = True
        what = "the run has been ended by its owner" if word.order == "ended" else "banned by the run's owner"
        c.emit(Finished(what + _because(word), self._banned_here))

    @property
    def _banned_here(self) -> bool:
        return self._c.is_banned(self._c.me)

    @property
    def _until(self) -> float:
        policy = self._c.policy
        return (self._since or 0.0) + policy.exchange_seconds + policy.patience_seconds

    def times(self) -> list[float]:
        """When something will be due."""
        return [self._leave_from] if self._since is None or self._deciding.finished else [self._until]

    def sizes(self) -> dict[str, tuple[int, int]]:
        """What is held, and its bound."""
        return {"told": (len(self._told), 2 * max(self._c.policy.max_members, self._c.base.max_members))}


def _because(word: Directive) -> str:
    return f" ({word.reason})" if word.reason else ""
