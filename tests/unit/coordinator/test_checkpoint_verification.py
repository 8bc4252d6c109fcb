"""A stranger checks a checkpoint: from the folder to the owner's signature, or to the place where it does not hold."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import io
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn.checkpoints import find_checkpoint, verify_checkpoint
from coordinator.checkpoints.archive import MANIFEST, MODEL, ArchivedState
from coordinator.checkpoints.copies import CopyStore
from coordinator.errors import CoordinatorError
from coordinator.export import export
from protocol.envelope import seal
from protocol.errors import CairnError
from protocol.ids import Digest, Round
from protocol.invite import HostPort, Invite
from protocol.merkle import blob_digest
from protocol.message_codec import KeySigner, encode_certificate
from protocol.messages import Admission, Finalization, Heartbeat
from protocol.spec import KIND, sign_spec
from tests.support.checkpoint_world import CheckpointWorld
from tests.support.command_line import cairn
from tests.support.coordinator_fakes import peer
from tests.support.specs import OWNER, identity, tiny_spec


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointWorld:
    return CheckpointWorld(tmp_path, monkeypatch)


def invite(world: CheckpointWorld, run=None) -> str:
    return str(Invite(run or world.spec.run_id, Digest(bytes(32)), (HostPort("c.example", 1),)))


def test_a_final_state_verifies_by_the_invite_and_by_the_owners_key(world: CheckpointWorld):
    made = world.final(5)
    said: list[str] = []
    proved = verify_checkpoint(str(made.folder), invite(world), said.append)
    assert (proved.archived.round, proved.archived.state) == (5, world.digests[5])
    record = world.swarm.chain.certificates[5].digest
    assert any(f"{record}, round 5" in line and "2 of 2 contributors voted" in line for line in said)
    assert [line.split()[0] for line in said] == ["run", "state", "record", "final"]
    verify_checkpoint(str(made.folder), world.spec.owner)
    first = world.add(0)
    assert verify_checkpoint(str(first.folder), invite(world)).archived.round == 0


def test_the_command_says_what_it_found_and_fails_for_what_is_not_signed(world: CheckpointWorld):
    made = world.final(5)
    done = cairn("checkpoint", "verify", made.folder, invite(world))
    assert done.returncode == 0 and "verified: the state of round 5 of run tiny" in done.stdout
    assert cairn("checkpoint", "verify", made.folder, "-", input=f"{invite(world)}\n").stdout == done.stdout
    (made.folder / "model.safetensors").write_bytes(world.files[0].read_bytes())
    done = cairn("checkpoint", "verify", made.folder, world.spec.owner)
    assert done.returncode == 1 and "not the state that cairn.json names" in done.stderr


def _sheet(folder: Path, **changes) -> None:
    sheet = json.loads((folder / "cairn.json").read_text()) | changes
    (folder / "cairn.json").write_text(json.dumps({k: v for k, v in sheet.items() if v is not None}))


def _other_state(folder: Path, world: CheckpointWorld) -> None:
    """Replace the model and its manifest by another model's."""
    world.state(77)
    shutil.copyfile(world.files[77], folder / "model.safetensors")
    _sheet(folder, state=str(world.digests[77]))


def _signed_by_another(folder: Path, world: CheckpointWorld) -> None:
    c = world.swarm.chain.certificates[5]
    final = KeySigner(identity("liar")).sign(Finalization(world.spec.run_id, Round(5), c.digest))
    _sheet(folder, final=base64.b64encode(final.encoded).decode())


def _of_round(number: int) -> Callable[[Path, CheckpointWorld], None]:
    """Return a change to the record and the finalization of another round."""

    def change(folder: Path, world: CheckpointWorld) -> None:
        c = world.swarm.chain.certificates[number]
        final = KeySigner(OWNER).sign(Finalization(world.spec.run_id, Round(number), c.digest))
        _sheet(folder, final=base64.b64encode(final.encoded).decode())
        (folder / "certificate.bin").write_bytes(encode_certificate(c))

    return change


