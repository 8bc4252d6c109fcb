"""Fine-tuning on conversations: 4 and 8 peers against one process with the same tokens.

A Llama is trained on the shipped addresses, then fine-tuned on conversations made of them, whole or by a LoRA adapter.
Peers send signs, and their outer step is plain: in so few rounds the default's momentum learns less, as two rows show.
Both parts are trained by Muon, the default; adapters by AdamW, too.
Everything is simulated in one process, with the product's own data, trainer, codec and outer step. Each row
has its own learning rate, from one search on the first seed: factors of two, until the best rate's neighbours are worse
or the search ends. Rows that the JSON file has are kept.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  setting: parameters, adapter (its parameters), steps, batch, h, window, window_tokens (mean of the trained tokens of a
    window), conversations, held_out (windows), base_loss (of the base's last training step), before (its loss on
    held-out answers)
  runs: a list, each with what ("whole" or "adapter"), way ("alone", or "together" with what is special), optimizer,
    peers, steps (of each peer), seed, lr, loss (nats a trained token on held-out answers; null if it diverged), bytes
    (that a peer announced; for "alone" those of its bf16 gradients), commit
  goals: a list of goal, value, met
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from benchmarks import report
from benchmarks.finetune.base import make_base
from benchmarks.finetune.chat import write_conversations
from benchmarks.finetune.rows import KINDS, LARGE_BATCH, TUNING, Row, Run, measured_row, rows, sizes_of
from benchmarks.finetune.world import FineTuning

TRAINED = ("whole", "adapter")
WRITTEN = {"whole": "muon", "adapter": "adamw"}
"""The inner optimizer in the run file that `cairn run init --sft` writes."""


def best(runs: Sequence[Run], row: Row) -> list[Run]:
    """Return a row's runs at its best rate, one for each seed."""
    mine = [r for r in runs if row.holds(r) and r["loss"] is not None]
    if not mine:
        return []
    first = min(r["seed"] for r in mine)
    lr = min((r for r in mine if r["seed"] == first), key=lambda r: r["loss"])["lr"]
    return [r for r in mine if r["lr"] == lr]


def best_alone(runs: Sequence[Run], row: Row) -> list[Run]:
    """Return the runs of one process with the better optimizer and as many windows as a row, one for each seed."""
    way = "alone" + LARGE_BATCH * row.way.endswith(LARGE_BATCH)
    found = [best(runs, Row(*kind, row.peers, row.steps)) for kind in KINDS if kind[:2] == (row.what, way)]
    return min(filter(None, found), key=lambda some: mean(r["loss"] for r in some), default=[])


def to_alone(runs: Sequence[Run], row: Row) -> list[float]:
    """Return by how much a row's loss is above that of one process, relative, for each seed of both."""
    alone = {r["seed"]: r["loss"] for r in best_alone(runs, row)}
    return [r["loss"] / alone[r["seed"]] - 1 for r in best(runs, row) if r["seed"] in alone]


def goals(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the goals with what was measured."""
    runs, out = results["runs"], []
    for what in TRAINED:
        longer = [r for r in rows(results["sizes"]) if (r.what, r.way) == (what, "together") and r.steps > TUNING.steps]
        for row in [*(Row(what, "together", WRITTEN[what], peers) for peers in results["sizes"]), *longer]:
            above = to_alone(runs, row)
            told = f"{what} by {row.optimizer}, {row.steps} steps"
            text = f"{told}: the loss of {row.peers} peers at most +1% of one process's"
            met = mean(above) <= 0.01 if above else None
            out.append(report.goal(text, f"{mean(above):+.2%}" if above else None, met))
        peers = results["sizes"][0]
        row = Row(what, "together", WRITTEN[what], peers)
        ours, alone = best(runs, row), best_alone(runs, row)
        fewer = alone[0]["bytes"] / ours[0]["bytes"] if ours and alone else None
        text = f"{what}: at least 500 times fewer bytes than bf16 gradients"
        out.append(report.goal(text, f"{fewer:.0f}x" if fewer else None, fewer >= 500 if fewer else None))
    return out


def show(results: Mapping[str, Any]) -> str:
    """Return the table."""
    lines = []
    for row in rows(results["sizes"]):
        if found := best(results["runs"], row):
            losses, above = [r["loss"] for r in found], to_alone(results["runs"], row)
            lines.append([
                f"{row.what}, {row.way}, {row.optimizer}, {row.peers} peers, {row.steps} steps", f"{mean(losses):.4f}",
                f"{pstdev(losses):.4f}", len(losses), f"{mean(above):+.2%}" if above else None,
                f"{found[0]['lr']:g}", f"{found[0]['bytes']:,}",
            ])  # fmt: skip
    return report.table(["row", "loss", "sd", "seeds", "to alone", "lr", "bytes"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save. Return 1 when a goal is missed."""
    parser = report.command_line(__doc__ or "", "finetune")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--peers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    seeds, sizes = (options.seeds[:1], options.peers[:1]) if options.quick else (options.seeds, options.peers)
    results: dict[str, Any] = report.provenance("finetune", arguments, seeds)
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    results |= {"sizes": sizes, "runs": list(before.get("runs", []))}
    with tempfile.TemporaryDirectory(prefix="cairn-finetune-") as folder:
        results["setting"] = _setting(Path(folder), options.quick, seeds[0])
        # A fresh interpreter: torch's threads do not survive a fork.
        with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
            jobs = [
                pool.submit(measured_row, row, folder, options.quick, seeds, results["commit"], results["runs"])
                for row in rows(sizes)
            ]
            for job in as_completed(jobs):
                results["runs"] += job.result()
                results["goals"] = goals(results)
                if options.json:
                    report.save(options.json, results)
    return report.ended(results, options, show(results))


def _setting(folder: Path, quick: bool, seed: int) -> dict[str, Any]:
    """Make base model and conversations in a folder, and describe them."""
    size, plan = sizes_of(quick=quick)
    loss = make_base(size, folder / "base")
    texts = write_conversations(folder, every=24 if quick else 3)
    worlds = [
        FineTuning(folder / f"setting-{a}", folder / "base", texts, size, plan, adapter=a, optimizer="muon", seed=seed)
        for a in (False, True)
    ]
    whole, adapter = worlds
    return {
        "parameters": whole.spec.model.layout.numel, "adapter": adapter.spec.model.layout.numel,
        "steps": plan.steps, "batch": plan.batch, "h": plan.h, "window": plan.window, "rank": plan.rank,
        "window_tokens": whole.spec.data.window_tokens, "windows": whole.train.total,
        "held_out": whole.held_out.total, "conversations": sum(1 for _ in texts[0].open()), "base_loss": loss,
        "before": whole.before(),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
