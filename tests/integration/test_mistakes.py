"""Every mistake that a newcomer made has an exit code, and a last line that says what to do; none has a traceback."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.authoring.resolve import resolve
from coordinator.authoring.runfile import load_run
from coordinator.checkpoints.archive import Archive
from peer.keyfile import load_or_make
from protocol.chain import genesis_digest
from protocol.ids import Digest, RunId
from protocol.invite import HostPort, Invite
from tests.support.command_line import (
    TINY_RUN,
    cairn,
    logging_as_it_was,  # noqa: F401 - a fixture
)
from tests.support.specs import digest

USAGE, ERROR = 2, 1
LONG = "x" * 300
"""No name of a file may be that long."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has a good run file and some bad files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAIRN_HOME", str(tmp_path / "home"))
    files: dict[str, str | bytes] = {
        "run.toml": TINY_RUN,
        "text.txt": "\n".join(f"the quick brown fox number {i} jumps over the lazy dog" for i in range(200)),
        "file": "x",
        "noise": b"\xff\xfe\x00" * 50,
        "latin.txt": b"caf\xe9",
        "empty.txt": "",
        "blank.txt": " \n \n",
        "bad.jsonl": '{"text": "fine"}\n{"text": \n',
        "number.jsonl": '{"text": 5}\n',
        "chat.jsonl": json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n",
        "no.txt.gz": "hello",
        "list.json": "[1]",
        "config.json": json.dumps({"model_type": "lama"}),
        "adapter/adapter_config.json": "{}",
        "pickled/config.json": json.dumps({"model_type": "llama"}),
        "pickled/pytorch_model.bin": b"x",
        "nothing/readme": "x",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return tmp_path


def mistaken(code: int, arguments: tuple[str, ...], remedy: str) -> None:
    """Run a command. Raise AssertionError unless it ends with this code, and its last line has the remedy."""
    done = cairn(*arguments)  # an error that is not expected is raised here
    last = (done.stderr.strip().splitlines() or ["(nothing)"])[-1]
    assert (done.returncode, remedy in last) == (code, True), f"{done.returncode}: {done.stdout}{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr


INVITE = str(Invite(RunId(digest("run")), Digest(digest("tls")), (HostPort("127.0.0.1", 9),)))
"""Of a coordinator at a port at which nobody listens."""


@pytest.mark.parametrize(
    ("old", "new", "remedy"),
    [
        ("lr = 0.001", 'lr = "fast"', "run.toml:21: inner.lr: Input should be a valid number"),
        ("lr = 0.001", "lr = 1e9", "less than or equal to 10 (found '1000000000.0')"),
        ("lr = 0.001", "learning_rate = 0.001", "inner.learning_rate: is not a field; did you mean lr?"),
        ("lr = 0.001", "lr = 0.001\nlr = 0.002", "not TOML: Cannot overwrite a value (at line 22"),
        ("window = 16", "window = 12.5", "data.window: Input should be a valid integer"),
        ("window = 16", "window = 0", "data.window: Input should be greater than or equal to 8"),
        ("window = 16", "window = 1_000_000_000", "data.window: Input should be less than or equal to"),
        ("window = 16", "window = 128", "do not fit model.max_position_embeddings = 64: make one smaller"),
        ("batch = 2", "batch = 1_000_000_000", "inner.batch: Input should be less than or equal to"),
        ("vocabulary = 300", "vocabulary = 10", "data.vocabulary: Input should be greater than or equal to 257"),
        ("hidden_size = 32", "hidden_dim = 32", "did you mean hidden_size"),
        ("num_attention_heads = 2", "num_attention_heads = 3", "not a multiple of the number of attention heads"),
        ('"llama"', '"lama"', "known ones nearby: llama"),
        ('"llama"', '"bert"\nnum_key_value_heads = 2', "bert has no such field"),
        ("[inner]", "[admision]\n[inner]", "did you mean admission?"),
        ("[inner]", "[lora]\n[inner]", "lora: is not a field: remove it"),
        ("[inner]", '[codec]\nkind = "fp8"\n[inner]', "Input should be 'sign', 'sparse', 'int8' or 'none'"),
        ("[inner]", "[inner", "not TOML: "),
        ("target_tokens = 1024", "", "round.target_tokens: is missing: `cairn run plan --out FILE` writes"),
        ("target_tokens = 1024", 'target_tokens = "many"', "round.target_tokens: Input should be a valid integer"),
        ("total_tokens = 2_000", "total_tokens = -5", "run.total_tokens: Input should be greater than or equal to 0"),
        ("window = 16", "windows = 16", "did you mean window?"),
        ('"llama"', '"lama"', "llama"),
        ('name = "tiny"', 'name = "../../etc"', "run.name: String should match pattern"),
        ('name = "tiny"', 'name = "tiny"\nweights = "org/gpt-2"', "`hf download org/gpt-2 --local-dir DIR`, then"),
        ('source = "text.txt"', 'source = "nowhere/*.jsonl"', "nowhere/*.jsonl: no file matches this pattern"),
        ('source = "text.txt"', 'source = "chat.jsonl"', "with --field, in a run.toml as data.field"),
        # These were found by `serve` alone.
        ("[data]", "vocab_size = 200\n[data]", "remove the line, and it is filled in"),
        ("window = 16\n\n", "window = 8192\n\n", "add documents or make it smaller"),
        ("window = 16", "window = 16\nvalidation_every = 500", "write a smaller number, or name files for validation"),
    ],
)
def test_a_mistake_in_a_run_file(folder: Path, old: str, new: str, remedy: str):
    assert old in TINY_RUN
    (folder / "run.toml").write_text(TINY_RUN.replace(old, new, 1))
    mistaken(ERROR, ("run", "validate", "run.toml"), remedy)


PREPARE = ("data", "prepare")
OUT = ("--out", "out", "--vocab", "300")
JOIN = ("peer", "join", INVITE)
SERVE = ("coordinator", "serve", "run.toml")


@pytest.mark.parametrize(
    ("code", "arguments", "remedy"),
    [
        # run files and models
        (ERROR, ("run", "validate", "file"), "file: not TOML: "),
        (ERROR, ("run", "validate", "noise"), "not UTF-8 text: this is not a run.toml"),
        (USAGE, ("run", "validate", "nothing"), "'nothing' is a directory"),
        (ERROR, ("run", "plan", "--model", "gone.json"), "no such file or directory: give a config.json or a run.toml"),
        (ERROR, ("run", "plan", "--model", "list.json"), "give a transformers config.json or a run.toml"),
        (ERROR, ("run", "plan", "--model", "config.json"), "known ones nearby: llama"),
        (USAGE, ("run", "plan", "--parameters", "lots"), "write for example 130M, 1B or 7e9"),
        (USAGE, ("run", "plan", "--peers", "0"), "--peers: 0 will not do: give from 2 to"),
        (USAGE, ("run", "plan", "--parameters", "900T"), "will not do: give from 1 to"),
        (ERROR, ("run", "plan", "--parameters", "10M", "--out", "/proc/r.toml"), "cannot be written"),
        (ERROR, ("run", "plan", "--parameters", "10M", "--out", "file/r.toml"), "not a directory: name another place"),
        (USAGE, ("run", "plan", "--parameters", "10M", "--out", LONG), "file name too long: name another place"),
        (ERROR, ("run", "plan", "--parameters", "10M", "--out", "run.toml"), "--force to write over it"),
        (ERROR, ("run", "init", "--from", "gone", "--out", "i.toml"), "no such folder: name a model's folder"),
        (ERROR, ("run", "init", "--from", "org/gpt-2", "--out", "i.toml"), "`hf download org/gpt-2 --local-dir DIR`"),
        (ERROR, ("run", "init", "--from", "nothing", "--out", "i.toml"), "name a model's folder, with config.json"),
        (ERROR, ("run", "init", "--from", "adapter", "--out", "i.toml"), "merge it into its model first"),
        (ERROR, ("run", "init", "--from", "pickled", "--out", "i.toml"), "convert it where you trust it"),
        # data
        (USAGE, (*PREPARE, *OUT), "Missing argument 'INPUTS...'"),
        (ERROR, (*PREPARE, "gone.txt", *OUT), "gone.txt: no such file or folder"),
        (ERROR, (*PREPARE, "latin.txt", *OUT), "convert it, e.g. iconv -t UTF-8"),
        (ERROR, (*PREPARE, "empty.txt", *OUT), "no text to train on in these documents"),
        (ERROR, (*PREPARE, "blank.txt", *OUT), "no text to train on in these documents"),
        (ERROR, (*PREPARE, "bad.jsonl", *OUT), "bad.jsonl: line 2 is not JSON"),
        (ERROR, (*PREPARE, "number.jsonl", *OUT), "holds a number, not text; name the one that holds the text with"),
        (ERROR, (*PREPARE, "chat.jsonl", *OUT), "there is 'messages'; name the one that holds the text with --field"),
        (ERROR, (*PREPARE, "chat.jsonl", "--field", "messages", *OUT), "holds a list, not text; name the one"),
        (ERROR, (*PREPARE, "no.txt.gz", *OUT), "not what its ending says: Not a gzipped file"),
        (ERROR, (*PREPARE, "nothing", *OUT), "no document in this folder: looking for .txt"),
        (USAGE, (*PREPARE, "text.txt", "--out", "file", "--vocab", "300"), "Directory 'file' is a file"),
        (ERROR, (*PREPARE, "text.txt", "--out", "/proc/d", "--vocab", "300"), "/proc/d: cannot be written to"),
        (USAGE, (*PREPARE, "text.txt", "--out", "out", "--vocab", "5"), "5 is not in the range"),
        (ERROR, (*PREPARE, "text.txt", "--out", "out", "--tokenizer", "list.json"), "not a tokenizer.json"),
        (USAGE, (*PREPARE, "text.txt", *OUT, "--tokenizer", "list.json"), "leave out --vocab or --tokenizer"),
        # volunteers
        (USAGE, ("peer", "join"), "Missing argument 'INVITE'"),
        (ERROR, ("peer", "join", "http://127.0.0.1:7411"), "copy the whole line that begins with cairn1:"),
        (ERROR, ("peer", "join", "Kq3xZ0mT8yWc-1vB"), "copy the whole line that begins with cairn1:"),  # the code alone
        (ERROR, ("peer", "join", INVITE[:-4]), "cut off or altered: copy the whole line"),
        (ERROR, ("peer", "join", "cairn2:" + INVITE[7:]), "another version of Cairn: run `cairn peer upgrade`"),
        (USAGE, (*JOIN, "second-half"), "unexpected extra argument"),
        (USAGE, (*JOIN, "--name", "a\x07b"), "--name: at most 40 bytes of printable text"),
        (USAGE, (*JOIN, "--name", "x" * 60), "--name: at most 40 bytes of printable text"),
        (USAGE, (*JOIN, "--name", "\udcff"), "--name: at most 40 bytes of printable text"),
        (USAGE, (*JOIN, "--name", "x", "--anonymous"), "leave out --name"),
        (USAGE, (*JOIN, "--hours", "foo"), "--hours: 'foo' is no part of a day: write for example 22-7"),
        (USAGE, (*JOIN, "--max-upload", "x"), "--max-upload: 'x' is not a rate of at least 100K bytes a second"),
        (USAGE, (*JOIN, "--gpu-memory", "-1"), "--gpu-memory: -1 is not a number of GB"),
        (USAGE, ("peer", "doctor", INVITE, "--gpu-memory", "-1"), "--gpu-memory: -1 is not a number of GB"),
        (USAGE, (*JOIN, "--device", "gpu"), "write auto, cpu, cuda, or cuda:0"),
        (USAGE, (*JOIN, "--parallel", "lots"), "write auto, or some of dp=N"),
        (USAGE, (*JOIN, "--parallel", "dp=0"), "write auto, or some of dp=N"),
        (USAGE, (*JOIN, "--threads", "0"), "0 is not in the range"),
        (USAGE, (*JOIN, "--disk", "lots"), "write for example 800M or 50G"),
        (USAGE, (*JOIN, "--home", "file"), "Directory 'file' is a file"),
        (ERROR, (*JOIN, "--home", "file/home"), "name another folder with --home"),
        (ERROR, (*JOIN, "--home", "/proc/x"), "name another folder with --home"),
        (USAGE, (*JOIN, "--listen", "127.0.0.1:99"), "--listen: '127.0.0.1:99' is not an address to listen on; write"),
        (USAGE, (*JOIN, "--via", "1.2.3.4"), "want /ip4/192.0.2.1/tcp/4001/p2p/"),
        (ERROR, ("status", INVITE), "is it running, and does a firewall let you through?"),
        (ERROR, ("account", "show", INVITE), "this machine has no peer yet: join the run first"),
        (USAGE, ("account", "show", INVITE, "--peer", "zz"), "--peer: 'zz' is not a peer's key: want 64 hexadecimal"),
        (ERROR, ("account", "bind", INVITE, "--name", "x"), "make an account with `cairn account new`"),
        (ERROR, ("account", "bind", INVITE, "--name", "x", "--key", "noise"), "not a Cairn key file: restore it from"),
        (USAGE, ("account", "export", INVITE, "credits.txt"), "must end with .csv or .parquet"),
        (ERROR, ("account", "export", INVITE, "file/credits.csv"), "cannot be written: not a directory"),
        (ERROR, ("runs", "127.0.0.1:9"), "does not answer"),
        (ERROR, ("runs", "run example"), "give an invite, the address of a run's page, or HOST[:PORT]"),
        (USAGE, ("completion", "tcsh"), "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        (ERROR, ("audit", "receipt", INVITE), "name a peer with --peer, or receipts in files"),
        (USAGE, ("audit", "receipt", INVITE, "--peer", "zz"), "--peer: 'zz' is not a peer's key"),
        (USAGE, ("audit", "receipt", INVITE, "file", "--peer", "ab" * 32), "FILES or --peer, not both"),
        # owners
        (ERROR, ("coordinator", "serve", "gone.toml"), "gone.toml: no such file: "),
        (USAGE, (*SERVE, "--grpc", "7410"), "--grpc: '7410' is not HOST:PORT; write for example 0.0.0.0:7410"),
        (USAGE, (*SERVE, "--public", "http://example.org"), "write a name like run.example.org, or an address"),
        (USAGE, (*SERVE, "--keep", "most"), "write such as newest=5,every=100,best=3,bytes=200G"),
        (USAGE, (*SERVE, "--swarm", "/ip4/0.0.0.0/tcp/99999"), "--swarm: '/ip4/0.0.0.0/tcp/99999' is not an address"),
        (ERROR, (*SERVE, "--archive", "nope://x"), "nope://x is not an address: Protocol not known: nope: write"),
        (ERROR, (*SERVE, "--code", "x"), "admission.mode is 'open', and a code is for \"invite\": leave out"),
        (ERROR, (*SERVE, "--home", "/proc/x"), "name another folder with --home"),
        (USAGE, (*SERVE, "--settings", "gone.toml"), "--settings: gone.toml: no such file"),
        (ERROR, ("coordinator", "test-alert", "run.toml"), "or give --webhook URL"),
        (ERROR, ("run", "pause", "run.toml"), "(`cairn coordinator serve` prints it), or its run.toml, with --home"),
        (USAGE, ("run", "pause", "run.toml", "--reason", "\udcff"), "bytes on one line"),
        (USAGE, ("run", "ban", "run.toml", "zzz"), "`cairn status INVITE --json` show the keys of peers"),
        (USAGE, ("run", "init", "--from", ".", "--out", "x.toml", "--dtype", "nf4"), "give --adapter, too"),
        # models
        (ERROR, ("export", "gone", "out"), "name a run's folder"),
        (ERROR, ("export", "text.txt", "out"), "with --spec"),
        (ERROR, ("generate", "nothing", "--prompt", "x"), "name a run's folder"),
        (USAGE, ("generate", "nothing"), "Missing option '--prompt'"),
        (USAGE, ("generate", "nothing", "--prompt", "x", "--device", "foo"), "write auto, cpu, cuda, or cuda:0"),
        (ERROR, ("checkpoint", "verify", "nothing", INVITE), "not a whole copy of an archived state"),
    ],
)
def test_a_mistake_on_the_command_line(code: int, arguments: tuple[str, ...], remedy: str):
    mistaken(code, arguments, remedy)


@pytest.fixture
def served(folder: Path) -> Path:
    """Return the folder of a run that has begun, as its owner has it; nobody serves it now."""
    place = folder / "home" / "coordinated" / "tiny"
    run = resolve(load_run(folder / "run.toml"), place / "run", load_or_make(place / "owner.key"))
    invite = replace(Invite.parse(INVITE), run=run.spec.run_id)
    (place / "invite").write_text(str(invite))
    genesis, tokenizer = (run.blobs[ref.name] for ref in (run.spec.genesis, run.spec.tokenizer))
    archive = Archive(place / "checkpoints", run.spec, spec_envelope=run.spec_envelope)
    record = genesis_digest(run.spec.run_id)
    archive.add(genesis, tokenizer, round=0, state=run.spec.genesis.name, record=record, tokens=0)
    return place


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("run", "rollback", "run.toml", "7"), "is not archived; no state is yet: there is nothing to go back to"),
        (("run", "unban", "run.toml", "ab" * 32), "abababab is not banned"),
        (("run", "pardon", "run.toml", "ab" * 32), "the coordinator must run: it knows the conviction. Start it"),
        (("export", "SERVED", "out", "--invite", INVITE), "name that run's folder, or leave --invite and --spec away"),
        (("checkpoint", "verify", "SERVED/checkpoints/round-000000", INVITE), "give that run's invite, or another"),
    ],
)
def test_a_mistake_with_a_run_that_has_begun(served: Path, arguments: tuple[str, ...], remedy: str):
    mistaken(ERROR, tuple(a.replace("SERVED", str(served)) for a in arguments), remedy)


