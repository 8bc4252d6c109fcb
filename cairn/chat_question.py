"""A user's message in the chat format of a model that came from others, rendered by a separate process.

A chat template is a program, and its sandbox bounds neither time nor memory: `'a' * 10**12` is computed while it is
read. Job: chat (a `ChatSpec`, or null), tokenizer (the file beside which a template may be), prompt. Row: {"text"},
null without a template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from coordinator.checkpoints.job import JobError, Row, bound_memory, run_job, serve_job
from protocol.errors import CairnError
from protocol.spec import ChatSpec

SECONDS = 180.0
"""Seconds to import and render, at low priority beside a trainer. Templates take milliseconds."""

MEMORY = 2**30
"""Bytes of memory; imports take a tenth of it."""


def chat_question(prompt: str, chat: ChatSpec | None, tokenizer: Path) -> str | None:
    """Return the text after which a model answers a prompt; None if there is no chat template.

    `chat` is the run's. Without it, the template is the one beside the model's `tokenizer`. Raises CairnError for a
    template that cannot be rendered, or not within its time, memory and length.
    """
    rows: list[Row] = []
    job = {"chat": None if chat is None else chat.model_dump(), "tokenizer": str(tokenizer), "prompt": prompt}
    try:
        asyncio.run(run_job(__name__, job, rows.append, deadline=SECONDS))
    except JobError as e:
        raise CairnError(
            f"the model's chat template is not usable: {e}; --raw continues the prompt without it"
        ) from None
    return rows[0]["text"]


def render(job: Row, say: Callable[[Row], None]) -> None:
    """Render as a job says. Raises CairnError."""
    from coordinator.authoring.chat_template import load_template
    from coordinator.checkpoints.evaluation_job import run_template

    bound_memory(MEMORY)
    if job["chat"] is not None:
        template = run_template(ChatSpec.model_validate(job["chat"]))
    else:
        template = load_template(None, Path(job["tokenizer"]), "", "")
    say({"text": None if template is None else template.question([{"role": "user", "content": job["prompt"]}])})


if __name__ == "__main__":
    serve_job(render)
