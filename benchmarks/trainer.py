"""The trainer beside a bare PyTorch loop of the same model, optimizer, batch and windows on the same device.

The trainer does all the work of a peer's trainer process for a step, without the channel to the node. This is reading
and checking data ahead, micro-batches, the gate, accounting of windows, throughput and learning rate. The bare loop
is forward, backward, clip, step, on windows that
lie ready; with --compile both compile each decoder layer. Both take turns; ratios are medians over turns. MFU is 6 x
parameters x tokens/s over what a matrix product reaches in the same run. A round's own work: `announce` is
pseudo-gradient, error feedback, encoding and the update's file; `apply` is 4 updates into the base; both also as a
share of 30 steps. Ranks: the trainer with data parallelism over a number of processes (gloo on a CPU, NCCL on GPUs).
The ranks share the threads and the batch.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  device, optimizer, compiled (whether both are)
  sizes: a list, each with
    name, parameters, batch_tokens, threads
    trainer_tokens_per_second, bare_tokens_per_second, ratio; matmul_flops; mfu
    peak_bytes (the most that the trainer held on a CUDA device in its first two steps; else null)
    announce_seconds, apply_seconds, announce_per_million, apply_per_million (seconds), round_share
  ranks: a list, each with world, tokens_per_second, speedup (over one rank)
  goals: a list of goal, value, met
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.convergence.corpus import corpus
from benchmarks.convergence.wan_run_file import toml
from coordinator.authoring.resolve import resolve
from coordinator.authoring.runfile import load_run
from peer.channel import Load, MakeUpdate, Start, UpdateMade
from peer.training.device import choose_device
from peer.training.inner_optimizer import hidden_matrices
from peer.training.layers import decoder_layers
from peer.training.muon import Muon
from peer.training.trainer import Trainer
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey
from protocol.model import build_model
from protocol.outer import Contribution
from protocol.spec import RunSpec

GOAL = 0.97
STEPS_OF_A_ROUND = 30
UPDATES = 4


@dataclass(frozen=True)
class Size:
    """A Llama; `batch` windows of `window` tokens in an inner step."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    window: int
    batch: int


CPU = (
    Size("1M", 192, 512, 2, 6, 1024, 128, 8),
    Size("5M", 320, 864, 4, 5, 2048, 128, 8),
)
CUDA = (
    Size("150M", 768, 2048, 16, 12, 4096, 1024, 32),
    Size("1B", 2048, 5632, 20, 16, 4096, 2048, 4),
)
"""The batch of the largest leaves room for the bare loop, which keeps all activations of a step beside the trainer."""