@pytest.mark.parametrize(
    ("data", "total_tokens", "remedy"),
    [
        ('source = "text.txt"\nvocabulary = 300\nvalidation_every = 9', 0, "run.total_tokens: the demo waits for"),
        ('source = "text.txt"\nvocabulary = 300', 2_000, "write for example validation_every = 12, or prepare"),
        ('prepared = "out"', 2_000, "write for example validation_every = 12, or prepare the data with"),
    ],
)
def test_a_run_that_the_demo_cannot_show_is_refused_before_it_begins(
    folder: Path, data: str, total_tokens: int, remedy: str
):
    assert cairn(*PREPARE, "text.txt", *OUT).returncode == 0
    text = TINY_RUN.replace('source = "text.txt"\nvocabulary = 300', data).replace("2_000", str(total_tokens))
    (folder / "run.toml").write_text(f'{text}\n[inner.schedule]\nkind = "constant"\n')
    mistaken(ERROR, ("demo", "--folder", "shown", "--run-file", "run.toml"), remedy)
    assert not (folder / "shown").exists()


def test_a_run_file_gives_no_orders_to_another_run_in_the_folder_of_its_name(served: Path, folder: Path):
    """As "my run" and "my_run" have one folder."""
    served.rename(served.with_name("my_run"))
    (folder / "my_run.toml").write_text(TINY_RUN.replace('"tiny"', '"my_run"'))
    mistaken(ERROR, ("run", "end", "my_run.toml"), "is of the run 'tiny', not of 'my_run' in my_run.toml: name its own")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "validate"), ("coordinator", "serve"), ("coordinator", "test-alert"), ("account", "new", "--home"),
        ("account", "bind", INVITE, "--name", "x", "--key"), ("generate", "--prompt", "x"), ("demo", "--folder"),
        ("demo", "--run-file"), ("run", "init", "--out", "i.toml", "--from"), (*SERVE, "--settings"), (*JOIN, "--home"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_looked_up(arguments: tuple[str, ...]):
    """As a folder that is closed to this user, which a test by root cannot have."""
    mistaken(USAGE, (*arguments, LONG), "file name too long: name another place")


def test_an_invite_that_the_terminal_wrapped_is_whole():
    """Two lines in quotes."""
    mistaken(ERROR, ("status", f"{INVITE[:40]}\n{INVITE[40:]}"), "is it running, and does a firewall")
