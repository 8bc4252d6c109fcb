"""A stranger checks a checkpoint: from the folder to the owner's signature, or to the place where it does not hold."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cairn.checkpoints import verify_checkpoint
from coordinator.checkpoints.archive import ArchivedState
from coordinator.checkpoints.copies import CopyStore
from coordinator.errors import CoordinatorError
from protocol.errors import CairnError
from protocol.ids import Digest, Round
from protocol.invite import HostPort, Invite
from protocol.message_codec import KeySigner, encode_certificate
from protocol.messages import Admission, Finalization, Heartbeat
from protocol.spec import sign_spec
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
    assert verify_checkpoint(f"{address}/{made.folder.name}/", invite(world)).signed is not None
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
    sent: list[str] = []
    monkeypatch.setattr(CopyStore, "_send", lambda self, source, path, size: sent.append(path))
    place.copy(made)
    assert sent == [] and [t.archived.round for t in place.list()] == [5]  # complete files are not sent again


def test_what_reads_back_otherwise_is_never_named_as_whole(world: CheckpointWorld, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    place = CopyStore("memory://bucket", world.spec.run_id)
    made = world.final(5)
    send = CopyStore._send

    def rots(self, source, path, size):
        send(self, source, path, size)
        if path.endswith("model.safetensors"):
            self._fs.pipe_file(path, bytes(size))

    monkeypatch.setattr(CopyStore, "_send", rots)
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
