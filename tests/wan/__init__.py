"""An emulated internet: one network namespace a host, and one userspace router (router.c) between them.

Rates, round-trip times, loss, NAT, cuts and power failures between real processes on one machine, without the kernel's
netem. `Wan` is the whole of it for Python; `python -m tests.wan` is the same for a terminal. Here lives nothing that
knows of Cairn, so that rivals run over the very same lines: besides the tests, `benchmarks` may import this package
(and no other of `tests`). Needs root, Linux, iproute2, util-linux, procps and gcc, and nftables for NAT: `why_not()`
says in a line what is missing.
"""

from tests.wan.testbed import Counters, HostCounters, Wan, why_not
from tests.wan.topology import Topology, WanError, star

__all__ = ["Counters", "HostCounters", "Topology", "Wan", "WanError", "star", "why_not"]
