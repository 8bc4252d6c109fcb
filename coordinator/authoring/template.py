"""The commented run.toml that `cairn run plan --out` writes: every field, filled in by a plan.

A field that the plan decides is set. A field with its default value stands behind a `#` without a space, so that
removing the `#` changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from string import Template
from typing import Any

from coordinator.authoring import measurements
from coordinator.authoring.plan import RunPlan

TEMPLATE = Template("""\
# A run for about $peers volunteers with $uplink Mbit/s up and $rtt ms to each other, planned by `cairn run plan`.
#
#     cairn run validate FILE         checks this file, once [data] names your documents
#     cairn coordinator serve FILE    begins the run and prints its invite
#
# The plan has set its fields. The others have their defaults behind a # without a space: remove it to change the value.
# docs/runs.md says more about each field. Once the run has begun, this file must stay as it is.

[run]
# The name of the run: 1 to 64 letters, digits, spaces, ".", "_", "-".
name = "my-run"
# Initial weights and the assignment of data follow from it. Default 0.
#seed = 0
# Instead of drawn weights: the folder of a trained model (safetensors) to continue from; [model] is its config, and
# data.tokenizer its tokenizer. Default "".
#weights = ""
# Training ends when this many tokens have been accepted; 0: never. Default 0. Planned: $tokens_a_parameter a parameter.
total_tokens = $total_tokens

[model]
# Any causal language model of transformers, by its config: model_type and that type's own fields. Missing fields have
# the type's default; vocab_size (when absent), bos_token_id and eos_token_id come from the tokenizer.
# $model_note
$model

[data]
# EDIT THIS: your documents. A file, folder, pattern ("corpus/*.jsonl.gz") or fsspec address, or a list of these: text
# (a file is a document), JSONL or Parquet. Paths are relative to this file.
source = "EDIT-ME/documents.jsonl"
# Instead of source: a folder made by `cairn data prepare`. Then only window and addresses may stand beside it.
#prepared = "data"
# Tokens that a model sees at once in training.
window = $window
# The JSONL field or Parquet column with the text. Default "text".
#field = "text"
# With source: train a byte-level BPE tokenizer of this size (257 or more) on the training documents.
vocabulary = $vocabulary
# Instead of vocabulary: an existing tokenizer.json.
#tokenizer = "tokenizer.json"
# The token that ends a document, when a given tokenizer has none of the usual names. Default: searched for.
#end_of_text = "<|endoftext|>"
# Hold out every n-th document to measure the loss; 0: none. Default 0.
validation_every = 100
# Instead of validation_every: files of which every document is held out. Default [].
#validation = []
# Maximum tokens in a shard. Default 67_108_864.
#shard_tokens = 67_108_864
# Folders (fsspec addresses) from which peers can read the shards; else they fetch them from each other. Default [].
#addresses = []

[inner]
# The inner optimiser. "muon": hidden matrices by Muon, all else by AdamW; or "adamw". Default "muon".
optimiser = "$inner"
# Peak learning rate. Default 0.001. Planned from the model's size, a start only: try half and double on a small scale.
lr = $lr
# Decay of AdamW's two averages. Default [0.9, 0.95].
#betas = [0.9, 0.95]
# Default 1e-8.
#eps = 1e-8
# Decoupled weight decay. Default 0.1.
#weight_decay = 0.1
# Gradients are clipped to this norm. Default 1.0.
#clip_norm = 1.0
# Windows in one inner step of one peer; split into micro-batches where memory does not suffice. Default 16.
batch = $batch

[inner.schedule]
# The rate as a factor of lr, by the tokens that the chain has accepted: "constant", "cosine", or "wsd" (constant, then
# a linear fall at the end). Default "cosine".
#kind = "cosine"
# The rate rises from 0 over this number of tokens. Default 0. Planned: $warmup of the run.
warmup_tokens = $warmup_tokens
# The end of the fall. Default: run.total_tokens.
#total_tokens = $total_tokens
# Share of total_tokens in which the rate falls, for "wsd". Default 0.2.
#decay_fraction = 0.2
# The factor at the end, and after it. Default 0.1.
min_ratio = $min_ratio

[codec]
# How updates are compressed: "sparse" (the largest of each 4096 coordinates), "sign" (a bit a parameter), "int8" (a
# byte) or "none" (fp32). Default "sign". Planned: $update a peer and round; with $inner_steps inner steps a round, a
# final loss $loss times that of data-parallel training ($source).
kind = "$kind"
# For "sparse": coordinates kept of each 4096, 64 to 4096. Default 64.
$k_line
# Share of the untransmitted residual that error feedback keeps each round. Default 0.5.
beta = $beta

