"""The parts of `cairn demo --liars`: its liars, whose updates are valid in form, its run file, what a chain says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cairn.commands.demo import demo
from cairn.demo.audit_trail import convictions, replays
from cairn.demo.audited_run import write_audited_run
from cairn.demo.liar import main as join_as_liar
from cairn.demo.lying_trainer import deceive
from coordinator.authoring.runfile import load_run
from peer.auditor.replay import Replayed, compare
from peer.training.trainer import Trainer
from protocol.errors import CairnError
from protocol.ids import Digest, Round, RunId, sha256
from protocol.invite import HostPort, Invite
from protocol.messages import AuditDecision, Certificate, RoundRecord, Score, Signed, WorkReport
from tests.support.audited import RUN, STATE, header, key
from tests.support.local_trainer import closed, loaded, train, update  # noqa: F401 - `closed` is a fixture
from tests.support.trainer_world import BATCH, World

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "sotu.toml"
STEPS = 8


def announced(trainer: Trainer) -> bytes:
    """Return an update of STEPS steps, which did train: it claims all of their windows."""
    before = trainer.backend.outer.local["model.embed_tokens.weight"].clone()
    train(trainer, STEPS)
    assert not before.equal(trainer.backend.outer.local["model.embed_tokens.weight"])
    made = update(trainer, trainer.folder.folder.parent / "update.blob")
    assert (made.first_window, made.end_window, made.inner_steps) == (0, STEPS * BATCH, STEPS)
    return made.blob_path.read_bytes()


@pytest.mark.parametrize("lie, least, most", [("noise", 0.4, 0.6), ("half", 0.6, 0.97)])
def test_a_lie_is_an_update_that_the_codec_accepts_and_a_replay_does_not_find_again(tmp_path, lie, least, most):
    blobs = []
    for deceives in (False, True):
        folder = tmp_path / str(deceives)
        folder.mkdir()
        trainer = loaded(World.make(folder, replayable=True, optimizer="muon", lr=1e-2))
        blobs.append(announced(deceive(trainer, lie) if deceives else trainer))
        trainer.base.codec.check(blobs[-1])
        codec = trainer.base.codec
    scores = {s.name: s.value for s in compare(codec, blobs[1], [Replayed(blobs[0], {})])}
    assert least < scores["signs"] < most


def test_the_run_file_of_a_demo_with_liars_is_valid_and_says_where_it_differs(tmp_path):
    founders = [key(name) for name in ("ada", "alan", "edsger", "grace")]
    made = load_run(write_audited_run(EXAMPLE, tmp_path / "run.toml", founders))
    old = load_run(EXAMPLE)
    assert made.audit.replayable and made.codec.beta == 0
    assert made.admission.founders == [k.hex() for k in founders]
    step = made.inner.batch * made.data.window
    # Rounds end by the clock: two liars, and all of the honest, cannot claim the target together.
    assert made.round.max_update_tokens == old.round.target_tokens // 4
    assert made.round.target_tokens > 7 * made.round.max_update_tokens and made.round.max_update_tokens % step == 0
    assert made.model == old.model and Path(made.data.sources[0]).samefile(EXAMPLE.parent / old.data.sources[0])
    assert "# Made by `cairn demo --liars` from sotu.toml" in (tmp_path / "run.toml").read_text()


def test_the_run_file_of_a_demo_with_liars_finds_the_files_of_conversations(tmp_path):
    text = EXAMPLE.read_text().partition("\n[data]\n")
    rest = text[2][text[2].index("\n[") :]
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "demo").mkdir()
    data = 'source = "chats.jsonl"\ntokenizer = "tokenizer.json"\nwindow = 256\n'
    chats = '[data.conversations]\nchat_template = "chat.jinja"\nmix = [{source = "old.txt", share = 0.5}]\n'
    (tmp_path / "chat.toml").write_text(f"{text[0]}\n[data]\n{data}{chats}{rest}")
    made = load_run(write_audited_run(tmp_path / "chat.toml", tmp_path / "demo" / "run.toml", [key("ada")]))
    table = made.data.conversations
    assert table is not None and table.chat_template == str(tmp_path / "chat.jinja")
    assert table.mix[0].sources == [str(tmp_path / "old.txt")]


def test_a_run_file_that_is_none_is_refused_for_its_own_fault(tmp_path):
    (tmp_path / "other.toml").write_text("[run]\nname = 7\n")
    with pytest.raises(CairnError, match="other.toml:2: run.name"):
        write_audited_run(tmp_path / "other.toml", tmp_path / "run.toml", [key("ada")])


def test_liars_take_part_in_runs_of_this_machine_only(tmp_path, capsys):
    elsewhere = Invite(RunId(sha256(b"run")), Digest(sha256(b"certificate")), (HostPort("run.example.org", 7410),))
    assert join_as_liar(["noise", str(elsewhere), str(tmp_path), "mallory"]) == 1
    assert "not on this machine" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_more_than_two_liars_are_refused():
    result = CliRunner().invoke(demo, ["--liars", "3"])
    assert result.exit_code == 2 and "0<=x<=2" in result.output


# -- what the chain says -------------------------------------------------------------------------------------


def record(number: int, name: str, **fields) -> Certificate:
    body = RoundRecord(RUN, Round(number), STATE, STATE, 0, fields.pop("updates", ()), **fields)
    return Certificate(Signed(body, key("ada"), Digest(sha256(name.encode())), b""), ())


def test_a_conviction_has_its_numbers_from_the_reports_of_its_branch():
    liar, honest = header(key("mallory"), 48), header(key("ada"), 48)
    about = record(4, "about", updates=(liar, honest))

    def report(author: str, update, signs: float) -> Signed[WorkReport]:
        body = WorkReport(RUN, Round(4), about.digest, update.digest, "replay", (Score("signs", signs, 0.97),))
        return Signed(body, key(author), Digest(sha256(repr((author, signs)).encode())), b"")

    first = record(5, "first", reports=(report("grace", honest, 1.0), report("ada", liar, 0.5)))
    decision = AuditDecision(about.digest, key("mallory"), True)
    second = record(6, "second", reports=(report("alan", liar, 0.51),), decisions=(decision,))
    (found,) = convictions((about, first, second))
    assert (found.author, found.update_round, found.decided_round) == (key("mallory"), 4, 6)
    assert (found.windows, found.reporters) == (
        48,
        2,
    ) and found.measured == "50% to 51% of signs agree, 97% needed"
    assert replays((about, first, second)) == {key("mallory"): (0, 2), key("ada"): (1, 0)}
    acquitted = replace(second.record.body, decisions=(replace(decision, convicted=False),))
    third = Certificate(replace(second.record, body=acquitted), ())
    assert convictions((about, first, third)) == ()
