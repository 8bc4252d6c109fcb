"""Callers: honest ones with the requests of 10,000 peers, viewers of the page, and senders of garbage.

The load is open loop: calls are due at times drawn beforehand, and a call's time counts from the moment it was due.
Run as a
process: `python -m benchmarks.coordinator.load`, with the plan as JSON on standard input; the results are JSON, too.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from benchmarks.coordinator.swarm import identity, make_spec
from peer.coordinator_client import server_certificate
from protocol.envelope import seal
from protocol.invite import TLS_NAME, HostPort
from protocol.version import PROTOCOL
from protocol.wire import coordinator_pb2 as wire

CHANNELS = 32
SERVICE = "/cairn.coordinator.Coordinator/"
OPTIONS = (
    ("grpc.ssl_target_name_override", TLS_NAME),
    ("grpc.use_local_subchannel_pool", 1),  # else all channels would share one connection
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.enable_retries", 0),
)

REFUSED_STREAM = "RST_STREAM with error code 7"
"""Details of a call whose stream the server's gRPC refused unread (RFC 9113, section 8.7).

It refuses them while a connection has as many calls as it may have. Calls that have ended count until they are freed,
so a caller that keeps to the limit meets this as well. A client without retries gives such a call UNAVAILABLE.
"""

Ask = Callable[[grpc.aio.Channel], Awaitable[Any]]


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(seconds) or [0.0]
    at = {f"p{p}": 1e3 * ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))] for p in (50, 99)}
    return at | {"max": 1e3 * ordered[-1], "calls": len(seconds)}


class Calls:
    """The requests of a plan, and their durations."""

    def __init__(self, port: int, plan: dict[str, Any]):
        der = server_certificate(HostPort("127.0.0.1", port))
        pem = ssl.DER_cert_to_PEM_cert(der).encode()
        self._channels = [
            grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(pem), options=OPTIONS)
            for _ in range(plan.get("channels", CHANNELS))
        ]
        self._plan = plan
        self._run = bytes(make_spec().run_id)
        self._peers = plan["peers"]
        self._random = random.Random(plan.get("seed", 1))
        self.seconds: dict[str, list[float]] = {}
        self.codes: dict[str, Counter[str]] = {}
        self.late = 0.0

    def _raw(self, method: str, body: bytes) -> Ask:
        def ask(channel: grpc.aio.Channel) -> Awaitable[Any]:
            return channel.unary_unary(SERVICE + method)(body, timeout=20)

        return ask

    def honest(self, method: str) -> Ask:
        """Return a valid request of some peer."""
        if method == "Admit":
            me = identity(self._random.randrange(self._peers))
            body = wire.AdmissionRequest(run=self._run, time=int(time.time()), name="somebody", protocol=PROTOCOL)
            sealed = seal(me, "admission-request", body.SerializeToString(deterministic=True)).encoded
            return self._raw(method, wire.AdmitRequest(request=sealed).SerializeToString())
        request = getattr(wire, f"{method}Request")(run=self._run)
        if "peer" in request.DESCRIPTOR.fields_by_name:
            request.peer = bytes(identity(self._random.randrange(self._peers)).key)
        return self._raw(method, request.SerializeToString())

    def bad(self, _: str) -> Ask:
        """Rubbish of many kinds: what does not parse, is signed wrong, too large, unknown, or of another run."""
        r = self._random
        method = r.choice(["GetRun", "Admit", "Status", "Account", "Nothing"])
        kind = r.randrange(5)
        if kind == 0:
            return self._raw(method, r.randbytes(r.randrange(2000)))
        if kind == 1:
            return self._raw(method, b"\x0a" + r.randbytes(20_000))  # over the limit
        if kind == 2:
            sealed = bytearray(seal(identity(r.randrange(self._peers)), "admission-request", r.randbytes(100)).encoded)
            sealed[-1] ^= 1
            return self._raw("Admit", wire.AdmitRequest(request=bytes(sealed)).SerializeToString())
        if kind == 3:
            return self._raw("Account", wire.AccountRequest(run=self._run, peer=r.randbytes(31)).SerializeToString())
        return self._raw("Status", wire.StatusRequest(run=r.randbytes(32)).SerializeToString())

    async def one(self, name: str, ask: Ask, due: float) -> None:
        """Make one call when it is due."""
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        self.late = max(self.late, time.monotonic() - due)
        code = "OK"
        try:
            await ask(self._random.choice(self._channels))
        except grpc.aio.AioRpcError as e:
            refused = e.code() is grpc.StatusCode.UNAVAILABLE and REFUSED_STREAM in (e.details() or "")
            code = "REFUSED_STREAM" if refused else e.code().name
        self.codes.setdefault(name, Counter())[code] += 1
        self.seconds.setdefault(name, []).append(time.monotonic() - due)

    async def run(self) -> dict[str, Any]:
        """Run a plan: calls a second by method for its seconds, and viewers."""
        plan, begin = self._plan, time.monotonic() + 0.5
        tasks = []
        for name, rate in plan["rates"].items():
            make = self.bad if plan.get("bad") else self.honest
            at = 0.0
            while (at := at + self._random.expovariate(rate)) < plan["seconds"]:
                tasks.append(asyncio.create_task(self._later(name, make, begin + at)))
        end = begin + plan["seconds"]
        views = [asyncio.create_task(view(plan["page"], end)) for _ in range(plan.get("viewers", 0))]
        await asyncio.gather(*tasks)
        events = sum(await asyncio.gather(*views))
        for channel in self._channels:
            await channel.close()
        return {
            "calls": {name: percentiles(s) | {"codes": dict(self.codes[name])} for name, s in self.seconds.items()},
            "events": events, "late_ms": 1e3 * self.late,
        }  # fmt: skip

    async def _later(self, name: str, make: Callable[[str], Ask], due: float) -> None:
        # Made shortly before it is due: a request is signed with the time.
        await asyncio.sleep(max(0.0, due - time.monotonic() - 0.05))
        await self.one(name, make(name), due)


async def view(page: int, end: float) -> int:
    """View the page; return the number of updates received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", page, limit=2**22)
    writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
    events = 0
    try:
        while (left := end - time.monotonic()) > 0:
            events += b"data: " in await asyncio.wait_for(reader.readuntil(b"\n\n"), left)
    except (asyncio.TimeoutError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
    return events


def main() -> int:
    """Run a plan from standard input; write the results to standard output."""
    plan = json.load(sys.stdin)

    async def all_of_it() -> dict[str, Any]:
        return await Calls(plan["grpc"], plan).run()

    print(json.dumps(asyncio.run(all_of_it())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
