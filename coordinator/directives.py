"""The round policy that holds at the moment: the spec's, with what the owner has changed since (docs/control.md)."""

from __future__ import annotations

from dataclasses import asdict

from protocol.messages import RoundChanges
from protocol.spec import RoundSpec


class EffectiveRoundPolicy:
    """For what people are told: when a round is late, who is silent, when the next is due."""

    def __init__(self, spec: RoundSpec):
        self._spec = spec
        self._held, self._next = spec, spec
        self._from = 0

    def change(self, changes: RoundChanges, from_round: int, training: int) -> None:
        """The owner's newest word; `training` is the round that is being trained. Changes are those to the spec."""
        self._held = self.at(training)
        new = {name: value for name, value in asdict(changes).items() if value is not None}
        self._next, self._from = self._spec.model_copy(update=new), from_round

    def at(self, training: int) -> RoundSpec:
        """What holds in this round."""
        return self._next if training >= self._from else self._held
