"""Measurements of this machine and of the run's swarm, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any


@dataclass(frozen=True, slots=True)
class Device:
    """The devices of a trainer: `ranks` of one `kind` ("cuda" or "cpu"), laid out as `layout` says.

    Bytes of one of them: `needed` for the state of the training, without activations; `free` now; `whole`; `limit`, the
    most that training may take of a GPU (0: all). `offloaded`: bytes of the state between rounds, of
    all ranks, that lie in the machine's memory; or in files, of which `note` then warns. The ranks of a CPU share its
    memory. `unused` are GPUs that nvidia-smi lists and this torch does not see.
    """

    name: str
    kind: str
    layout: str
    ranks: int
    needed: int
    free: int
    whole: int
    torch: str
    cuda: str = ""
    driver: str = ""
    unused: tuple[str, ...] = ()
    limit: int = 0
    offloaded: int = 0
    note: str = ""
    savable: int = 0
    """Bytes of one that moments in 8 bits would save; 0 where they are no choice, or chosen already."""
    base_savable: int = 0
    """Bytes of one that a frozen base in nf4 would save, which the run's owner decides."""
    holds_whole: bool = False
    """Each device holds the whole of a frozen base, so more of them do not help."""

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Device:
        """Return the device that the process of a check has reported."""
        return cls(**{**report, "unused": tuple(report["unused"])})

    @property
    def usable(self) -> int:
        """Bytes of one that training can have now."""
        return min(self.free, self.limit or self.free)


@dataclass(frozen=True, slots=True)
class Sample:
    """One step on a number of random windows. `memory`: bytes then in use on the device, if known.

    `gradient` are the seconds of forward and backward passes, which grow with the windows. `optimizer` are those of the
    optimizer, which do not.
    """

    windows: int
    gradient: float
    optimizer: float = 0.0
    memory: int = 0


@dataclass
class Trial:
    """The outcome of training on random tokens.

    `refused` says why there is no device, or why training failed on it. `waited` are the seconds after which a trial
    ended before its first sample.
    """

    device: Device | None = None
    samples: list[Sample] = field(default_factory=list)
    refused: str = ""
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class PresentSwarm:
    """The run at this moment: members that are there, and the tokens a second that they train together."""

    members: int = 0
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class DownloadProbe:
    """A piece of a checkpoint from the coordinator's page, and the seconds from its first byte on."""

    size: int
    seconds: float

    @property
    def mbits(self) -> float:
        """Mbit/s."""
        return 8e-6 * self.size / self.seconds


def step_seconds(samples: Sequence[Sample], batch: int) -> float | None:
    """Return the seconds of an inner step of `batch` windows; None without a sample.

    Of the steps with the most windows all but the first count, which warms the device up. The gradient of fewer windows
    than a batch is scaled, which overestimates on a device that computes some windows at once.
    """
    most = max((s.windows for s in samples), default=0)
    if not most:
        return None
    steps = [s.gradient * batch / most + s.optimizer for s in samples if s.windows == most]
    return fmean(steps[1:] or steps)