@contextmanager
def trainer_of(
    size: Size, device: str, threads: int, optimizer: str, parallel: str, compiled: bool = False
) -> Iterator[tuple[Trainer, Load]]:
    """Return a trainer with the state of a fresh run, as a node starts it, and the message that loaded it."""
    prepared = corpus(size.vocabulary, size.window).prepared.folder
    tables: dict[str, Any] = {
        "run": {"name": f"trainer {size.name}", "total_tokens": 10**9},
        "model": {
            "model_type": "llama", "hidden_size": size.hidden, "intermediate_size": size.intermediate,
            "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "num_key_value_heads": size.heads,
            "max_position_embeddings": size.window, "tie_word_embeddings": True,
        },
        "data": {"prepared": str(prepared.resolve()), "window": size.window},
        "inner": {"optimizer": optimizer, "batch": size.batch},
        "round": {"target_tokens": 10**7, "max_update_tokens": 10**8},
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="cairn-benchmark-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(toml(tables))
        run = resolve(load_run(folder / "run.toml"), folder / "run", Identity(bytes(31) + b"\x07"))
        spec = run.spec
        (folder / "spec.json").write_bytes(spec.canonical())
        shards = {s.digest: str(run.blobs[Digest.parse(s.digest)]) for s in spec.data.train}
        me = PeerKey(b"\x01" * 32)
        start = Start(
            folder / "spec.json", me, folder / "trainer", device, threads, shards, parallel,
            compile="on" if compiled else "off",
        )  # fmt: skip
        trainer = Trainer(start, lambda *_: None)
        try:
            genesis = run.blobs[spec.genesis.name]
            load = Load(genesis, spec.genesis.name, Digest(bytes(32)), 0, (), (), 0, 0)
            trainer.load(load)
            yield trainer, load
        finally:
            trainer.close(in_order=True)


def bare_loop(
    spec: RunSpec, device: torch.device, compiled: bool = False
) -> tuple[torch.nn.Module, Callable[[torch.Tensor], None]]:
    """Return a model with the run's initial weights, and a step of a plain loop on int64 [batch, window + 1]."""
    model = build_model(spec.model.config, device=device, seed=spec.seed)
    for layer in decoder_layers(model).values() if compiled else ():
        layer.compile()
    named = dict(model.named_parameters())
    chosen = hidden_matrices(model) if spec.inner.optimizer == "muon" else frozenset[str]()
    rest = [p for n, p in named.items() if n not in chosen]
    settings: dict[str, Any] = {"lr": spec.inner.lr, "betas": spec.inner.betas, "eps": spec.inner.eps, "fused": True}
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": spec.inner.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, **settings)]
    if chosen:
        optimizers.append(by_muon := Muon([named[n] for n in chosen], spec.inner))
        by_muon.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def step(windows: torch.Tensor) -> None:
        windows = windows.to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), spec.inner.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        float(loss.detach())  # a loop that shows its loss waits for the device once a step

    return model, step


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def matmul_flops(device: torch.device, seconds: float = 0.5) -> float:
    """FLOP/s of a square product: fp32 on a CPU, bf16 on CUDA. The best of several."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best, until = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = clock(device)
        torch.mm(a, b)
        best = min(best, clock(device) - began)
    return 2 * n**3 / best


def measured(
    size: Size, device: str, threads: int, optimizer: str, turns: int, steps: int, compiled: bool = False
) -> dict[str, Any]:
    """One size: the trainer and the bare loop in turns, then a round's own work."""
    torch.compiler.reset()  # else what was compiled for another size made this one's for any size
    with trainer_of(size, device, threads, optimizer, "dp=1", compiled) as (trainer, _):
        where = trainer.backend.device
        for _ in range(2):  # only the second has the moments beside its activations
            trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))
        held = torch.cuda.max_memory_allocated(where) if where.type == "cuda" else None
        _, bare = bare_loop(trainer.spec, where, compiled)
        ready = [trainer.steps.batches.take(n * size.batch) for n in range(steps)]

        def trainer_turn() -> None:
            for _ in range(steps):
                trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))

        def bare_turn() -> None:
            for windows in ready:
                bare(windows)

        took: dict[str, list[float]] = {"trainer": [], "bare": []}
        for turn in range(turns + 1):
            for name, run in (("trainer", trainer_turn), ("bare", bare_turn)):
                began = clock(where)
                run()
                if turn:  # the first warms up
                    took[name].append(clock(where) - began)
        announce, applied = round_work(trainer)
        tokens = steps * size.batch * size.window
        ratio = statistics.median(b / t for b, t in zip(took["bare"], took["trainer"], strict=True))
        speeds = {name: tokens / statistics.median(seconds) for name, seconds in took.items()}
        peak, parameters = matmul_flops(where), trainer.spec.model.layout.numel
    step = size.batch * size.window / speeds["trainer"]
    return {
        **asdict(size),
        "parameters": parameters,
        "batch_tokens": size.batch * size.window,
        "threads": threads,
        "trainer_tokens_per_second": speeds["trainer"],
        "bare_tokens_per_second": speeds["bare"],
        "ratio": ratio,
        "peak_bytes": held,
        "matmul_flops": peak,
        "mfu": 6 * parameters * speeds["trainer"] / peak,
        "announce_seconds": announce,
        "apply_seconds": applied,
        "announce_per_million": announce / parameters * 1e6,
        "apply_per_million": applied / parameters * 1e6,
        "round_share": (announce + applied) / (STEPS_OF_A_ROUND * step),
    }


def round_work(trainer: Trainer, turns: int = 5) -> tuple[float, float]:
    """Return the least seconds of several tries: to make an update, and to apply UPDATES of them and rebase."""
    announce, applied = [], []
    for turn in range(turns):
        trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))
        out = trainer.folder.folder / f"update-{turn}"
        began = clock(trainer.backend.device)
        if trainer.base.record is None:
            raise RuntimeError("the trainer holds no state")
        made = trainer.base.make_update(
            MakeUpdate(trainer.base.round, trainer.base.record, out), trainer.spec.max_update_windows
        )
        announce.append(clock(trainer.backend.device) - began)
        if not isinstance(made, UpdateMade):
            raise RuntimeError("there was nothing to announce")
        blob = out.read_bytes()
        updates = [Contribution(PeerKey(bytes([n + 2]) * 32), 100, blob) for n in range(UPDATES)]
        began = clock(trainer.backend.device)
        trainer.backend.outer.advance(updates)
        trainer.backend.outer.rebase()
        applied.append(clock(trainer.backend.device) - began)
        with trainer.exchange:
            trainer.exchange.windows = trainer.windows.lost()
    return min(announce), min(applied)


