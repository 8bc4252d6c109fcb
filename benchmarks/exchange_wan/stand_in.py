"""The trainer's place in the benchmark: it speaks the channel, makes updates of noise, and applies rounds for real.

Started by the node of `cairn_peer`. Updates are made before a round begins, so that what is measured begins with the
announcement; a round begins when the harness says so, for all at once.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.exchange_wan.job import LOOK_SECONDS, Diary, Job
from benchmarks.exchange_wan.setting import TARGET
from peer.channel import (
    Applied,
    Apply,
    Load,
    MakeUpdate,
    Orders,
    Progress,
    Ready,
    RoundUpdates,
    Start,
    Stop,
    Stopped,
    ToTrainer,
    TrainerEnd,
    UpdateMade,
)
from peer.errors import ChannelError
from peer.parent_process import exit_with_parent
from protocol.codec import make_codec
from protocol.ids import Digest
from protocol.layout import BLOCK
from protocol.merkle import blob_digest
from protocol.outer import Contribution, apply
from protocol.spec import parse_spec
from protocol.state import state_digest, state_layout, tensors_from_checkpoint


class StandIn:
    """One trainer that trains nothing: `serve` until the node says Stop."""

    def __init__(self, end: TrainerEnd, diary: Diary, start: Start, number: int):
        self._end, self._diary, self._number = end, diary, number
        self._me = start.identity_key
        self._spec = parse_spec(start.spec_path.read_bytes())
        self._layout = state_layout(self._spec.model.layout, self._spec.outer)
        self._codec = make_codec(self._spec.codec, self._spec.model.layout)
        self._file = start.state_folder.with_name("update.blob")
        self._state: dict[str, torch.Tensor] = {}
        self._round = -1
        self._window = 0
        self._made: Digest | None = None
        self._told = False
        end.send(Ready("nothing", self._spec.model.layout.numel, self._codec.size))

    def serve(self) -> None:
        while True:
            message = self._end.receive(self._patience())
            if isinstance(message, Stop):
                self._end.send(Stopped(True))
                return
            if message is not None:
                self._answer(message)
            self._begin()

    def _patience(self) -> float:
        at = None if self._told else self._diary.begins(self._round)
        return LOOK_SECONDS if at is None else max(0.0, min(LOOK_SECONDS, at - time.monotonic()))

    def _begin(self) -> None:
        """Once the round has begun: as much is done as a round of this run wants, so it is announced at once."""
        at = None if self._told or self._made is None else self._diary.begins(self._round)
        if at is not None and time.monotonic() >= at:
            self._told = True
            self._progress(TARGET)

    def _progress(self, windows: int) -> None:
        self._end.send(Progress(windows, 1.0, float(self._spec.data.window), False))

    def _answer(self, message: ToTrainer) -> None:
        match message:
            case Load():
                with open(message.checkpoint, "rb") as file:
                    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._state = tensors_from_checkpoint(self._layout, data)
                self._apply(message.replay)
                state = self._digest() if message.replay else message.base_state
                record = message.replay[-1].record if message.replay else message.record
                self._end.send(Applied(record, state, None))
                self._prepare(message.round + len(message.replay), message.next_window)
            case Apply():
                self._diary.say("certified", message.update.round)
                began = time.process_time()
                self._apply([message.update])
                applied = time.process_time()
                state = self._digest()
                spent = {"apply_cpu": applied - began, "digest_cpu": time.process_time() - applied}
                self._end.send(Applied(message.update.record, state, None))
                self._diary.say("summed", message.update.round, **spent)
                self._prepare(message.update.round + 1, message.next_window)
            case MakeUpdate() if self._made is not None:
                os.replace(self._file, message.out)
                first, end = self._window, self._window + TARGET
                self._end.send(
                    UpdateMade(message.parent, message.out, self._codec.size, self._made, first, first, end, 1, 1.0)
                )
                self._made = None
            case Orders():
                pass  # nobody orders anything here
            case _:
                raise ChannelError(f"a stand-in for a trainer does not know what to do with {type(message).__name__}")

    def _apply(self, rounds: Sequence[RoundUpdates]) -> None:
        for each in rounds:
            maps = []
            for update in each.updates:
                with open(update.blob, "rb") as file:
                    maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            contributions = [
                Contribution(u.author, u.windows, memoryview(m)) for u, m in zip(each.updates, maps, strict=True)
            ]
            apply(self._state, contributions, self._codec, self._spec.outer)

    def _digest(self) -> Digest:
        return state_digest(self._layout, self._state, 1)

    def _prepare(self, round: int, window: int) -> None:
        """Make the update of a round from fresh noise: of full size, and as hard to compress as any."""
        self._round, self._window, self._told = round, window, False
        self._progress(0)
        generator = torch.Generator().manual_seed(1000 * round + self._number)
        blob = bytearray(self._codec.header)
        for index, tensor in enumerate(self._spec.model.layout.tensors):
            if tensor.numel % BLOCK:
                raise ChannelError(f"{tensor.name} is not a whole number of blocks")
            blob += self._codec.encode_blocks(index, 0, torch.randn(tensor.numel, generator=generator))
        update = self._codec.with_author(blob, self._me)
        self._made = blob_digest(update)
        self._file.write_bytes(update)
        # Report some work: the others learn from heartbeats that this peer trains, and wait for it.
        self._progress(1)
        self._diary.ready(round)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    end = TrainerEnd.from_fd(arguments.fd)
    if not exit_with_parent(arguments.parent):
        return 1
    start = end.receive(None)
    if not isinstance(start, Start):
        return 1
    try:
        diary = Diary(Job.read(arguments.job), arguments.number)
        StandIn(end, diary, start, arguments.number).serve()
    except ChannelError as e:
        print(f"stand-in: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
