"""The device of this trainer, and its setup."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from peer.errors import TrainingError


def choose_device(name: str, threads: int, gpu_memory: int = 0) -> torch.device:
    """Return the device for "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N", ready for use.

    `gpu_memory`: the most bytes that this process's tensors may take of a CUDA device; 0: all. Raises TrainingError.
    """
    torch.set_num_threads(threads)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = "cuda:0"  # some of torch's functions take no device without a number
    try:
        device = torch.device(name)
    except RuntimeError:
        raise TrainingError(f"{name[:40]!r} is not a device: write auto, cpu, or cuda:0 (cuda:1, ...)") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise TrainingError(f"{name[:40]!r} is not a device that Cairn trains on: write auto, cpu, or cuda:0")
    if not torch.cuda.is_available():
        raise TrainingError(
            f"{name} is asked for, and torch {torch.__version__} sees no CUDA device: look whether nvidia-smi lists "
            "the GPU, and whether a torch with CUDA is installed; or train with --device cpu"
        )
    if (device.index or 0) >= torch.cuda.device_count():
        raise TrainingError(f"{name} is asked for; this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device)  # by a kernel of this torch
    except RuntimeError as e:
        remedy = "is another program on it?"
        if "no kernel image" in str(e):
            remedy = (
                "this torch has no code for this GPU: install one of an older CUDA (https://pytorch.org/get-started), "
                "or use --device cpu"
            )
        raise TrainingError(f"{name} cannot be used ({' '.join(str(e).split())[:200]}): {remedy}") from None
    if gpu_memory:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpu_memory / whole), device)
    return device


def device_name(device: torch.device) -> str:
    """Return the device's name for people: at most 80 printable characters."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    return "".join(c for c in name if c.isprintable())[:80]


def pinned_for(device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """Return a function for any thread that copies a tensor to pinned memory; None on a CPU.

    The device reads such memory while the host continues.
    """
    if device.type != "cuda":
        return None

    def pinned(tensor: Tensor) -> Tensor:
        try:
            with torch.cuda.device(device):  # a new thread's device is cuda:0, where another process may train
                return tensor.pin_memory()
        except RuntimeError:
            return tensor  # the host may allow no (more) such memory: the copy is slower, not wrong

    return pinned


def out_of_memory(device: torch.device, doing: str) -> TrainingError:
    """Return the error for memory that ran out outside of a step."""
    return TrainingError(
        f"the memory of {device_name(device)} does not suffice to {doing}: `cairn peer doctor INVITE` says what a peer "
        "of this run needs; stop other programs on it, allow more with --gpu-memory if that is set, "
        "choose another device, or a GPU with more memory"
    )


@contextmanager
def memory_for(device: torch.device, doing: str) -> Iterator[None]:
    """Run a block. Raises TrainingError, `out_of_memory`, when memory runs out in it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise out_of_memory(device, doing) from None