def _another_owner(folder: Path, world: CheckpointWorld) -> None:
    liar = identity("liar")
    spec = world.spec.model_copy(update={"owner": liar.key.hex()})
    (folder / "spec.signed").write_bytes(sign_spec(liar, spec).encoded)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda f, w: _sheet(f, final=None), "not final when this copy was made"),
        (lambda f, w: (f / "cairn.json").write_text("{"), "not that of an archived state"),
        (lambda f, w: (f / "cairn.json").unlink(), "cairn.json is not there"),
        (lambda f, w: (f / "model.safetensors").write_bytes(b"x" * 100), "has 100 bytes"),
        (lambda f, w: (f / "config.json").write_text("{}"), "config.json is not the run's"),
        (lambda f, w: (f / "tokenizer.json").write_text("{}"), "tokenizer.json is not the run's"),
        (lambda f, w: (f / "certificate.bin").write_bytes(b"x"), "signatures do not hold"),
        (_other_state, "does not name state"),
        (_signed_by_another, "not signed by the run's owner"),
        (_of_round(3), "does not name state"),
        (_of_round(4), "witnesses.json is not there"),
        (_another_owner, "another run"),
        (lambda f, w: _sheet(f, round=0), "not the one that the run's spec begins with"),
    ],
)
def test_what_does_not_hold_is_said(
    world: CheckpointWorld, change: Callable[[Path, CheckpointWorld], object], said: str
):
    made = world.final(5)
    change(made.folder, world)
    with pytest.raises(CairnError, match=said):
        verify_checkpoint(str(made.folder), invite(world))


def test_another_run_another_owner_and_what_is_no_trust_at_all(world: CheckpointWorld):
    made = world.final(5)
    with pytest.raises(CairnError, match="another run"):
        verify_checkpoint(str(made.folder), invite(world, tiny_spec(seed=9).run_id))
    with pytest.raises(CairnError, match="another owner"):
        verify_checkpoint(str(made.folder), identity("liar").key.hex())
    with pytest.raises(CairnError, match="owner's key"):
        verify_checkpoint(str(made.folder), "trust me")


# -- folders that a stranger made to break the reader -------------------------------------------------------------

FILES = ("cairn.json", "config.json", "tokenizer.json", "spec.signed", "certificate.bin", "model.safetensors")
FOR_EVER = 300


