"""Limits of a caller and of all: rates, by token buckets in a bounded table, and places. Pure: time is an argument."""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from coordinator.errors import TooManyError
from protocol.bounded import BoundedDict
from protocol.token_bucket import TokenBucket


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `burst` at once, and `per_second` in the long run."""

    per_second: float
    burst: float


class RateLimit:
    """One bucket for each caller. When the table is full, the caller with the oldest request is forgotten."""

    def __init__(self, rate: Rate, *, callers: int = 10_000):
        self._rate = rate
        self._buckets: BoundedDict[Hashable, TokenBucket] = BoundedDict(callers)

    def take(self, caller: Hashable, now: float) -> None:
        """Count one request. Raises TooManyError, with the time to wait, if the bucket is empty."""
        bucket = self._buckets.get(caller) or TokenBucket(self._rate.per_second, self._rate.burst, now)
        self._buckets.renew(caller, bucket)
        bucket.refill(now)
        if bucket.tokens < 1:
            wait = (1 - bucket.tokens) / self._rate.per_second
            raise TooManyError(f"too many requests: try again in {max(1, round(wait))} s")
        bucket.charge(1)

    def __len__(self) -> int:
        return len(self._buckets)


class ConcurrencyLimit:
    """Limits what is in progress at once, of all callers together and of each one."""

    def __init__(self, in_all: int, of_one: int):
        self._in_all = in_all
        self._of_one = of_one
        self._held: Counter[Hashable] = Counter()
        self._sum = 0

    def take(self, caller: Hashable | None) -> Callable[[], None]:
        """Take a place, and return the function that frees it (once). Raises TooManyError.

        None is a caller that stands for many, and is limited by the number of all places alone.
        """
        if self._sum >= self._in_all or (caller is not None and self._held[caller] >= self._of_one):
            if not self._held[caller]:
                del self._held[caller]
            raise TooManyError("too many calls at once: try again in 5 s")
        self._held[caller] += 1
        self._sum += 1
        free = [True]

        def give_back() -> None:
            if free:
                free.clear()
                self._sum -= 1
                self._held[caller] -= 1
                if not self._held[caller]:
                    del self._held[caller]

        return give_back

    def __len__(self) -> int:
        return self._sum


def caller_of(grpc_peer: str) -> str:
    """Return the network that a caller is counted by: its IPv4 address, or the /64 of its IPv6 address.

    `grpc_peer` is as gRPC writes it: "ipv4:1.2.3.4:5", "ipv6:%5B::1%5D:5", "ipv6:[::1]:5", "unix:...".
    """
    kind, _, rest = grpc_peer.partition(":")
    host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    if kind not in ("ipv4", "ipv6"):
        return grpc_peer[:100]
    return network_of(host)


def network_of(host: str) -> str:
    """Return the network of an address; see `caller_of`."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host[:100]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)


def stranger_at(host: str) -> str | None:
    """Return the network of an address; None for this machine: a reverse proxy on it stands for everybody."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return None
    return network_of(host)
