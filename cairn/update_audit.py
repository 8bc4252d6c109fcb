"""`cairn audit update`: repeats the check of one update on this machine, beside what the chain's reports say.

An observer node reads the chain from members and fetches blobs, as a newcomer does. It needs no admission, and has a
key that is used once. Members serve such a key slowly, so blobs that this machine's own peer holds are taken from its
disk. Everything is verified: certificates by their votes, files by their digests, and the state that the check begins
with by what the chain says. The job and the process that answers it are those of a peer's audits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from cairn.connection import parse_invite
from cairn.files import private_files
from cairn.swarm_view import put_blob
from peer.auditor.score_words import ordered_scores, score_words
from peer.coordinator_client import CoordinatorClient
from peer.node.audit_process import AuditProcess
from peer.node.builder import build_node, load_chain
from peer.node.coordinator_discovery import discover_run
from peer.node.enrollment import COORDINATOR_ABSENT, Enrollment, run_folder
from peer.node.node import Node
from peer.node.options import NodeOptions
from peer.store import Store
from peer.store.blobs import blob_file
from protocol.adapter import missing_package
from protocol.chain import Chain
from protocol.errors import CairnError, MalformedError
from protocol.identity import Identity
from protocol.ids import PeerKey
from protocol.message_codec import MessageDecoder
from protocol.messages import AuditCheck, AuditDecision, Certificate, Score, Signed, UpdateHeader, WorkReport
from protocol.plain_text import printable
from protocol.rounds.blobs import applied_blobs
from protocol.rounds.policy import RoundPolicy
from protocol.rounds.retention import retained
from protocol.spec import RunSpec, open_spec

STORE_BYTES = 10**12
"""Most disk space to use: a check needs a checkpoint, the rounds after it, and perhaps the run's data."""

SILENT_SECONDS = 60.0
"""Seconds without a new record after which the chain has no more."""

SETTLE_SECONDS = 15.0
"""Seconds to wait for more once the round is known and members speak of newer ones."""

POLL_SECONDS = 0.2

STRANGERS_BYTES = 64 * 1024.0
"""Bytes a second from all members to expect at least: each gives peers without an admission 256 KiB/s in all."""

CHECK_SECONDS = 24 * 3600.0
"""Deadline of the check itself. Nobody waits for it but the user, who has Ctrl-C."""

CHECKS = {"loss": "loss check", "replay": "replay"}


@dataclass(frozen=True)
class RepeatOptions:
    """The options of the command line. `check` None: the replay where the run has it, else the loss check.

    `folder` keeps what was fetched, for the next check; None: a temporary one. `home` is that of this machine's peer.
    """

    invite: str
    round: int
    peer: str
    check: AuditCheck | None
    device: str
    threads: int | None
    folder: Path | None
    home: Path
    via: Sequence[str]


@dataclass(frozen=True)
class AuditedUpdate:
    """One update of a record, and the name of its author by the owner's admission."""

    certificate: Certificate
    update: Signed[UpdateHeader]
    name: str


@dataclass(frozen=True)
class ChainFindings:
    """The reports and the decisions on one update in records up to `round`, each with its record's round."""

    reports: tuple[tuple[int, Signed[WorkReport]], ...]
    decisions: tuple[tuple[int, AuditDecision], ...]
    round: int


@dataclass(frozen=True)
class RepeatedCheck:
    """A check that was made here, and what the chain says."""

    audited: AuditedUpdate
    check: AuditCheck
    scores: tuple[Score, ...]
    cpu_seconds: float
    chain: ChainFindings

    @property
    def passed(self) -> bool:
        return all(s.passed for s in self.scores)