def _replace(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder / name


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


STRANGE: dict[str, Callable[[Path], object]] = {
    "deep": lambda path: path.write_bytes(b"[" * 200_000),
    "deep and closed": lambda path: path.write_bytes(b'{"run":' * 50_000 + b"1" + b"}" * 50_000),
    "no Unicode": lambda path: path.write_bytes(b'{"run": "\xff"}'),
    "half a surrogate pair": lambda path: path.write_bytes(b'{"run": "\\ud800"}'),
    "empty": lambda path: path.write_bytes(b""),
    "null": lambda path: path.write_bytes(b"null"),
    "a list": lambda path: path.write_bytes(b"[[], {}]"),
    "a folder": lambda path: path.mkdir(),
    "a pipe": _pipe,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("gone"),
    "a terabyte": _huge,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.timeout(FOR_EVER)
def test_anything_under_any_name_is_an_error_in_one_line(strange_world: CheckpointWorld, name: str, kind: str):
    folder = strange_world.folder / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(strange_world.archive.all()[-1].folder, folder)
    STRANGE[kind](_replace(folder, name))
    for trusted in (invite(strange_world), strange_world.spec.owner):
        with pytest.raises(CairnError) as caught:
            verify_checkpoint(str(folder), trusted)
        assert str(caught.value).isprintable()
    with contextlib.suppress(CairnError):  # an export looks at neither certificate.bin nor config.json
        found = find_checkpoint(folder)
        export(found.checkpoint, found.config, found.tokenizer, found.origin, folder / "out")


@pytest.fixture(scope="module")
def strange_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckpointWorld]:
    with pytest.MonkeyPatch.context() as patch:
        world = CheckpointWorld(tmp_path_factory.mktemp("strange"), patch)
        world.final(5)
        yield world


@pytest.mark.parametrize("field", ["round", "tokens"])
@pytest.mark.parametrize(
    "value", ["Infinity", "NaN", "1e999", "20.9", "5.0", "true", '" 2_0 "', "-1", "9" * 5000, "null"]
)
def test_an_integer_of_the_manifest_is_an_integer(world: CheckpointWorld, field: str, value: str):
    made = world.final(5)
    path = made.folder / "cairn.json"
    text, count = re.subn(rf'"{field}": \d+', f'"{field}": {value}', path.read_text())
    assert count == 1
    path.write_text(text)
    with pytest.raises(CairnError, match="cairn.json is not that of an archived state"):
        verify_checkpoint(str(made.folder), invite(world))


def test_a_key_that_occurs_twice_is_refused(world: CheckpointWorld):
    made = world.final(5)
    path = made.folder / "cairn.json"
    path.write_text(path.read_text().replace('"round": 5', '"round": 4,\n "round": 5'))
    with pytest.raises(CairnError, match="cairn.json is not that of an archived state"):
        verify_checkpoint(str(made.folder), invite(world))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"hidden_size": 32', '"hidden_size": 77,\n "hidden_size": 32'),
        ('"hidden_size": 32', '"hidden_size": 32.0'),
        ('"tie_word_embeddings": true', '"tie_word_embeddings": 1'),
        ('"hidden_size": 32', '"hidden_size":  32'),
        ('"hidden_size"', '"\\u0068idden_size"'),
    ],
)
def test_a_config_that_another_reader_reads_otherwise_is_not_the_runs(world: CheckpointWorld, old: str, new: str):
    made = world.final(5)
    path = made.folder / "config.json"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(CairnError, match="config.json is not the run's"):
        verify_checkpoint(str(made.folder), invite(world))


def test_only_what_is_proved_is_said(world: CheckpointWorld):
    made = world.final(5)
    _sheet(made.folder, tokens=999_999_999_999)
    for name in ("tokenizer_config.json", "adapter_config.json", "witnesses.json", "\x1b[2J\u202e"):
        (made.folder / name).write_text("{}")
    said: list[str] = []
    verify_checkpoint(str(made.folder), invite(world), said.append)
    assert not any("999" in line or "tokens" in line for line in said)
    others = said[-1]
    assert others.startswith("others   not checked")
    assert all(name in others for name in ("tokenizer_config.json", "adapter_config.json", "witnesses.json"))
    assert others.isprintable() and "certificate.bin" not in others
    for i in range(50):
        (made.folder / f"more-{i}").touch()
    verify_checkpoint(str(made.folder), invite(world), said.append)
    assert "and 44 more" in said[-1] and len(said[-1]) < 500


def test_a_spec_is_parsed_only_when_the_trusted_key_or_run_vouches_for_it(world: CheckpointWorld, monkeypatch):
    made = world.final(5)
    hostile = seal(identity("liar"), KIND, b'{"model":{"tensors":[' + b"[]," * 340_000 + b"[]]}}")
    (made.folder / "spec.signed").write_bytes(hostile.encoded)
    _sheet(made.folder, run=str(blob_digest(hostile.payload)))
    monkeypatch.setattr("protocol.spec.parse_spec", lambda _: pytest.fail("parsed"))
    with pytest.raises(CairnError, match="another run"):
        verify_checkpoint(str(made.folder), invite(world))
    with pytest.raises(CairnError, match="another owner"):
        verify_checkpoint(str(made.folder), world.spec.owner)


# -- the last state: no record names it --------------------------------------------------------------------------


def _heartbeat(world: CheckpointWorld, number: int, head: Digest, state: Digest) -> bytes:
    who, run = peer(number), world.spec.run_id
    admitted = KeySigner(OWNER).sign(Admission(run, who.key, 0, 2**33, "")).encoded
    beat = Heartbeat(run, 1, Round(5), head, 0, 0, "training", 1.0, 1.0, 0, 0, (), (), admitted, "cpu", state)
    return KeySigner(who).sign(beat).encoded


