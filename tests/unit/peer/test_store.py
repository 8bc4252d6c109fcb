"""The store keeps what it was given, across crashes, and hands out nothing that is not what its name says."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from peer.store import BlobCorrupt, BlobMissing, Store, StoreBusy, StoreError, StoreFull, blobs, in_progress
from protocol.errors import MalformedError
from protocol.ids import Digest, Round
from protocol.merkle import CHUNK, blob_digest, blob_leaves, leaf_hash
from tests.support.waiting import LIMIT

BIG = 1 << 40


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store", BIG) as s:
        yield s


def data_of(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 17])
def test_what_is_put_is_read_back_also_after_a_restart(tmp_path, size):
    data = data_of(size)
    with Store(tmp_path, BIG) as store:
        digest = store.put(data)
        assert digest == blob_digest(data)
        assert store.put(data) == digest
        assert store.used_bytes == size
    with Store(tmp_path, BIG) as store:
        assert store.has(digest) and store.size(digest) == size
        assert store.read(digest) == data
        assert store.leaves(digest) == blob_leaves(data)
        assert store.path(digest).read_bytes() == data


def test_a_page_of_leaves_is_a_part_of_all(store):
    digest = store.put(data_of(5 * CHUNK))
    leaves = store.leaves(digest)
    assert [store.leaves_page(digest, n, 2) for n in (0, 2, 4, 6)] == [
        b"".join(leaves[n : n + 2]) for n in (0, 2, 4, 6)
    ]


def test_leaves_are_made_again_when_their_file_is_lost_or_wrong(tmp_path):
    data = data_of(3 * CHUNK)
    with Store(tmp_path, BIG) as store:
        digest = store.put(data)
        sidecar = store.path(digest).with_name(digest.hex() + ".leaves")
    for damage in (lambda: sidecar.unlink(), lambda: sidecar.write_bytes(b"x" * 96), lambda: sidecar.write_bytes(b"")):
        damage()
        with Store(tmp_path, BIG) as store:
            assert store.leaves(digest) == blob_leaves(data)
            assert store.read_chunk(digest, 2) == data[2 * CHUNK :]


def test_a_finished_file_is_adopted_and_its_source_gone(store):
    data = data_of(2 * CHUNK + 5)
    source = store.scratch / "checkpoint"
    source.write_bytes(data)
    digest = store.adopt(source, blob_digest(data))
    assert store.read(digest) == data and not source.exists()
    source.write_bytes(data)
    assert store.adopt(source) == digest and not source.exists()


def test_a_file_that_is_another_blob_is_not_adopted(store):
    source = store.scratch / "x"
    source.write_bytes(b"abc")
    with pytest.raises(MalformedError, match="is not blob"):
        store.adopt(source, blob_digest(b"abd"))
    assert source.read_bytes() == b"abc" and store.used_bytes == 0


def test_a_file_of_another_file_system_is_adopted_too(store, monkeypatch):
    source = store.folder.parent / "elsewhere"
    source.write_bytes(b"abc")
    real = os.rename

    def rename(a, b):
        if str(a) == str(source):
            raise OSError(errno.EXDEV, "cross-device link")
        real(a, b)

    monkeypatch.setattr(os, "rename", rename)
    assert store.read(store.adopt(source)) == b"abc"
    assert not source.exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "delete"])
def test_a_damaged_blob_is_removed_and_reported_missing(tmp_path, caplog, damage):
    data = data_of(3 * CHUNK)
    with Store(tmp_path, BIG) as store:
        digest = store.put(data)
        path = store.path(digest)
        leaves = path.with_name(path.name + ".leaves")
    if damage == "flip":
        path.write_bytes(data[: 2 * CHUNK] + b"\0" + data[2 * CHUNK + 1 :])
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "grow":
        path.write_bytes(data + b"\0" * CHUNK)
        leaves.unlink()
    with Store(tmp_path, BIG) as store:
        if damage == "delete":
            path.unlink()
        with pytest.raises(BlobCorrupt, match="fetched again"):
            store.read_chunk(digest, 2)
        assert not store.has(digest) and not path.exists()
        assert store.used_bytes == 0 and caplog.text.count("was damaged") == 1
        with pytest.raises(BlobMissing):
            store.path(digest)
        assert store.put(data) == digest and store.read(digest) == data


def test_a_blob_that_the_disk_cannot_read_is_removed_also_when_its_leaves_are_lost(tmp_path, monkeypatch):
    with Store(tmp_path, BIG) as store:
        path = store.path(digest := store.put(b"abc"))
    path.with_name(path.name + ".leaves").unlink()

    def fails(chunk: bytes) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Store(tmp_path, BIG) as store:
        monkeypatch.setattr(blobs, "leaf_hash", fails)
        with pytest.raises(BlobCorrupt, match="cannot read it"):
            store.verify(digest)
        assert not store.has(digest)


def test_no_more_is_taken_than_allowed(tmp_path):
    with Store(tmp_path, 1000) as store:
        store.put(b"a" * 600)
        with pytest.raises(StoreFull, match=r"allow it more disk \(--disk\)"):
            store.put(b"b" * 600)
        big = b"c" * 401
        with pytest.raises(StoreFull):
            store.receive(blob_digest(big), len(big), blob_leaves(big))
        source = store.scratch / "x"
        source.write_bytes(big)
        with pytest.raises(StoreFull):
            store.adopt(source)
        assert source.exists()
        store.receive(blob_digest(b"d" * 400), 400, blob_leaves(b"d" * 400))
        assert store.used_bytes == 1000
        with pytest.raises(StoreFull):
            store.put(b"e")


def arrive(store: Store, data: bytes) -> None:
    arriving = store.receive(blob_digest(data), len(data), blob_leaves(data))
    assert arriving is not None
    arriving.write(0, data)
    arriving.finish()
    arriving.close()


def adopt(store: Store, data: bytes) -> None:
    source = store.scratch / "x"
    source.write_bytes(data)
    store.adopt(source)


@pytest.mark.parametrize("keep", [Store.put, adopt, arrive])
def test_a_new_folder_of_blobs_is_durable_as_well(store, monkeypatch, keep):
    real, flushed = os.fsync, []

    def fsync(fd):
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    keep(store, b"abc")
    folder = store.path(blob_digest(b"abc")).parent
    assert {str(folder), str(folder.parent)} <= set(flushed)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_too_few_open_files_are_not_taken_for_a_fault_of_the_disk(store, monkeypatch, code):
    def fails(*_):
        raise OSError(code, os.strerror(code))

    digest = store.put(b"abc")
    with monkeypatch.context() as m:
        m.setattr(os, "pread", fails)
        m.setattr(os, "rename", fails)
        for use in (lambda: store.read_chunk(digest, 0), lambda: store.put(b"d")):
            with pytest.raises(StoreError, match="raise the limit of open files"):
                use()
    assert store.read(digest) == b"abc"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_an_error_with_a_remedy_and_leaves_no_draft(store, monkeypatch, code):
    def fails(fd):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", fails)
        with pytest.raises(StoreError, match="disk|folder"):
            store.put(b"abc")
        with pytest.raises(StoreError):
            store.write_value("x", b"1")
    assert not store.has(blob_digest(b"abc"))
    assert list(store.scratch.iterdir()) == []
    assert store.read(store.put(b"abc")) == b"abc"


def test_two_processes_cannot_use_one_store(tmp_path):
    with Store(tmp_path, BIG):
        code = f"from peer.store import *\ntry: Store({str(tmp_path)!r}, 1)\nexcept StoreBusy as e: print(e)"
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
        assert "already running" in said and f"process {os.getpid()}" in said
        with pytest.raises(StoreBusy):
            Store(tmp_path, BIG)
    Store(tmp_path, BIG).close()


# -- arriving blobs ------------------------------------------------------------------------------------------------


def test_chunks_arrive_in_any_order_and_only_right_ones_are_written(store):
    data = data_of(3 * CHUNK + 9)
    chunks = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
    digest = blob_digest(data)
    partial = store.receive(digest, len(data), blob_leaves(data))
    assert partial.missing() == [0, 1, 2, 3] and not store.has(digest)
    for index, wrong in [(3, chunks[0]), (0, chunks[1]), (3, chunks[3] + b"x"), (2, b"")]:
        with pytest.raises(MalformedError):
            partial.write(index, wrong)
    with pytest.raises(MalformedError):
        partial.write(4, b"")
    with pytest.raises(StoreError, match="4 chunks are missing"):
        partial.finish()
    for index in (3, 1, 0, 2, 2):
        partial.write(index, chunks[index])
        assert partial.read_chunk(index) == chunks[index]
    partial.finish()
    partial.finish()
    partial.close()
    assert store.read(digest) == data and store.in_progress(digest) is None
    assert list((store.folder / "partial").iterdir()) == []


def test_an_interrupted_arrival_goes_on_and_trusts_only_what_still_hashes(tmp_path):
    data = data_of(4 * CHUNK)
    digest, leaves = blob_digest(data), blob_leaves(data)
    with Store(tmp_path, BIG) as store:
        partial = store.receive(digest, len(data), leaves)
        for index in (0, 2):
            partial.write(index, data[index * CHUNK : (index + 1) * CHUNK])
    with open(tmp_path / "partial" / digest.hex(), "r+b") as file:
        file.seek(2 * CHUNK)
        file.write(b"torn")
    with Store(tmp_path, BIG) as store:
        assert store.used_bytes == len(data)
        assert store.known_leaves(digest, len(data)) == leaves
        assert store.known_leaves(digest, len(data) - CHUNK) is None
        partial = store.receive(digest, len(data), leaves)
        assert store.used_bytes == len(data)
        assert partial.missing() == [1, 2, 3] and partial.rechecked == 1
        assert partial.bitmap() == b"\x01"
        for index in partial.missing():
            partial.write(index, data[index * CHUNK : (index + 1) * CHUNK])
        partial.finish()
        assert store.read(digest) == data and store.used_bytes == len(data)


def test_a_blob_that_is_fetched_again_is_not_read_again(store):
    data = data_of(2 * CHUNK)
    digest, leaves = blob_digest(data), blob_leaves(data)
    first = store.receive(digest, len(data), leaves)
    first.write(0, data[:CHUNK])
    first.close()
    again = store.receive(digest, len(data), leaves)
    assert again is first and again.missing() == [1]
    again.write(1, data[CHUNK:])
    again.finish()
    again.close()
    assert store.read(digest) == data


def test_what_is_left_from_before_the_start_is_checked_while_others_use_the_store(tmp_path, monkeypatch):
    data = data_of(2 * CHUNK)
    digest, leaves = blob_digest(data), blob_leaves(data)
    with Store(tmp_path, BIG) as store:
        store.receive(digest, len(data), leaves).write(0, data[:CHUNK])
    checking, may_end = threading.Event(), threading.Event()

    def slow(chunk: bytes) -> bytes:
        checking.set()
        assert may_end.wait(LIMIT)
        return leaf_hash(chunk)

    monkeypatch.setattr(in_progress, "leaf_hash", slow)
    with Store(tmp_path, BIG) as store, ThreadPoolExecutor(2) as pool:
        opening = pool.submit(store.receive, digest, len(data), leaves)
        assert checking.wait(LIMIT)
        try:
            pool.submit(store.put, b"another").result(LIMIT)
        finally:
            may_end.set()
        assert opening.result(LIMIT).missing() == [1]


@pytest.mark.parametrize(
    ("module", "step", "work"),
    [
        (blobs, "flush_folder", lambda store, blob: blob.finish()),
        (blobs, "remove", lambda store, blob: store.remove(blob.digest)),
        (in_progress, "reserve", lambda store, blob: slice_of(store, data_of(CHUNK + 1, 5), [0, 1])),
        (in_progress, "reserve", lambda store, blob: slice_of(store, data_of(2 * CHUNK), [0])),
    ],
)
def test_event_loops_wait_for_no_slow_disk_work(store, monkeypatch, module, step: str, work: Callable):
    slow, other, data = data_of(CHUNK), data_of(2 * CHUNK), data_of(CHUNK + 1, 5)
    blob = slice_of(store, slow, [0])
    fill(blob, slow, [0])
    partial = slice_of(store, other, [1])
    working, may_end, do = threading.Event(), threading.Event(), getattr(module, step)

    def wait(*args):
        working.set()
        assert may_end.wait(LIMIT)
        do(*args)

    with ThreadPoolExecutor(2) as pool:
        with monkeypatch.context() as m:
            m.setattr(module, step, wait)
            working_on = pool.submit(work, store, blob)
            try:
                assert working.wait(LIMIT)
                pool.submit(partial.close).result(LIMIT)
                used = pool.submit(lambda: store.used_bytes).result(LIMIT)
                unreferenced = pool.submit(store.unreferenced, set()).result(LIMIT)
                if step == "flush_folder":
                    assert not store.has(blob.digest), "it is not durable yet"
                    assert blob.read_chunk(0) == slow
            finally:
                may_end.set()
            working_on.result(LIMIT)
    assert used == store.used_bytes
    assert blob_digest(data) not in unreferenced


def test_wrong_leaves_make_no_room(store):
    with pytest.raises(MalformedError):
        store.receive(blob_digest(b"a"), 1, blob_leaves(b"b"))
    with pytest.raises(MalformedError):
        store.receive(blob_digest(b"a"), 1 << 50, [b"x" * 32])
    assert list((store.folder / "partial").iterdir()) == []


def test_two_who_fetch_one_blob_share_its_arrival(store):
    data = data_of(2 * CHUNK)
    digest = blob_digest(data)
    a = store.receive(digest, len(data), blob_leaves(data))
    b = store.receive(digest, len(data), blob_leaves(data))
    assert a is b
    a.write(0, data[:CHUNK])
    a.close()
    b.write(1, data[CHUNK:])
    b.finish()
    b.close()
    assert store.read(digest) == data


def test_a_blob_that_is_dropped_while_it_arrives_says_so(store):
    data = data_of(2 * CHUNK)
    partial = store.receive(blob_digest(data), len(data), blob_leaves(data))
    store.remove(blob_digest(data))
    with pytest.raises(BlobMissing, match="not wanted"):
        partial.write(0, data[:CHUNK])
    with pytest.raises(BlobMissing):
        partial.finish()
    assert store.used_bytes == 0 and list((store.folder / "partial").iterdir()) == []


def pruned(store: Store, keep: set[Digest]) -> list[Digest]:
    """Remove the unreferenced blobs, and return their digests."""
    gone = store.unreferenced(keep)
    for digest in gone:
        store.remove(digest)
    return gone


def test_pruning_keeps_what_it_is_told_and_what_is_arriving(tmp_path):
    data = data_of(2 * CHUNK)
    with Store(tmp_path, BIG) as store:
        kept, dropped = store.put(b"kept"), store.put(b"dropped")
        partial = store.receive(blob_digest(data), len(data), blob_leaves(data))
        assert pruned(store, {kept}) == [dropped]
        assert store.has(kept) and not store.has(dropped) and store.in_progress(blob_digest(data)) is partial
    with Store(tmp_path, BIG) as store:
        assert pruned(store, {kept}) == [blob_digest(data)]
        assert store.used_bytes == 4


def test_free_room_is_bounded_by_the_limit_and_by_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    with Store(tmp_path, 4000) as store:
        store.put(data_of(1000))
        assert store.free_bytes == 3000
    with Store(tmp_path, BIG) as store:
        assert store.free_bytes == 5000
    with Store(tmp_path, 10) as store:
        assert store.free_bytes == 0


def test_many_threads_put_read_and_remove_without_harm(store):
    errors = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(30):
            data = data_of(rng.randrange(3 * CHUNK), rng.randrange(6))
            try:
                digest = store.put(data)
                assert store.read(digest) == data
            except BlobMissing:
                pass  # another thread removed it in between
            except BaseException as e:
                errors.append(e)
                raise
            if rng.random() < 0.3:
                store.remove(blob_digest(data))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert store.used_bytes == sum(store.blobs().values())


# -- chain and values ----------------------------------------------------------------------------------------------


def digest_of(n: int) -> Digest:
    return Digest(bytes([n]) * 32)


def test_certificates_come_back_in_the_order_of_rounds_with_both_sides_of_a_fork(tmp_path):
    with Store(tmp_path, BIG) as store:
        for n in (3, 1, 200, 2):
            store.append_certificate(b"c%d" % n, Round(n), digest_of(n))
        store.append_certificate(b"c1-other", Round(1), digest_of(9))
        store.append_certificate(b"c1", Round(1), digest_of(1))
    with Store(tmp_path, BIG) as store:
        assert list(store.certificates()) == [b"c1", b"c1-other", b"c2", b"c3", b"c200"]
        assert store.drop_certificates(lambda round, _: round < 3, first=3) == 0
        assert store.drop_certificates(lambda round, _: round < 3) == 3
        assert list(store.certificates()) == [b"c3", b"c200"]


def test_who_reads_all_certificates_ends_when_the_store_is_closed(store):
    for n in range(3):
        store.append_certificate(b"c%d" % n, Round(n), digest_of(n))
    read = store.certificates()
    assert next(read) == b"c0"
    store.close()
    with pytest.raises(StoreError, match="was closed while its certificates were read: open it again"):
        next(read)


@pytest.mark.parametrize("keep", [0, 5, 40])
def test_a_torn_certificate_is_removed_and_reported_and_the_others_stay(store, caplog, keep):
    for n in (1, 2):
        store.append_certificate(b"certificate %d" % n * 10, Round(n), digest_of(n))
    last = sorted((store.folder / "chain").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:keep])
    assert list(store.certificates()) == [b"certificate 1" * 10]
    assert not last.exists() and "round 2" in caplog.text
    store.append_certificate(b"again", Round(2), digest_of(2))
    assert list(store.certificates())[1] == b"again"


def test_values_are_replaced_whole(store):
    assert store.read_value("admission") is None
    store.write_value("admission", b"one")
    store.write_value("admission", b"two")
    assert store.read_value("admission") == b"two"
    for name in ("", "../x", "A", "x/y", ".hidden", "x" * 65):
        with pytest.raises(StoreError, match="name"):
            store.write_value(name, b"")


# -- crashes -------------------------------------------------------------------------------------------------------

WRITER = """
    import random, sys
    from peer.store import Store
    from protocol.ids import Digest, Round
    from protocol.merkle import CHUNK, blob_digest, blob_leaves
    store = Store(sys.argv[1], 1 << 40)
    rng = random.Random(int(sys.argv[2]))
    for n in range(10**6):
        data = rng.randbytes(rng.randrange(2 * CHUNK))
        digest = store.put(data)
        store.append_certificate(data[:1000], Round(n), digest)
        store.write_value("head", b"%d" % n)
        partial = store.receive(blob_digest(data * 2), len(data) * 2, blob_leaves(data * 2))
        for i in partial.missing():
            partial.write(i, (data * 2)[i * CHUNK : (i + 1) * CHUNK])
        partial.finish()
        print(n, digest, flush=True)
