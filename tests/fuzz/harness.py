"""Runs inputs through a parser under bounds of CPU seconds and memory, in a process of its own.

The process that watches survives whatever the parser does: a crash of the interpreter, a hang that no signal ends, a
kill for memory. It knows the input by its number, since every input follows from seed, parser and number.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.fuzz.mutation import splice

STUCK_SECONDS = 30.0
"""Seconds at one input after which its process is killed: no signal ended it at its bound, which is CPU time."""

BATCH = 20_000
"""Inputs of one process: a death costs no more counts."""

MAX_FAILURES = 5
"""Failures after which a parser's run ends."""


class Hung(BaseException):
    """The CPU time of one input is over. No `Exception`: a parser must not catch it."""


@dataclass(frozen=True)
class Parser:
    """A parser of foreign input.

    `parse` returns if it accepts, and asserts what must then hold. `refusals` are the errors that it documents.
    `mutate` makes an input of another one, valid or not. `seconds` (CPU) and `mebibytes` (resident memory) bound one
    input.
    """

    name: str
    samples: Sequence[bytes]
    mutate: Callable[[random.Random, bytes], bytes]
    parse: Callable[[bytes], object]
    refusals: tuple[type[BaseException], ...]
    seconds: float = 2.0
    mebibytes: int = 64

    def input(self, seed: int, number: int) -> bytes:
        """Return an input: a sample after one to four mutations."""
        rng = random.Random(f"{seed}/{self.name}/{number}")
        data = rng.choice(self.samples)
        if rng.random() < 0.03:
            data = splice(rng, data, self.samples)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = self.mutate(rng, data)
        return data


@dataclass
class Failure:
    """A fault that an input showed. `number` is that of the input."""

    number: int
    what: str
    input: str = ""


@dataclass
class Tally:
    """The run of one parser."""

    parser: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_seconds: float = 0.0
    peak_mebibytes: float = 0.0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)


class Memory:
    """Peak of the resident memory, in MiB, above that at the beginning of an input. On Linux only; else 0."""

    def __init__(self) -> None:
        self._reset = Path("/proc/self/clear_refs")
        self._status = Path("/proc/self/status")
        self.works = os.access(self._reset, os.W_OK) and self._status.exists()
        self._before = 0

    def begin(self) -> None:
        if self.works:
            self._reset.write_text("5")
            self._before = self._peak()

    def grown(self) -> float:
        return (self._peak() - self._before) / 1024 if self.works else 0.0

    def _peak(self) -> int:
        return int(self._status.read_text().partition("VmHWM:")[2].split(maxsplit=1)[0])


def check(parser: Parser, data: bytes, tally: Tally, memory: Memory) -> str | None:
    """Parse one input. Return what is wrong with the parser; None if nothing is."""
    tally.inputs += 1
    memory.begin()
    began = time.process_time()
    wrong = None
    try:
        # Repeated: one that comes while another exception is handled may be lost.
        signal.setitimer(signal.ITIMER_PROF, parser.seconds, parser.seconds)
        try:
            parser.parse(data)
            tally.accepted += 1
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except parser.refusals:
        tally.refused += 1
    except Hung:
        wrong = f"hang: more than {parser.seconds:g} CPU seconds"
    except MemoryError:
        wrong = f"memory: more than {parser.mebibytes} MiB"
    except BaseException as e:  # noqa: BLE001 - whatever a parser raises beside its refusals is the finding
        where = traceback.extract_tb(e.__traceback__)[-1]
        wrong = f"crash: {type(e).__name__}: {str(e)[:200]} ({Path(where.filename).name}:{where.lineno})"
    took, grown = time.process_time() - began, memory.grown()
    tally.slowest_seconds = max(tally.slowest_seconds, took)
    tally.peak_mebibytes = max(tally.peak_mebibytes, grown)
    if wrong is None and grown > parser.mebibytes:
        wrong = f"memory: {grown:.0f} MiB, more than {parser.mebibytes}"
    return wrong


def _limit_memory(mebibytes: int) -> None:
    """Bound the address space, so that a bomb is a MemoryError and no danger to the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        top = pages * resource.getpagesize() + (4 * mebibytes + 256) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (top, top))


def _work(parser: Parser, seed: int, numbers: range, place: mmap.mmap, pipe: Connection) -> None:
    """Run inputs, write the number of each to `place` before it, and send the tally at the end."""

    def hung(*_: Any) -> None:
        raise Hung

    signal.signal(signal.SIGPROF, hung)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A collector that ends gRPC's objects here waits for ever: the threads that they wait for were not forked.
    gc.freeze()
    _limit_memory(parser.mebibytes)
    tally, memory = Tally(parser.name), Memory()
    for number in numbers:
        place[:] = number.to_bytes(8, "little")
        data = parser.input(seed, number)
        if (wrong := check(parser, data, tally, memory)) is not None:
            tally.failures.append(Failure(number, wrong, data[:4096].hex()))
            if len(tally.failures) >= MAX_FAILURES:
                break
    pipe.send(tally)


def run(parser: Parser, seed: int, inputs: int, first: int = 0) -> Tally:
    """Run inputs `first` to `first + inputs` of a parser in a process of its own, and return what they did."""
    began, total, numbers = time.monotonic(), Tally(parser.name), range(first, first + inputs)
    while numbers and len(total.failures) < MAX_FAILURES:
        batch = numbers[:BATCH]
        tally, died_at, why = _watched(parser, seed, batch)
        if died_at is not None:
            batch = range(batch.start, died_at + 1)
            tally.inputs = len(batch)
            tally.failures.append(Failure(died_at, f"death: {why}", parser.input(seed, died_at)[:4096].hex()))
        for count in ("inputs", "accepted", "refused"):
            setattr(total, count, getattr(total, count) + getattr(tally, count))
        for most in ("slowest_seconds", "peak_mebibytes"):
            setattr(total, most, max(getattr(total, most), getattr(tally, most)))
        total.failures += tally.failures
        numbers = range(batch.stop, numbers.stop)
    total.seconds = time.monotonic() - began
    return total


def _watched(parser: Parser, seed: int, numbers: range) -> tuple[Tally, int | None, str]:
    """Run inputs in a process; return its tally, and the number at which it died, and why, if it did."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    place = mmap.mmap(-1, 8)
    process = context.Process(target=_work, args=(parser, seed, numbers, place, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        before = None
        while not ours.poll(STUCK_SECONDS):
            if (at := int.from_bytes(place[:], "little")) == before:
                return Tally(parser.name), at, f"no end after {STUCK_SECONDS:g} s, and no signal stops it"
            before = at
        return ours.recv(), None, ""
    except EOFError:
        process.join(STUCK_SECONDS)
        return Tally(parser.name), int.from_bytes(place[:], "little"), f"exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        ours.close()
        place.close()


def as_json(tally: Tally) -> dict[str, Any]:
    return asdict(tally)
