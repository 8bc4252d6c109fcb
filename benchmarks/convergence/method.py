"""The interface of a method: it takes inner steps, returns its state, and counts the bytes that it sends."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from benchmarks.convergence.setting import Setting


class Method(ABC):
    """A way to train on several peers, all simulated in one process.

    Counters, for one peer (the mean over peers): `payload` is the bytes of its gradient or update, once. `up` is the
    bytes that it sends to reach everyone: direct sends for updates, a ring for all-reduces, committees for reduced
    rounds. `exchanges` is the number of times that it waits for the others.
    """

    def __init__(self, setting: Setting):
        self.setting = setting
        self.payload = 0.0
        self.up = 0.0
        self.exchanges = 0

    @abstractmethod
    def step(self, number: int) -> None:
        """One inner step on every peer: step `number` from 0. Raises FloatingPointError when training diverges."""

    @abstractmethod
    def state(self) -> Tensor:
        """Return the method's present parameters: fp32 [parameters], flat in layout order."""

    @abstractmethod
    def finish(self) -> None:
        """After the last step: what is under way is brought in."""

    # -- how bytes spread ------------------------------------------------------------------------------------

    def all_reduced(self, size: float) -> None:
        """Count a ring all-reduce of a vector of `size` bytes: each peer sends it 2 (n - 1) / n times."""
        n = self.setting.profile.peers
        self.payload += size
        self.up += 2 * (n - 1) / n * size
        self.exchanges += 1

    def gathered(self, size: float, *, waits: bool = True) -> None:
        """Count `size` bytes from each peer to each other peer."""
        self.payload += size
        self.up += (self.setting.profile.peers - 1) * size
        self.exchanges += waits

    def reduced(self, size: float, sums: float, committee: int, *, waits: bool = True) -> None:
        """Count `size` bytes from each peer to committees of `committee` peers, and the `sums` among all."""
        self.payload += size
        self.up += min(committee, self.setting.profile.peers - 1) * size + sums
        self.exchanges += waits
