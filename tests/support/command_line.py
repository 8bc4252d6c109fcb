"""The command line in the process of the test."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cairn.main import main

TINY_RUN = """
[run]
name = "tiny"
total_tokens = 2_000

[model]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
tie_word_embeddings = true

[data]
source = "text.txt"
vocabulary = 300
window = 16

[inner]
lr = 0.001
batch = 2

[round]
target_tokens = 1024
"""


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands set logging up for a process of their own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [h for h in root.handlers if h not in handlers]:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def invite_on_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `-` an invite in a module that imports this."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"cairn1:invite\n" * 100)))


@contextmanager
def stdout_without_reader() -> Iterator[None]:
    """Make stdout a pipe whose reader has ended, as after `cairn ... | head`. No fixture: pytest sets stdout later."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, redirect_stdout(pipe):
        yield


def parsed(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the command that these words name, and its options. Nothing is run. Raises click's errors."""
    command, rest = main, list(words)
    while isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    name = " ".join(words[: len(words) - len(rest)])
    try:
        return name, command.make_context(name, rest).params
    except click.exceptions.Exit:
        return name, {}  # --help


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def cairn(*arguments: str | Path, env: dict[str, str] | None = None, input: str | None = None) -> Done:
    """Run a command like the console script, but in this process, since imports cost seconds."""
    result = CliRunner().invoke(main, list(map(str, arguments)), env=env, input=input, prog_name="cairn")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def refused(*arguments: str | Path, env: dict[str, str] | None = None, input: str | None = None) -> str:
    """Return the one error that a refused command writes to stderr; it may have several lines."""
    done = cairn(*arguments, env=env, input=input)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert sum(line.lower().startswith("error") for line in done.stderr.splitlines()) == 1, done.stderr
    return done.stderr
