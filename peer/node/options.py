"""The settings of a node on this machine, as opposed to those of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peer.channel import Choice, MomentForm


@dataclass(frozen=True)
class NodeOptions:
    """A node's folder, the multiaddresses at which it listens and which it announces, and its trainer's settings.

    An `observer` trains nothing, and is no peer. An `auditor` is a peer that trains nothing: it checks others' updates
    on `device`. `parallel` is the layout over several devices. `recompute` saves memory by computing activations again,
    `compile` compiles the layers, and with `overlap` training goes on while an update is undecided. `private_data`
    allows private addresses of data. See `peer.channel.Start`. `audit_device` is where a peer that trains checks
    others' updates: "cpu", "cuda:N", "off", or "auto". That is the trainer's device in a replayable run, and "off" in
    others, where checks convict nobody.
    """

    folder: Path
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    device: str = "auto"
    parallel: str = "auto"
    recompute: Choice = "auto"
    compile: Choice = "auto"
    moments: MomentForm = "fp32"
    threads: int = 1
    observer: bool = False
    auditor: bool = False
    overlap: bool = True
    private_data: bool = False
    audit_device: str = "auto"
    shows_device: bool = True
    """True if heartbeats say what kind of device this peer trains on."""
    gpu_memory: Callable[[], int] = lambda: 0
    """Returns the most bytes that tensors of this peer may take on each GPU from now on; 0: all."""
    trainer_command: tuple[str, ...] = ()
    """Replaces the trainer's own command line, to measure the node by itself."""

    @property
    def trains(self) -> bool:
        """True for a node with a trainer."""
        return not self.observer and not self.auditor

    def makes_audits(self, *, replayable: bool) -> bool:
        """Return whether this node checks others' updates."""
        is_off = self.audit_device == "off" or (self.audit_device == "auto" and not replayable)
        return not self.observer and (self.auditor or not is_off)

    def gpu_share(self, *, replayable: bool) -> int:
        """Return the most bytes that the trainer may take on each GPU, and so may an audit; 0: all.

        Each has half of `gpu_memory` if both may be on one GPU.
        """
        limit = self.gpu_memory()
        return limit // 2 if self.trains and self._audits_beside_trainer(replayable=replayable) else limit

    def _audits_beside_trainer(self, *, replayable: bool) -> bool:
        """Return whether checks may be made on a GPU that the trainer uses."""
        if not self.makes_audits(replayable=replayable) or "cpu" in (self.device, self.audit_device):
            return False
        if self.audit_device == "auto" or (":" not in self.device and self.parallel != "dp=1"):
            return True  # the trainer may use all GPUs
        return _number(self.device) == _number(self.audit_device)


def _number(device: str) -> int:
    """Return N of "cuda:N"; 0 for "cuda" and "auto"."""
    return int(device.partition(":")[2] or 0)
