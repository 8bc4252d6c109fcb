"""A run.toml for a run that continues from a trained model, for `cairn run init --from FOLDER`.

It is the template of `cairn run plan`, with the folder's config, weights and tokenizer filled in.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.authoring import tokens
from coordinator.authoring.chat_template import TEMPLATE, load_template
from coordinator.authoring.conversations import ConversationTable
from coordinator.authoring.errors import DataInputError
from coordinator.authoring.model_config import FROM_TOKENIZER, model_of, read_settings, with_adapter
from coordinator.authoring.plan import FINE_TUNING_TOKENS, PlanError, PlanInputs, RunPlan, plan
from coordinator.authoring.prepare import ConversationData, prepare, temporary_folder
from coordinator.authoring.template import OF_FINE_TUNING, VALIDATION_EVERY, fill
from coordinator.authoring.weights import CONFIG, WeightsError, check, read_headers
from protocol.spec import AdapterSettings

TOKENIZER = "tokenizer.json"
PASSES = 3
"""Default passes over conversations."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\\n' }}{% endif %}\n"
)
"""A chat template for a base model without one: it needs no special token but those around a text."""

CONVERSATIONS = """\
[data.conversations]
# Each row has messages (role and content), prompt and completion, or text. [run], [inner] and [round] count trained
# tokens: here {trained:,} in a pass; a window counts as {window_tokens:,} of its {window:,}.
{template}
# The roles whose messages are trained. Default ["assistant"].
#train_on = ["assistant"]
# A conversation that is longer than a window: "refuse", "drop", "cut" (its beginning stays), "split" (into parts).
{long}
# Other documents against forgetting, by their share of the trained tokens; the first ones are taken.
#[[data.conversations.mix]]
#source = "EDIT-ME/text.jsonl"
#share = 0.1"""

LR_FACTOR = 0.1
"""Factor of the learning rate for new weights: large steps would undo the training so far.

Of 1.1M parameters a fifth was best, among factors of two, and a tenth 2% worse (docs/results/finetune.json). Bases that
were trained for longer want smaller steps, a tenth of these perhaps: not measured.
"""


@dataclass(frozen=True)
class DraftRunFile:
    """The text of a run.toml, with the run's name, the model's parameters and the tokenizer's size.

    `left_out` are fields of the folder's config that `transformers` does not know.
    """

    text: str
    name: str
    parameters: int
    vocabulary: int
    left_out: tuple[str, ...]
    template: str | None = None
    """The chat template to write beside it as `TEMPLATE`, if the model's folder has none."""
    cautions: tuple[str, ...] = ()
    """The plan's warnings, one sentence each."""


