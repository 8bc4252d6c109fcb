"""The state after the newest record of a run that is over or paused, which no record names.

More than two thirds of that record's contributors must state in signed heartbeats that they hold it. They need not be
there at the same time.
"""

from __future__ import annotations

from collections import Counter

from coordinator.swarm import RestingState
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey
from protocol.messages import Heartbeat, Signed, quorum
from protocol.spec import RunSpec, is_total_reached


class RestingStateClaims:
    """The newest heartbeats of the newest record's contributors that name it and the state after it."""

    def __init__(self, chain: Chain, spec: RunSpec):
        self._chain = chain
        self._spec = spec
        self._head: Digest | None = None
        """The record that the claims are about."""
        self._contributors: frozenset[PeerKey] = frozenset()
        self._claims: dict[PeerKey, Signed[Heartbeat]] = {}

    @property
    def tokens(self) -> int:
        """Tokens that the chain has accepted."""
        return self._chain.weight(self._chain.head) * self._spec.data.window_tokens

    @property
    def is_finished(self) -> bool:
        """Return whether the chain has accepted what the run wanted."""
        return is_total_reached(self._spec.total_tokens, self.tokens)

    @property
    def is_stopped(self) -> bool:
        """Return whether the run is over or paused, and has a record."""
        chain = self._chain
        directive = chain.newest_directive
        ordered = directive is not None and directive.body.run_status != "running"
        return chain.head != chain.root and (ordered or self.is_finished)

    def receive(self, message: Signed) -> bool:
        """Remember a verified message if it is such a heartbeat. Return whether it is its author's first."""
        body = message.body
        if not isinstance(body, Heartbeat) or body.state is None:
            return False
        if body.head != self._chain.head or not self.is_stopped:
            return False
        # A peer that is not paused yet may be about to certify another record, and has not written the state.
        if not self.is_finished and body.phase != "paused":
            return False
        self._follow_head()
        known = self._claims.get(message.author)
        if message.author not in self._contributors or (known is not None and known.body.sequence >= body.sequence):
            return False
        self._claims[message.author] = message
        return known is None

    def _follow_head(self) -> None:
        head = self._chain.head
        if head != self._head:
            self._head, self._claims = head, {}
            self._contributors = frozenset(self._chain.certificate(head).record.body.contributors)

    def _most(self) -> tuple[Digest | None, list[Signed[Heartbeat]]]:
        """Return the state that most contributors claim, and their heartbeats."""
        self._follow_head()
        counted = Counter(h.body.state for h in self._claims.values()).most_common(1)
        state = counted[0][0] if counted else None
        return state, [h for h in self._claims.values() if h.body.state == state]

    def agreed(self) -> tuple[Digest, list[Signed[Heartbeat]]] | None:
        """Return the state and the heartbeats that prove it; None while too few contributors claim one."""
        if not self.is_stopped:
            return None
        state, claims = self._most()
        return (state, claims) if state is not None and len(claims) >= quorum(len(self._contributors)) else None

    def resting_state(self, archived: Digest | None) -> RestingState | None:
        """Return the state of a stopped run, with the digest that is archived for it."""
        if not self.is_stopped:
            return None
        _, claims = self._most()
        holders = {h.author for h in claims}
        needed = quorum(len(self._contributors)) - len(holders)
        wanted = self._contributors - holders if needed > 0 else holders
        head = self._chain.head
        return RestingState(
            head, self._chain.height(head), archived, tuple(sorted(self._contributors)), tuple(sorted(wanted)),
            max(1, needed),
        )  # fmt: skip
