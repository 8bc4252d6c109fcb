"""The command line in the process of the test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from cairn.main import main


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
