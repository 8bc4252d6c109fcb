"""The reader of windows: the right tokens from any source, and no byte that was not checked."""

import http.server
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from peer.training.data import Batches, DataError, DataUnavailableError, WindowReader
from protocol.errors import MalformedError
from protocol.merkle import CHUNK, blob_digest, blob_leaves
from protocol.spec import DataShard, DataSpec

WINDOW = 16


def make_shard(folder: Path, tokens: np.ndarray) -> DataShard:
    data = tokens.tobytes()
    digest = blob_digest(data)
    (folder / f"{digest}.tokens").write_bytes(data)
    (folder / f"{digest}.leaves").write_bytes(b"".join(blob_leaves(data)))
    return DataShard(digest=str(digest), size=len(data), tokens=len(tokens))


@pytest.fixture
def shards(tmp_path):
    """Two shards, the first of several chunks with a cut-off end; a folder `good` with them, and the tokens."""
    folder = tmp_path / "good"
    folder.mkdir()
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 60_000, n, dtype="<u2") for n in (3 * CHUNK // 2 + 777, 500)]
    return folder, [make_shard(folder, a) for a in arrays], arrays


def spec(shards, *addresses) -> DataSpec:
    return DataSpec(window=WINDOW, train=shards, addresses=list(addresses))


def local(folder, shards):
    return {s.name: folder / f"{s.digest}.tokens" for s in shards}


def expected(arrays, index):
    in_first = (len(arrays[0]) - 1) // WINDOW
    tokens, first = (arrays[0], index) if index < in_first else (arrays[1], index - in_first)
    return tokens[first * WINDOW : first * WINDOW + WINDOW + 1].astype(np.int64)


class Server:
    """A web server over a folder: honest ranges, or a fault."""

    def __init__(self, folder: Path, fault: str = ""):
        self.requests = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.requests += 1
                path = folder / self.path.strip("/")
                if not path.is_file():
                    return self.send_error(404)
                a, b = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                data = path.read_bytes()[a : b + 1]
                if fault == "wrong" and path.suffix == ".tokens":
                    data = bytes([data[0] ^ 1]) + data[1:]
                if fault == "no ranges" and path.suffix == ".tokens":
                    data = path.read_bytes()
                    self.send_response(200)
                else:
                    self.send_response(206)
                if fault == "endless":
                    self.end_headers()
                    try:
                        while True:
                            self.wfile.write(b"x" * 65536)
                            outer.requests += 1
                    except OSError:
                        return None
                if fault == "drip":
                    self.end_headers()
                    try:
                        while True:
                            self.wfile.write(b"x")
                            self.wfile.flush()
                            time.sleep(0.05)
                    except OSError:
                        return None
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()
        self.address = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


@pytest.mark.parametrize("kind", ["local", "local without leaves", "file address", "http"])
def test_every_window_has_the_tokens_of_its_place(shards, kind):
    folder, refs, arrays = shards
    if kind == "local without leaves":
        for leaf_file in folder.glob("*.leaves"):
            leaf_file.unlink()
    with Server(folder) as server:
        if kind.startswith("local"):
            reader = WindowReader(spec(refs), local(folder, refs))
        else:
            reader = WindowReader(spec(refs, server.address if kind == "http" else str(folder)))
        assert reader.total == spec(refs).train_windows
        in_chunks = [0, 1, CHUNK // (2 * WINDOW) - 1, CHUNK // (2 * WINDOW), reader.total - 32, reader.total - 1]
        got = reader.read(in_chunks)
        assert got.dtype == torch.int64 and got.shape == (len(in_chunks), WINDOW + 1)
        for row, index in zip(got, in_chunks, strict=True):
            assert np.array_equal(row.numpy(), expected(arrays, index)), index


def test_wrong_bytes_on_this_disk_are_never_given_and_another_source_helps(shards, tmp_path):
    folder, refs, arrays = shards
    bad = tmp_path / "bad.tokens"
    data = bytearray((folder / f"{refs[0].digest}.tokens").read_bytes())
    data[10] ^= 1
    bad.write_bytes(data)
    (tmp_path / "bad.leaves").write_bytes((folder / f"{refs[0].digest}.leaves").read_bytes())
    told: list[str] = []
    alone = WindowReader(spec(refs), {refs[0].name: bad}, report=told.append)
    with pytest.raises(
        DataUnavailableError, match=f"this disk gave wrong bytes for shard {refs[0].name.short}, chunk 0"
    ):
        alone.read([0])
    helped = WindowReader(spec(refs, str(folder)), {refs[0].name: bad}, report=told.append)
    assert np.array_equal(helped.read([0])[0].numpy(), expected(arrays, 0))
    assert len(told) == 2 and all("this disk" in t for t in told)


@pytest.mark.parametrize(
    ("fault", "says"),
    [("wrong", "wrong bytes"), ("no ranges", "range requests"), ("endless", "wrong"), ("drip", "of .* bytes after")],
)
def test_a_bad_server_is_named_bounded_and_left_for_the_next(shards, fault, says):
    folder, refs, arrays = shards
    told: list[str] = []
    with Server(folder, fault) as bad, Server(folder) as good:
        reader = WindowReader(spec(refs, bad.address, good.address), timeout=2, report=told.append)
        index = CHUNK // (2 * WINDOW) + 5  # in the second chunk
        assert np.array_equal(reader.read([index])[0].numpy(), expected(arrays, index))
        assert told and bad.address in told[0]
        assert bad.requests < 200  # the endless one was not read on and on
        with pytest.raises(DataUnavailableError, match=says):
            WindowReader(spec(refs, bad.address), timeout=2, report=told.append).read([index])


def test_a_dead_address_is_put_aside_and_not_asked_for_every_chunk(shards):
    folder, refs, _ = shards
    told: list[str] = []
    reader = WindowReader(spec(refs, "http://127.0.0.1:9", str(folder)), timeout=2, report=told.append)
    reader.read([0, CHUNK // (2 * WINDOW) + 5, reader.total - 1])
    assert len(told) == 1 and "127.0.0.1:9" in told[0]


def test_nowhere_to_read_from_says_so(shards):
    _, refs, _ = shards
    with pytest.raises(DataUnavailableError, match="names no address"):
        WindowReader(spec(refs)).read([0])


@pytest.mark.parametrize("address", ["simplecache::file:///x", "jupyter://h/x", "reference://x", "ssh://h/x"])
def test_a_spec_cannot_make_a_volunteer_load_other_file_systems(shards, address):
    _, refs, _ = shards
    told: list[str] = []
    reader = WindowReader(spec(refs, address), report=told.append)
    assert told and "begins with one of" in told[0]
    with pytest.raises(DataUnavailableError):
        reader.read([0])


def test_a_window_that_does_not_exist_and_a_token_beyond_the_vocabulary_are_refused(shards):
    folder, refs, arrays = shards
    reader = WindowReader(spec(refs), local(folder, refs), vocabulary=int(max(a.max() for a in arrays)))
    for index in (-1, reader.total):
        with pytest.raises(MalformedError):
            reader.read([index])
    with pytest.raises(DataError, match="vocabulary ends at"):
        reader.read(range(reader.total))


def test_memory_is_bounded_by_the_cache(shards):
    folder, refs, _ = shards
    reader = WindowReader(spec(refs), local(folder, refs), cache_bytes=CHUNK)
    reader.read([0, reader.total - 1])
    for path in local(folder, refs).values():
        path.unlink()
    reader.read([reader.total - 1])  # the only chunk in memory
    with pytest.raises(DataUnavailableError):
        reader.read([0])


def test_validation_has_windows_of_its_own(shards):
    folder, refs, arrays = shards
    data = DataSpec(window=WINDOW, train=[refs[0]], validation=[refs[1]])
    reader = WindowReader(data, local(folder, refs), part="validation")
    assert reader.total == (500 - 1) // WINDOW
    assert np.array_equal(reader.read([0])[0].numpy(), arrays[1][: WINDOW + 1].astype(np.int64))


def test_batches_read_ahead_are_what_reading_gives_also_after_a_jump(shards):
    folder, refs, _ = shards
    reader = WindowReader(spec(refs), local(folder, refs))

    def plan(first, count):
        return (np.arange(first, first + count) * 7) % reader.total

    batches = Batches(reader, plan, batch=4)
    for first in (0, 4, 8, 100, 104, 0, 4):
        assert torch.equal(batches.take(first), reader.read(plan(first, 4)))
    batches.close()
    assert torch.equal(batches.take(8), reader.read(plan(8, 4)))
    batches.close()


def test_a_batch_is_prepared_by_the_thread_that_reads_it(shards):
    folder, refs, _ = shards
    reader = WindowReader(spec(refs), local(folder, refs))
    by: list[str] = []

    def prepare(tokens):
        by.append(threading.current_thread().name)
        return tokens + 1

    batches = Batches(reader, lambda first, count: np.arange(first, first + count), batch=2, prepare=prepare)
    assert torch.equal(batches.take(0), reader.read([0, 1]) + 1)
    batches.close()
    assert by and set(by) == {"read ahead_0"}


def test_an_error_while_reading_ahead_reaches_the_trainer_and_a_second_try_can_succeed(shards, tmp_path):
    folder, refs, _ = shards
    hidden = tmp_path / "hidden"
    folder.rename(hidden)
    reader = WindowReader(spec(refs), local(folder, refs))
    batches = Batches(reader, lambda first, count: np.arange(first, first + count), batch=2)
    with pytest.raises(DataUnavailableError):
        batches.take(0)
    hidden.rename(folder)
    assert batches.take(0).shape == (2, WINDOW + 1)
    batches.close()
