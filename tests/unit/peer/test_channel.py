"""The channel between node and trainer: strict lines, both ends, and a trainer that ends in every way it can."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

import pytest

from peer.channel import (
    Applied,
    Apply,
    Failed,
    Load,
    MakeUpdate,
    Memory,
    Note,
    NothingDone,
    Progress,
    Ready,
    RoundUpdates,
    Start,
    Stop,
    Stopped,
    TimeShares,
    TrainerEnd,
    TrainerLink,
    UpdateFile,
    UpdateMade,
    WriteCheckpoint,
)
from peer.channel import link as channel_link
from peer.channel import messages as channel_messages
from peer.channel.messages import from_line, to_line
from peer.errors import ChannelError, TrainerDied
from protocol.ids import Digest, PeerKey
from tests.support.open_files import files_limit
from tests.support.waiting import LIMIT, ended, wait_until

D, K, P = Digest(bytes(range(32))), PeerKey(bytes(range(1, 33))), Path("/a folder/b")
ROUND = RoundUpdates(7, D, (UpdateFile(K, 3, P), UpdateFile(K, 0, P)))
REDUCED = RoundUpdates(8, D, (UpdateFile(K, 3, P),), (P, P))
EVERY_MESSAGE = [
    Start(P, K, P, "cuda:0", 2, {"aa": "/x", "bb": ""}),
    Start(P, K, P, "cpu", 1, {}, "dp=2", "on", "off"),
    Load(P, D, D, 3, (ROUND, ROUND), (P,), 4, 5, P),
    Load(P, D, D, 0, (), (), 0, 0),
    Load(P, D, D, 3, (REDUCED,), (), 4, 5, P, (P,), (REDUCED,)),
    MakeUpdate(1, D, P),
    Apply(ROUND, (P, P), 1, 2, None),
    Apply(REDUCED, (), 1, 2, None),
    WriteCheckpoint(P),
    Stop(),
    Ready("NVIDIA H200", 10**9, 5),
    Progress(1, 2.5, 1e4, False),
    Progress(1, 2.5, 1e4, False, 0.43, Memory(2, 3), TimeShares(0.5, 0.25, 0.0, 0.25, 0.0, 0.0)),
    UpdateMade(D, P, 1, D, 2, 3, 4, 5, 6.5),
    NothingDone(D),
    Applied(D, D, None),
    Stopped(True),
    Note("warning", "data", "an address\nof two lines"),
    Failed("load", "why, and what to do", False),
]

TRAINED = to_line(Progress(1, 0.25, 0.0, False))[:-1]


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda m: type(m).__name__)
def test_a_message_is_one_line_and_comes_back_as_it_was(message):
    line = to_line(message)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    back = from_line(line[:-1])
    assert back == message and type(back) is type(message)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe {}",
        b"Stop",
        b"Stop {} {}",
        b"Reboot {}",
        b'Stop {"now":true}',
        b'Stopped {"saved":1}',
        b"Stopped {}",
        TRAINED.replace(b"0.25", b"NaN"),
        TRAINED.replace(b"0.25", b'"1"'),
        b'NothingDone {"parent":"00"}',
        b'NothingDone {"parent":7}',
        b'NothingDone {"parent":null}',
        b'Note {"level":"shout","kind":"","text":""}',
        to_line(Start(P, K, P, "cpu", 1, {}, compile="on"))[:-1].replace(b'"on"', b'"yes"'),
        b'MakeUpdate {"round":-1,"parent":"' + b"0" * 64 + b'","out":"x"}',
        b'MakeUpdate {"round":9007199254740993,"parent":"' + b"0" * 64 + b'","out":"x"}',
    ],
)
def test_what_is_not_exactly_a_message_is_refused(line):
    with pytest.raises(ChannelError):
        from_line(line)


def test_a_number_that_is_not_finite_never_arrives():
    with pytest.raises(ChannelError):
        from_line(to_line(Progress(1, float("nan"), 0.0, False))[:-1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"mfu": 1.01},
        {"mfu": -0.1},
        {"mfu": "0.5"},
        {"memory": {"used": -1, "whole": 3}},
        {"memory": {"used": 1.5, "whole": 3}},
        {"memory": {"used": 1}},
        {"spent": {"training": 1.0}},
        {"spent": dict.fromkeys(("training", "data", "compressing", "applying", "saving", "waiting"), 2.0)},
        {"spent": dict.fromkeys(("training", "data", "compressing", "applying", "saving", "waiting", "idle"), 0.1)},
    ],
    ids=str,
)
def test_figures_beyond_their_bounds_are_refused(wrong):
    name, fields = to_line(Progress(1, 2.5, 1e4, False)).split(b" ", 1)
    with pytest.raises(ChannelError):
        from_line(name + b" " + json.dumps(json.loads(fields) | wrong).encode())


def test_a_line_beyond_the_bound_is_refused_at_both_ends(monkeypatch):
    monkeypatch.setattr(channel_messages, "MAX_LINE", 1000)
    with pytest.raises(ChannelError, match="at most 1000"):
        to_line(Note("info", "", "x" * 1000))
    monkeypatch.setattr("peer.channel.trainer_end.MAX_LINE", 1000)
    node, trainer = socket.socketpair()
    end = TrainerEnd(trainer)
    node.sendall(b"x" * 2000)
    with pytest.raises(ChannelError, match="line of more than"):
        end.receive(1)
    end.close()
    node.close()


def test_the_trainers_end_polls_waits_and_reads_lines_that_come_in_pieces():
    node, trainer = socket.socketpair()
    end = TrainerEnd(trainer)
    assert end.receive(0) is None
    began = time.monotonic()
    assert end.receive(0.05) is None
    assert time.monotonic() - began > 0.04
    line = to_line(EVERY_MESSAGE[0]) + to_line(Stop())
    node.sendall(line[:10])
    assert end.receive(0) is None
    node.sendall(line[10:])
    assert end.receive(1) == EVERY_MESSAGE[0] and end.receive(0) == Stop()
    node.sendall(to_line(MakeUpdate(1, D, P)))
    node.close()
    assert end.receive(None) == MakeUpdate(1, D, P)
    with pytest.raises(ChannelError, match="closed the channel"):
        end.receive(None)
    with pytest.raises(ChannelError, match="closed the channel"):
        end.send(Stopped(True))
    end.close()


def test_the_trainers_end_works_with_any_number_of_open_files():
    """`select` knows no descriptor above 1023."""
    node, trainer = socket.socketpair()
    with files_limit(2048):
        high = fcntl.fcntl(trainer, fcntl.F_DUPFD, 1500)
        trainer.close()
        end = TrainerEnd.from_fd(high)
        assert end.receive(0) is None
        node.sendall(to_line(Stop()))
        assert end.receive(1) == Stop()
        end.send(Progress(1, 0.0, 0.0, False))
        end.close()
    assert node.recv(1000) == to_line(Progress(1, 0.0, 0.0, False))
    node.close()


def test_a_message_meant_for_the_node_is_refused_by_the_trainers_end():
    node, trainer = socket.socketpair()
    end = TrainerEnd(trainer)
    node.sendall(to_line(Stopped(True)))
    with pytest.raises(ChannelError, match="not for the trainer"):
        end.receive(1)
    end.close()
    node.close()


def test_progress_is_dropped_when_the_node_does_not_read_and_the_rest_has_a_deadline(monkeypatch):
    monkeypatch.setattr("peer.channel.trainer_end.SEND_SECONDS", 0.1)
    node, trainer = socket.socketpair()
    end = TrainerEnd(trainer)
    for i in range(20_000):  # at 0.1 s each, it would be over the limit of a test
        end.send(Progress(i, 0.0, 0.0, False))
    with pytest.raises(ChannelError, match="read nothing"):
        for _ in range(20_000):
            end.send(Stopped(True))
    end.close()
    node.close()


# -- the node's end, with stand-ins for the trainer's process ---------------------------------------------------

PROLOGUE = """
import argparse, os, signal, sys, time
from peer.channel import *
p = argparse.ArgumentParser(); p.add_argument("--fd", type=int); p.add_argument("--parent", type=int)
a = p.parse_args(); end = TrainerEnd.from_fd(a.fd)
assert a.parent == os.getppid()
"""


async def link_to(program: str) -> TrainerLink:
    return await TrainerLink.start(command=(sys.executable, "-c", PROLOGUE + textwrap.dedent(program)))


async def test_messages_go_both_ways_and_the_end_is_told_with_code_and_last_words():
    link = await link_to(
        """
        for i in range(100): print("line", i)
        print("x" * 100_000 + "tail")
        end.send(Note("info", "got", type(end.receive(None)).__name__))
        print("my last words", file=sys.stderr)
        sys.exit(3)
        """
    )
    await link.send(Stop())
    assert [m async for m in link] == [Note("info", "got", "Stop")]
    gone = await ended(link.wait())
    assert gone.code == 3 and gone.last_lines[-1] == "my last words" and len(gone.last_lines) <= 40
    assert all(len(line) <= 500 for line in gone.last_lines)
    assert "code 3" in str(gone) and "my last words" in str(gone)
    assert not link.running
    with pytest.raises(TrainerDied):
        for _ in range(50):
            await link.send(Stop())
            await asyncio.sleep(0.01)
    assert await link.stop() == gone


async def test_a_killed_trainer_is_told_by_its_signal():
    link = await link_to("end.receive(None)")
    link.kill()
    gone = await link.stop()
    assert gone.code == -signal.SIGKILL and "SIGKILL (out of memory is the usual cause" in str(gone)


async def test_a_trainer_that_does_not_leave_is_killed_after_the_deadline():
    link = await link_to("signal.signal(signal.SIGTERM, signal.SIG_IGN); end.send(Stopped(True)); time.sleep(3600)")
    async for message in link:
        assert message == Stopped(True)
        break
    gone = await ended(link.stop(0.3))
    assert gone.code == -signal.SIGKILL and "SIGKILL (it did not exit in 0 s)" in str(gone)


async def test_a_trainer_that_takes_no_message_is_killed_which_is_not_taken_for_a_lack_of_memory(monkeypatch):
    monkeypatch.setattr(channel_link, "SEND_SECONDS", 0.05)
    link = await link_to("time.sleep(3600)")
    with pytest.raises(TrainerDied, match="was killed: it has taken no message for 0 s"):
        await link.send(Start(P, K, P, shards={"aa": "x" * 2**24}))
    assert "SIGKILL (it has taken no message for 0 s)" in str(await ended(link.stop()))


async def test_rubbish_from_a_trainer_is_an_error_and_not_a_message():
    link = await link_to("os.write(a.fd, b'hello\\n'); end.receive(None)")
    with pytest.raises(ChannelError, match="not a message"):
        async for _ in link:
            pass
    await link.stop(LIMIT)


async def test_a_command_that_does_not_exist_is_one_clear_error():
    with pytest.raises(TrainerDied, match="cannot start the trainer"):
        await TrainerLink.start(command=("/nonexistent/python",))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_trainer_dies_with_a_node_that_is_killed(tmp_path):
    """A node process starts a real trainer process, is killed, and leaves nothing behind."""
    import subprocess

    program = """
    import asyncio
    from peer.channel import TrainerLink
    async def main():
        link = await TrainerLink.start()
        print(link.pid, flush=True)
        await asyncio.sleep(3600)
    asyncio.run(main())
    """
    node = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    trainer = int(node.stdout.readline())
    time.sleep(0.5)  # so that it has asked for its signal, or (earlier) will find its parent gone
    os.kill(trainer, 0)
    node.kill()
    node.wait()
    node.stdout.close()
    wait_until(lambda: not _alive(trainer), "the trainer ends with its node")


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
