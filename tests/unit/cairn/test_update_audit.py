"""`cairn audit update`: its arguments, the choice of the update, and what it prints."""

from __future__ import annotations

import asyncio
import errno
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cairn import update_audit
from cairn.update_audit import (
    AuditedUpdate,
    ChainFindings,
    RepeatedCheck,
    RepeatOptions,
    check_of,
    find_update,
    findings_on,
    follow,
    lines,
    make_check,
    take_held,
)
from peer.auditor.job import AuditAnswer, MeasuredScore
from peer.errors import PeerError
from peer.store import Store
from protocol.chain import Chain
from protocol.errors import CairnError
from protocol.ids import RunId
from protocol.invite import HostPort, Invite
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import AuditCheck, AuditDecision, Certificate, Score, Signed, WorkReport
from protocol.rounds.policy import RoundPolicy
from tests.support.command_line import cairn
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.specs import OWNER, digest, identity
from tests.support.waiting import ended

FIELDS: dict[str, Any] = {"genesis": {"digest": state(0).hex(), "size": 524_288}}
SPEC = make_spec(**FIELDS)
HELD = {"credit": {"hold_rounds": 12}}
REPLAYABLE = make_spec(**FIELDS, **HELD, audit={"replayable": True}, codec={"kind": "sign", "beta": 0.0})
AUTHOR = peer(2)
GOOD = (Score("scale", 0.99, 0.8), Score("signs", 0.994, 0.97))
BAD = (Score("scale", 0.99, 0.8), Score("signs", 0.503, 0.97))


class Process:
    """An auditor's process that has its answer."""

    def __init__(self, answer: AuditAnswer):
        self._answer = answer

    async def answer(self, job: Any, seconds: float) -> AuditAnswer:
        return self._answer

    async def close(self) -> None:
        return None


class World:
    """An observer node with a chain of rounds by peers 1 and 2."""

    def __init__(self, rounds: int = 4):
        self.spec = SPEC
        self.made = ChainMaker(SPEC)
        self.chain = Chain(SPEC.run_id, SPEC.genesis.name, RoundPolicy.of(SPEC).chain_limits)
        self.decoder = MessageDecoder(SPEC.run_id, SPEC.owner_key)
        self.heard: dict[int, Any] = {}
        self.problem: CairnError | None = None
        self.held = {shard.name for shard in SPEC.data.train}
        self.store: Any = None
        for _ in range(rounds):
            self.chain.add(self.made.add({1: 8, 2: 8}))

    @property
    def node(self) -> Any:
        entries = {n: SimpleNamespace(heartbeat=SimpleNamespace(body=SimpleNamespace(round=n))) for n in self.heard}
        return SimpleNamespace(
            chain=self.chain,
            membership=SimpleNamespace(spec=self.spec, decoder=self.decoder),
            network=SimpleNamespace(peers=SimpleNamespace(entries=lambda: entries)),
            store=self.store or SimpleNamespace(has=self.held.__contains__),
            work=SimpleNamespace(
                jobs=SimpleNamespace(
                    begin=self._begin, job=self._job, release=lambda: None,
                    files=SimpleNamespace(allow_for=lambda speed: None),
                )
            ),
        )  # fmt: skip

    async def _begin(self, network: Any) -> None:
        """Hold the data already."""

    async def _job(self, certificate: Certificate, update: Any, check: AuditCheck, seed: bytes | None) -> Any:
        if self.problem is not None:
            raise self.problem
        return SimpleNamespace(device="cpu")

    def find(self, round_: int = 1, who: str = str(AUTHOR.key)) -> AuditedUpdate:
        return find_update(self.chain, self.decoder, round_, who)

    async def follow(self, round_: int, *, over: bool = False) -> None:
        running: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if over:
            running.set_result(None)
        await ended(follow(self.node, running, round_))


def report(audited: AuditedUpdate, scores: tuple[Score, ...], by: str = "auditor") -> Signed[WorkReport]:
    record = audited.certificate
    body = WorkReport(
        SPEC.run_id, record.record.body.round, record.digest, audited.update.digest, "replay", scores
    )  # fmt: skip
    return KeySigner(OWNER if by == "owner" else identity(by)).sign(body)


# -- arguments ---------------------------------------------------------------------------------------------------


INVITE = str(Invite(RunId(digest("run")), digest("tls"), (HostPort("127.0.0.1", 9),)))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--peer", "ada"),
        ("--round", "3"),
        ("--round", "-1", "--peer", "ada"),
        ("--round", "3", "--peer", "ada", "--check", "luck"),
        ("--round", "3", "--peer", "ada", "--device", "tpu"),
    ],
)
def test_wrong_arguments_are_no_result(arguments):
    done = cairn("audit", "update", INVITE, *arguments)
    assert done.returncode == 2 and not done.stdout


