"""Bad input gives one clear line with the remedy and a non-zero exit, never a traceback."""

from __future__ import annotations

import fcntl
import os
import pty
import socket
import stat
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.commands.join import JoinOptions
from cairn.demo.story import MARK
from protocol.ids import Digest, RunId
from protocol.invite import HostPort, Invite
from tests.support.command_line import (
    TINY_RUN,
    cairn,
    logging_as_it_was,  # noqa: F401 - a fixture
    refused,
)
from tests.support.specs import digest
from tests.support.waiting import LIMIT

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "sotu.toml"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    words = [f"the quick brown fox number {i} jumps over the lazy dog and runs away" for i in range(400)]
    (tmp_path / "text.txt").write_text("\n".join(words))
    path = tmp_path / "run.toml"
    path.write_text(TINY_RUN)
    return path


def invite(port: int = 9, host: str = "127.0.0.1") -> str:
    return str(Invite(RunId(digest("run")), Digest(digest("tls")), (HostPort(host, port),)))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield s.getsockname()[1]


# -- run files -----------------------------------------------------------------------------------------------


def test_a_valid_run_file_is_described(run_file: Path):
    done = cairn("run", "validate", run_file)
    assert done.returncode == 0, done.stderr
    assert "valid" in done.stdout and "parameters" in done.stdout


def test_the_example_is_valid():
    assert cairn("run", "validate", EXAMPLE).returncode == 0


@pytest.mark.parametrize("command", [("run", "validate"), ("coordinator", "serve")])
def test_a_missing_run_file_is_named(tmp_path: Path, command):
    assert "nowhere.toml" in refused(*command, tmp_path / "nowhere.toml")


def test_bad_toml_names_the_line(run_file: Path):
    run_file.write_text("[run\nname = 3")
    assert "line 1" in refused("run", "validate", run_file)


# -- invites and coordinators --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "hello", "cairn1:abc", "cairn9:abc", invite()[:-3], invite().replace("A", "B")])
@pytest.mark.parametrize("command", [("peer", "join"), ("status",)])
def test_what_is_no_invite_is_said_to_be_none(tmp_path: Path, command, text: str):
    assert "invite" in refused(*command, text, env={"CAIRN_HOME": str(tmp_path)})


def test_a_large_swarm_asks_for_its_credits_less_often():
    from cairn.commands.join import CREDIT_CALLS, CREDIT_SECONDS, credit_seconds

    assert credit_seconds(4) == CREDIT_SECONDS and 10_000 / credit_seconds(10_000) <= CREDIT_CALLS


def test_an_invite_is_read_from_stdin_where_others_cannot_see_it(tmp_path: Path):
    others = (("peer", "pause"), ("peer", "leave"), ("runs",), ("export", "model", "out", "--invite"))
    for command in (
        ("peer", "join"), ("peer", "invite"), ("status",), ("watch",), ("account", "show"), *others,
    ):  # fmt: skip
        said = refused(*command, "-", env={"CAIRN_HOME": str(tmp_path)}, input="cairn1:abc\n")
        assert "invite" in said and "'-'" not in said
    assert "127.0.0.1:9" in refused("peer", "join", "-", "--home", tmp_path, input=f"{invite()}\n")
    assert "stdin" in refused("status", "-", input="")


def test_what_the_services_write_is_for_their_user_alone(run_file: Path, tmp_path: Path, taken_port: int):
    home, old = tmp_path / "home", os.umask(0o022)
    rest = ["--page", "127.0.0.1:0", "--swarm", "/ip4/127.0.0.1/tcp/0", "--home", home]
    try:
        refused("coordinator", "serve", run_file, "--grpc", f"127.0.0.1:{taken_port}", *rest)
        refused("peer", "join", invite(), "--home", home)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(old)
    modes = {str(path.relative_to(home)): path.lstat().st_mode for path in [home, *home.rglob("*")]}
    assert any("ledger.sqlite" in name for name in modes) and any("peer.log" in name for name in modes)
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077 and not stat.S_ISLNK(mode)} == {}


