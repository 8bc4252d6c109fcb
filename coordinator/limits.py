"""Limits of a caller and of all: rates, by token buckets in a bounded table, and places. Pure: time is an argument."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from coordinator.errors import TooManyError
from protocol.bounded import BoundedDict
from protocol.token_bucket import TokenBucket

WIDER = {56: 2, 48: 4}
"""IPv6 networks beside the /64 (an ISP gives a customer one of these), and how often they have a /64's limit."""


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
        refuse_before(self.wait(caller, now))
        self.count(caller, now)

    def wait(self, caller: Hashable, now: float) -> float:
        """Return the seconds until the caller may send a request; 0.0: at once."""
        if (bucket := self._buckets.get(caller)) is None:
            return 0.0
        bucket.refill(now)
        return max(0.0, (1 - bucket.tokens) / self._rate.per_second)

    def count(self, caller: Hashable, now: float, amount: int = 1) -> None:
        """Count one request that is allowed, or an amount of something else, which may leave a debt."""
        bucket = self._buckets.get(caller) or TokenBucket(self._rate.per_second, self._rate.burst, now)
        self._buckets.renew(caller, bucket)
        bucket.charge(amount)

    def give_back(self, caller: Hashable) -> None:
        """Undo a count: the request came to nothing by our own fault."""
        if (bucket := self._buckets.get(caller)) is not None:
            bucket.charge(-1)

    def __len__(self) -> int:
        return len(self._buckets)


class NetworkLimit:
    """A rate of each network that a caller is in: one owner of addresses is one, however many it uses."""

    def __init__(self, rate: Rate, *, callers: int = 10_000):
        # One table for each size, so that many small networks do not push out a large one.
        sizes = (1, *WIDER.values())
        self._limits = {n: RateLimit(Rate(n * rate.per_second, n * rate.burst), callers=callers) for n in sizes}

    def take(self, caller: str, now: float) -> None:
        """Count one request. Raises TooManyError, with the time to wait, if one of the networks has none left."""
        refuse_before(self.wait(caller, now))
        self.count(caller, now)

    def wait(self, caller: str, now: float) -> float:
        """Return the seconds until the caller may send a request; 0.0: at once."""
        return max(self._limits[share].wait(network, now) for network, share in networks(caller))

    def count(self, caller: str, now: float, amount: int = 1) -> None:
        """Count one request that is allowed, or an amount of something else, which may leave a debt."""
        for network, share in networks(caller):
            self._limits[share].count(network, now, amount)

    def give_back(self, caller: str) -> None:
        """Undo a count: the request came to nothing by our own fault."""
        for network, share in networks(caller):
            self._limits[share].give_back(network)


def refuse_before(seconds: float) -> None:
    """Raise TooManyError if a caller has to wait."""
    if seconds:
        raise TooManyError(f"too many requests: try again in {max(1, round(seconds))} s")


class ConcurrencyLimit:
    """Limits what is in progress at once, of all callers together and of each network."""

    def __init__(self, total: int, per_caller: int):
        self._total = total
        self._per_caller = per_caller
        self._held: Counter[str] = Counter()
        self._sum = 0

    def take(self, caller: str | None) -> Callable[[], None]:
        """Take a place, and return the function that frees it (once). Raises TooManyError.

        None is a caller that stands for many, and is limited by the number of all places alone.
        """
        counted = [] if caller is None else networks(caller)
        if self._sum >= self._total or any(self._held[n] >= share * self._per_caller for n, share in counted):
            raise TooManyError("too many calls at once: try again in 5 s")
        self._held.update(network for network, _ in counted)
        self._sum += 1
        free = [True]

        def give_back() -> None:
            if free:
                free.clear()
                self._sum -= 1
                for network, _ in counted:
                    self._held[network] -= 1
                    if not self._held[network]:
                        del self._held[network]

        return give_back

    def __len__(self) -> int:
        return self._sum


def caller_of(grpc_peer: str) -> str:
    """Return the network that a caller is counted by: its IPv4 address, or the /64 of its IPv6 address.

    `grpc_peer` is as gRPC writes it: "ipv4:1.2.3.4:5", "ipv6:%5B::1%5D:5", "ipv6:[::1]:5", "unix:...".
    """
    kind, _, remaining = grpc_peer.partition(":")
    host = remaining.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    if kind not in ("ipv4", "ipv6"):
        return grpc_peer[:100]
    return network_of(host)


def networks(caller: str) -> list[tuple[str, int]]:
    """Return the networks that a caller (`caller_of`) counts in, each with the number of times it has the limit."""
    found = [(caller, 1)]
    if caller.endswith("::/64"):
        own = ipaddress.IPv6Network(caller)
        found += [(str(own.supernet(new_prefix=length)), share) for length, share in WIDER.items()]
    return found


def is_loopback(caller: str) -> bool:
    """Return whether a caller (`caller_of`) is this machine."""
    if caller.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_network(caller).is_loopback
    except ValueError:
        return False


def network_of(host: str) -> str:
    """Return the caller (`caller_of`) at an address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host[:100]
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)


def caller_at(host: str) -> str | None:
    """Return the caller at an address, as `caller_of`; None for this machine, on which a proxy stands for everybody."""
    network = network_of(host)
    return None if is_loopback(network) else network