def scaled(
    size: Size, device: str, threads: int, optimizer: str, world: int, steps: int, compiled: bool = False
) -> dict[str, Any]:
    """Return the tokens a second of one trainer with a number of ranks."""
    torch.compiler.reset()
    with trainer_of(size, device, max(1, threads // world), optimizer, f"dp={world}", compiled) as (trainer, _):
        for _ in range(2):
            trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))
        began = clock(trainer.backend.device)
        for _ in range(steps):
            trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))
        seconds = clock(trainer.backend.device) - began
    return {"world": world, "tokens_per_second": steps * size.batch * size.window / seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save. Return 1 when a goal is missed."""
    parser = report.command_line(__doc__ or "", "trainer")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:0 (default auto)")
    parser.add_argument("--threads", type=int, default=1, help="of the trainer, on a CPU (default 1)")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--size", action="append", metavar="NAME", help="only this model, and no ranks")
    parser.add_argument("--compile", action="store_true", help="compile the layers, of the bare loop too")
    options = parser.parse_args(arguments)
    device = choose_device(options.device, options.threads)
    provenance = report.provenance("trainer", arguments)
    sizes = CPU if device.type == "cpu" else CUDA
    if unknown := set(options.size or ()) - {s.name for s in sizes}:
        parser.error(f"--size: there is no {', '.join(sorted(unknown))} for {device.type}")
    turns, steps = (3, 3) if options.quick else (9, 6)
    if options.size:
        sizes = [s for s in sizes if s.name in options.size]
    elif options.quick:
        sizes = sizes[:1]
    found = [
        measured(s, options.device, options.threads, options.optimizer, turns, steps, options.compile) for s in sizes
    ]
    most = torch.cuda.device_count() if device.type == "cuda" else 4
    worlds = [] if options.quick or options.size else [w for w in (1, 2, 4, 8) if w <= most]
    ranks = [
        scaled(sizes[-1], options.device.split(":")[0], 2, options.optimizer, w, 2 * steps, options.compile)
        for w in worlds
    ]
    for r in ranks:
        r["speedup"] = r["tokens_per_second"] / ranks[0]["tokens_per_second"]
    results = provenance | {
        "device": str(device),
        "optimizer": options.optimizer,
        "compiled": options.compile,
        "sizes": found,
        "ranks": ranks,
        "goals": [
            report.goal(f"{f['name']}: at least {GOAL} of the bare loop", f["ratio"], f["ratio"] >= GOAL) for f in found
        ],
    }
    return report.ended(results, options, show(results))


def show(results: dict[str, Any]) -> str:
    """Return the tables."""
    m = results["machine"]
    compiled = ", layers compiled" if results.get("compiled") else ""
    what = f"{results['device']}, {results['optimizer']}{compiled}"
    out = [f"{what}, {m['cores']} cores at load {m['load']}, torch {m['torch']}"]
    columns = ("model", "parameters", "tokens a step", "tokens/s", "of bare loop", "MFU", "announce ms per M",
               "apply 4 ms per M", "of 30 steps")  # fmt: skip
    rows = [
        [f["name"], f"{f['parameters']:,}", f["batch_tokens"], f"{f['trainer_tokens_per_second']:,.0f}",
         f"{f['ratio']:.3f}", f"{f['mfu']:.1%}", 1e3 * f["announce_per_million"], 1e3 * f["apply_per_million"],
         f"{f['round_share']:.2%}"]
        for f in results["sizes"]
    ]  # fmt: skip
    out.append(report.table(columns, rows))
    if results["ranks"]:
        rows = [[r["world"], f"{r['tokens_per_second']:,.0f}", r["speedup"]] for r in results["ranks"]]
        out.append(report.table(("ranks", "tokens/s", "speedup"), rows))
    return "\n\n".join(out)


if __name__ == "__main__":
    sys.exit(main())