def repeat_check(options: RepeatOptions) -> bool:
    """Make the check and print it; return whether the update passed. Raises CairnError if it cannot be made."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(private_files())
        stack.enter_context(_quiet_node())
        folder = options.folder
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="cairn-audit-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made))
        found, owner = asyncio.run(_repeat(options, folder))
    for line in lines(found, owner):
        click.echo(line)
    return found.passed


@contextmanager
def _quiet_node() -> Iterator[None]:
    """Show the errors of the observer node alone: it reports every old conviction that it reads."""
    log = logging.getLogger("peer")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


async def _repeat(options: RepeatOptions, folder: Path) -> tuple[RepeatedCheck, PeerKey]:
    spec, addresses = await _run_of(options)
    if missing := missing_package(spec.model.adapter):
        raise CairnError(missing)
    check = check_of(spec, options.check)
    node_options = NodeOptions(
        folder, device=options.device, threads=options.threads or os.cpu_count() or 1, observer=True
    )
    with Store(folder / "store", STORE_BYTES) as store:
        async with _observer(spec, addresses, store, node_options) as (node, running):
            _say("reading the chain from the swarm's members")
            await follow(node, running, options.round)
            audited = find_update(node.chain, node.membership.decoder, options.round, options.peer)
            await asyncio.to_thread(take_held, node, audited, check, run_folder(options.home, spec.run_id) / "store")
            found = await make_check(node, audited, check, AuditProcess())
    return found, spec.owner_key


def check_of(spec: RunSpec, wanted: AuditCheck | None) -> AuditCheck:
    """Return the check to make. Raises CairnError for a replay in a run that has none."""
    if wanted == "replay" and not spec.audit.replayable:
        raise CairnError(
            "this run has no replays: its updates depend on what only their authors have (audit.replayable is false "
            "in its spec). Repeat the loss check instead: --check loss"
        )
    return wanted or ("replay" if spec.audit.replayable else "loss")


async def _run_of(options: RepeatOptions) -> tuple[RunSpec, list[str]]:
    """Return a run's spec, and members' addresses: from the coordinator, and without it from members."""
    invite = parse_invite(options.invite)
    known = [*options.via, *invite.addresses]
    async with CoordinatorClient(invite) as client:
        try:
            info = await client.get_run(attempts=1)
            return info.spec, list(dict.fromkeys([*known, *info.addresses]))
        except COORDINATOR_ABSENT as e:
            absent = e
    found = await discover_run(invite.run, known)
    if found is None:
        raise absent
    return open_spec(found.encoded, invite.run), list(dict.fromkeys([*known, *found.addresses]))


@asynccontextmanager
async def _observer(
    spec: RunSpec, addresses: list[str], store: Store, options: NodeOptions
) -> AsyncIterator[tuple[Node, asyncio.Future[None]]]:
    """Run an observer node under a new key; yield it, in the swarm, with the task of its `run`."""
    membership = Enrollment(
        identity=Identity(secrets.token_bytes(32)),
        spec=spec,
        store=store,
        client=None,
        name="",
        admission=b"",
        addresses=addresses,
    )
    node = build_node(membership, options, await asyncio.to_thread(load_chain, membership, options))
    running = asyncio.ensure_future(node.run())
    try:
        await node.started(running)
        yield node, running
    finally:
        node.leave()
        with contextlib.suppress(CairnError):
            await running


async def follow(node: Node, running: asyncio.Future[None], round_: int) -> None:
    """Wait until the node has the record of a round, and those that may carry reports on it. Raises CairnError."""
    chain = node.chain
    height, changed, reached = -1, time.monotonic(), 0.0
    while True:
        if running.done():
            running.result()
            raise CairnError("the observer ended before the chain was read; the same command tries again")
        now = time.monotonic()
        if chain.height(chain.head) != height:
            height, changed = chain.height(chain.head), now
        heard = [e.heartbeat.body.round for e in node.network.peers.entries().values()]
        if height > round_:
            reached = reached or now
            late = height > round_ + node.membership.spec.credit.hold_rounds
            if late or max(heard, default=0) <= height or now >= reached + SETTLE_SECONDS:
                return
        patience = SETTLE_SECONDS if heard and max(heard) <= height else SILENT_SECONDS
        if height <= round_ and now >= changed + patience:
            raise CairnError(_no_record(height, round_, bool(heard)))
        await asyncio.sleep(POLL_SECONDS)


def _no_record(height: int, round_: int, heard: bool) -> str:
    if not heard and not height:
        return "no member of the swarm answers: name one with --via, or try again later"
    last = f"the last one is round {height - 1}" if height else "there is none yet"
    return f"round {round_} has no record on the chain that members gave: {last}. Take the round from the run page"


def find_update(chain: Chain, decoder: MessageDecoder, round_: int, peer: str) -> AuditedUpdate:
    """Return the update of a round by a peer. Raises CairnError unless just one author matches.

    `peer` is the author's key, or the beginning of its key or name.
    """
    record = chain.main_chain_at(round_ + 1)
    if record is None or record == chain.root:
        raise CairnError(f"the record of round {round_} is not in memory: the chain read here begins after it")
    certificate = chain.certificate(record)
    every = [AuditedUpdate(certificate, u, _name_of(u, decoder)) for u in certificate.record.body.updates]
    wanted = peer.strip()
    if not wanted:
        raise CairnError("--peer is empty: write the author's key, or the beginning of its key or name")
    exact = [a for a in every if wanted.lower() == str(a.update.author) or wanted == a.name]
    begins = [a for a in every if str(a.update.author).startswith(wanted.lower()) or a.name.startswith(wanted)]
    found = exact or begins
    if len(found) != 1:
        listed = ", ".join(_title(a) for a in (found or every)[:20])
        if not found:
            raise CairnError(f"round {round_} lists no update of {wanted[:80]!r}. It lists those of {listed}")
        raise CairnError(
            f"{len(found)} authors of round {round_} match {wanted[:80]!r}: {listed}. Write more of the key"
        )
    return found[0]


def _name_of(update: Signed[UpdateHeader], decoder: MessageDecoder) -> str:
    """Return an author's name by its admission, printable; "" without one."""
    try:
        name = decoder.decode_admission(update.body.admission, update.author).name
    except CairnError:
        return ""
    return printable(name)


