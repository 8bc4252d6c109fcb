"""A comparison of everybody's credits in `cairn status` with the chain."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Mapping

from protocol.spec import RunSpec
from tests.e2e.chains import Branch
from tests.scenarios.swarm import Swarm


async def credits_complete(swarm: Swarm, host: str, seconds: float) -> str:
    """Wait until credits and chain agree, and describe the result; fail with the differences otherwise."""
    end, apart = time.monotonic() + seconds, "nothing was seen"
    while time.monotonic() < end:
        try:
            status = await asyncio.to_thread(swarm.status_on, host)
        except subprocess.CalledProcessError as e:
            raise AssertionError(f"`cairn status`: {(e.stderr or e.stdout).strip()[-300:]}") from None
        branch = await asyncio.to_thread(swarm.branch, "coordinator")
        found = {p["peer"]: (p["micro_credits_settled"], p["micro_credits_pending"]) for p in status["peers"]}
        apart = credits_apart(swarm.spec, branch, status["head"], status["final_round"], found)
        if not apart:
            return f"of {len(branch.windows)} peers as by the chain, settled up to round {status['final_round']}"
        await asyncio.sleep(1)
    raise AssertionError(apart)


def credits_apart(
    spec: RunSpec, branch: Branch, head: str, final: int | None, found: Mapping[str, tuple[int, int]]
) -> str:
    """Return the differences of all micro-credits (settled and pending) from the chain up to a record; "" if none.

    `final`: the last round that is posted; no more than a few checkpoints' rounds may be open. Posted rounds settle
    when `credit.hold_rounds` are posted after them, or when the run is over.
    """
    until = next((i for i, c in enumerate(branch.path, 1) if str(c.digest) == head), None)
    if until is None:
        return f"the coordinator shows record {head[:8]}, which is not in its chain"
    if final is None or final < until - 1 - spec.checkpoint.final_depth - 3 * spec.checkpoint.every:
        return f"of {until} rounds those up to {final} are final"
    posted = sum(c.record.body.windows for c in branch.path[: final + 1]) * spec.data.window
    settled = final if 0 < spec.total_tokens <= posted else final - spec.credit.hold_rounds
    expected: dict[str, list[int]] = {}
    for c in branch.path[:until]:
        for u, windows in zip(c.record.body.updates, c.record.body.weighed, strict=True):
            flops = 6 * spec.model.layout.numel * windows * spec.data.window
            expected.setdefault(str(u.author), [0, 0])[c.record.body.round > settled] += flops // 10**9
    for key, of in expected.items():
        if found.get(key) != tuple(of):
            return f"{key[:8]} has {found.get(key)} micro-credits, and by the chain {tuple(of)}"
    return ""
