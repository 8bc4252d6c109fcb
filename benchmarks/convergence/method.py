"""What a method is to the comparison: it takes inner steps, tells its state, and counts the bytes it sends."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from benchmarks.convergence.setting import Setting


class Method(ABC):
    """A way to train on several peers, all simulated in one process.

    Counters, for one peer (the mean over peers): `payload` bytes of what it says (its gradient or update, once);
    `up` bytes that leave it when everyone must hear (the other peers by direct sends for updates, a ring for
    all-reduces, committees for reduced rounds); `exchanges`, how often it waits for the others.
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
        """The parameters that the method would hand out now: fp32 [parameters], flat in layout order."""

    @abstractmethod
    def finish(self) -> None:
        """After the last step: what is under way is brought in."""

    # -- how bytes spread ------------------------------------------------------------------------------------

    def all_reduced(self, size: float) -> None:
        """A vector of `size` bytes was averaged among all by a ring: each sends it 2 (n - 1) / n times."""
        n = self.setting.profile.peers
        self.payload += size
        self.up += 2 * (n - 1) / n * size
        self.exchanges += 1

    def gathered(self, size: float, *, waits: bool = True) -> None:
        """Each peer's `size` bytes went to each other peer."""
        self.payload += size
        self.up += (self.setting.profile.peers - 1) * size
        self.exchanges += waits

    def reduced(self, size: float, sums: float, committee: int, *, waits: bool = True) -> None:
        """Each peer's `size` bytes went, part by part, to committees of so many; all had the `sums` from each other."""
        self.payload += size
        self.up += min(committee, self.setting.profile.peers - 1) * size + sums
        self.exchanges += waits
