"""The reader of windows: the right tokens from any source, and no byte that was not checked."""

import http.client
import http.server
import socket
import ssl
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from coordinator.tls import load_or_make
from peer.channel import Note
from peer.channel.messages import from_line, to_line
from peer.training import sources
from peer.training.data import Batches, DataError, DataUnavailableError, WindowReader
from peer.training.sources import MAX_REDIRECTS, SourceError, at_address
from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.invite import TLS_NAME
from protocol.merkle import CHUNK, blob_digest, blob_leaves
from protocol.spec import BEGINS, TRAINED, ConversationSpec, DataShard, DataSpec

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

    def __init__(self, folder: Path, fault: str = "", ip: str = "127.0.0.1"):
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
                if fault.startswith("redirect"):
                    self.send_response(302)
                    self.send_header("Location", fault.split()[1] + self.path)
                    return self.end_headers()
                if fault == "a long status line":
                    return self.wfile.write(b"x" * 65_530 + b"\r\n")
                if fault == "continue":
                    try:
                        while True:
                            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
                    except OSError:
                        return None
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
                self.wfile.write(data[:-1] if fault == "broken once" and outer.requests == 2 else data)

            def log_message(self, format, *args):
                pass

        self.http = http.server.ThreadingHTTPServer((ip, 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()
        self.address = f"http://{ip}:{self.http.server_port}"

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
            address = server.address if kind == "http" else str(folder)
            reader = WindowReader(spec(refs, address), private_data=True)
        assert reader.total == spec(refs).train_windows
        in_chunks = [0, 1, CHUNK // (2 * WINDOW) - 1, CHUNK // (2 * WINDOW), reader.total - 32, reader.total - 1]
        got = reader.read(in_chunks)
        assert got.dtype == torch.int64 and got.shape == (len(in_chunks), WINDOW + 1)
        for row, index in zip(got, in_chunks, strict=True):
            assert np.array_equal(row.numpy(), expected(arrays, index)), index
        assert (reader.bytes_received >= CHUNK) == (kind == "http"), "this disk's bytes are no traffic"


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
    helped = WindowReader(spec(refs, str(folder)), {refs[0].name: bad}, report=told.append, private_data=True)
    assert np.array_equal(helped.read([0])[0].numpy(), expected(arrays, 0))
    assert len(told) == 2 and all("this disk" in t for t in told)


def test_this_disk_is_read_again_once_its_shard_is_repaired_also_by_leaves_that_were_wrong(shards):
    folder, refs, arrays = shards
    path, leaves = (folder / f"{refs[0].digest}.{kind}" for kind in ("tokens", "leaves"))
    data = path.read_bytes()
    leaves.write_bytes(bytes(leaves.stat().st_size))
    reader = WindowReader(spec(refs), local(folder, refs), report=lambda _: None)
    for damaged in (data[:10] + bytes([data[10] ^ 1]) + data[11:], data[:-1], b""):
        path.write_bytes(damaged)
        with pytest.raises(DataUnavailableError) as e:
            reader.read([0])
        assert e.value.shard == refs[0].name
    path.write_bytes(data)
    assert np.array_equal(reader.read([0])[0].numpy(), expected(arrays, 0))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("wrong", "wrong bytes"),
        ("no ranges", "range requests"),
        ("endless", "wrong"),
        ("drip", "not complete after 2 s"),
    ],
)
def test_a_bad_server_is_named_bounded_and_left_for_the_next(shards, fault, says):
    folder, refs, arrays = shards
    told: list[str] = []
    with Server(folder, fault) as bad, Server(folder) as good:
        both = spec(refs, bad.address, good.address)
        reader = WindowReader(both, timeout=2, report=told.append, private_data=True)
        index = CHUNK // (2 * WINDOW) + 5  # in the second chunk
        assert np.array_equal(reader.read([index])[0].numpy(), expected(arrays, index))
        assert told and bad.address in told[0]
        assert bad.requests < 200  # the endless one was not read on and on
        with pytest.raises(DataUnavailableError, match=says):
            alone = spec(refs, bad.address)
            WindowReader(alone, timeout=2, report=told.append, private_data=True).read([index])


def test_what_a_server_s_long_status_line_makes_a_trainer_report_reaches_the_node(shards):
    folder, refs, arrays = shards
    told: list[str] = []
    with Server(folder, "a long status line") as bad, Server(folder) as good:
        data = spec(refs, bad.address, good.address)
        reader = WindowReader(data, timeout=2, report=told.append, private_data=True)
        assert np.array_equal(reader.read([0])[0].numpy(), expected(arrays, 0))
        note = Note("warning", "data", told[0])
        assert bad.address in note.text and from_line(to_line(note)) == note
        with pytest.raises(DataUnavailableError, match="cannot be had: .*xxx") as e:
            WindowReader(spec(refs, bad.address), timeout=2, report=told.append, private_data=True).read([0])
        assert len(str(e.value)) < 1000


def test_an_answer_that_breaks_off_is_no_wrong_bytes_and_its_server_is_asked_again(shards, monkeypatch):
    folder, refs, arrays = shards
    told: list[str] = []
    with Server(folder, "broken once") as server:
        reader = WindowReader(spec(refs, server.address), timeout=2, report=told.append, private_data=True)
        with pytest.raises(DataUnavailableError, match="ended after"):
            reader.read([0])
        later = time.monotonic() + 3600
        monkeypatch.setattr(time, "monotonic", lambda: later)
        assert np.array_equal(reader.read([0])[0].numpy(), expected(arrays, 0))
    assert len(told) == 1 and "wrong bytes" not in told[0]


def test_a_dead_address_is_put_aside_and_not_asked_for_every_chunk(shards):
    folder, refs, _ = shards
    told: list[str] = []
    data = spec(refs, "http://127.0.0.1:1024", str(folder))
    reader = WindowReader(data, timeout=2, report=told.append, private_data=True)
    reader.read([0, CHUNK // (2 * WINDOW) + 5, reader.total - 1])
    assert len(told) == 1 and "127.0.0.1:1024" in told[0]


def test_nowhere_to_read_from_says_so(shards):
    _, refs, _ = shards
    with pytest.raises(DataUnavailableError, match="names no address"):
        WindowReader(spec(refs)).read([0])


@pytest.mark.parametrize("address", ["simplecache::file:///x", "jupyter://h/x", "reference://x", "ssh://h/x"])
def test_a_spec_cannot_make_a_volunteer_load_other_file_systems(shards, address):
    _, refs, _ = shards
    with pytest.raises(ValidationError, match="begins with one of"):
        spec(refs, address)


# -- addresses that a volunteer need not trust --------------------------------------------------------------------


def resolves(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """Let names resolve to these addresses, one for each question; return the list of questions."""
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, **_: object) -> list[object]:
        asked.append(host)
        ip = answers[min(len(asked), len(answers)) - 1]
        return [(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "0", "[::1]", "[::ffff:7f00:1]"])
def test_an_address_of_this_machine_gets_no_request_unless_it_is_allowed(shards, host):
    folder, refs, _ = shards
    with Server(folder) as server:
        address = f"http://{host}:{server.http.server_port}"
        with pytest.raises(DataUnavailableError, match="allow-private-data"):
            WindowReader(spec(refs, address), report=lambda _: None).read([0])
        assert not server.requests
        WindowReader(spec(refs, server.address), private_data=True).read([0])
        assert server.requests


@pytest.mark.parametrize("ip", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "100.64.0.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_name_of_a_private_address_is_never_connected_to(shards, monkeypatch, ip, scheme):
    _, refs, _ = shards
    resolves(monkeypatch, ip)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    with pytest.raises(DataUnavailableError, match=f"a.example is at {ip}, which is not an address of the public"):
        WindowReader(spec(refs, f"{scheme}://a.example/x"), report=lambda _: None).read([0])


def test_the_checked_address_is_the_one_that_is_connected_to(shards, monkeypatch):
    # DNS rebinding: the second answer for the name is another one.
    _, refs, _ = shards
    asked = resolves(monkeypatch, "93.184.216.34", "127.0.0.1")
    connected: list[tuple[str, int]] = []

    def connect(_: socket.socket, address: tuple[str, int]) -> None:
        connected.append(address)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(DataUnavailableError, match="refused"):
        WindowReader(spec(refs, "http://a.example/x"), report=lambda _: None).read([0])
    assert connected == [("93.184.216.34", 80)] and asked == ["a.example"]


def test_this_machine_by_its_public_address_is_refused_too(shards, monkeypatch):
    folder, refs, _ = shards
    monkeypatch.setattr(sources, "is_public", lambda _: True)
    with Server(folder) as server:
        with pytest.raises(DataUnavailableError, match="is this machine itself"):
            WindowReader(spec(refs, server.address), report=lambda _: None).read([0])
        assert not server.requests


def test_a_proxy_of_the_environment_is_not_used(shards, monkeypatch):
    folder, refs, _ = shards
    with Server(folder) as proxy:
        monkeypatch.setenv("http_proxy", proxy.address)
        resolves(monkeypatch, "10.0.0.1")
        with pytest.raises(DataUnavailableError, match="not an address of the public internet"):
            WindowReader(spec(refs, "http://a.example"), report=lambda _: None).read([0])
        assert not proxy.requests


@pytest.mark.parametrize("host", [TLS_NAME, "another.example"])
def test_tls_is_spoken_over_the_checked_connection_with_the_name_of_the_address(shards, monkeypatch, tmp_path, host):
    folder, refs, arrays = shards
    load_or_make(tmp_path)
    pem = str(tmp_path / "tls.pem")
    monkeypatch.setattr(sources, "tls_context", lambda: ssl.create_default_context(cafile=pem))
    monkeypatch.setattr(sources, "is_public", lambda _: True)
    asked = resolves(monkeypatch, "127.0.0.2")  # not the address from which this machine connects to it
    with Server(folder, ip="127.0.0.2") as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
        reader = WindowReader(spec(refs, f"https://{host}:{server.http.server_port}"), report=lambda _: None)
        if host == TLS_NAME:
            assert np.array_equal(reader.read([0])[0].numpy(), expected(arrays, 0))
        else:
            with pytest.raises(DataUnavailableError, match="certificate"):
                reader.read([0])
            assert not server.requests
    assert set(asked) == {host}


def test_a_server_of_the_owner_cannot_redirect(shards):
    folder, refs, _ = shards
    with Server(folder) as other, Server(folder, f"redirect {other.address}") as server:
        with pytest.raises(DataUnavailableError, match="redirects to .*, which is not followed"):
            WindowReader(spec(refs, server.address), private_data=True, report=lambda _: None).read([0])
        assert server.requests and not other.requests


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("https://127.0.0.1:1/x", "not an address of the public internet"),
        ("https://user@cdn.example/x", "without a user"),
        ("http://cdn.example/x", "only https"),
        ("file:///etc/passwd", "only https"),
        ("/loop", "which is not followed"),
    ],
)
def test_a_redirect_of_a_cloud_is_checked_like_an_address(monkeypatch, place, says):
    asked = answers(monkeypatch, "huggingface.co", b"HTTP/1.1 302 Found\r\nLocation: %s\r\n\r\n" % place.encode())
    with pytest.raises(SourceError, match=says):
        at_address("hf://datasets/org/name/x", 2).chunk(Digest(bytes(32)), 0, 8)
    (line, *_), *_ = [asked_of(end) for end in asked]
    assert line == f"GET /datasets/org/name/resolve/main/x/{'00' * 32}.tokens HTTP/1.1"
    assert len(asked) <= 1 + MAX_REDIRECTS


def answers(monkeypatch: pytest.MonkeyPatch, host: str, answer: bytes) -> list[socket.socket]:
    """Let a host give this answer to each connection over TLS; return the other ends of the connections."""
    ends: list[socket.socket] = []
    connect = sources.PublicTlsConnection.connect

    def answered(self: http.client.HTTPConnection) -> None:
        if not self.host.endswith(host):
            return connect(self)  # type: ignore[arg-type]
        self.sock, other = socket.socketpair()
        other.sendall(answer)
        ends.append(other)

    monkeypatch.setattr(sources.PublicTlsConnection, "connect", answered)
    return ends


def asked_of(end: socket.socket) -> list[str]:
    with end:
        return end.recv(10_000).decode().splitlines()


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("s3://bucket/x", "bucket.s3.amazonaws.com"),
        ("gs://bucket/x", "storage.googleapis.com"),
        ("hf://datasets/org/name/x", "huggingface.co"),
    ],
)
def test_a_cloud_is_read_without_the_volunteers_accounts(monkeypatch, address, host):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.setenv(name, "secret")
    asked = answers(monkeypatch, host, b"HTTP/1.1 206 Partial Content\r\nContent-Length: 8\r\n\r\n12345678")
    assert at_address(address, 2).chunk(Digest(bytes(32)), 8, 8) == b"12345678"
    lines = asked_of(asked[0])
    assert {line.split(":")[0] for line in lines[1:] if line} == {"Host", "Accept-Encoding", "Range", "User-Agent"}
    assert f"Host: {host}" in lines and "Range: bytes=8-15" in lines
    assert isinstance(at_address(address, 2, private=True), sources.FsspecFolder)