def _last(world: CheckpointWorld, *holders: int) -> ArchivedState:
    world.rounds(5, {1: 1, 2: 1, 3: 1})
    world.state(5)
    last = world.swarm.chain.certificates[-1]
    sent = encode_certificate(last)
    words = [_heartbeat(world, n, last.digest, world.digests[5]) for n in holders]
    made = world.add(5, certificate=sent, witnesses=words)
    final = KeySigner(OWNER).sign(Finalization(world.spec.run_id, Round(4), last.digest))
    return world.archive.mark_final(made, final.encoded, sent)


def test_the_last_state_is_what_the_last_contributors_sign_that_they_hold(world: CheckpointWorld):
    made = _last(world, 1, 2, 3)
    said: list[str] = []
    verify_checkpoint(str(made.folder), invite(world), said.append)
    assert any("3 of 3 contributors sign" in line for line in said)


@pytest.mark.parametrize("holders", [(1, 2), (1, 1, 1), (1, 2, 9)])
def test_too_few_of_them_are_not_enough(world: CheckpointWorld, holders: tuple[int, ...]):
    made = _last(world, *holders)
    with pytest.raises(CairnError, match="too few"):
        verify_checkpoint(str(made.folder), invite(world))


# -- copies at an address -----------------------------------------------------------------------------------------


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """Serves a folder; no ranges, as simple servers are."""
    servers = []

    def serve(folder: Path) -> str:
        handler = functools.partial(_Handler, directory=str(folder))
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_checkpoint_on_a_web_server_verifies_and_a_damaged_one_does_not(world: CheckpointWorld, web):
    made = world.final(5)
    address = web(made.folder.parent)
    assert verify_checkpoint(f"{address}/{made.folder.name}/", invite(world)).archived.final
    data = bytearray(world.files[5].read_bytes())
    data[-1] ^= 1
    (made.folder / "model.safetensors").unlink()  # it is linked to the other
    (made.folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CairnError, match="damaged or exchanged"):
        verify_checkpoint(f"{address}/{made.folder.name}", invite(world))
    with pytest.raises(CairnError, match="cairn.json is not there"):
        verify_checkpoint(f"{address}/round-000099", invite(world))
    with pytest.raises(CairnError, match="cannot be read"):
        verify_checkpoint("http://127.0.0.1:9/round-000005", invite(world))


def test_a_copy_in_memory_is_whole_is_listed_and_goes_by_the_policy(world: CheckpointWorld):
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    said: list[dict] = []
    place = CopyStore("memory://bucket/runs", world.spec.run_id, said.append)
    assert place.list() == []
    folders = [world.final(r).folder for r in (0, 5, 10)]
    place.keep(folders, replace(world.archive.policy, newest=5), {}, set())
    assert [t.archived.round for t in place.list()] == [0, 5, 10]
    assert [r["copied"] for r in said if "copied" in r] == [str(world.digests[r]) for r in (0, 5, 10)]
    path = place.list()[1].path
    proved = verify_checkpoint(f"memory://{path}", invite(world))
    assert proved.archived.round == 5
    place.keep(folders, replace(world.archive.policy, newest=1), {}, set())
    assert [t.archived.round for t in place.list()] == [0, 10]
    place.keep(folders, replace(world.archive.policy, newest=1), {}, set())
    assert said[-1] == {"skipped": str(world.digests[5])}  # nothing is sent to be removed
    place.keep([], world.archive.policy, {}, {world.digests[10]})
    assert [t.archived.round for t in place.list()] == [0]
    assert not [k for k in MemoryFileSystem.store if "round-000010" in k]