def run_file_from(
    folder: Path, out: Path, inputs: PlanInputs, sft: str | None = None, adapter: AdapterSettings | None = None,
    report: Callable[[str], None] = lambda _: None, check_template: Callable[[str], None] = lambda _: None,
) -> DraftRunFile:  # fmt: skip
    """Return a run.toml to be written at `out`, for a run that begins with the model in `folder`.

    With `adapter` that is trained, and the model is its frozen base. The folder replaces the model of `inputs` and
    limits its window. `sft`: train on these conversations, which are prepared to count them; without
    `inputs.total_tokens` for PASSES passes. `check_template` is called with the template to be written beside `out`, if
    any, before they are prepared. Raises AuthoringError for an incomplete folder or bad conversations,
    SpecError for a config that is not of a causal language model, and PlanError.
    """
    found = read_headers(folder)
    given = _config(folder)
    left_out = unknown_fields(given)
    model = model_of({k: v for k, v in given.items() if k not in left_out}, None, folder / CONFIG)
    try:
        check(found, model.layout)
    except WeightsError as e:
        if not left_out:
            raise
        fields = ", ".join(left_out)
        raise WeightsError(
            f"{e} (of its fields, transformers does not know {fields}: one may decide a shape)"
        ) from None
    tokenizer = _tokenizer(folder)
    if tokenizer.size > model.vocabulary:
        raise DataInputError(
            f"{folder / TOKENIZER}: {tokenizer.size} tokens, but the model has {model.vocabulary}: take the model's "
            "own tokenizer"
        )
    window = inputs.window if model.positions is None else min(inputs.window, model.positions)
    if window < inputs.window != PlanInputs.window:
        raise PlanError(
            "window", f"{inputs.window} tokens do not fit the model's {window} positions: give at most that"
        )
    if adapter is not None:
        model = with_adapter(model, adapter, folder / CONFIG)
    counted = template = None
    if sft is not None:
        if load_template(None, folder / TOKENIZER, tokenizer.end, tokenizer.begin) is None:
            template = _plain_template(tokenizer)
            check_template(template)
        counted = _counted(folder, sft, window, tokenizer, template, report)
    if counted is None:
        total = inputs.total_tokens or FINE_TUNING_TOKENS
    else:
        asked = inputs.total_tokens or PASSES * counted.data.trained
        # The plan is of what is computed: whole windows.
        total = round(asked * window / counted.data.window_tokens)
    frozen = {"frozen": model.frozen, "frozen_bytes": model.frozen_bytes}
    planned = replace(
        inputs, model=model.layout, window=window, total_tokens=total, conversations=counted is not None, **frozen
    )
    made = plan(planned) if counted is None else _plan_of(planned, counted)
    table = model.table | {k: v for k in FROM_TOKENIZER if isinstance(v := given.get(k), int | list)}
    note = f"From {ascii(folder.name)}: it must stay the config of run.weights."
    if left_out:
        note += f" Left out, for transformers does not know them: {ascii(', '.join(left_out))}."
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{folder.name}-more").lstrip("._-")[:64] or "my-run"
    place = _place(folder, out)
    rate = f"# Here a tenth of that, for the weights are trained.\nlr = {float(f'{made.lr * LR_FACTOR:.2g}')}"
    lines = {
        "by": f"continuing from {ascii(folder.name)}, by `cairn run init`",
        "name": f"name = {_text(name)}",
        "weights": f"weights = {_text(place)}",
        "vocabulary": f"#vocabulary = {tokenizer.size}",
        "tokenizer": f"tokenizer = {_text(f'{place}/{TOKENIZER}')}",
        "end_of_text": f"end_of_text = {_text(tokenizer.end)}",
        "lr": rate if adapter is None else f"lr = {made.lr}",
        "loss": OF_FINE_TUNING,
    }
    if counted is not None and sft is not None:
        lines |= _conversation_lines(sft, out, counted, made)
    text = fill(made, table, tokenizer.size, note, lines, adapter)
    return DraftRunFile(text, name, model.whole.numel, tokenizer.size, left_out, template, made.cautions)


@dataclass(frozen=True)
class _Counted:
    """Conversations as they were prepared, and whether the model's folder has a chat template."""

    data: ConversationData
    documents: int
    own_template: bool


def _plain_template(tokenizer: tokens.RunTokenizer) -> str:
    """Return PLAIN_TEMPLATE, after the token with which the tokenizer itself begins a text, if any."""
    return "{{ bos_token }}" * bool(tokenizer.begin) + PLAIN_TEMPLATE


def _counted(
    folder: Path, sft: str, window: int, tokenizer: tokens.RunTokenizer, template: str | None,
    report: Callable[[str], None],
) -> _Counted:  # fmt: skip
    """Prepare conversations in a temporary folder, without those that are longer than a window.

    Raises DataInputError.
    """
    with temporary_folder() as temporary:
        plain = temporary / TEMPLATE
        plain.write_text(template or "")
        table = ConversationTable(long="drop", chat_template=None if template is None else str(plain))
        made = prepare(
            [sft], temporary / "data", tokenizer=folder / TOKENIZER, end_of_text=tokenizer.end,
            window=window, conversations=table, report=report,
        )  # fmt: skip
    assert made.manifest.conversations is not None
    return _Counted(made.manifest.conversations, made.manifest.train.documents, template is None)