@pytest.mark.parametrize("address", ["/srv/x", "file:///srv/x", "az://container/x", "s3://dotted.bucket/x"])
def test_this_disk_and_what_needs_an_account_is_used_only_if_it_is_allowed(shards, address):
    _, refs, _ = shards
    told: list[str] = []
    WindowReader(spec(refs, address), report=told.append)
    assert len(told) == 1 and "join with --allow-private-data" in told[0]
    WindowReader(spec(refs, address), report=told.append, private_data=True)
    assert len(told) == 1


def test_endless_headers_end_with_the_deadline_and_their_thread_too(shards):
    folder, refs, _ = shards
    with Server(folder, "continue") as server:
        source = at_address(server.address, 0.5, private=True)
        with pytest.raises(SourceError, match="not complete after"):
            source.chunk(refs[0].name, 0, 8)
        for thread in threading.enumerate():
            if thread.name == "read":
                thread.join(5)
                assert not thread.is_alive()


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


def test_a_marked_token_is_compared_with_the_vocabulary_without_its_marks(tmp_path):
    numbers = np.arange(3 * WINDOW + 1)
    tokens = (numbers + np.where(numbers % WINDOW, TRAINED, BEGINS)).astype("<u4")
    shard = make_shard(tmp_path, tokens)
    marked = ConversationSpec(window_tokens=15, attention="document")
    data = DataSpec(window=WINDOW, dtype="uint32", train=[shard], conversations=marked)
    read = WindowReader(data, local(tmp_path, [shard]), vocabulary=3 * WINDOW + 1).read([1])
    assert read[0].tolist() == tokens[WINDOW : 2 * WINDOW + 1].tolist()
    with pytest.raises(DataError, match="has the token 48, the model's vocabulary ends at 47"):
        WindowReader(data, local(tmp_path, [shard]), vocabulary=3 * WINDOW).read([2])
