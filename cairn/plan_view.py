"""A plan for people: the lines that `cairn run plan` prints. Pure: a plan in, lines out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from coordinator.authoring import measurements
from coordinator.authoring.plan import (
    ASSUMED_FLOPS,
    ASSUMED_UTILISATION,
    LEAST_STEPS,
    MOST_BATCH,
    Remedies,
    RunPlan,
)
from protocol.training_memory import LEAST_BYTES, MOST_BYTES, MOST_EIGHT_BIT
from protocol.units import byte_size, count


def lines(p: RunPlan, model: str = "", *, assumed: bool = False) -> Iterator[str]:
    """Yield the lines of a plan: conditions, choices with reasons, costs, and nearby settings."""
    q = p.inputs
    yield from _aligned(_conditions(p, model, assumed))
    yield ""
    if p.remedies:
        yield from _remedies_lines(p, p.remedies)
        yield ""
    yield from _aligned([("write", "value", "why"), *_choices(p)])
    yield ""
    yield from _aligned(_costs(p))
    yield ""
    yield from _aligned(_changes(p))
    for caution in p.cautions:
        yield f"note: {caution}"
    if not q.relays:
        yield "note: every peer is assumed to send its update to all others itself; relays by members would avoid that"


def _conditions(p: RunPlan, model: str, assumed: bool) -> Iterator[tuple[str, ...]]:
    q = p.inputs
    said = " (assumed: --parameters or --model says otherwise)" if assumed else f" ({model})" if model else ""
    on_base = f", on a frozen base of {q.frozen:,}" if q.frozen else ""
    yield "model", f"{q.parameters:,} parameters{on_base}{said}"
    down = "the same" if q.downlink is None else f"{q.downlink:g} Mbit/s"
    yield "peers", f"{q.peers}, each {q.uplink:g} Mbit/s up, {down} down, {q.rtt:g} ms to each other and back"
    how = (
        f" (assumed: {ASSUMED_UTILISATION:.0%} of a GPU of {ASSUMED_FLOPS / 1e12:g} TFLOP/s; --tokens-per-second "
        "says otherwise)"
    )
    yield "speed", f"{q.speed:,.0f} tokens/s a peer{how if q.tokens_per_second is None else ''}"
    yield "data", f"{count(q.total)} tokens, {q.total / q.parameters:.3g} a parameter"


def _remedies_lines(p: RunPlan, remedies: Remedies) -> Iterator[str]:
    q = p.inputs
    yield (
        f"TOO SLOW: no measured setting exchanges within {q.share:.1%} of a round's training; the one that comes "
        f"nearest takes {p.cost.share:.1%}. It is planned below; one of these would make it fit:"
    )
    if remedies.inner_steps:
        yield (
            f"  longer rounds: round.target_tokens = {remedies.inner_steps * q.step_tokens:_} (H = "
            f"{remedies.inner_steps}; what that does to the loss was not measured)"
        )
    if remedies.share:
        yield f"  a larger share: --share {remedies.share:g} (training goes on meanwhile: no GPU waits)"
    if remedies.uplink < math.inf:
        yield f"  faster links: {_mbit(remedies.uplink)} up"
    if remedies.peers:
        yield f"  fewer peers: {remedies.peers}"
    if not q.relays:
        yield "  members with fast links that pass updates on: --relays, with --downlink"


def _choices(p: RunPlan) -> Iterator[tuple[str, ...]]:
    q, m, c = p.inputs, p.setting, p.cost
    measured = f"measured: {measurements.SOURCE}"
    rule = f"the least with an exchange of up to {q.share:.0%} of a round" if p.fits else "the nearest to fitting"
    tuned = f"measured: {measurements.FINE_TUNING}"
    yield "inner.optimizer", f"{p.inner.value}", f"{p.inner.why} ({tuned if q.frozen else measured})"
    of_loss = f"measured: {p.source}"
    yield "codec.kind", m.codec.kind, f"with H a final loss {p.final_loss}, {rule} ({of_loss})"
    if m.codec.kind == "sparse":
        yield "codec.k", f"{m.codec.k}", "coordinates of each 4096"
    yield (
        "inner steps (H)",
        f"{m.inner_steps}",
        f"{c.training_seconds:.3g} s a round, of {q.windows} x {q.window} tokens",
    )
    yield (
        "round.target_tokens",
        f"{p.target_tokens:_}",
        f"H {m.inner_steps} x {q.peers} peers x {q.windows} windows x {q.window} tokens",
    )
    yield "codec.beta", f"{m.codec.beta:g}", f"{measurements.BETA_WHY} ({measured})"
    if p.outer.optimizer == "nesterov":
        yield "outer.optimizer", p.outer.optimizer, f"{measurements.OUTER_WHY} ({measured})"
        yield "outer.momentum", f"{p.outer.momentum:g}", "everyone holds it: 4 more bytes a parameter, also to fetch"
        yield "outer.lr", f"{p.outer.lr:g}", "0.5 of momentum goes as far as a rate of 2 without"
    elif m.codec.kind == "sign":
        yield "outer.optimizer", p.outer.optimizer, f"{measurements.PLAIN_WHY} ({tuned})"
        yield "outer.lr", f"{p.outer.lr:g}", f"the best plain rate of those that were tried ({measured})"
    else:
        yield "outer.lr", f"{p.outer.lr:g}", "the whole mean change"
    yield "inner.lr", f"{p.lr:g}", "a start, from the model's size: try half and double of it on a small scale"
    halved = f"at most {MOST_BATCH}, halved until the run has {LEAST_STEPS:,} inner steps"
    yield "inner.batch", f"{q.windows}", halved if q.batch is None else "as given"
    yield "warmup_tokens", f"{p.warmup_tokens:_}", f"{measurements.WARMUP:.0%} of the run, then a cosine to a tenth"
    for field, why in (
        ("max_seconds", f"3 x the {c.training_seconds:.3g} s of training, at least 600"),
        ("exchange_seconds", f"4 x the {c.exchange_seconds:.3g} s planned, at least 60"),
        ("propose_seconds", "20 round trips, at least 10"),
        ("patience_seconds", "2 x exchange_seconds, at least 120"),
    ):
        yield f"round.{field}", f"{p.timers[field]}", why
    yield "overlap", "always", "training goes on during the exchange: not a field"


def _costs(p: RunPlan) -> Iterator[tuple[str, ...]]:
    q, c = p.inputs, p.cost
    to = "once, the rest by relays" if q.relays else f"to {q.copies} others"
    yield "update", f"{c.update_bytes:,} bytes, {8 * c.update_bytes / q.parameters:.3f} bits a parameter"
    yield "up", f"{byte_size(p.up_bytes)} a peer and round ({to}); down {byte_size(p.down_bytes)}"
    slower = "up" if q.copies / q.uplink >= (q.peers - 1) / (q.downlink or q.uplink) else "down"
    yield "exchange", f"{c.exchange_seconds:.3g} s (bytes {slower} / {slower}link + 2 round trips)"
    yield "of the round", f"{c.share:.1%} of {c.training_seconds:.3g} s of training, which goes on meanwhile"
    yield "memory", f"{_memory(p)} on each GPU, and room for one window"
    yield "length", f"{p.rounds:,} rounds, {_long(p.days)}"
    total = p.rounds * p.up_bytes
    yield (
        "in all",
        f"{byte_size(total)} up a peer; data-parallel in bf16 {byte_size(p.data_parallel_bytes)} (ring "
        f"all-reduce a step): {p.data_parallel_bytes / total:,.3g}x",
    )


def _memory(p: RunPlan) -> str:
    state = MOST_BYTES * p.inputs.parameters
    if not p.inputs.frozen:
        most_rounded = byte_size(round(MOST_EIGHT_BIT * p.inputs.parameters))
        by_muon = byte_size(LEAST_BYTES * p.inputs.parameters)
        return f"{by_muon} to {byte_size(state)}, the more of embeddings (at most {most_rounded} with --moments 8bit)"
    base = p.inputs.frozen_bytes
    parts = f"{byte_size(base)} the frozen base, {byte_size(state)} the adapter"
    return f"{byte_size(base + state)} ({parts}; fsdp divides both among a peer's GPUs, but no base of int8 or nf4)"


def _changes(p: RunPlan) -> Iterator[tuple[str, ...]]:
    q, c = p.inputs, p.cost
    if p.setting.loss == min(m.loss for m in measurements.MEASURED):
        yield "better", "nothing that was measured has less loss"
    elif p.better:
        b = p.better.setting
        yield (
            "better",
            f"from {_mbit(p.better.uplink_needed)} up: {b} (loss {b.loss:g} x as measured, not {p.setting.loss:g} x)",
        )
    else:
        yield "better", "over a faster uplink: shorter rounds, or the same with less training on old states"
    if p.fits:
        yield "worse", f"below {_mbit(c.uplink_needed)} up this does not fit into {q.share:.1%}"
        if p.most_peers:
            yield "", f"nor with more than {p.most_peers} peers"


def _mbit(n: float) -> str:
    return f"{n:,.0f} Mbit/s" if n >= 100 else f"{n:.3g} Mbit/s"


def _long(days: float) -> str:
    return (
        f"{days:,.1f} days" if days >= 2 else f"{24 * days:.1f} hours" if days >= 1 / 12 else f"{1440 * days:.1f} min"
    )


def _aligned(rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> Iterator[str]:
    """Yield rows with columns as wide as their widest cell; the last column is free."""
    table = list(rows)
    widths = [max(len(row[i]) for row in table) for i in range(min(map(len, table)) - 1)]
    for row in table:
        yield "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
