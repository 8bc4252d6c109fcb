"""The frozen base model reaches a peer's store from the nearest place that has it, and is there once."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from peer.errors import PeerError
from peer.fetched_data import data_bytes
from peer.node import base_model
from peer.node.base_model import read_from_address
from peer.node.blob_retention import assets
from peer.node.machine_check import check_machine
from peer.node.options import NodeOptions
from peer.node.trainer_files import base_file, fetch_assets
from peer.store import Store, StoreFull
from peer.swarm.pace import Pace, Paces
from peer.training import sources
from protocol.ids import Digest
from protocol.merkle import CHUNK, blob_digest, blob_leaves
from protocol.spec import RunSpec
from tests.support.specs import spec_fields
from tests.support.waiting import LIMIT

BASE = bytes(range(256)) * 1024 * 5 + b"the end"
NAME = blob_digest(BASE)


def run_spec(*addresses: str, dtype: str = "bfloat16") -> RunSpec:
    fields = spec_fields()
    fields["tokenizer"] = {"digest": blob_digest(b"words").hex(), "size": 5}
    fields["data"]["train"] = [{"digest": blob_digest(b"tk" * 100).hex(), "size": 200, "tokens": 100}]
    adapter = {"rank": 4, "alpha": 8, "dtype": dtype, "parameters": 1000, "addresses": list(addresses)}
    fields["model"]["adapter"] = adapter | {"base": {"digest": NAME.hex(), "size": len(BASE)}}
    return RunSpec.model_validate(fields)


class Members:
    """A network whose members have everything; it notes what they were asked for."""

    def __init__(self, store: Store):
        self.store = store
        self.downloads = self
        self.paces = Paces()
        self.asked: list[Digest] = []

    def providers(self) -> list[Any]:
        return []

    @contextlib.contextmanager
    def noted(self, what: str, blob: Digest, size: int) -> Iterator[None]:
        yield

    async def fetch_blob(self, digest: Digest, size: int, providers: Any, *, deadline_seconds: float):
        self.asked.append(digest)
        for data in (BASE, b"words", b"tk" * 100):
            if blob_digest(data) == digest:
                self.store.put(data)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "runs" / "mine" / "store", 1 << 30) as opened:
        yield opened


def published(folder: Path, data: bytes = BASE) -> Path:
    folder.mkdir()
    (folder / f"{NAME}.safetensors").write_bytes(data)
    (folder / f"{NAME}.leaves").write_bytes(b"".join(blob_leaves(BASE)))
    return folder


async def fetch(spec: RunSpec, store: Store, *, private_data: bool = False, paces: Paces | None = None) -> Members:
    members = Members(store)
    members.paces = paces or members.paces
    await fetch_assets(spec, store, cast(Any, members), private_data=private_data)
    assert base_file(spec, store) == store.path(NAME) and store.read(NAME) == BASE
    return members


async def test_members_give_the_base_and_it_is_never_fetched_again(store: Store):
    spec = run_spec()
    assert NAME in (await fetch(spec, store)).asked
    assert (await fetch(spec, store)).asked == []
    assert NAME in assets(spec)


async def test_another_run_here_shares_its_base_without_a_copy(store: Store, tmp_path: Path):
    with Store(tmp_path / "runs" / "other" / "store", 1 << 30) as other:
        other.put(BASE)
        assert NAME not in (await fetch(run_spec(), store)).asked
        assert store.path(NAME).samefile(other.path(NAME))
        other.remove(NAME)
    assert store.read(NAME) == BASE


async def test_a_damaged_base_of_another_run_is_left_alone(store: Store, tmp_path: Path):
    with Store(tmp_path / "runs" / "other" / "store", 1 << 30) as other:
        other.put(BASE)
        other.path(NAME).write_bytes(BASE[:-1] + b"!")
        assert NAME in (await fetch(run_spec(), store)).asked


async def test_an_address_gives_the_base_if_it_may_be_used(store: Store, tmp_path: Path):
    folder = published(tmp_path / "published")
    members = await fetch(run_spec(str(folder)), store, private_data=True)
    assert NAME not in members.asked


async def test_a_base_of_an_address_comes_at_the_rate_that_downloads_may_have_unless_it_is_on_this_disk(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = published(tmp_path / "published")
    monkeypatch.setattr(sources, "at_address", lambda *_, **__: sources.FsspecFolder(str(folder), LIMIT))
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    paces = Paces(down=Pace(lambda: sum(slept), sleep))
    paces.down.set_rate(CHUNK)
    await fetch(run_spec(str(folder)), store, private_data=True, paces=paces)
    assert not paces.down.gone
    store.remove(NAME)
    await fetch(run_spec("https://base.example/folder"), store, paces=paces)
    assert paces.down.gone == len(BASE) and sum(slept) > len(BASE) / CHUNK - 2


async def test_a_private_address_is_not_read_unless_it_is_allowed(store: Store, tmp_path: Path):
    folder = published(tmp_path / "published")
    assert NAME in (await fetch(run_spec(str(folder)), store)).asked


async def test_wrong_bytes_at_an_address_are_refused_and_what_was_right_is_kept(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(base_model, "READ_CHUNKS", 2)
    wrong = published(tmp_path / "wrong", BASE[: 3 * CHUNK] + b"?" + BASE[3 * CHUNK + 1 :])
    right = published(tmp_path / "right")
    whole = len(blob_leaves(BASE))
    spec = run_spec(str(tmp_path / "nowhere"), str(wrong))
    members = await fetch(spec, store, private_data=True)
    assert NAME in members.asked and caplog.text.count("the base model was not read from") == 2
    store.remove(NAME)
    adapter = spec.model.adapter
    assert adapter is not None
    with contextlib.suppress(Exception):
        read_from_address(adapter, store, str(wrong), threading.Event(), int, private=True)
    arriving = store.in_progress(NAME)
    assert arriving is not None and arriving.left == whole - 3
    read_from_address(adapter, store, str(right), threading.Event(), int, private=True)
    assert store.read(NAME) == BASE


def test_a_reading_that_is_stopped_leaves_its_chunks_for_the_next(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(base_model, "READ_CHUNKS", 2)
    adapter, stopped, read = run_spec().model.adapter, threading.Event(), []

    def stop_after_two(size: int) -> None:
        read.append(size)
        if len(read) == 2:
            stopped.set()

    assert adapter is not None
    address = str(published(tmp_path / "published"))
    read_from_address(adapter, store, address, stopped, stop_after_two, private=True)
    arriving = store.in_progress(NAME)
    assert len(read) == 2 and not store.has(NAME) and arriving is not None
    left = arriving.left
    assert 0 < left < -(-len(BASE) // CHUNK)
    read_from_address(adapter, store, address, threading.Event(), read.append, private=True)
    assert len(read) == 2 + left and store.read(NAME) == BASE, "no chunk is read twice"


@pytest.mark.parametrize("failures", [3, 6])
def test_a_request_that_fails_is_repeated_a_few_times(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
):
    adapter, pauses, left = run_spec().model.adapter, list[float](), [failures]
    assert adapter is not None

    class Unstopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return False

    chunk = sources.RemoteFolder.chunk

    def fails_sometimes(self: Any, *args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise PeerError("the connection was reset")
        return chunk(self, *args)

    monkeypatch.setattr(sources.RemoteFolder, "chunk", fails_sometimes)
    address = str(published(tmp_path / "base"))
    read = partial(read_from_address, adapter, store, address, Unstopped(), lambda _: None, private=True)
    if failures > base_model.RETRIES:
        with pytest.raises(PeerError, match="reset"):
            read()
        assert len(pauses) == base_model.RETRIES
    else:
        read()
        assert store.read(NAME) == BASE and pauses == [2.0, 4.0, 8.0]


async def test_the_base_counts_against_the_disk_that_is_allowed(tmp_path: Path):
    spec = run_spec(str(published(tmp_path / "published")))
    assert data_bytes(spec, private_data=False) == 5 + 200 + len(BASE)
    with Store(tmp_path / "runs" / "small" / "store", 1_000_000) as small:
        with pytest.raises(StoreFull, match="allow it more disk"):
            await fetch(spec, small, private_data=True)


async def test_a_peer_without_a_package_is_told_before_anything_is_fetched(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = NodeOptions(tmp_path, device="cpu")
    await check_machine(run_spec(), options, store)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PeerError, match="needs one more package: .* -m pip install 'peft"):
        await check_machine(run_spec(), options, store)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    await check_machine(run_spec(), options, store)
    with pytest.raises(PeerError, match="is quantised, which needs one more package: .* -m pip install 'bitsandbytes"):
        await check_machine(run_spec(dtype="nf4"), options, store)
