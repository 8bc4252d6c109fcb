"""One peer of the rival: trains with `hivemind.Optimizer`, and writes down what it averaged.

    python -m benchmarks.convergence.hivemind_peer JOB.json NUMBER

Started by `rival_hivemind`. Each global step writes a line in steps-NUMBER.jsonl: its end, the number of this peer's
windows, and two sketches of gradients. One is of its own gradients, one of those that the optimizer then used. A
sketch is the projection on a few fixed random vectors. It is linear, so the mean of all peers' own sketches must
equal each peer's used sketch, whatever the averager reports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hivemind
import numpy as np
import torch
from hivemind import compression
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.convergence.corpus import Corpus
from benchmarks.convergence.hivemind_job import Job
from benchmarks.convergence.setting import Profile, Setting
from benchmarks.exchange_wan.job import first_peer, publish
from coordinator.authoring.prepare import load_prepared

PROJECTIONS = 8
WAIT_SECONDS = 0.02


COMPRESSIONS = {
    "none": compression.NoCompression,
    "fp16": compression.Float16Compression,
    "uint8": compression.Uniform8BitQuantization,
    "blockwise8": compression.BlockwiseQuantization,
}


def setting_of(job: Job) -> Setting:
    """Return the comparison's setting, from the prepared folder that all share (without its lock)."""
    prepared = load_prepared(Path(job.prepared))
    dtype = np.dtype(prepared.manifest.dtype).newbyteorder("<")
    train, validation = (
        np.concatenate([np.fromfile(prepared.folder / f"{s.digest}.tokens", dtype=dtype) for s in part.shards])
        for part in (prepared.manifest.train, prepared.manifest.validation)
    )
    return Setting(Profile(**job.profile), job.seed, Corpus(train, validation, (), prepared))


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips the averaged gradients' norm and sketches them first. hivemind's examples clip in here too."""

    def __init__(self, groups: Any, sketch: Sketch, **options: Any):
        super().__init__(groups, **options)
        self._sketch = sketch
        self.used: list[list[float]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.used.append(self._sketch.of(p.grad for p in parameters if p.grad is not None))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        return super().step(closure)


class Sketch:
    """Projections of all gradients together on PROJECTIONS fixed vectors of +1 and -1, divided by the root of n."""

    def __init__(self, numel: int):
        generator = torch.Generator().manual_seed(20)
        signs = torch.randint(0, 2, (PROJECTIONS, numel), generator=generator, dtype=torch.int8)
        self._signs = (2.0 * signs - 1.0) / numel**0.5

    def of(self, gradients: Iterator[Tensor]) -> list[float]:
        return (self._signs @ torch.cat([g.detach().reshape(-1).float() for g in gradients])).tolist()


def main() -> int:
    job, number = Job.read(Path(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    folder = Path(job.folder)
    setting = setting_of(job)
    profile = setting.profile
    model = setting.model()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    ordered = [p for group in groups for p in group["params"]]
    sketch = Sketch(sum(p.numel() for p in ordered))
    share = job.micro * profile.batch
    dht = hivemind.DHT(
        host_maddrs=[job.addresses[number]],
        initial_peers=first_peer(folder) if number else [],
        start=True,
    )
    if not number:
        publish(folder / "first-peer.json", json.dumps([str(a) for a in dht.get_visible_maddrs()]))
    optimizers: list[ClippedAdamW] = []

    def adamw(params: Any) -> ClippedAdamW:
        optimizers.append(ClippedAdamW(params, sketch, lr=job.lr, betas=(0.9, 0.95), eps=1e-8))
        return optimizers[-1]

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: setting.factor(min(1.0, (step + 0.5) * job.micro / profile.steps))
        )

    options = dict(job.options)
    # Its `averager_opts` reach the averager of parameters only, whatever the docstring says: gradients want them too.
    also = options.get("averager_opts", {})
    options["grad_averager_factory"] = (
        partial(PowerSGDGradientAverager, averager_rank=job.power_rank, **also)
        if job.power_rank
        else partial(GradientAverager, **also)
    )
    wire = COMPRESSIONS[job.compression]()
    opt = hivemind.Optimizer(
        dht=dht,
        run_id="rival",
        target_batch_size=share * profile.peers,
        batch_size_per_step=profile.batch,
        params=groups,
        optimizer=adamw,
        scheduler=schedule,
        grad_compression=wire,
        state_averaging_compression=wire,
        verbose=True,
        **options,
    )
    publish(folder / f"ready-{number}", "")
    while not (folder / "go").exists():
        time.sleep(WAIT_SECONDS)
    _train(job, number, setting, model, opt, optimizers, sketch, ordered)
    publish(folder / f"done-{number}", "")
    while not (folder / "stop").exists():
        time.sleep(WAIT_SECONDS)
    opt.shutdown()
    dht.shutdown()
    return 0


def _train(
    job: Job,
    number: int,
    setting: Setting,
    model: torch.nn.Module,
    opt: hivemind.Optimizer,
    optimizers: list[ClippedAdamW],
    sketch: Sketch,
    ordered: list[torch.nn.Parameter],
) -> None:
    profile, folder = setting.profile, Path(job.folder)
    share, counter, given = job.micro * profile.batch, 0, 0
    own = np.zeros(PROJECTIONS)
    compute = 0.0
    with open(folder / f"steps-{number}.jsonl", "w", buffering=1) as lines:
        while opt.local_epoch < job.steps:
            epoch, began = opt.local_epoch, time.monotonic()
            used_before = len(optimizers[-1].used)
            if job.free or given < share:
                windows = setting.windows(number, counter, profile.batch)
                opt.zero_grad()
                logits = model(input_ids=windows[:, :-1], use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
                loss.backward()
                counter, given = counter + profile.batch, given + profile.batch
                own += profile.batch * np.array(sketch.of(p.grad for p in ordered if p.grad is not None))
                compute += time.monotonic() - began
                began = time.monotonic()
                opt.step()
            else:
                _step_without_batch(opt)
            if opt.local_epoch == epoch:
                continue
            used = optimizers[-1].used[used_before:]
            line = {
                "step": epoch, "to": opt.local_epoch, "at": time.monotonic(), "averaging": time.monotonic() - began,
                "compute": compute, "windows": given, "own": (own / max(1, given)).tolist(),
                "used": used[-1] if used else None, "peers": opt.tracker.global_progress.num_peers,
            }  # fmt: skip
            lines.write(json.dumps(line) + "\n")
            own, given, compute = np.zeros(PROJECTIONS), 0, 0.0
            if not number and job.save_every and opt.local_epoch % job.save_every == 0:
                _save(model, folder / f"model-{opt.local_epoch:05d}.safetensors")
    opt.state_averager.step(wait_for_delayed_updates=True)
    _save(model, folder / f"last-{number}.safetensors")


def _step_without_batch(opt: hivemind.Optimizer) -> None:
    """Do the work of `opt.step` without a batch: the peer has given its share, and waits for others."""
    opt.state_averager.step(apply_delayed_updates=True)
    if opt._should_load_state_from_peers():
        opt.load_state_from_peers()
        return
    opt._maybe_schedule_gradient_averaging()
    opt._maybe_schedule_state_averaging()
    if opt.tracker.ready_to_update_epoch:
        opt._update_global_epoch(None)
    else:
        time.sleep(WAIT_SECONDS)


def _save(model: torch.nn.Module, path: Path) -> None:
    draft = path.with_suffix(".partial")
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, draft)
    os.replace(draft, path)


if __name__ == "__main__":
    sys.exit(main())