UNREADABLE = PermissionError(errno.EACCES, "Permission denied", "/home/x")


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (True, 0, ""),
        (False, 1, ""),
        (CairnError("no member answers"), 3, "error: no member answers\n"),
        (UNREADABLE, 3, "error: /home/x: permission denied: name other folders (--home, --folder)\n"),
    ],
)
def test_the_exit_code_says_passed_failed_or_not_made(monkeypatch, outcome, code, said):
    asked: list[RepeatOptions] = []

    def repeat(options: RepeatOptions) -> bool:
        asked.append(options)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(update_audit, "repeat_check", repeat)
    done = cairn("audit", "update", INVITE, "--round", "3", "--peer", "ada", "--home", "/home")
    assert done.returncode == code and done.stderr == said
    assert asked == [RepeatOptions(INVITE, 3, "ada", None, "auto", None, None, Path("/home"), ())]


def test_a_service_manager_ends_it_like_ctrl_c_so_that_its_folder_is_removed(monkeypatch):
    monkeypatch.setattr(update_audit, "repeat_check", lambda _: signal.raise_signal(signal.SIGTERM))
    assert cairn("audit", "update", INVITE, "--round", "3", "--peer", "ada").returncode == 130
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_invite_that_is_none_is_no_result():
    done = cairn("audit", "update", "nonsense", "--round", "3", "--peer", "ada")
    assert done.returncode == 3 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_the_replay_is_made_where_there_is_one():
    assert check_of(SPEC, None) == check_of(SPEC, "loss") == check_of(REPLAYABLE, "loss") == "loss"
    assert check_of(REPLAYABLE, None) == check_of(REPLAYABLE, "replay") == "replay"
    with pytest.raises(CairnError, match="this run has no replays.*--check loss"):
        check_of(SPEC, "replay")


# -- the chain ---------------------------------------------------------------------------------------------------


def test_an_update_is_found_by_the_key_of_its_author_or_its_beginning():
    w = World()
    for wanted in (str(AUTHOR.key), AUTHOR.key.short, AUTHOR.key.short.upper()):
        found = w.find(2, wanted)
        assert found.update.author == AUTHOR.key and found.certificate == w.made.certificates[2]


def test_an_update_that_is_not_there_and_one_of_several_are_named():
    w = World()
    with pytest.raises(CairnError, match=f"round 1 lists no update of 'zoe'.*{AUTHOR.key.short}"):
        w.find(1, "zoe")
    with pytest.raises(CairnError, match="--peer is empty"):
        w.find(1, " ")
    with pytest.raises(CairnError, match="round 9 is not in memory"):
        w.find(9)


def test_names_are_those_of_the_owners_admissions(monkeypatch):
    w = World()
    names = {peer(1).key: "ada", AUTHOR.key: "adam\x1b"}
    monkeypatch.setattr(w.decoder, "decode_admission", lambda encoded, key: SimpleNamespace(name=names[key]))
    assert w.find(1, "ada").update.author == peer(1).key  # the whole name comes first
    assert w.find(1, "adam").name == "adam?"
    with pytest.raises(CairnError, match="2 authors of round 1 match 'ad'.*Write more of the key"):
        w.find(1, "ad")


def test_reports_and_the_decision_are_those_about_this_update():
    w = World()
    audited, other = w.find(1), w.find(2)
    about, elsewhere = report(audited, BAD), report(other, BAD)
    decision = AuditDecision(audited.certificate.digest, AUTHOR.key, True)
    wrong = AuditDecision(other.certificate.digest, AUTHOR.key, False)
    bodies = [
        SimpleNamespace(round=2, reports=(elsewhere, about), decisions=(wrong,)),
        SimpleNamespace(round=3, reports=(), decisions=(decision,)),
    ]
    path = [SimpleNamespace(record=SimpleNamespace(body=b)) for b in bodies]
    chain = SimpleNamespace(head=w.chain.head, path=lambda after, to: path, height=w.chain.height)
    found = findings_on(cast(Any, chain), audited.certificate, audited.update)
    assert found == ChainFindings(((2, about),), ((3, decision),), 3)


