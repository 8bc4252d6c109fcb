"""Every command: its help, its example, its completion; and the exit codes, which are the same everywhere."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from cairn.commands.examples import EXAMPLES
from cairn.commands.group import CommandGroup, commands
from cairn.main import main
from cairn.output import Output
from protocol.errors import CairnError
from tests.support.command_line import cairn, stdout_without_reader

ALL = {" ".join(path): command for path, command in commands(main)}
LEAVES = sorted(name for name, command in ALL.items() if not isinstance(command, click.Group))
DOCS = Path(__file__).resolve().parents[3] / "docs" / "command_line.md"


@pytest.mark.parametrize("name", LEAVES)
def test_help_has_an_example_that_the_command_understands(name: str):
    said = cairn(*name.split(), "--help").stdout
    found = re.search(r"Example.*?:\n((?:.*\\\n)*.*)", said)
    assert found, "name one in cairn/commands/examples.py"
    words = shlex.split(found[1].replace("\\\n", " "))
    assert words[: 1 + len(name.split())] == ["cairn", *name.split()]
    command, context = ALL[name], click.Context(ALL[name])
    given = command.make_parser(context).parse_args(words[1 + len(name.split()) :])
    values, rest, _ = given
    missing = [p.name for p in command.params if p.required and p.name in values and not values[p.name]]
    assert not rest and not missing, f"{rest} {missing}"


@pytest.mark.parametrize("name", LEAVES)
def test_each_option_has_a_help(name: str):
    options = [p for p in ALL[name].params if isinstance(p, click.Option)]
    assert not [o.name for o in options if not (o.help or o.hidden)]


def test_every_example_is_of_a_command():
    assert EXAMPLES.keys() <= ALL.keys()


@pytest.mark.parametrize("name", ["", *sorted(ALL.keys() - set(LEAVES))])
def test_listings_are_not_cut(name: str):
    said = cairn(*name.split(), "--help").stdout
    assert "Commands:" in said and "..." not in said.partition("Commands:")[2]


def test_a_shell_completes_commands_and_options(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"typed\n")))
    complete = ShellComplete(main, {}, "cairn", "_CAIRN_COMPLETE")
    assert [c.value for c in complete.get_completions([], "pe")] == ["peer"]
    assert "--device" in [c.value for c in complete.get_completions(["peer", "join"], "--de")]
    assert "--device" in [c.value for c in complete.get_completions(["peer", "join", "-"], "--de")]
    assert len(sys.stdin.readline()) > 0, "what the user types is not read"
    for shell in ("bash", "zsh", "fish"):
        assert f"_CAIRN_COMPLETE={shell}_complete" in cairn("completion", shell).stdout


@click.group(cls=CommandGroup)
def group() -> None:
    """Hold commands that end in each way."""


@group.command()
@click.argument("how")
def end(how: str) -> None:
    """End."""
    if how == "refused":
        raise CairnError("no such run: ask its owner")
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "asked":
        click.confirm("Sure?", abort=True)
    if how == "shown":
        Output().print("a line")


CASES = {0: ("end", "well"), 1: ("end", "refused"), 2: ("end",), 130: ("end", "interrupted")}


@pytest.mark.parametrize("code", CASES)
def test_the_exit_codes(code: int):
    done = CliRunner().invoke(group, CASES[code])
    assert done.exit_code == code
    assert ("error: no such run: ask its owner\n" == done.stderr) is (code == 1)
    assert "Traceback" not in done.output


@pytest.mark.parametrize("answer, code", [(KeyboardInterrupt, 130), (EOFError, 1)])
def test_ctrl_c_at_a_question_has_the_code_of_ctrl_c(monkeypatch, answer: type[BaseException], code: int):
    def answered(_prompt: str) -> str:
        raise answer

    monkeypatch.setattr("click.termui.visible_prompt_func", answered)
    with pytest.raises(SystemExit, match=f"^{code}$"):
        group.main(["end", "asked"])


def test_a_reader_that_closes_the_output_early_is_no_error():
    """As of `cairn status INVITE | head`."""
    with stdout_without_reader(), pytest.raises(SystemExit, match="^0$"):
        group.main(["end", "shown"])


def test_the_table_of_exit_codes_is_whole():
    """Code 3 is of one command; `test_update_audit` holds it."""
    table = re.findall(r"^\| ([0-9]+) \|", DOCS.read_text(), re.M)
    assert [int(code) for code in table] == [*list(CASES)[:3], 3, 130]


def test_a_home_of_another_user_is_said_before_anything_is_read(tmp_path, monkeypatch):
    home = tmp_path / ".cairn"
    home.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CAIRN_HOME", raising=False)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(home) and access(path, mode))
    for command in (["account", "new"], ["peer", "pause"], ["peer", "key"]):
        said = CliRunner().invoke(main, command)
        assert said.exit_code == 2 and f"{home} cannot be read by this user" in said.output, command


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_process_that_lasts_survives_a_full_disk_below_its_output():
    code = "from cairn.output import Output\nfor _ in range(3): Output(lasts=True).print('a line')\nexit(7)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (7, b"")


def test_a_process_that_lasts_needs_no_output():
    """As of `cairn peer join INVITE >&-`."""
    code = "import sys; from cairn.output import Output\nassert sys.stdout is None\nOutput(lasts=True).print('a line')"
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_terminal_without_the_signs_of_a_bar_gets_question_marks():
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    code = (
        "import cairn.main, click\ncairn.main.main(['peer', '--help'], standalone_mode=False); click.echo('\u2501 ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=60)
    assert done.returncode == 0 and b"? ok" in done.stdout, done.stderr