def test_a_coordinator_that_does_not_answer_is_named(tmp_path: Path):
    said = refused("peer", "join", invite(), "--home", tmp_path)
    assert "127.0.0.1:9" in said and "is it running" in said
    assert "127.0.0.1:9" in refused("status", invite())


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_what_others_see_is_said_at_the_first_join_alone(tmp_path: Path, form: tuple[str, ...]):
    first, second = (cairn("peer", "join", invite(), "--home", tmp_path, "--anonymous", *form) for _ in range(2))
    assert "what others see of this peer" in first.stdout and "made for this run alone" in first.stdout
    assert second.returncode == 1 and "what others see" not in second.stdout + second.stderr
    assert len(list(tmp_path.rglob("identity.key"))) == 1 and not (tmp_path / "identity.key").exists()
    hint = f"your anonymous peer in this run has --home {next(tmp_path.rglob('identity.key')).parent}"
    for command in (("peer", "invite"), ("account", "show")):
        assert hint in refused(*command, invite(), "--home", tmp_path)


def test_what_answers_but_is_no_coordinator_is_named(taken_port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("peer.coordinator_client.CONNECT_SECONDS", 0.5)
    assert f"127.0.0.1:{taken_port}" in refused("status", invite(taken_port))


@pytest.mark.parametrize("option", ["--grpc", "--page", "--swarm"])
def test_a_taken_port_is_named(run_file: Path, tmp_path: Path, taken_port: int, option: str):
    address = f"/ip4/127.0.0.1/tcp/{taken_port}" if option == "--swarm" else f"127.0.0.1:{taken_port}"
    rest = {"--grpc": "127.0.0.1:0", "--page": "127.0.0.1:0", "--swarm": "/ip4/127.0.0.1/tcp/0"} | {option: address}
    said = refused("coordinator", "serve", run_file, "--home", tmp_path, *[x for pair in rest.items() for x in pair])
    assert str(taken_port) in said


def test_an_address_that_is_none_is_refused(run_file: Path, tmp_path: Path):
    assert "--page" in refused("coordinator", "serve", run_file, "--home", tmp_path, "--page", "nonsense")


@pytest.mark.parametrize(
    "option",
    [("--page-url", "example.org"), ("--code", "my code"), ("--webhook", "ftp://example.org"), ("--archive", "no://x")],
)
def test_a_wrong_option_is_refused_before_the_run_begins(run_file: Path, tmp_path: Path, option: tuple[str, str]):
    run_file.write_text(f'{TINY_RUN}\n[admission]\nmode = "invite"\n')
    said = refused("coordinator", "serve", run_file, "--home", tmp_path / "home", *option)
    assert option[0].removeprefix("--") in said or option[1] in said
    assert not (tmp_path / "home/coordinated/tiny/run").exists()


def test_wrong_receivers_of_alerts_are_refused_before_the_run_begins(run_file: Path, tmp_path: Path):
    folder = tmp_path / "coordinated/tiny"
    folder.mkdir(parents=True)
    (folder / "alerts.toml").write_text('[alerts]\nwebhooks = "one"\n')
    assert "alerts.toml" in refused("coordinator", "serve", run_file, "--home", tmp_path)
    assert not (folder / "run").exists()


def test_a_run_file_that_changed_after_the_run_began_is_refused(run_file: Path, tmp_path: Path, taken_port: int):
    serve = ("coordinator", "serve", run_file, "--home", tmp_path, "--grpc", f"127.0.0.1:{taken_port}",
             "--page", "127.0.0.1:0", "--swarm", "/ip4/127.0.0.1/tcp/0")  # fmt: skip
    refused(*serve)  # begins the run, then fails at the port
    run_file.write_text(TINY_RUN.replace("target_tokens = 1024", "target_tokens = 2048"))
    said = refused(*serve)
    assert "changed" in said and "target_tokens" in said


@pytest.mark.parametrize("content", [None, "not a key"])
def test_a_run_that_has_begun_gets_no_other_owner(run_file: Path, tmp_path: Path, taken_port: int, content: str | None):
    serve = ("coordinator", "serve", run_file, "--home", tmp_path, "--grpc", f"127.0.0.1:{taken_port}",
             "--page", "127.0.0.1:0", "--swarm", "/ip4/127.0.0.1/tcp/0")  # fmt: skip
    refused(*serve)  # begins the run, then fails at the port
    key = tmp_path / "coordinated" / "tiny" / "owner.key"
    key.unlink()
    if content is not None:
        key.write_text(content)
    commands = (serve,) if content is None else (serve, ("run", "pause", run_file, "--home", tmp_path))
    for command in commands:
        said = refused(*command)
        assert str(key) in said and "restore it from your copy" in said and "identity" not in said
        assert (key.read_text() if key.exists() else None) == content


def test_a_run_that_has_begun_is_served_again_without_its_documents(run_file: Path, tmp_path: Path, taken_port: int):
    serve = ("coordinator", "serve", run_file, "--home", tmp_path, "--grpc", f"127.0.0.1:{taken_port}",
             "--page", "127.0.0.1:0", "--swarm", "/ip4/127.0.0.1/tcp/0")  # fmt: skip
    refused(*serve)  # begins the run, then fails at the port
    (tmp_path / "text.txt").unlink()
    assert str(taken_port) in refused(*serve)


# -- a peer's own machine ------------------------------------------------------------------------------------


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    assert str(tmp_path / "file") in refused("peer", "join", invite(), "--home", tmp_path / "file" / "home")


def test_one_home_is_used_by_one_peer_at_a_time(tmp_path: Path):
    from peer.node.enrollment import run_folder
    from peer.store import Store

    with Store(run_folder(tmp_path, RunId(digest("run"))) / "store", 10**9):
        assert "already" in refused("peer", "join", invite(), "--home", tmp_path)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--disk", "none"), ("--threads", "0"), ("--name", "x" * 41), ("--device", "tpu"), ("--audit-device", "none")],
)
def test_an_option_out_of_range_is_named(tmp_path: Path, option: str, value: str):
    assert option in refused("peer", "join", invite(), "--home", tmp_path, option, value)


