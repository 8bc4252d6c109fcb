"""One peer of the benchmark, on a host of its own: a Swarm and a Store, no rounds and no trainer.

    python -m benchmarks.transfer.host FOLDER IP NUMBER

Reads a JSON object a line, {"do": "make" | "connect" | "fetch" | "sent", ...}, and answers each with one. Ends with its
input.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from peer.store import Store
from peer.swarm import Handlers, Swarm
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, RunId
from protocol.wire import swarm_pb2 as wire

PORT = 7300
RUN = RunId(b"transfer" * 4)
Answer = dict[str, Any]


def identity(number: int) -> Identity:
    return Identity(bytes([number + 1]) * 32)


def status_bytes(pid: int, field: str) -> int:
    """Return a field of /proc/PID/status in bytes; 0 if there is none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    return 0


def forget_highest(pid: int) -> None:
    """Reset VmHWM, so that it is the maximum from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def daemon_pid() -> int:
    """Return the process of libp2p, our child's child; our own if there is none."""
    mine = os.getpid()
    for child in Path(f"/proc/{mine}/task/{mine}/children").read_text().split():
        for found in Path(f"/proc/{child}/task/{child}/children").read_text().split():
            return int(found)
    return mine


class Peer:
    """The commands of a host."""

    def __init__(self, swarm: Swarm, store: Store):
        self.swarm = swarm
        self.store = store

    async def make(self, order: Answer) -> Answer:
        return {"digest": (await asyncio.to_thread(self._make, order["size"], order["seed"])).hex()}

    def _make(self, size: int, seed: int) -> Digest:
        """Return a blob of random bytes, the same for the same seed."""
        path = self.store.scratch / "made"
        chance = random.Random(seed)
        with open(path, "wb") as file:
            while size:
                size -= file.write(chance.randbytes(min(size, 1 << 20)))
        return self.store.adopt(path)

    async def connect(self, order: Answer) -> Answer:
        return {"met": len(await self.swarm.connect(order["addresses"]))}

    async def fetch(self, order: Answer) -> Answer:
        """Seconds and bytes, and the highest resident memory of this process and of libp2p's while it went on."""
        pids = (os.getpid(), daemon_pid())
        before = status_bytes(pids[0], "VmRSS")
        for pid in pids:
            forget_highest(pid)
        came, cpu, began = self.swarm.bytes_down, time.process_time(), time.monotonic()
        holders = [PeerKey.parse(h) for h in order["holders"]]
        await self.swarm.fetch_blob(
            Digest.parse(order["digest"]), order["size"], holders, deadline_seconds=order["within"]
        )
        return {
            "seconds": time.monotonic() - began,
            "bytes_down": self.swarm.bytes_down - came,
            "cpu_seconds": time.process_time() - cpu,
            "rss_before": before,
            "rss": status_bytes(pids[0], "VmHWM"),
            "daemon_rss": status_bytes(pids[1], "VmHWM"),
        }

    async def sent(self, order: Answer) -> Answer:
        return {"bytes_up": self.swarm.bytes_up}


async def serve(folder: Path, ip: str, number: int) -> None:
    with Store(folder, 1 << 40) as store:
        handlers = Handlers(
            on_packet=lambda sender, packet: None,
            on_chain_request=lambda sender, request: wire.ChainReply(),
            serve_refusal=lambda blob, requester: None,
        )
        swarm = await Swarm.start(
            identity(number), RUN, store=store, handlers=handlers, listen=[f"/ip4/{ip}/tcp/{PORT}"]
        )
        peer = Peer(swarm, store)
        do: dict[str, Callable[[Answer], Awaitable[Answer]]] = {
            "make": peer.make, "connect": peer.connect, "fetch": peer.fetch, "sent": peer.sent,
        }  # fmt: skip
        try:
            say({"key": swarm.key.hex(), "addresses": swarm.addresses})
            while line := await asyncio.to_thread(sys.stdin.readline):
                order = json.loads(line)
                say(await do[order["do"]](order))
        finally:
            await swarm.stop()


def say(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
