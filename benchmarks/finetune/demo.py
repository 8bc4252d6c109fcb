"""`make demo-finetune`: four peers make an assistant of a small base model; one is killed.

The base model is trained here first, on addresses to Congress. Coordinator and peers are processes on this machine. At
the end `cairn export` writes the adapter, and peft loads it. Exits with 1 if the answers did not get better.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.convergence.wan_run_file import toml
from benchmarks.finetune.base import make_base
from benchmarks.finetune.chat import write_conversations
from benchmarks.finetune.example import SIZE
from cairn.commands.serve import coordinator_folder
from cairn.demo.processes import Process, serve, stop_all, wait_for_file
from protocol.errors import CairnError
from protocol.quantised import without_kernel_hub

NAME = "finetune"
PEERS = ("ada", "alan", "edsger", "grace")
KILLED, KILL_AT = "edsger", 0.3

RANK, TOTAL_TOKENS = 8, 60_000
SECONDS = 600.0
JUDGED = 64
"""Held-out conversations on which the answers are judged."""
MARGIN = 0.3
"""Nats by which the loss on held-out answers must fall."""


def tables(base: Path, rows: tuple[Path, Path]) -> dict[str, Mapping[str, Any]]:
    """Return the run.toml's tables."""
    return {
        "run": {"name": NAME, "seed": 1, "weights": str(base), "total_tokens": TOTAL_TOKENS},
        "model": {**SIZE.config, "adapter": {"rank": RANK, "alpha": 2 * RANK, "targets": ["all-linear"]}},
        "data": {
            "source": str(rows[0]), "validation": [str(rows[1])], "window": SIZE.window,
            "tokenizer": str(base / "tokenizer.json"), "conversations": {"long": "drop"},
        },
        "inner": {"lr": 8e-3, "batch": 4, "schedule": {"kind": "cosine", "warmup_tokens": 2000}},
        "round": {
            "target_tokens": 6_000, "max_update_tokens": 6_000, "max_seconds": 20, "exchange_seconds": 8,
            "propose_seconds": 2, "patience_seconds": 10, "heartbeat_seconds": 0.5, "member_seconds": 6,
        },
        "credit": {"hold_rounds": 2},
        "checkpoint": {"every": 2, "final_depth": 3},
    }  # fmt: skip