def test_half_a_copy_is_no_checkpoint_and_is_gone_on_with(world: CheckpointWorld, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    place = CopyStore("memory://bucket", world.spec.run_id)
    made = world.final(5)
    with monkeypatch.context() as m:
        m.setattr(MemoryFileSystem, "pipe_file", lambda *a, **k: (_ for _ in ()).throw(OSError("quota exceeded")))
        with pytest.raises(CoordinatorError, match="quota exceeded.*may this account write there"):
            place.copy(made)
    assert place.list() == [] and MemoryFileSystem.store
    written: list[str] = []

    def noted(self, path, mode="rb", **how):
        if mode == "wb":
            written.append(path.rsplit("/", 1)[-1])
        return opened(self, path, mode, **how)

    opened = MemoryFileSystem.open
    monkeypatch.setattr(MemoryFileSystem, "open", noted)
    place.copy(made)
    assert written == [MANIFEST]  # complete files are not sent again
    assert [t.archived.round for t in place.list()] == [5]


@pytest.mark.parametrize("interrupted", ["copy", "deletion"])
def test_half_a_copy_that_nobody_will_finish_is_deleted(world: CheckpointWorld, monkeypatch, interrupted: str):
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    made, policy = world.final(5), replace(world.archive.policy, newest=5)
    place, other = (CopyStore("memory://bucket", run) for run in (world.spec.run_id, tiny_spec(seed=4).run_id))

    def fails(*_: object, **__: object) -> None:
        raise OSError("the coordinator was killed")

    def stops_at_the_model(fs: MemoryFileSystem, path: str, mode: str, **how: Any) -> Any:
        return fails() if (mode, path.rsplit("/", 1)[-1]) == ("wb", MODEL) else opened(fs, path, mode, **how)

    opened = MemoryFileSystem.open
    with monkeypatch.context() as m, pytest.raises(CoordinatorError, match="was killed"):
        if interrupted == "copy":
            m.setattr(MemoryFileSystem, "open", stops_at_the_model)
            place.copy(made)
        copied = place.copy(made)
        m.setattr(MemoryFileSystem, "rm", fails)
        place.remove(copied)
    other.keep([], policy, {}, set())
    place.keep([], policy, {}, set(), [made.state])
    assert MemoryFileSystem.store, "another run's half, or one that is to be finished"
    place.keep([], policy, {}, set())
    assert not MemoryFileSystem.store


def test_what_reads_back_otherwise_is_never_named_as_whole(world: CheckpointWorld, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    place = CopyStore("memory://bucket", world.spec.run_id)
    made = world.final(5)
    opened = MemoryFileSystem.open

    def rots(self, path, mode="rb", **how):
        if mode == "rb" and path.endswith("model.safetensors"):
            return io.BytesIO(bytes(self.size(path)))
        return opened(self, path, mode, **how)

    monkeypatch.setattr(MemoryFileSystem, "open", rots)
    with pytest.raises(CoordinatorError, match="reads back otherwise"):
        place.copy(made)
    assert place.list() == []


def test_copies_of_another_run_are_left_alone(world: CheckpointWorld):
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    made = world.final(5)
    CopyStore("memory://bucket", world.spec.run_id).copy(made)
    other = CopyStore("memory://bucket", tiny_spec(seed=4).run_id)
    assert other.list() == []
    other.keep([], replace(world.archive.policy, newest=1), {}, {world.digests[5]})
    assert len(CopyStore("memory://bucket", world.spec.run_id).list()) == 1


def test_an_address_that_cannot_be_is_refused_with_the_remedy():
    run = tiny_spec().run_id
    with pytest.raises(CoordinatorError, match="nosuch://x"):
        CopyStore("nosuch://x", run)
    with pytest.raises(CoordinatorError, match="install the package for s3://|s3://"):
        CopyStore("s3://bucket/x", run)


@pytest.mark.parametrize("bytes_", ["1e999", "1.5", "true", "-1", '"7"', "null"])
def test_a_copy_whose_manifest_has_no_integers_is_no_copy(world: CheckpointWorld, bytes_: str):
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    place = CopyStore("memory://bucket", world.spec.run_id)
    made = place.copy(world.final(5))
    fs, path = MemoryFileSystem(), f"{made.path}/cairn.json"
    text = re.sub(r'"bytes": \d+', f'"bytes": {bytes_}', fs.cat_file(path).decode(), count=1)
    fs.pipe_file(path, text.encode())
    assert place.list() == []
