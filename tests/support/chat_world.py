"""A small base model's folder with a chat template, and conversations to train it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BEGIN, END, TURN, TURN_END = "<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def base_tokenizer(folder: Path, template: str | None = CHATML, vocabulary: int = 300, *, begins: bool = False) -> Path:
    """Write the tokenizer.json and tokenizer_config.json of a base model; return the first.

    With `begins` the tokenizer writes BEGIN before a text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox says yes and no to the lazy dog"], trainer)
    tokenizer.add_special_tokens([AddedToken(TURN, special=True), AddedToken(TURN_END, special=True)])
    if begins:
        number = tokenizer.get_vocab_size()
        tokenizer.add_special_tokens([AddedToken(BEGIN, special=True)])
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, number)]
        )
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    config: dict[str, Any] = {"eos_token": {"content": END}, "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def chat(*said: str, system: str = "") -> dict[str, Any]:
    """Return a row of conversation: the user and the assistant speak in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    return {"messages": messages}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