"""


def test_what_was_acknowledged_survives_kill_9_and_nothing_else_is_damaged(tmp_path, caplog):
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(attempt)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().split() for _ in range(5 + 7 * attempt)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [line.split() for line in process.stdout.read().splitlines() if len(line.split()) == 2]
        process.wait()
        process.stdout.close()
        with Store(folder, BIG) as store:
            certificates = list(store.certificates())
            for n, name in acknowledged:
                digest = Digest.parse(name.decode())
                assert certificates[int(n)] == store.read(digest)[:1000]
            for digest in store.blobs():
                store.read(digest)
            head = store.read_value("head")
            assert head is not None and int(head) >= len(acknowledged) - 1
            assert "was damaged" not in caplog.text
            assert list(store.scratch.iterdir()) == []


# -- slices: blobs of which only some chunks are wanted ------------------------------------------------------------


def slice_of(store: Store, data: bytes, chunks: list[int]):
    return store.receive(blob_digest(data), len(data), blob_leaves(data), chunks)


def fill(partial, data: bytes, chunks: list[int]) -> None:
    for index in chunks:
        partial.write(index, data[index * CHUNK : (index + 1) * CHUNK])


def test_a_slice_takes_the_room_of_its_chunks_only_and_is_read_while_nobody_fetches_it(store):
    data = data_of(6 * CHUNK + 5)
    digest = blob_digest(data)
    partial = slice_of(store, data, [1, 6])
    assert store.used_bytes == CHUNK + 5 and partial.missing([1, 6]) == [1, 6]
    fill(partial, data, [1, 6])
    assert not partial.is_incomplete([1, 6]) and partial.is_incomplete() and partial.left == 5
    assert partial.path.stat().st_size == len(data)
    partial.close()
    arriving = store.in_progress(digest)
    assert arriving is not None and not store.has(digest)
    assert arriving.read_chunk(6) == data[6 * CHUNK :] and arriving.bitmap() == b"\x42"
    with pytest.raises(BlobMissing):
        arriving.read_chunk(0)
    with pytest.raises(BlobMissing):
        arriving.write(0, data[:CHUNK])  # its user has closed it


def test_a_slice_grows_by_what_others_want_of_the_blob_and_becomes_the_blob_when_that_is_all(store):
    data = data_of(4 * CHUNK)
    digest = blob_digest(data)
    first = slice_of(store, data, [0])
    fill(first, data, [0])
    first.close()
    second = slice_of(store, data, [0, 2])
    assert second is first and store.used_bytes == 2 * CHUNK and second.missing([0, 2]) == [2]
    fill(second, data, [2])
    second.close()
    with pytest.raises(MalformedError):
        slice_of(store, data, [4])
    assert store.used_bytes == 2 * CHUNK
    whole = store.receive(digest, len(data), blob_leaves(data))
    assert store.used_bytes == len(data) and whole.missing() == [1, 3]
    fill(whole, data, [1, 3])
    whole.finish()
    whole.close()
    assert store.read(digest) == data and store.used_bytes == len(data)


def test_a_slice_outlives_a_restart_and_is_pruned_unless_it_is_to_be_kept(tmp_path):
    data = data_of(5 * CHUNK)
    digest = blob_digest(data)
    with Store(tmp_path, BIG) as store:
        fill(slice_of(store, data, [1, 3]), data, [1, 3])
    with Store(tmp_path, BIG) as store:
        assert store.used_bytes <= 3 * CHUNK < len(data)  # as much of the disk as it takes
        partial = slice_of(store, data, [1, 2])
        assert partial.missing([1, 2]) == [2] and store.used_bytes == 2 * CHUNK
        partial.close()
        assert pruned(store, {digest}) == [] and store.in_progress(digest) is partial
        assert pruned(store, set()) == [digest] and store.in_progress(digest) is None
        assert store.used_bytes == 0 and list((store.folder / "partial").iterdir()) == []


def test_a_full_disk_costs_no_chunk_of_an_interrupted_slice_and_leaves_no_uncounted_file(tmp_path, monkeypatch):
    data, new = data_of(5 * CHUNK), data_of(2 * CHUNK, 1)
    digest = blob_digest(data)
    with Store(tmp_path, BIG) as store:
        fill(slice_of(store, data, [1, 3]), data, [1, 3])

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Store(tmp_path, BIG) as store:
        used = store.used_bytes
        with monkeypatch.context() as m:
            m.setattr(in_progress, "reserve", full)
            for chunks_of in (data, new):
                with pytest.raises(StoreFull, match="free some disk space"):
                    slice_of(store, chunks_of, [1])
        assert store.used_bytes == used and not (tmp_path / "partial" / blob_digest(new).hex()).exists()
        partial = slice_of(store, data, [1, 3])
        assert partial.missing([1, 3]) == [] and store.used_bytes == 2 * CHUNK
        partial.close()
        with monkeypatch.context() as m:
            m.setattr(in_progress, "reserve", full)
            with pytest.raises(StoreFull):
                store.receive(digest, len(data) - 1, blob_leaves(data))  # the file is of no use for another size
        assert store.used_bytes == 0 and not partial.path.exists()


def test_a_full_disk_ends_only_the_use_that_needed_more_of_a_slice(store, monkeypatch):
    data = data_of(4 * CHUNK)
    partial = slice_of(store, data, [1])

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m:
        m.setattr(in_progress, "reserve", full)
        with pytest.raises(StoreFull):
            slice_of(store, data, [1, 2])
    assert store.used_bytes == CHUNK and not partial.idle
    fill(partial, data, [1])
    partial.close()
    assert partial.idle and partial.read_chunk(1) == data[CHUNK : 2 * CHUNK]
    slice_of(store, data, [2])
    assert store.used_bytes == 2 * CHUNK


def test_a_slice_counts_towards_what_the_store_may_use(tmp_path):
    data = data_of(8 * CHUNK)
    with Store(tmp_path, 3 * CHUNK) as store:
        slice_of(store, data, [0, 1]).close()
        with pytest.raises(StoreFull):
            slice_of(store, data, [2, 3])
        slice_of(store, data, [7])
        assert store.used_bytes == 3 * CHUNK


def test_a_blob_that_is_put_while_it_arrives_is_whole_for_those_who_fetch_it(store):
    data = data_of(2 * CHUNK)
    digest, leaves = blob_digest(data), blob_leaves(data)
    blob = store.receive(digest, len(data), leaves)
    blob.write(0, data[:CHUNK])
    store.put(data)
    assert store.in_progress(digest) is None and blob.has(1) and not blob.left
    blob.write(1, data[CHUNK:])
    blob.finish()
    blob.close()
    assert store.read(digest) == data and store.used_bytes == len(data)
    assert list((store.folder / "partial").iterdir()) == []


def test_two_threads_that_finish_one_blob_at_once_both_succeed(store):
    for seed in range(50):
        data = data_of(CHUNK + 1, seed)
        digest, leaves = blob_digest(data), blob_leaves(data)
        blob = store.receive(digest, len(data), leaves)
        assert store.receive(digest, len(data), leaves) is blob
        blob.write(0, data[:CHUNK])
        begin, failed = threading.Barrier(2), []

        def work(blob=blob, data=data, begin=begin, failed=failed) -> None:
            begin.wait()
            try:
                blob.write(1, data[CHUNK:])
                blob.finish()
            except StoreError as e:
                failed.append(e)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        blob.close()
        blob.close()
        assert not failed and store.read(digest) == data


def test_a_whole_blob_is_not_received_again(store):
    data = data_of(CHUNK)
    digest = store.put(data)
    assert store.receive(digest, len(data), blob_leaves(data)) is None


def test_a_blob_that_is_removed_while_it_arrives_can_be_received_again(store):
    data = data_of(2 * CHUNK)
    digest = blob_digest(data)
    blob = store.receive(digest, len(data), blob_leaves(data))
    blob.write(1, data[CHUNK:])
    store.remove(digest)
    with pytest.raises(BlobMissing):
        blob.write(0, data[:CHUNK])
    assert store.receive(digest, len(data), blob_leaves(data)).missing() == [0, 1]