def _plan_of(inputs: PlanInputs, counted: _Counted) -> RunPlan:
    """Return the plan of a run with these conversations. Raises PlanError with a remedy for too few of them."""
    try:
        return plan(inputs)
    except PlanError as e:
        if e.field != "total_tokens":
            raise
    data = counted.data
    tokens = round(inputs.total * data.window_tokens / data.window)
    few = (
        f"{tokens:,} trained tokens ({tokens / data.trained:.2g} passes over {counted.documents:,} conversations) are "
        f"fewer than one round of {inputs.peers} peers has: take "
    )
    most = 1 + bisect_left(range(2, inputs.peers), True, key=lambda peers: _is_refused(replace(inputs, peers=peers)))
    if most < 2:
        raise PlanError("sft", f"{few}more conversations, a larger --total-tokens or a smaller --window")
    raise PlanError("peers", f"{few}--peers {most}, or more conversations, or a larger --total-tokens")


def _is_refused(inputs: PlanInputs) -> bool:
    try:
        plan(inputs)
    except PlanError:
        return True
    return False


def _conversation_lines(sft: str, out: Path, counted: _Counted, made: RunPlan) -> dict[str, str]:
    """Return the lines of a run.toml that differ for conversations. Its tokens are trained ones."""
    data = counted.data
    share = data.window_tokens / data.window
    long = '# None of these is longer than a window. Default "refuse".\n#long = "refuse"'
    if data.dropped:
        of = "" if data.at_answers else f" of {data.dropped + counted.documents:,}"  # else a row may lose several
        long = (
            f"# {data.dropped:,}{of} are longer than a window of {data.window:,} "
            'tokens. Default "refuse".\nlong = "drop"'
        )
    template = (
        "# A file with another chat template. Default: the one beside the tokenizer.\n#chat_template = "
        '"chat_template.jinja"'
        if counted.own_template
        else "# The model's folder has no chat template: this plain one was written for it.\n"
        f"chat_template = {_text(TEMPLATE)}"
    )
    source = Path(sft).expanduser()
    place = sft if "://" in sft else _place(source, out)
    target = max(1, round(made.target_tokens * share))
    some = counted.documents >= 10 * VALIDATION_EVERY
    return {
        "validation_every": str(VALIDATION_EVERY if some else max(2, min(20, counted.documents // 2))),
        "next": "checks this file",
        "documents": "The conversations.",
        "source": f"source = {_text(place)}",
        "conversations": CONVERSATIONS.format(
            trained=data.trained, window_tokens=data.window_tokens, window=data.window, long=long, template=template
        ),
        "tokens_a_parameter": f"{made.inputs.total * share / made.inputs.parameters:.3g}",
        "total_tokens": f"{round(made.inputs.total * share):_}",
        "window_tokens": f"{data.window_tokens}",
        "warmup_tokens": f"{round(made.warmup_tokens * share):_}",
        "target_tokens": f"{target:_}",
        "max_update_tokens": f"{max(2 * target, 4 * made.inputs.windows * data.window):_}",
    }


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json unchanged. Raises ModelFileError."""
    path = folder / CONFIG
    given = read_settings(path)
    if "quantization_config" in given:
        raise WeightsError(f"{path}: quantised weights cannot be trained: take the model that they were made from")
    return given


def unknown_fields(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields that authors added to a config of a known type, and that its code does not use.

    A field that decides a shape is noticed when the weights are compared. Fields that would load code are not returned,
    so they are refused as everywhere.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from protocol.errors import SpecError
    from protocol.model import plain_config

    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return ()
    defaults = CONFIG_MAPPING[kind]()
    known = {*defaults.to_dict(), *defaults.attribute_map, "model_type", "auto_map", "trust_remote_code"}
    left_out: list[str] = []
    for field in sorted(given.keys() - known):
        try:
            plain_config({"model_type": kind, field: given[field]})
        except SpecError:
            left_out.append(field)
    return tuple(left_out)


def _tokenizer(folder: Path) -> tokens.RunTokenizer:
    """Return the folder's tokenizer with its own end-of-text token. Raises DataInputError."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise DataInputError(
            f"{path}: no such file: make it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return tokens.load(path, None)


def _place(folder: Path, out: Path) -> str:
    """Return the path of a folder for a run.toml at `out`: relative if the folder is below it, else absolute."""
    folder, beside = folder.resolve(), out.resolve().parent
    return os.path.relpath(folder, beside) if beside in folder.parents else str(folder)