def _title(audited: AuditedUpdate) -> str:
    key = audited.update.author.short
    return f"{audited.name} ({key})" if audited.name else key


def take_held(node: Node, audited: AuditedUpdate, check: AuditCheck, store: Path) -> None:
    """Take what a check needs from the store of this machine's peer, as far as that has it. Nothing is written there.

    Raises StoreError for our own disk.
    """
    chain, certificate = node.chain, audited.certificate
    path = chain.path(chain.root, certificate.digest)
    if not os.access(store, os.R_OK | os.X_OK):  # not there, or another user's
        return
    held = partial(blob_file, store)
    last = len(path) - 1 - _has_rebase(audited, check)
    states = [c.record.body.base_state for c in path[: last + 1]]
    start = next((i for i in range(last, -1, -1) if held(states[i]).is_file()), last)
    spec = node.membership.spec
    shards = [shard.name for shard in spec.data.train]
    if spec.model.adapter is not None:
        shards.append(spec.model.adapter.base.name)
    needed = [blob for c in path[start:] if c is not certificate for blob in applied_blobs(c)]
    for digest in (*shards, *states[start : start + 1], *needed, audited.update.body.blob):
        if held(digest).is_file() and not node.store.has(digest):
            with contextlib.suppress(MalformedError):  # damaged, so it is fetched
                put_blob(node.store, digest, held(digest), link=True)


def _has_rebase(audited: AuditedUpdate, check: AuditCheck) -> bool:
    """Return whether a check begins with the state before that of the round."""
    header = audited.update.body
    return check == "replay" and header.rebase_window > header.first_window


async def make_check(node: Node, audited: AuditedUpdate, check: AuditCheck, process: AuditProcess) -> RepeatedCheck:
    """Fetch what a check needs, make it, and read the chain's reports. Raises CairnError if it cannot be made."""
    certificate, update = audited.certificate, audited.update
    seed = node.chain.audit_seed(certificate.digest, update)
    if check == "loss" and seed is None:
        raise CairnError(
            f"no record follows round {certificate.record.body.round} yet, and that record draws the windows of a loss "
            "check: try again after the next round"
        )
    _require_kept(node, audited, check)
    _say("fetching what the check needs: a checkpoint, the rounds after it, and the update")
    try:
        node.work.jobs.files.allow_for(STRANGERS_BYTES)
        await node.work.jobs.begin(node.network)
        job = await node.work.jobs.job(certificate, update.digest, check, seed)
    except (CairnError, asyncio.TimeoutError) as e:
        reason = str(e) or "no member gave it in time"
        raise CairnError(
            f"what the check needs did not come: {reason}. Try again with --folder, so that what came is kept, or on "
            "the machine of a member of the run"
        ) from None
    _say(f"making the {CHECKS[check]} on {job.device}; it may take as long as the update itself")
    try:
        answer = await process.answer(job, CHECK_SECONDS)
    finally:
        node.work.jobs.release()
        await process.close()
    if answer.reason:
        raise CairnError(
            f"the {CHECKS[check]} was not made: {answer.reason}. This says nothing about the update; try again, or on "
            "another device with --device"
        )
    findings = findings_on(node.chain, certificate, update)
    return RepeatedCheck(audited, check, answer.as_scores, answer.cpu_seconds, findings)


