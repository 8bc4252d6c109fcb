"""What the owner's word (docs/control.md) means on this machine: the trainer rests, or begins anew; people are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from peer.channel import Orders
from peer.store import Store
from protocol.ids import PeerKey
from protocol.messages import Directive
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import RoundPolicy

EPOCH = "epoch"
"""The store's name for: how many rollbacks what the trainer has saved knows of."""

_LEARNT = ("trainer-*.safetensors", "trainer.json", "update*", "dropped-*", ".trainer-*", ".update*", ".dropped-*")


class Obeying:
    """One node's. `order` takes what the trainer is to be told whenever that changes."""

    def __init__(
        self,
        machine: RoundMachine,
        store: Store,
        window: int,
        order: Callable[[Orders], None],
        govern: Callable[[RoundPolicy], None] = lambda policy: None,
    ):
        """`govern` takes the policy of the open round whenever that changes."""
        self._machine = machine
        self._store = store
        self._window = window
        self._order = order
        self._govern = govern
        self._policy: RoundPolicy | None = None
        self._told: Orders | None = None

    def follow(self) -> None:
        """After each step of the machine."""
        policy = self._machine.orders.policy
        if policy is not self._policy and policy != self._policy:
            self._govern(policy)
        self._policy = policy
        orders = orders_of(self._machine.orders.rests, policy, self._window)
        if orders != self._told:
            self._told = orders
            self._order(orders)

    def reached(self) -> None:
        """The trainer holds a state: what it saves from now on is of the branch that counts."""
        epoch = self._epoch
        if not self._machine.orders.afresh and epoch != saved_epoch(self._store):
            self._store.write_value(EPOCH, str(epoch).encode())

    def prepare(self, folder: Path) -> None:
        """Before the trainer starts: what it saved on rounds that were rolled back since goes. Raises StoreError."""
        if saved_epoch(self._store) < self._epoch:
            forget_learnt(folder)

    @property
    def _epoch(self) -> int:
        newest = self._machine.chain.newest_directive
        return 0 if newest is None else newest.body.epoch

    def words(self, me: PeerKey) -> str:
        """For people; empty while the run goes on as ever."""
        return words_of(self._machine.orders.word, me)

    def refusal(self, requester: PeerKey) -> str | None:
        """Why nothing is given to a peer; None when nothing is in the way."""
        return "the run's owner has banned you" if self._machine.orders.is_banned(requester) else None


def orders_of(rests: bool, policy: RoundPolicy, window: int) -> Orders:
    """What the trainer must know."""
    return Orders(rests, policy.max_update_windows, policy.target_windows * window)


def words_of(word: Directive, me: PeerKey) -> str:
    """What the owner has ordered that concerns a peer."""
    why = f" ({word.reason})" if word.reason else ""
    since = f" since {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(word.since))}" if word.since else ""
    if me in word.banned:
        return f"banned by the run's owner{why}"
    return "" if word.run_status == "running" else f"{word.run_status} by the run's owner{since}{why}"


def saved_epoch(store: Store) -> int:
    """Raises StoreError."""
    text = (store.read_value(EPOCH) or b"").decode(errors="replace")
    return int(text) if text.isdigit() else 0


def forget_learnt(folder: Path) -> None:
    """Remove what a trainer has saved: what it had learnt, the optimiser's moments, its counts. Raises OSError."""
    for pattern in _LEARNT:
        for path in folder.glob(pattern):
            if path.is_file():
                path.unlink(missing_ok=True)