async def test_the_chain_is_read_until_the_round_and_what_members_speak_of(monkeypatch):
    monkeypatch.setattr(update_audit, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(update_audit, "SILENT_SECONDS", 0.1)
    w = World()
    with pytest.raises(CairnError, match="round 7 has no record.*the last one is round 3"):
        await w.follow(7)
    w.heard = {4: None}
    await w.follow(3)
    with pytest.raises(CairnError, match="round 4 has no record"):
        await w.follow(4)
    w.heard = {10**9: None}  # a liar's heartbeat delays it for a moment
    await w.follow(3)
    with pytest.raises(CairnError, match="the observer ended"):
        await w.follow(3, over=True)
    with pytest.raises(CairnError, match="no member of the swarm answers"):
        await World(0).follow(0)


# -- the check ---------------------------------------------------------------------------------------------------


def answer(scores: tuple[Score, ...]) -> AuditAnswer:
    return AuditAnswer(tuple(MeasuredScore(s.name, s.value, s.threshold) for s in scores), "", 12.3)


async def test_what_the_process_measures_is_the_result():
    w = World()
    found = await make_check(w.node, w.find(), "replay", cast(Any, Process(answer(BAD))))
    assert found.scores == BAD and not found.passed and found.chain == ChainFindings((), (), 3)
    assert (await make_check(w.node, w.find(), "replay", cast(Any, Process(answer(GOOD))))).passed


async def test_a_check_that_fails_to_be_made_says_nothing_of_the_update():
    w = World()
    process = Process(AuditAnswer((), "CUDA out of memory", 1.0))
    with pytest.raises(CairnError, match="CUDA out of memory. This says nothing about the update.*--device"):
        await make_check(w.node, w.find(), "loss", cast(Any, process))


async def test_what_is_no_longer_kept_is_told_from_what_did_not_come():
    w = World(60)  # a checkpoint every 5 rounds
    w.problem = PeerError("nobody has it")
    process = cast(Any, Process(answer(GOOD)))
    with pytest.raises(CairnError, match=r"no longer keeps what a check of round 1 needs: .* from round 4\d on"):
        await make_check(w.node, w.find(1), "loss", process)
    with pytest.raises(CairnError, match="what the check needs did not come: nobody has it. Try again"):
        await make_check(w.node, w.find(58), "loss", process)
    w.problem = None
    w.held.add(w.find(1).update.body.blob)  # this machine's own peer has it
    assert (await make_check(w.node, w.find(1), "loss", process)).passed


def test_what_this_machines_peer_holds_is_taken_from_its_disk(tmp_path):
    w = World(0)
    with Store(tmp_path / "peer" / "store", 1 << 30) as mine, Store(tmp_path / "store", 1 << 30) as ours:
        blobs = {n: mine.put(f"blob {n}".encode()) for n in ("state", "before", "update", "old")}
        w.store = ours
        updates = [SimpleNamespace(author=AUTHOR.key, body=SimpleNamespace(blob=blobs[n])) for n in ("old", "before")]
        bodies = [
            SimpleNamespace(base_state=state, updates=[u])
            for state, u in zip((digest("not held"), blobs["state"]), updates, strict=True)
        ]
        path = [SimpleNamespace(record=SimpleNamespace(body=b), shards=()) for b in bodies]
        header = SimpleNamespace(blob=blobs["update"], first_window=0, rebase_window=0)
        body = SimpleNamespace(base_state=digest("not held either"), updates=[])
        certificate = SimpleNamespace(digest=digest("record"), record=SimpleNamespace(body=body), shards=())
        path.append(certificate)
        w.chain = cast(Any, SimpleNamespace(root=None, path=lambda after, to: path))
        audited = AuditedUpdate(cast(Any, certificate), cast(Any, SimpleNamespace(body=header)), "")
        mine_file = mine.path(blobs["before"])
        take_held(w.node, audited, "replay", tmp_path / "peer" / "store")
        assert {n for n, d in blobs.items() if ours.has(d)} == {"state", "before", "update"}
        assert ours.read(blobs["before"]) == b"blob before" and mine_file.is_file()
        take_held(w.node, audited, "replay", tmp_path / "nobody")  # without a peer nothing happens


def test_the_result_has_the_numbers_of_this_machine_beside_those_of_the_reports():
    w = World()
    audited = replace(w.find(), name="noisy")
    reports = ((2, report(audited, BAD)), (3, report(audited, GOOD, by="owner")))
    decision = AuditDecision(audited.certificate.digest, AUTHOR.key, True, (peer(1).key,))
    found = RepeatedCheck(audited, "replay", BAD, 12.3, ChainFindings(reports, ((3, decision),), 9))
    assert lines(found, OWNER.key) == [
        f"update    of noisy ({AUTHOR.key})",
        "          round 1, windows 8 to 16",
        "check     replay, made on this machine in 12.3 s of CPU time",
        "score     50.3% of signs agree (97% needed): FAILED",
        "score     norms within 99% (80% needed): passed",
        "chain     up to round 9 it carries 2 reports on this update",
        f"report    round 2, by {identity('auditor').key.short}: replay FAILED, 50.3% of signs agree (97% needed), "
        "norms within 99% (80% needed)",
        "report    round 3, by the owner: replay passed, 99.4% of signs agree (97% needed), "
        "norms within 99% (80% needed)",
        f"decision  round 3 convicts the author, and refutes {peer(1).key.short}",
        "result    FAILED",
    ]
    late = AuditDecision(audited.certificate.digest, AUTHOR.key, False, (peer(1).key,))
    chain = ChainFindings(reports, ((3, replace(decision, refuted=())), (5, late)), 9)
    assert lines(replace(found, chain=chain), OWNER.key)[-3:-1] == [
        "decision  round 3 convicts the author",
        f"decision  round 5 refutes {peer(1).key.short}",
    ]


def test_a_failed_loss_check_is_no_accusation():
    found = RepeatedCheck(World().find(), "loss", BAD, 1.0, ChainFindings((), (), 3))
    shown = lines(found, OWNER.key)
    assert shown[0] == f"update    of {AUTHOR.key}" and "carries no report" in "\n".join(shown)
    assert "accuses nobody" in shown[-2] and shown[-1] == "result    FAILED"