def _require_kept(node: Node, audited: AuditedUpdate, check: AuditCheck) -> None:
    """Raise CairnError if members have dropped what a check needs, and this machine does not hold it."""
    chain, round_ = node.chain, audited.certificate.record.body.round
    kept = retained(RoundPolicy.of(node.membership.spec), chain)
    path = chain.path(chain.root, chain.head)
    first = next((c.record.body.round for c in path if applied_blobs(c).keys() <= kept), 0)
    if round_ - _has_rebase(audited, check) < first and not node.store.has(audited.update.body.blob):
        raise CairnError(
            f"the swarm no longer keeps what a check of round {round_} needs: members keep updates from round {first} "
            "on. So nobody can repeat it, unless a peer on this machine (--home) still holds the files"
        )


def findings_on(chain: Chain, certificate: Certificate, update: Signed[UpdateHeader]) -> ChainFindings:
    """Return what the head's path says about an update. Raises ChainError when its record has left that path."""
    reports: list[tuple[int, Signed[WorkReport]]] = []
    decisions: list[tuple[int, AuditDecision]] = []
    for later in chain.path(certificate.digest, chain.head):
        body = later.record.body
        reports += [
            (body.round, r)
            for r in body.reports
            if (r.body.record, r.body.update) == (certificate.digest, update.digest)
        ]
        decisions += [
            (body.round, d) for d in body.decisions if (d.record, d.author) == (certificate.digest, update.author)
        ]
    return ChainFindings(tuple(reports), tuple(decisions), chain.height(chain.head) - 1)


def lines(found: RepeatedCheck, owner: PeerKey) -> list[str]:
    """Return the result for people."""
    audited, chain = found.audited, found.chain
    header, certificate = audited.update.body, audited.certificate
    author = f"{audited.name} ({audited.update.author})" if audited.name else str(audited.update.author)
    early = header.rebase_window - header.first_window
    result = [
        f"update    of {author}",
        f"          round {certificate.record.body.round}, windows {header.first_window} to {header.end_window}"
        + (f", the first {early} of them from the state before" if early else ""),
        f"check     {CHECKS[found.check]}, made on this machine in {found.cpu_seconds:.1f} s of CPU time",
    ]
    result += [f"score     {score_words([s])}: {_verdict(s.passed)}" for s in ordered_scores(found.scores)]
    result.append(f"chain     up to round {chain.round} it carries {_count(len(chain.reports))} on this update")
    result += [f"report    {_report(round_, report, owner)}" for round_, report in chain.reports]
    for number, (round_, decision) in enumerate(chain.decisions):
        said = [] if number else ["convicts the author" if decision.convicted else "acquits the author"]
        if decision.refuted:
            said.append(f"refutes {', '.join(key.short for key in decision.refuted)}")
        result.append(f"decision  round {round_} {', and '.join(said)}")
    if not found.passed and found.check == "loss":
        result.append("note      a failed loss check accuses nobody: some honest updates fail it")
    result.append(f"result    {_verdict(found.passed)}")
    return result


def _report(round_: int, report: Signed[WorkReport], owner: PeerKey) -> str:
    author = "the owner" if report.author == owner else report.author.short
    body = report.body
    verdict = _verdict(body.passed)
    return f"round {round_}, by {author}: {CHECKS[body.check]} {verdict}, {score_words(body.scores)}"


def _verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def _count(reports: int) -> str:
    return "no report" if not reports else "1 report" if reports == 1 else f"{reports} reports"


def _say(text: str) -> None:
    """Report progress; stdout is for the result."""
    click.echo(text, err=True)