def test_an_auditor_without_training_reports_by_the_owners_key(tmp_path: Path, monkeypatch):
    from peer.keyfile import load_or_make

    asked: list[JoinOptions] = []
    monkeypatch.setattr("cairn.commands.auditor.join_run", asked.append)
    said = refused("auditor", invite(), "--home", tmp_path)
    assert "--owner-key" in said and "cairn peer join INVITE --audit-device" in said
    key = tmp_path / "owner.key"
    owner = load_or_make(key)
    options = ("--home", tmp_path, "--device", "cuda:1", "--owner-key", key)
    assert cairn("auditor", invite(), *options).returncode == 0
    assert [(o.device, o.owner and o.owner.key) for o in asked] == [("cuda:1", owner.key)]


@pytest.mark.parametrize("content", [None, "not a key"])
def test_an_owners_key_that_is_none_is_named_and_stays_as_it_is(tmp_path: Path, content: str | None):
    key = tmp_path / "owner.key"
    if content is not None:
        key.write_text(content)
    said = refused("auditor", invite(), "--home", tmp_path, "--owner-key", key)
    assert str(key) in said and "--owner-key" in said and "coordinator serve" in said
    assert (key.read_text() if key.exists() else None) == content


def test_an_unknown_command_is_named():
    assert "fly" in refused("peer", "fly")


# -- data and text -------------------------------------------------------------------------------------------


def test_data_that_is_not_there_is_named(tmp_path: Path):
    assert "gone" in refused("data", "prepare", tmp_path / "gone.txt", "--out", tmp_path / "out", "--vocab", "300")


def test_binary_data_is_refused_by_name(tmp_path: Path):
    (tmp_path / "noise.txt").write_bytes(bytes(range(128, 256)) * 100)
    assert "noise.txt" in refused(
        "data", "prepare", tmp_path / "noise.txt", "--out", tmp_path / "out", "--vocab", "300"
    )


