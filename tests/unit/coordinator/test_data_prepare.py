"""Preparing data: every document once, the same bytes every time, and clear words for bad input."""

import bz2
import errno
import gzip
import json
import lzma
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from tokenizers import Tokenizer, models, pre_tokenizers

from coordinator.authoring import tokens
from coordinator.authoring.data_check import spelled_warning
from coordinator.authoring.documents import SEGMENT, TextSegment, find_sources, read_documents
from coordinator.authoring.errors import DataInputError, RunChangedError
from coordinator.authoring.prepare import load_prepared, prepare
from coordinator.authoring.tokens import LONGEST, SpelledToken, byte_level_bpe, load, open_tokenizer
from protocol.merkle import CHUNK, blob_digest, blob_leaves

TEXTS = [f"Document {i}: the quick brown fox jumps over {i * i} lazy dogs.\nIt was été, naïve." for i in range(30)]


def jsonl(path: Path, texts=TEXTS, field="text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: t}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    return path


def tokens_of(prepared, part) -> np.ndarray:
    shards = getattr(prepared.manifest, part).shards
    return np.concatenate(
        [np.fromfile(prepared.folder / f"{s.digest}.tokens", dtype="<u2") for s in shards] or [np.empty(0, "<u2")]
    )


def documents_of(prepared, part) -> list[str]:
    """Return the documents, decoded from the shards."""
    tokenizer = Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
    tokens, end = tokens_of(prepared, part), prepared.manifest.end_of_text_id
    cuts = np.flatnonzero(tokens == end)
    assert not len(tokens) or cuts[-1] == len(tokens) - 1
    return [tokenizer.decode(list(map(int, d[d != end]))) for d in np.split(tokens, cuts + 1)[:-1]]


def test_every_document_is_in_the_shards_once_and_every_nth_is_held_out(tmp_path):
    made = prepare([str(jsonl(tmp_path / "a.jsonl"))], tmp_path / "out", vocabulary=300, validation_every=7)
    held_out = TEXTS[6::7]
    assert documents_of(made, "validation") == held_out
    assert documents_of(made, "train") == [t for t in TEXTS if t not in held_out]
    assert (made.manifest.train.documents, made.manifest.validation.documents) == (26, 4)


def test_shards_are_named_by_their_digest_with_their_leaves_and_cut_at_the_limit(tmp_path):
    limit = CHUNK // 2 + 100  # a chunk and a bit, in uint16
    made = prepare(
        [str(jsonl(tmp_path / "a.jsonl", TEXTS * 400))], tmp_path / "out", vocabulary=260, shard_tokens=limit
    )
    shards = made.manifest.train.shards
    assert len(shards) > 2 and all(s.tokens == limit for s in shards[:-1]) and 0 < shards[-1].tokens <= limit
    for s in shards:
        data = (made.folder / f"{s.digest}.tokens").read_bytes()
        assert len(data) == s.size == 2 * s.tokens and str(blob_digest(data)) == s.digest
        assert (made.folder / f"{s.digest}.leaves").read_bytes() == b"".join(blob_leaves(data))
    assert made.manifest.train.tokens == sum(s.tokens for s in shards)
    assert not list(made.folder.glob(".partial-*"))


@pytest.mark.parametrize("kind", ["jsonl", "gz", "xz", "bz2", "parquet", "text"])
def test_every_format_gives_the_same_tokens(tmp_path, kind):
    plain = jsonl(tmp_path / "a.jsonl")
    reference = prepare([str(plain)], tmp_path / "reference", vocabulary=300)
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"n": list(range(len(TEXTS))), "text": TEXTS}), path)
        inputs = [str(path)]
    elif kind == "text":
        (tmp_path / "t").mkdir()
        for i, t in enumerate(TEXTS):
            (tmp_path / "t" / f"{i:03}.txt").write_text(t, encoding="utf-8")
        inputs = [str(tmp_path / "t")]
    else:
        packed = {"jsonl": lambda b: b, "gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}[kind]
        path = tmp_path / f"b.jsonl{'' if kind == 'jsonl' else '.' + kind}"
        path.write_bytes(packed(plain.read_bytes()))
        inputs = [str(path)]
    made = prepare(inputs, tmp_path / "out", vocabulary=300)
    assert made.manifest.train == reference.manifest.train
    assert made.manifest.tokenizer == reference.manifest.tokenizer


def test_the_same_documents_give_the_same_digests_in_another_process_with_other_threads(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [t * 3 for t in TEXTS])
    script = (
        "import sys; from pathlib import Path; from coordinator.authoring.prepare import prepare;"
        "m = prepare([sys.argv[1]], Path(sys.argv[2]), vocabulary=400, validation_every=5).manifest;"
        "print(m.tokenizer.digest, m.train.shards[0].digest, m.validation.shards[0].digest)"
    )
    seen = set()
    for threads in ("1", "3"):
        env = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        command = [sys.executable, "-c", script, str(path), str(tmp_path / f"out{threads}")]
        seen.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert len(seen) == 1


def test_preparing_again_does_nothing_and_a_change_is_named(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    out = tmp_path / "out"
    first = prepare([str(path)], out, vocabulary=300)
    written = (out / "manifest.json").stat().st_mtime_ns
    again = prepare([str(path)], out, vocabulary=300)
    assert again.manifest == first.manifest and (out / "manifest.json").stat().st_mtime_ns == written
    with pytest.raises(RunChangedError, match="vocabulary was 300, is 310"):
        prepare([str(path)], out, vocabulary=310)
    jsonl(path, TEXTS[1:])
    with pytest.raises(RunChangedError, match=r"a\.jsonl changed"):
        prepare([str(path)], out, vocabulary=300)
    replaced = prepare([str(path)], out, vocabulary=300, replace=True)
    assert documents_of(replaced, "train") == TEXTS[1:]
    assert len(list(out.glob("*.tokens"))) == 1


def test_a_crash_in_the_middle_leaves_nothing_that_counts_and_the_next_try_succeeds(tmp_path, monkeypatch):
    path, out = jsonl(tmp_path / "a.jsonl", TEXTS * 200), tmp_path / "out"
    script = (
        "import os, sys; from pathlib import Path; from coordinator.authoring import shards\n"
        "from coordinator.authoring.prepare import prepare\n"
        "real = shards.ShardWriter._end\n"
        "def die(self):\n"
        "    if self.shards: os.kill(os.getpid(), 9)\n"
        "    real(self)\n"
        "shards.ShardWriter._end = die\n"
        "prepare([sys.argv[1]], Path(sys.argv[2]), vocabulary=260, shard_tokens=140_000)"
    )
    died = subprocess.run([sys.executable, "-c", script, str(path), str(out)], timeout=120, check=False)
    assert died.returncode == -9 and list(out.glob("*.tokens")) and list(out.glob(".partial-*"))
    with pytest.raises(DataInputError, match="cairn data prepare"):
        load_prepared(out)
    made = prepare([str(path)], out, vocabulary=260, shard_tokens=140_000)
    whole = prepare([str(path)], tmp_path / "other", vocabulary=260, shard_tokens=140_000)
    assert made.manifest == whole.manifest and not list(out.glob(".partial-*"))


def test_shards_of_an_attempt_that_was_killed_are_not_among_those_of_the_next(tmp_path):
    out = tmp_path / "out"
    prepare([str(jsonl(tmp_path / "a.jsonl"))], out, vocabulary=300)
    (out / "manifest.json").unlink()  # as before it is written
    (out / "own.tokens").touch()
    made = prepare([str(jsonl(tmp_path / "b.jsonl", TEXTS[:9]))], out, vocabulary=300)
    names = {f"{s.digest}.{kind}" for s in made.manifest.train.shards for kind in ("tokens", "leaves")}
    assert {p.name for p in (*out.glob("*.tokens"), *out.glob("*.leaves"))} == names | {"own.tokens"}


def test_an_attempt_that_is_refused_leaves_no_shards(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataInputError, match="only 30 documents"):
        prepare([str(jsonl(tmp_path / "a.jsonl"))], out, vocabulary=300, validation_every=50, shard_tokens=500)
    assert out.is_dir() and not [*out.glob("*.tokens"), *out.glob("*.leaves")]


def test_published_shards_are_kept(tmp_path):
    path, published = str(jsonl(tmp_path / "a.jsonl")), tmp_path / "published"
    made, published_before = prepare([path], tmp_path / "out", vocabulary=300), []
    published.mkdir()
    for file in (*made.folder.glob("*.tokens"), *made.folder.glob("*.leaves")):
        published_before.append(shutil.copy(file, published))
    for _ in range(2):
        with pytest.raises(DataInputError, match="but no manifest.json: choose another folder"):
            prepare([path], published, vocabulary=400)
        assert sorted(map(str, published.iterdir())) == sorted(map(str, published_before))


def test_a_folder_with_a_missing_or_cut_shard_is_refused(tmp_path):
    made = prepare([str(jsonl(tmp_path / "a.jsonl"))], tmp_path / "out", vocabulary=300)
    shard = next(made.folder.glob("*.tokens"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    with pytest.raises(DataInputError, match="bytes instead of"):
        load_prepared(made.folder)
    shard.unlink()
    with pytest.raises(DataInputError, match="is missing"):
        load_prepared(made.folder)


def test_what_writes_samples_reads_a_tokenizer_without_the_padding_that_it_asks_for(tmp_path):
    made = prepare([str(jsonl(tmp_path / "a.jsonl"))], tmp_path / "out", vocabulary=300)
    tokenizer = Tokenizer.from_file(str(made.folder / "tokenizer.json"))
    plain = tokenizer.encode("Once").ids
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("Once").ids) == 64
    assert open_tokenizer(tmp_path / "tokenizer.json").encode("Once").ids == plain
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataInputError, match="not a tokenizer.json"):
        open_tokenizer(tmp_path / "tokenizer.json")


def test_a_given_tokenizer_is_taken_byte_for_byte_and_its_end_of_text_found(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    trained = prepare([str(path)], tmp_path / "one", vocabulary=300)
    tokenizer = trained.folder / "tokenizer.json"
    taken = prepare([str(path)], tmp_path / "two", tokenizer=tokenizer)
    assert taken.manifest.train == trained.manifest.train and taken.manifest.tokenizer == trained.manifest.tokenizer
    with pytest.raises(DataInputError, match="no token '</s>'"):
        prepare([str(path)], tmp_path / "three", tokenizer=tokenizer, end_of_text="</s>")
    unclear = json.loads(tokenizer.read_text())
    unclear["added_tokens"] = []
    unclear["model"]["vocab"]["the_end"] = unclear["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "unclear.json").write_text(json.dumps(unclear))
    with pytest.raises(DataInputError, match="not clear which token ends a document"):
        prepare([str(path)], tmp_path / "four", tokenizer=tmp_path / "unclear.json")
    # As Gemma's: a tag of HTML has a usual name, and the tokenizer_config.json says what ends a text.
    tag = json.loads(tokenizer.read_text())
    tag["model"]["vocab"]["</s>"] = 301
    tag["added_tokens"].append({**tag["added_tokens"][0], "id": 301, "content": "</s>", "special": False})
    tag["added_tokens"].append({**tag["added_tokens"][0], "id": 302, "content": "[EOS]"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tag))
    assert load(tmp_path / "tokenizer.json", None).end == "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[EOS]"}')
    assert load(tmp_path / "tokenizer.json", None).end == "[EOS]"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataInputError, match=r"tokenizer_config\.json: cannot be read"):
        load(tmp_path / "tokenizer.json", None)
    assert load(tmp_path / "tokenizer.json", "[EOS]").end == "[EOS]"


def test_a_folder_that_an_earlier_version_prepared_keeps_its_end_of_text(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    tokenizer = prepare([str(path)], tmp_path / "one", vocabulary=300).folder / "tokenizer.json"
    with_end = json.loads(tokenizer.read_text())
    with_end["added_tokens"].append({**with_end["added_tokens"][0], "id": 301, "content": "[EOS]"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_end))
    made = prepare([str(path)], tmp_path / "two", tokenizer=tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[EOS]"}')
    again = prepare([str(path)], tmp_path / "two", tokenizer=tmp_path / "tokenizer.json")
    assert again.manifest == made.manifest and made.manifest.end_of_text == "<|endoftext|>"
    new = prepare([str(path)], tmp_path / "three", tokenizer=tmp_path / "tokenizer.json")
    assert new.manifest.end_of_text == "[EOS]"


def test_text_that_looks_like_the_end_of_text_is_text(tmp_path):
    texts = ["one <|endoftext|> two", *TEXTS]
    made = prepare([str(jsonl(tmp_path / "a.jsonl", texts))], tmp_path / "out", vocabulary=300)
    assert (tokens_of(made, "train") == made.manifest.end_of_text_id).sum() == len(texts)
    assert documents_of(made, "train")[0] == texts[0]


def test_documents_that_spell_out_special_tokens_are_counted(tmp_path):
    trained = prepare([str(jsonl(tmp_path / "a.jsonl"))], tmp_path / "one", vocabulary=300)
    assert trained.manifest.spelled is None
    tokenizer = Tokenizer.from_file(str(trained.folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<think>"])
    tokenizer.save(str(tmp_path / "chat.json"))
    turn = "<|im_start|>user\nhello<|im_end|>\n"
    long = "word " * (SEGMENT // 4) + turn  # in the second segment
    texts = [turn * 3, "plain", "a < b |> c", long, "<|im_start|>"]
    again = prepare([str(jsonl(tmp_path / "b.jsonl", texts))], tmp_path / "two", tokenizer=tmp_path / "chat.json")
    assert again.manifest.spelled == SpelledToken(text="<|im_start|>", documents=3)
    warning = spelled_warning(again.manifest.spelled, again.manifest.documents, "<|endoftext|>")
    assert "3 of 5 documents" in warning and "'<|im_start|>'" in warning and "[data.conversations]" in warning
    joined = jsonl(tmp_path / "c.jsonl", ["one<|endoftext|>two"])
    ended = prepare([str(joined)], tmp_path / "three", vocabulary=300).manifest
    assert "a row of its own" in spelled_warning(ended.spelled, ended.documents, ended.end_of_text)


def test_a_vocabulary_above_65536_gets_uint32(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    trained = prepare([str(path)], tmp_path / "one", vocabulary=300)
    tokenizer = json.loads((trained.folder / "tokenizer.json").read_text())
    for i in range(70_000):
        tokenizer["model"]["vocab"].setdefault(f"<{i}>", len(tokenizer["model"]["vocab"]))
    (tmp_path / "big.json").write_text(json.dumps(tokenizer))
    made = prepare([str(path)], tmp_path / "two", tokenizer=tmp_path / "big.json")
    assert made.manifest.dtype == "uint32" and made.manifest.train.shards[0].size == 4 * made.manifest.train.tokens


def test_a_long_document_passes_through_in_pieces_and_loses_nothing(tmp_path):
    text = "Some words, then more.\n" * (3 * SEGMENT // 20) + "x" * (2 * SEGMENT) + " end"
    (tmp_path / "long.txt").write_text(text)
    (source,) = find_sources([str(tmp_path / "long.txt")], tmp_path)
    segments = list(read_documents(source, "text"))
    assert "".join(p.text for p in segments) == text
    assert [p.last for p in segments] == [False] * (len(segments) - 1) + [True]
    assert max(len(p.text) for p in segments) <= SEGMENT


@pytest.mark.long
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    tokenizer = prepare([str(jsonl(tmp_path / "a.jsonl"))], tmp_path / "out", vocabulary=260).folder / "tokenizer.json"

    def peak(megabytes: float) -> int:
        path = jsonl(tmp_path / f"{megabytes}.jsonl", ["the quick brown fox " * 500] * int(100 * megabytes))
        tracemalloc.start(1)
        prepare([str(path)], tmp_path / f"out{megabytes}", tokenizer=tokenizer)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    assert peak(5) < 1.2 * peak(2.5) + 2**20


def test_folders_and_patterns_are_read_in_order_of_name_and_hidden_files_are_not(tmp_path):
    folder = tmp_path / "d"
    (folder / "sub").mkdir(parents=True)
    for name, text in [("b.txt", "bb"), ("a.txt", "aa"), ("sub/c.md", "cc"), (".h.txt", "hh"), ("x.bin", "no")]:
        (folder / name).write_text(text)
    assert [s.name for s in find_sources(["d"], tmp_path)] == ["a.txt", "b.txt", "sub/c.md"]
    assert [s.name for s in find_sources(["d/*.txt", "d/a.txt"], tmp_path)] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"body": "x"}\n', r"a\.jsonl: line 2: no field 'text': there is 'body'"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": 5}\n', r"line 2: field 'text' holds a number, not text; .*--field"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n', r"line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", r"line 1 is not a JSON object"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"surrogate"),
        ("a.jsonl", b"[" * 100_000, r"line 1 is not JSON"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', r"line 1: not UTF-8 text \(byte 0xe9\).*iconv"),
        ("a.txt", b"caf\xe9", r"not UTF-8"),
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz: "),
        ("a.jsonl.xz", b"not xz", r"a\.jsonl\.xz: "),
        ("a.jsonl.xz", lzma.compress(b'{"text": "fine"}\n' * 99)[:-30], r"a\.jsonl\.xz: "),
        ("a.parquet", b"not parquet at all", r"a\.parquet: "),
        ("a.txt", b"  \n ", r"no text"),
        ("a.jsonl", b"", r"no text"),
        ("a.pdf", b"%PDF", r"no known kind of document"),
    ],
)
def test_bad_input_is_named_with_its_place_and_remedy(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataInputError, match=says) as e:
        prepare([name], tmp_path / "out", vocabulary=300, base=tmp_path)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_documents_that_may_not_be_read_or_are_damaged_are_named_with_what_to_do(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    jsonl(tmp_path / "a.jsonl")
    with monkeypatch.context() as m:
        m.setattr(LocalFileSystem, "open", refused)
        with pytest.raises(DataInputError, match=r"a\.jsonl: cannot be read: permission denied: make it readable"):
            prepare(["a.jsonl"], tmp_path / "out", vocabulary=300, base=tmp_path)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "b.parquet")
    data = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(data[:4] + b"\xff" * 40 + data[44:])  # the first page
    with pytest.raises(DataInputError, match=r"^b\.parquet: damaged, .*: get it again, or leave it out$") as e:
        prepare(["b.parquet"], tmp_path / "out", vocabulary=300, base=tmp_path)
    assert "\n" not in str(e.value)


class _FailingServer(BaseHTTPRequestHandler):
    """A server that has each file, and fails as its name says when it is read."""

    def do_HEAD(self):
        self._answer(200)

    def do_GET(self):
        if self.path.startswith("/busy"):
            self._answer(503)
        elif self.path.startswith("/long"):
            self._answer(503, "\x9b2J" + "x" * 4000)
        elif self.path.startswith("/cut"):
            self._answer(200)
            self.wfile.write(b'{"text": "half')
        self.close_connection = True

    def _answer(self, status: int, reason: str | None = None):
        self.send_response(status, reason)
        self.send_header("Content-Length", "1000")
        self.end_headers()

    def log_message(self, format, *args):
        pass


@pytest.mark.parametrize("name", ["busy.jsonl", "cut.jsonl", "closed.jsonl", "busy.jsonl.gz", "long.jsonl"])
def test_a_server_that_fails_is_named_with_the_remedy(tmp_path, name):
    with ThreadingHTTPServer(("127.0.0.1", 0), _FailingServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/{name}"
        with pytest.raises(DataInputError, match=f"{name}: its server failed: .*: try again, or leave it out$") as e:
            prepare([address], tmp_path / "out", vocabulary=300)
        server.shutdown()
    assert str(e.value).isprintable() and len(str(e.value)) < 400


class _FileServer(SimpleHTTPRequestHandler):
    """A server of whole files: it does not know ranges."""

    def log_message(self, format, *args):
        pass


@contextmanager
def served(folder: Path):
    """Serve a folder, and yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_FileServer, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_jsonl_and_parquet_are_read_from_a_server(tmp_path):
    jsonl(tmp_path / "a.jsonl", TEXTS[:20])
    pq.write_table(pa.table({"text": TEXTS[20:]}), tmp_path / "b.parquet")
    with served(tmp_path) as address:
        inputs = [f"{address}/a.jsonl", f"{address}/b.parquet"]
        assert documents_of(prepare(inputs, tmp_path / "out", vocabulary=300), "train") == TEXTS


def test_a_server_that_sends_whole_files_only_is_named_with_the_remedy(tmp_path):
    (tmp_path / "long.txt").write_text("some words " * 600_000)  # more than fsspec asks for at a time
    with served(tmp_path) as address, pytest.raises(DataInputError, match=r"long\.txt: its server .*: download it"):
        prepare([f"{address}/long.txt"], tmp_path / "out", vocabulary=300)


def test_zst_is_read_to_the_end_of_its_last_frame_and_a_cut_one_is_refused(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    half = len(TEXTS) // 2
    frames = [
        zstandard.compress(jsonl(tmp_path / "a.jsonl", part).read_bytes()) for part in (TEXTS[:half], TEXTS[half:])
    ]
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(frames))
    made = prepare(["b.jsonl.zst"], tmp_path / "out", vocabulary=300, base=tmp_path)
    assert documents_of(made, "train") == TEXTS
    (tmp_path / "c.txt.zst").write_bytes(frames[0] + frames[1][:-20])
    with pytest.raises(DataInputError, match=r"c\.txt\.zst: damaged, .*: it ends in the middle"):
        prepare(["c.txt.zst"], tmp_path / "two", vocabulary=300, base=tmp_path)


def test_a_data_sets_card_is_no_document(tmp_path):
    (tmp_path / "set" / "data").mkdir(parents=True)
    jsonl(tmp_path / "set" / "data" / "train.jsonl")
    (tmp_path / "set" / "README.md").write_text("---\nlicense: mit\n---\n")
    said = []
    made = prepare(["set"], tmp_path / "out", vocabulary=300, base=tmp_path, report=said.append)
    assert documents_of(made, "train") == TEXTS
    assert any("plain text in it is left out ('README.md', 1 in all)" in line for line in said)


def test_the_splits_of_a_data_set_that_are_held_out_by_their_names_are_told(tmp_path):
    data = tmp_path / "set" / "data"
    (data / "validation").mkdir(parents=True)
    for name in ("train-00000-of-00001", "test-00000-of-00001", "extra", "latest", "validation/0"):
        jsonl(data / f"{name}.jsonl")
    said: list[str] = []
    assert len(find_sources(["set"], tmp_path, said.append)) == 5
    assert len(said) == 1 and "others not ('data/test-00000-of-00001.jsonl', 2 in all)" in said[0]
    (data / "train-00000-of-00001.jsonl").unlink()
    assert len(find_sources(["set", "set/data/test*.jsonl"], tmp_path, said.append)) == 4 and len(said) == 1


def test_a_file_is_the_same_by_every_path_to_it(tmp_path):
    jsonl(tmp_path / "a.jsonl")
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for again in ("d/../a.jsonl", "link/a.jsonl"):
        assert len(find_sources(["a.jsonl", again], tmp_path)) == 1
        with pytest.raises(DataInputError, match="both for training and for validation"):
            prepare(["a.jsonl"], tmp_path / "out", vocabulary=300, validation=[again], base=tmp_path)


def test_a_folder_or_file_may_have_the_characters_of_a_pattern_in_its_name(tmp_path):
    folder = tmp_path / "br [v2]"
    folder.mkdir()
    for name in ("data[1].txt", "data1.txt"):
        (folder / name).write_text("words")
    assert [s.name for s in find_sources(["*.txt"], folder)] == ["data1.txt", "data[1].txt"]
    assert [s.name for s in find_sources(["data[1].txt"], folder)] == ["data[1].txt"]


def test_a_name_that_is_not_utf_8_is_refused_before_anything_is_read(tmp_path):
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("words")
    except OSError:
        pytest.skip("this file system has no such names")
    with pytest.raises(DataInputError, match=r"'caf\\udce9\.txt': a file name that is not UTF-8: rename"):
        prepare(["*.txt"], tmp_path / "out", vocabulary=300, base=tmp_path)
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_of_somebody_else_is_not_replaced(tmp_path):
    path, out = str(jsonl(tmp_path / "a.jsonl")), tmp_path / "model"
    own = prepare([path], tmp_path / "one", vocabulary=300).folder / "tokenizer.json"
    out.mkdir()
    (out / "tokenizer.json").write_text("another")
    for choice in ({"vocabulary": 300}, {"tokenizer": own}):
        with pytest.raises(DataInputError, match="is another tokenizer: choose another folder"):
            prepare([path], out, **choice)
    assert [p.name for p in out.iterdir()] == ["tokenizer.json"]
    shutil.copy(own, out)
    assert prepare([path], out, tokenizer=out / "tokenizer.json").manifest.train.documents == len(TEXTS)


def test_a_tokenizer_that_cannot_encode_a_text_or_is_damaged_is_refused(tmp_path):
    model = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.add_special_tokens(["<|endoftext|>"])
    model.save(str(tmp_path / "words.json"))
    damaged = json.loads((tmp_path / "words.json").read_text())
    damaged["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (tmp_path / "damaged.json").write_text(json.dumps(damaged))
    (tmp_path / "a.txt").write_text("a b zebra")
    for name, says in [("words.json", r"cannot encode .*\[UNK\].*: take"), ("damaged.json", "not a tokenizer.json")]:
        with pytest.raises(DataInputError, match=says):
            prepare(["a.txt"], tmp_path / "out", tokenizer=tmp_path / name, base=tmp_path)


def test_a_tokenizer_is_trained_on_a_text_without_spaces_in_short_pieces(monkeypatch):
    words = []
    monkeypatch.setattr(
        tokens, "byte_level_bpe", lambda texts, *_: words.extend(texts) or byte_level_bpe(["a"], 257, [])
    )
    long = "ACGT" * 1000
    with pytest.raises(DataInputError):
        tokens.train([TextSegment(f"one two {long} three", True)], 300)
    assert "".join(words) == f"one two {long} three" and max(map(len, words)) <= LONGEST


def test_a_full_disk_leaves_no_draft(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, out = str(jsonl(tmp_path / "a.jsonl")), tmp_path / "out"
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataInputError, match=r"no space left .*: free some space .* \(TMPDIR, for a temporary one\)"):
        prepare([path], out, vocabulary=300)
    assert [p.name for p in out.iterdir()] == [".lock"]


def test_bad_settings_are_refused(tmp_path):
    path = str(jsonl(tmp_path / "a.jsonl"))
    out = tmp_path / "out"
    for settings, says in [
        ({}, "either"),
        ({"vocabulary": 300, "tokenizer": tmp_path / "t.json"}, "either"),
        ({"vocabulary": 100}, "at least 257"),
        ({"vocabulary": 300, "validation_every": 1}, "2 or more"),
        ({"vocabulary": 300, "validation_every": 50}, "only 30 documents"),
        ({"vocabulary": 300, "validation_every": 5, "validation": [path]}, "not both"),
        ({"vocabulary": 300, "validation": [path]}, "both for training and for validation"),
        ({"tokenizer": tmp_path / "none.json"}, "cannot be read"),
        ({"tokenizer": Path(path)}, "not a tokenizer.json"),
    ]:
        with pytest.raises(DataInputError, match=says):
            prepare([path], out, **settings)
    for inputs, says in [(["none.jsonl"], "no such file"), (["*.none"], "no file matches"), (["e"], "no document in")]:
        (tmp_path / "e").mkdir(exist_ok=True)
        with pytest.raises(DataInputError, match=says):
            prepare(inputs, out, vocabulary=300, base=tmp_path)


def test_a_parquet_without_the_column_lists_what_there_is(tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataInputError, match="no column 'text': there is 'body'"):
        prepare(["a.parquet"], tmp_path / "out", vocabulary=300, base=tmp_path)
    made = prepare(["a.parquet"], tmp_path / "out", vocabulary=300, base=tmp_path, field="body")
    assert documents_of(made, "train") == ["x"]


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataInputError, match="pip install 'pyarrow"):
        prepare(["a.parquet"], tmp_path / "out", vocabulary=300, base=tmp_path)