[outer]
# The step between rounds. A coordinate's mean is over the peers that sent it ("senders") or "all". Default "senders".
#mean = "senders"
# Each tensor's update is clipped to the median norm ("median"), or not ("none"). Default "median".
#clip = "median"
# The largest share of a round's weight that one update can have. Default 1.0.
#weight_cap = 1.0
# "nesterov" with momentum, which every peer holds (4 bytes a parameter) and every newcomer fetches, or "plain". Left
# out, it is "nesterov" with "sign". Default "plain".
optimiser = "$outer_optimiser"
# How far along the mean change the state goes. Left out, it is 1.8 for "plain" with "sign". Default 1.0.
lr = $outer_lr
# For "nesterov". Left out, it is 0.5 with "sign". Default 0.9.
$momentum_line

[round]
# The tokens of all peers together that end a round's training; required.
# Planned: $inner_steps inner steps x $peers peers x $batch windows x $window tokens: $training s a round, and
# $exchange s to exchange updates ($share of that), while training goes on.
target_tokens = $target_tokens
# The most tokens that one update may claim; a peer further ahead waits. Default: two targets, or four inner steps.
#max_update_tokens = $max_update_tokens
# The timers are for faults: a healthy round waits for none. Seconds.
# A round's training ends after this, however few tokens it has. Default 600.
max_seconds = $max_seconds
# From announcing until a record is proposed without the late peers. Default 60.
exchange_seconds = $exchange_seconds
# Wait for each proposer in turn. Default 10.
propose_seconds = $propose_seconds
# Wait before voting for a record that lists neither half of the announced tokens nor most announcers. Default 120.
patience_seconds = $patience_seconds
# Interval of heartbeats. Default 2.
#heartbeat_seconds = 2
# A member that is silent for this time is not waited for; at least two heartbeats. Default 20.
#member_seconds = 20
# Members at a time. Default 256.
max_members = $max_members
# Everyone fetches every update ("gather"), or committees make the mean in shards ("reduce"), or the one with fewer
# bytes ("auto"). Default "gather".
#exchange = "gather"
# Contributors that make each shard; more than half must agree. Default 3.
#committee = 3

[admission]
# Admission: "open"; "invite" (with the invite's code); "allow" (the keys in allow). Default "open".
#mode = "open"
# Lifetime of an admission, which is renewed in the background. Seconds. Default 86_400.
#seconds = 86_400
# Peer keys, 64 hexadecimal digits each. Default [].
#allow = []

[credit]
# FLOPs for each parameter and token; one credit is 10^15 FLOPs of accepted training. Default 6.
#flops_per_parameter_token = 6
# Credit settles when this many later rounds are finalized; until then the owner can void it. 0: at once. Default 12.
#hold_rounds = 12
# The most that one peer can plausibly do, in 10^12 FLOPs a second: larger claims are voided. Default 20_000.
#max_teraflops_per_second = 20_000

[checkpoint]
# Rounds between checkpoints. Default 10.
#every = 10
# Checkpoints that each member keeps. Default 2.
#keep = 2
# A round is finalized, and credited, when this many rounds are built on it. Default 12.
#final_depth = 12
""")


def fill(plan: RunPlan, model: Mapping[str, Any], vocabulary: int, model_note: str) -> str:
    """Return the text of a run.toml. `model` is its [model] table, `model_note` a line about the table's source."""
    q, cost, timers = plan.inputs, plan.cost, plan.timers
    codec, outer = plan.setting.codec, plan.setting.outer
    return TEMPLATE.substitute(
        peers=q.peers,
        uplink=f"{q.uplink:g}",
        rtt=f"{q.rtt:g}",
        tokens_a_parameter=f"{q.total / q.parameters:.3g}",
        total_tokens=_integer(q.total),
        model_note=" ".join(model_note.split()),
        model="\n".join(f"{_key(k)} = {_value(v)}" for k, v in model.items()),
        window=q.window,
        vocabulary=vocabulary,
        lr=plan.lr,
        batch=q.windows,
        warmup=f"{measurements.WARMUP:.0%}",
        warmup_tokens=_integer(plan.warmup_tokens),
        min_ratio=measurements.MIN_RATIO,
        inner=measurements.INNER.value,
        kind=codec.kind,
        update=f"{cost.update_bytes:,} bytes",
        inner_steps=plan.setting.inner_steps,
        loss=f"{plan.setting.loss:g}",
        source=measurements.SOURCE,
        k_line=f"k = {codec.k}" if codec.kind == "sparse" else "#k = 64",
        beta=codec.beta,
        outer_optimiser=outer.optimiser,
        outer_lr=outer.lr,
        momentum_line=f"momentum = {outer.momentum}" if outer.optimiser == "nesterov" else "#momentum = 0.9",
        training=f"{cost.training_seconds:.3g}",
        exchange=f"{cost.exchange_seconds:.3g}",
        share=f"{cost.share:.1%}",
        target_tokens=_integer(plan.target_tokens),
        max_update_tokens=_integer(2 * plan.target_tokens),
        max_seconds=timers.max_seconds,
        exchange_seconds=timers.exchange_seconds,
        propose_seconds=timers.propose_seconds,
        patience_seconds=timers.patience_seconds,
        max_members=plan.max_members,
    )


def _integer(n: int) -> str:
    return f"{n:_}"


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
