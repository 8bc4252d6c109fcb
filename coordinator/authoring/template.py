"""The commented run.toml that `cairn run plan --out` writes: run_template.toml, filled in by a plan.

A field that the plan decides is set. A field with its default value stands behind a `#` without a space, so that
removing the `#` changes nothing.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from coordinator.authoring import measurements
from coordinator.authoring.plan import RunPlan
from protocol.spec import AdapterSettings

TEMPLATE = Path(__file__).with_name("run_template.toml")
VALIDATION_EVERY = 100
OF_FINE_TUNING = f"# Of runs that continue from a model few losses were measured: {measurements.FINE_TUNING}."
TEXT = "# Conversations instead of text: add the table [data.conversations] (docs/runs.md)."


def fill(
    plan: RunPlan,
    model: Mapping[str, Any],
    vocabulary: int,
    model_note: str,
    lines: Mapping[str, str] | None = None,
    adapter: AdapterSettings | None = None,
) -> str:
    """Return the text of a run.toml.

    `model` is its [model] table, `adapter` the one to train, `model_note` a line about the table's source. `lines`
    replace those of a new run: by, next, name, weights, documents, source, vocabulary, tokenizer, end_of_text,
    conversations, lr, loss; and numbers of the plan.
    """
    new_run = {
        "by": "planned by `cairn run plan`",
        "next": "checks this file, once [data] names your documents",
        "documents": "EDIT THIS: your documents.",
        "name": 'name = "my-run"',
        "weights": '#weights = ""',
        "vocabulary": f"vocabulary = {vocabulary}",
        "tokenizer": '#tokenizer = "tokenizer.json"',
        "source": 'source = "EDIT-ME/documents.jsonl"',
        "conversations": TEXT,
        "end_of_text": '#end_of_text = "<|endoftext|>"',
        "lr": f"lr = {plan.lr}",
        "loss": OF_FINE_TUNING if plan.inputs.frozen else _comment(f"A final loss {plan.final_loss}: {plan.source}."),
    }
    q, cost = plan.inputs, plan.cost
    codec, outer = plan.setting.codec, plan.outer
    planned = dict(
        peers=q.peers,
        uplink=f"{q.uplink:g}",
        rtt=f"{q.rtt:g}",
        tokens_a_parameter=f"{q.total / q.parameters:.3g}",
        total_tokens=f"{q.total:_}",
        model_note=" ".join(model_note.split()),
        model=_lines(model),
        adapter="" if adapter is None else "\n" + ADAPTER.format(_lines(adapter.model_dump())),
        window=q.window,
        window_tokens=q.window,
        validation_every=VALIDATION_EVERY,
        batch=q.windows,
        warmup=f"{measurements.WARMUP:.0%}",
        warmup_tokens=f"{plan.warmup_tokens:_}",
        min_ratio=measurements.MIN_RATIO,
        inner=plan.inner.value,
        kind=codec.kind,
        update=f"{cost.update_bytes:,} bytes",
        inner_steps=plan.setting.inner_steps,
        k_line=f"k = {codec.k}" if codec.kind == "sparse" else "#k = 64",
        beta=codec.beta,
        outer_optimizer=outer.optimizer,
        outer_lr=outer.lr,
        momentum_line=f"momentum = {outer.momentum}" if outer.optimizer == "nesterov" else "#momentum = 0.9",
        training=f"{cost.training_seconds:.3g}",
        exchange=f"{cost.exchange_seconds:.3g}",
        share=f"{cost.share:.1%}",
        target_tokens=f"{plan.target_tokens:_}",
        max_update_tokens=f"{2 * plan.target_tokens:_}",
        max_members=plan.max_members,
        **plan.timers,
    )
    return Template(TEMPLATE.read_text()).substitute(planned | new_run | dict(lines or {}))


ADAPTER = """\
[model.adapter]
# Train a LoRA adapter of this rank, and keep run.weights frozen. Its output counts alpha / rank times. targets: the
# ends of names of linear modules, or "all-linear"; train: of norms that are trained in full. dtype: of the base as each
# peer fetches and holds it: "bfloat16", "float32", or with bitsandbytes "int8", "nf4" (4 bits).
# addresses: folders (fsspec) with the files of the run's base/, else peers fetch it from each other.
{}
"""


def _comment(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120, initial_indent="# ", subsequent_indent="# "))


def _lines(table: Mapping[str, Any]) -> str:
    return "\n".join(f"{_key(k)} = {_value(v)}" for k, v in table.items())


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    """Return a value of a checked model config (no null, no NaN) in TOML."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    # JSON's strings, numbers and booleans are valid TOML, except that TOML requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
