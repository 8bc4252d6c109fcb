"""Results as tables, a figure and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.convergence import links
from benchmarks.convergence.job import Job, Result
from benchmarks.convergence.measure import Measured
from benchmarks.convergence.setting import Profile
from benchmarks.convergence.studies import MAIN, NOT_TUNED, Row

BF16 = 2.0
SCALES = {row.label: row.scale for row in MAIN}

COLUMNS = (
    "method", "loss", "sd", "to reference", "lr", "bytes/token", "fewer than bf16", "MB up",
    *(f"s at {m}" for m in links.LINKS),
)  # fmt: skip


def per_token(m: Measured, profile: Profile) -> float:
    """Bytes that one peer says for each token that it trains on."""
    return m.payload / (profile.tokens / profile.peers)


def fewer(m: Measured, profile: Profile, parameters: int) -> float | None:
    """Return the ratio of the bytes of data-parallel training with bf16 gradients to a row's; None without bytes."""
    return BF16 * parameters * profile.steps / m.payload if m.payload else None


def compute_seconds(reference: Measured, profile: Profile) -> float:
    """Seconds of one inner step of one peer, measured: the reference's, whose step is all peers' work."""
    took = [r.seconds for r in reference.results.values()]
    return min(took) / (profile.steps * profile.peers)


def main_rows(found: Sequence[Measured], profile: Profile, parameters: int) -> list[list[object]]:
    """Return the comparison's table, without seconds of rows that exchange in each step: most would be round trips."""
    reference = found[0]
    step = compute_seconds(reference, profile)
    rows = []
    for m in found:
        ratio, _ = m.paired(reference)
        times = [links.seconds(profile.steps, step, m.up, m.exchanges, mbit) for mbit in links.LINKS]
        rows.append(
            [m.row.label + ", not tuned" * (m.row.label in NOT_TUNED),
             f"{m.loss:.4f}", m.spread and f"{m.spread:.4f}", f"{ratio:+.2%}", f"{m.lr:g}",
             _short(per_token(m, profile)), _times(fewer(m, profile, parameters)), _short(m.up / 1e6),
             *(f"{t:.0f}" if m.exchanges < profile.steps else None for t in times)]
        )  # fmt: skip
    return rows


STUDY_COLUMNS = ("choice", "loss", "to base", "error", "lr", "fewer than bf16")


def study_rows(found: Sequence[Measured], base: Measured, profile: Profile, parameters: int) -> list[list[object]]:
    """Return a study's table: each choice beside the base, seed by seed."""
    rows = []
    for m in found:
        ratio, error = m.paired(base)
        told = error and f"{error:.2%}"
        times = _times(fewer(m, profile, parameters))
        rows.append([m.row.label, f"{m.loss:.4f}", f"{ratio:+.2%}", told, f"{m.lr:g}", times])
    return rows


def time_rows(found: Sequence[Measured], target: float, profile: Profile, mbit: float) -> list[list[object]]:
    """Seconds to a validation loss, by arithmetic."""
    step = compute_seconds(found[0], profile)
    rows = []
    for m in found:
        first = next(iter(m.results.values()))
        at = links.crossing(first.curve, target)
        if at is None:
            rows.append([m.row.label, None, None])
            continue
        tokens, _, up, exchanges = at
        steps = tokens / profile.step_tokens
        took = links.seconds(steps, step, up * m.row.scale, exchanges, mbit)
        rows.append([m.row.label, f"{steps:.0f}", f"{took:.0f}"])
    return rows


TIME_COLUMNS = ("method", "steps", "seconds")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _times(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}x" if value >= 10 else f"{value:.2g}x"


def as_json(m: Measured) -> dict[str, Any]:
    """Return a row with all its measurements."""
    return {
        "label": m.row.label,
        "method": m.row.method,
        "options": dict(m.row.options),
        "scale": m.row.scale,
        "lr": m.lr,
        "tried": {f"{lr:g}": loss for lr, loss in m.tried.items()},
        "loss": m.loss,
        "losses": {str(s): r.loss for s, r in m.results.items()},
        "payload_bytes": m.payload,
        "up_bytes": m.up,
        "exchanges": m.exchanges,
        "seconds": [r.seconds for r in m.results.values()],
        "curve": next(iter(m.results.values())).curve,
    }


def from_json(row: Mapping[str, Any], profile: Profile) -> Measured:
    """Return a row that `as_json` has written. Bytes and exchanges are the mean of its seeds."""
    scale = row.get("scale", SCALES.get(row["label"], 1.0))
    results = {
        int(seed): Result(
            Job(profile.name, row["method"], row["options"], row["lr"], int(seed), None), loss, profile.tokens,
            row["payload_bytes"] / scale, row["up_bytes"] / scale, row["exchanges"], seconds, row["curve"],
        )
        for (seed, loss), seconds in zip(row["losses"].items(), row["seconds"], strict=True)
    }  # fmt: skip
    tried = {float(lr): loss for lr, loss in row["tried"].items()}
    return Measured(Row(row["label"], row["method"], row["options"], scale), row["lr"], tried, results)


def figure(found: Sequence[Measured], path: Path, title: str) -> None:
    """Plot the validation loss of tuned rows by tokens, and by the payload bytes of a peer (logarithmic)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fig, (by_tokens, by_bytes) = pyplot.subplots(1, 2, figsize=(13, 6.6), sharey=True)
    colours = pyplot.get_cmap("tab20")
    lows, highs = [], []
    for i, m in enumerate(found):
        curve = next(iter(m.results.values())).curve
        if len(curve) < 3 or m.row.label in NOT_TUNED:
            continue
        style = {"color": colours(i % 20), "label": m.row.label, "linewidth": 2.2 if m.row.method == "cairn" else 1.3}
        losses = [p[1] for p in curve]
        by_tokens.plot([p[0] / 1e6 for p in curve], losses, **style)
        if curve[-1][2]:
            by_bytes.plot([p[2] * m.row.scale / 1e6 for p in curve[1:]], losses[1:], **style)
        lows.append(losses[-1])
        highs.append(losses[len(losses) // 6])
    by_tokens.set_ylim(min(lows) - 0.05, max(highs))
    by_tokens.set_xlabel("million tokens, all peers")
    by_tokens.set_ylabel("validation loss, nats a token")
    by_bytes.set_xscale("log")
    by_bytes.set_xlabel("megabytes that a peer says")
    for axes in (by_tokens, by_bytes):
        axes.grid(alpha=0.25)
    fig.legend(*by_tokens.get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=8, frameon=False)
    fig.suptitle(title)
    fig.tight_layout(rect=(0, 0.16, 1, 1))
    fig.savefig(path, dpi=110)
    pyplot.close(fig)


def setting(profile: Profile, parameters: int) -> dict[str, Any]:
    """Return the size of a comparison, for its JSON file."""
    return {**asdict(profile), "model": dict(profile.model), "parameters": parameters, "tokens": profile.tokens}