def test_text_becomes_shards(run_file: Path, tmp_path: Path):
    done = cairn("data", "prepare", tmp_path / "text.txt", "--out", tmp_path / "out", "--vocab", "300")
    assert done.returncode == 0, done.stderr
    assert "tokens in 1 shard\n" in done.stdout and (tmp_path / "out" / "manifest.json").exists()
    assert '(in a run.toml beside it: [data] prepared = "out")' in done.stdout and "warning" not in done.stderr
    (tmp_path / "chat.txt").write_text("one<|endoftext|>two")
    done = cairn("data", "prepare", tmp_path / "chat.txt", "--out", tmp_path / "chat", "--vocab", "300")
    assert done.stderr.count("warning: 1 of 1 documents spell out '<|endoftext|>'") == 1


def test_generating_from_what_is_no_checkpoint_names_what_is_wanted(tmp_path: Path):
    assert "checkpoints" in refused("generate", tmp_path, "--prompt", "hello")


def test_a_full_disk_is_said_in_one_line(run_file: Path, tmp_path: Path):
    """A file system of a megabyte, where this user may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system needs root and the right to mount a tmpfs")
    try:
        (small / "filler").write_bytes(bytes(1_000_000))
        said = refused(
            "coordinator", "serve", run_file, "--home", small, "--grpc", "127.0.0.1:0", "--page", "127.0.0.1:0",
            "--swarm", "/ip4/127.0.0.1/tcp/0",
        )  # fmt: skip
        assert "space" in said
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_the_demo_does_not_empty_a_folder_that_is_not_its_own(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "not empty" in refused("demo", "--folder", tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_the_demo_does_not_delete_its_run_file(run_file: Path, tmp_path: Path):
    (tmp_path / MARK).touch()  # an earlier demo's folder
    assert "which the demo empties" in refused("demo", "--folder", tmp_path, "--run-file", run_file)
    assert run_file.exists()


def test_ctrl_c_while_entering_ends_at_once(tmp_path: Path):
    """A coordinator that accepts the connection and says nothing: the volunteer gives up."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        peer = subprocess.Popen(
            [sys.executable, "-m", "cairn", "peer", "join", invite(s.getsockname()[1]), "--home", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        s.settimeout(LIMIT)
        connection, _ = s.accept()
        connection.settimeout(LIMIT)
        connection.recv(1)  # it has begun to speak TLS, and waits for an answer
        peer.send_signal(2)
        _, errors = peer.communicate(timeout=LIMIT)
        connection.close()
        assert "Traceback" not in errors


def test_a_terminal_that_closes_stops_a_peer_in_order(tmp_path: Path):
    """The terminal is gone, and with it every place to write to.

    The terminal closes once the peer calls. Other tests call 127.0.0.1, also at ports that have a new owner.
    """
    host = "127.8.7.6"
    with socket.socket() as s:
        s.bind((host, 0))
        s.listen()
        terminal, side = pty.openpty()
        peer = subprocess.Popen(
            [sys.executable, "-m", "cairn", "peer", "join", invite(s.getsockname()[1], host), "--home", str(tmp_path)],
            stdin=side, stdout=side, stderr=side, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(side)
        s.settimeout(LIMIT)
        connection, _ = s.accept()
        connection.settimeout(LIMIT)
        connection.recv(1)
        os.close(terminal)
        assert peer.wait(timeout=LIMIT) == 0
        connection.close()


def an_invite() -> Invite:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return Invite(RunId(digest("run")), Digest(bytes(32)), (HostPort("127.0.0.1", port),))


@pytest.mark.parametrize("command", [("peer", "join"), ("status",)])
def test_a_member_to_ask_that_is_no_address_is_named(command):
    said = refused(*command, str(an_invite()), "--via", "192.0.2.1:4001")
    assert "--via" in said and "/p2p/" in said


def test_without_coordinator_and_members_it_says_whom_to_ask_for_a_current_invite(tmp_path):
    said = refused("peer", "join", str(an_invite()), "--home", tmp_path, "--plain")
    assert "does not answer" in said and "cairn peer invite" in said


def test_who_never_was_in_a_run_prints_no_invite_to_it(tmp_path):
    assert "join it first" in refused("peer", "invite", str(an_invite()), "--home", tmp_path)