def main() -> int:
    """Run the demo. Return 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune.demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("demo-finetune"), help="emptied first, if it is a demo's")
    folder = parser.parse_args().folder.resolve()
    mark = folder / "cairn-demo-finetune"
    if folder.exists() and any(folder.iterdir()) and not mark.exists():
        parser.error(f"{folder} is not empty and not of an earlier demo: name another with --folder")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mark.touch()
    except OSError as e:
        parser.error(f"{folder} cannot be made: {e.strerror or e}; name another with --folder")
    processes: list[Process] = []
    try:
        return _demo(folder, processes)
    except CairnError as e:
        print(f"FAILED: {e}")
        return 1
    except KeyboardInterrupt:
        print("stopped: every process of the demo is ended in order")
        return 130
    finally:
        stop_all(processes)


def _demo(folder: Path, processes: list[Process]) -> int:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)

    from transformers.utils import logging

    logging.disable_progress_bar()
    base = folder / "base"
    say("a base model learns to continue addresses to Congress")
    loss = make_base(SIZE, base)
    rows = write_conversations(folder)
    say(f"base model: {base} (training loss {loss:.2f}); conversations: {rows[0]}")
    run_file = folder / "run.toml"
    run_file.write_text(toml(tables(base, rows)))
    coordinator, page = serve(run_file, folder)
    processes.append(coordinator)
    home = coordinator_folder(folder / "coordinator", NAME)
    invite = wait_for_file(home / "invite", coordinator, SECONDS)
    say(f"coordinator: cairn coordinator serve {run_file}; page: {page}")
    peers = {name: _join(name, invite, folder) for name in PEERS}
    processes += peers.values()
    say(f"peers: {', '.join(PEERS)} join with cairn peer join INVITE")
    _watch(peers, coordinator, page, say)
    adapter = folder / "adapter"
    _cairn("export", str(home), str(adapter))
    say(f"adapter: cairn export {home} {adapter}")
    return _judge(base, adapter, rows[1], say)


def _join(name: str, invite: str, folder: Path) -> Process:
    options = ["--home", str(folder / name), "--name", name, "--threads", "1", "--device", "cpu"]
    return Process(name, ["peer", "join", invite, *options, "--listen", "/ip4/127.0.0.1/tcp/0", "--plain"], folder)


def _watch(peers: Mapping[str, Process], coordinator: Process, page: str, say) -> None:
    """Wait for the end of the run; kill one peer on the way. Raises CairnError."""
    end, killed, told = time.monotonic() + SECONDS, False, -1
    while any(p.running for name, p in peers.items() if name != KILLED):
        for p in (coordinator, *peers.values()):
            if p.code not in (None, 0) and not (killed and p.name == KILLED):
                raise CairnError(f"{p.name} ended with code {p.code}:\n{p.last_words()}")
        if time.monotonic() > end:
            raise CairnError(f"the run did not end within {SECONDS:.0f} s: see the logs of the peers")
        status = _status(page)
        if status and status["round"] != told:
            told = status["round"]
            loss = f", loss {status['loss']:.3f}" if status.get("loss") else ""
            say(f"round {told}: {status['tokens']:,} trained tokens of {TOTAL_TOKENS:,}{loss}")
        if not killed and status and KILL_AT * TOTAL_TOKENS <= status["tokens"] < TOTAL_TOKENS:
            peers[KILLED].kill()
            killed = True
            say(f"{KILLED} is killed with SIGKILL; the others go on")
        time.sleep(0.5)
    if not killed:
        raise CairnError(f"the run was over before {KILLED} could be killed")


def _status(page: str) -> dict[str, Any]:
    """Return what the coordinator's page tells of the run; nothing while it is too busy to answer.

    A `cairn status` takes many seconds to start beside the peers, in which half of the run goes by.
    """
    try:
        with urllib.request.urlopen(page.rstrip("/") + "/api/status", timeout=10) as reply:
            return json.loads(reply.read(1_000_000))
    except (OSError, ValueError):
        return {}


def _cairn(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "cairn", *arguments], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise CairnError(f"cairn {arguments[0]}: {done.stderr or done.stdout}")
    return done.stdout


def _judge(base: Path, adapter: Path, held_out: Path, say) -> int:
    """Let peft load the adapter; compare answers and losses with the base model's."""
    warnings.simplefilter("ignore", FutureWarning)  # peft's, of transformers
    with without_kernel_hub():
        from peft import PeftModel
    from transformers.generation.configuration_utils import GenerationConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(adapter)
    model = AutoModelForCausalLM.from_pretrained(base)
    rows = [json.loads(line)["messages"] for line in held_out.read_text().splitlines()[:JUDGED]]
    before, loss_before = _answer(model, tokenizer, rows[0]), _loss(model, tokenizer, rows)
    tuned: Any = PeftModel.from_pretrained(model, str(adapter))
    tuned.generation_config = GenerationConfig.from_pretrained(adapter)
    after, loss_after = _answer(tuned, tokenizer, rows[0]), _loss(tuned, tokenizer, rows)
    say(f"loss on {len(rows)} held-out answers: {loss_before:.3f} before, {loss_after:.3f} after")
    say(f"user:   {rows[0][0]['content']}")
    say(f"before: {before}")
    say(f"after:  {after}")
    if loss_before - loss_after < MARGIN:
        say(f"FAILED: the loss fell by less than {MARGIN}")
        return 1
    say("the adapter was trained by four peers, of which one was killed, and answers through peft")
    return 0


def _answer(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return the model's answer to a conversation's first message, the likeliest words."""
    asked = tokenizer.apply_chat_template(
        messages[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**asked, max_new_tokens=40, do_sample=False)
    return " ".join(tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True).split())


def _loss(model: Any, tokenizer: Any, rows: list[list[dict[str, str]]]) -> float:
    """Return the mean loss of the answers' tokens, in nats."""
    import torch

    total, count = 0.0, 0
    with torch.inference_mode():
        for messages in rows:
            asked = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)
            whole = {"truncation": True, "max_length": SIZE.window + 1}  # else it warns of those that are left out
            ids = tokenizer.apply_chat_template(messages, return_dict=True, **whole)["input_ids"]
            first = len(asked["input_ids"])
            if len(ids) > SIZE.window:
                continue
            tokens = torch.tensor([ids])
            logits = model(input_ids=tokens).logits[0, first - 1 : -1]
            total += float(torch.nn.functional.cross_entropy(logits, tokens[0, first:], reduction="sum"))
            count += len(ids) - first
    return total / count


if __name__ == "__main__":
    sys.exit(main())
