"""The commands around the services: codes, addresses, locks, and the first blobs of a run."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from cairn.commands import serve
from cairn.commands.serve import (
    PRIVATE,
    ServeOptions,
    announcement,
    invite_codes,
    last_line,
    public_addresses,
    published_page,
)
from cairn.demo.story import MARK, clear_folder
from cairn.files import write_whole
from cairn.swarm_view import put_blob
from coordinator.authoring.resolve import ResolvedRun
from coordinator.checkpoints.settings import CheckpointSettings
from peer.store import Store
from protocol.errors import CairnError, MalformedError
from protocol.ids import Digest
from protocol.invite import HostPort, Invite
from protocol.merkle import blob_digest
from protocol.spec import AdmissionSpec
from tests.support.specs import tiny_spec
from tests.support.waiting import until


def options(public: str, *, grpc: str = "0.0.0.0:7410", swarm: str = "/ip4/0.0.0.0/tcp/7412") -> ServeOptions:
    return ServeOptions(
        Path("run.toml"), CheckpointSettings(), Path("home"), grpc, "0.0.0.0:7411", swarm, public, "", "", ()
    )


@pytest.mark.parametrize(
    "public, endpoint, address",
    [
        ("run.example.org", "run.example.org:7410", "/dns4/run.example.org/tcp/7412"),
        ("192.0.2.7", "192.0.2.7:7410", "/ip4/192.0.2.7/tcp/7412"),
        ("2001:db8::1", "[2001:db8::1]:7410", "/ip6/2001:db8::1/tcp/7412"),
        ("[2001:db8::1]", "[2001:db8::1]:7410", "/ip6/2001:db8::1/tcp/7412"),
    ],
)
def test_a_public_name_or_address_of_any_kind_gives_the_invite_and_the_swarms_address(public, endpoint, address):
    (where,), announced = public_addresses(options(public), 7410)
    assert str(where) == endpoint and announced == (address,)


def test_without_a_public_name_nothing_is_announced():
    assert public_addresses(options(""), 7410) == ((), ())


@pytest.mark.parametrize("public", ["http://run.example.org", "run.example.org:80", "a b", ":::"])
def test_a_public_name_that_is_none_is_refused_with_the_option(public):
    with pytest.raises(click.BadParameter) as refused:
        public_addresses(options(public), 7410)
    assert "--public" in refused.value.format_message()


@pytest.mark.parametrize("port, swarm", [(0, "/ip4/0.0.0.0/tcp/7412"), (7410, "/ip4/0.0.0.0/tcp/0")])
def test_a_public_name_needs_ports_that_stay(port, swarm):
    with pytest.raises(click.UsageError, match="ports that stay"):
        public_addresses(options("run.example.org", swarm=swarm), port)


@pytest.mark.parametrize("given", ["", "https://run.example.org", "https://run.example.org/"])
def test_the_address_of_a_proxy_is_published_with_a_slash_at_its_end(given):
    found = published_page(replace(options("run.example.org"), page_url=given))
    assert found == (given and "https://run.example.org/")


@pytest.mark.parametrize("given", ["run.example.org", "ftp://run.example.org/", "https://a b/", "https://a/?b"])
def test_an_address_of_the_page_that_is_none_is_refused_with_the_option(given):
    with pytest.raises(click.BadParameter) as refused:
        published_page(replace(options("run.example.org"), page_url=given))
    assert "--page-url" in refused.value.format_message()


def admission(mode: str) -> AdmissionSpec:
    return tiny_spec(admission={"mode": mode}).admission


def test_a_code_is_made_once_and_is_nobody_elses_to_read(tmp_path):
    (code,) = invite_codes("", tmp_path, admission("invite"))
    assert len(code) >= 16 and invite_codes("", tmp_path, admission("invite")) == (code,)
    assert stat.S_IMODE((tmp_path / "invite-code").stat().st_mode) == 0o600
    assert invite_codes("given", tmp_path, admission("invite")) == ("given",)
    assert invite_codes("", tmp_path, admission("open")) == ()
    with pytest.raises(CairnError, match="leave out --code"):
        invite_codes("given", tmp_path, admission("open"))


@pytest.mark.parametrize("code", ["my code", "c\xf6de", "x" * 65])
def test_a_code_that_no_invite_can_have_is_refused_with_the_option(tmp_path, code: str):
    with pytest.raises(click.BadParameter) as refused:
        invite_codes(code, tmp_path, admission("invite"))
    assert "--code" in refused.value.format_message()


def test_a_private_file_is_whole_or_not_there(tmp_path, monkeypatch):
    old = os.umask(0)
    try:
        write_whole(tmp_path / "invite", "one", mode=PRIVATE)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "invite").stat().st_mode) == 0o600

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CairnError, match="no space left"):
        write_whole(tmp_path / "invite", "two", mode=PRIVATE)
    assert (tmp_path / "invite").read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["invite"]


def raised(error: Exception) -> None:
    raise error


async def test_the_invite_in_the_folder_names_who_is_there_and_is_written_only_when_that_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "INVITE_SECONDS", 0.01)
    made = Invite(tiny_spec().run_id, Digest(bytes(32)), (HostPort("c.example", 1),), addresses=("/a",))
    codes: list[str] = []
    bad = [MalformedError("'x' is not a multiaddress")]
    coordinator: Any = SimpleNamespace(invite=lambda code: raised(bad.pop()) if bad else codes.append(code) or made)
    config: Any = SimpleNamespace(folder=tmp_path, codes=("the-code",))
    full = [CairnError("no space left")]
    write = serve.write_whole
    monkeypatch.setattr(serve, "write_whole", lambda *a, **k: raised(full.pop()) if full else write(*a, **k))
    keeping = asyncio.create_task(serve.keep_invite(coordinator, config))
    file = tmp_path / "invite"
    await until(file.exists)
    assert Invite.parse(file.read_text()) == made and set(codes) == {"the-code"}
    first = file.stat().st_ino
    made = replace(made, addresses=("/b", "/a"))
    await until(lambda: file.stat().st_ino != first)
    second, made = file.stat().st_ino, replace(made, addresses=("/a", "/b"))
    seen = len(codes)
    await until(lambda: len(codes) >= seen + 3, "it has looked again")
    assert file.stat().st_ino == second
    keeping.cancel()


def test_a_blob_is_copied_into_the_store_only_when_it_is_the_one_that_the_run_names(tmp_path):
    file = tmp_path / "shard"
    file.write_bytes(b"tokens" * 1000)
    with Store(tmp_path / "store", 1 << 30) as store:
        put_blob(store, blob_digest(file.read_bytes()), file)
        assert store.has(blob_digest(file.read_bytes())) and file.exists()
        with pytest.raises(MalformedError, match="is not blob"):
            put_blob(store, blob_digest(b"other"), file)
        with pytest.raises(CairnError, match="copying"):
            put_blob(store, blob_digest(b"other"), tmp_path / "missing")
        assert list(store.scratch.iterdir()) == []


def test_a_run_that_begins_says_so_to_who_served_it_before_in_another_home(tmp_path):
    spec = tiny_spec()
    invite = Invite(spec.run_id, Digest(bytes(32)), (HostPort("127.0.0.1", 1),))
    first, later = (
        announcement(ResolvedRun(spec, b"", {}, begins), tmp_path, "http://page/", invite) for begins in (True, False)
    )
    (said,) = [line for line in first if line not in later]
    assert said.startswith("begins ") and "if it was served before" in said and "--home" in said
    assert f"join     cairn peer join {invite}" in later


def test_the_last_line_says_which_rounds_are_final():
    assert last_line(7, 4) == "stopped: round 7, final up to round 4; the same command goes on"
    assert last_line(2, None) == "stopped: round 2, nothing is final yet; the same command goes on"


def test_two_demos_at_once_do_not_share_a_folder(tmp_path):
    folder = tmp_path / "demo"
    lock = clear_folder(folder)
    (folder / "ada").mkdir()
    with pytest.raises(CairnError, match="another demo is running"):
        clear_folder(folder)
    assert (folder / "ada").exists()
    os.close(lock)
    again = clear_folder(folder)
    assert [p.name for p in folder.iterdir()] == [MARK]
    with pytest.raises(BlockingIOError), open(folder / MARK) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(again)
