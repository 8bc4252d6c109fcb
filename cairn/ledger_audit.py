"""`cairn audit`: recomputes a run's credits on any machine, and reports differences from what the coordinator says."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from cairn.connection import CoordinatorConnection, connect
from peer.keyfile import load
from peer.log_client import BALANCES_PAGE, LogClient
from protocol.errors import CairnError, MalformedError, ProtocolError, os_reason
from protocol.ids import PeerKey, from_b64url
from protocol.ledger.audit import AuditReport, CreditedRounds, Finding, LedgerAuditor
from protocol.ledger.credit_text import credit_text
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.statements import Receipt, open_receipt
from protocol.message_codec import MessageDecoder

PAGE = 500
"""Rounds in one request."""

TOTALS_ATTEMPTS = 5
"""Times that peers' totals are read: a round that becomes final meanwhile changes them."""

MAX_TOTALS = 1_000_000
"""Peers whose totals are compared."""


@dataclass
class AuditResult:
    """The result of an audit, with its sources."""

    report: AuditReport
    from_members: dict[PeerKey, int]
    from_coordinator: int
    final: int | None
    warnings: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return self.report.clean


def audit_ledger(text: str, *, as_json: bool, via: Sequence[str]) -> bool:
    """Audit and print; return whether everything is correct. Raises CairnError if the audit is impossible."""

    async def work() -> AuditResult:
        async with connect(text, via) as r:
            return await audit_credits(r)

    found = asyncio.run(work())
    if as_json:
        print(json.dumps(as_plain(found), indent=1))
    else:
        for line in result_lines(found):
            click.echo(line)
    return found.clean


async def audit_credits(r: CoordinatorConnection) -> AuditResult:
    """Recompute the credits of all final rounds, and compare. Raises CairnError."""
    from cairn.audited_chain import AuditedChain  # it imports hivemind and torch, which receipts do not need
    from peer.swarm.anonymous import chain_reader, members_at

    async with AsyncExitStack() as stack:
        asker = None
        if r.members:
            own = members_at(r.own)
            asking = chain_reader(r.spec.run_id, r.members, leave_out=own)
            asker = await stack.enter_async_context(asking)
        chain = AuditedChain(r.spec, asker, r.client)
        await chain.begin()
        final = chain.newest_final
        start, totals, problem = await _totals(r.log)
        size, settled = start.size, {start.settled}
        auditor = LedgerAuditor(r.spec, chain.find, size, is_abandoned=chain.is_abandoned)
        first = 0
        while first < size and not auditor.is_full:
            page = await r.log.rounds(first, min(PAGE, size - first))
            if page.size == size or page.settled < start.settled:
                settled.add(page.settled)  # settled rounds stay settled while the run goes on
            if not page.rounds:
                break
            for place, told in enumerate(page.rounds, first):  # not `told.number`, which may be any
                if not await chain.ensure(told.record, place):
                    chain.refresh()
                    await chain.ensure(told.record, place)
                auditor.add(told)
            first += len(page.rounds)
        if chain.newest_final is None:
            final = None  # the chain carries a newer rollback
    report = auditor.finish(*(final or (None, None)), epoch=chain.epoch if chain.agreed else None)
    if auditor.is_full:
        report.unproved.append(Finding(None, f"the audit ended after {first} of {size} rounds: too much is wrong"))
    elif first < size:
        report.findings.append(Finding(None, f"the coordinator speaks of {size} final rounds, and gives {first}"))
    if not chain.is_followed(auditor.tip):
        words = f"the credits end with record {auditor.tip.short}, which is not on the chain that the swarm follows"
        report.findings.append(Finding(None, words))
    for count in sorted(settled):
        auditor.check_settled(count)
    if totals is None:
        report.unproved.append(Finding(None, f"peers' totals were not compared: {problem}"))
    else:
        auditor.check_totals(totals)
    warnings = list(chain.warnings)
    if not chain.agreed:
        warnings.append(
            "no member of the swarm sent a certificate: the whole chain is from the coordinator. Its signatures are "
            "those of the peers, but no other source confirms that the swarm follows this very chain"
        )
    elif chain.from_coordinator:
        warnings.append(
            f"{chain.from_coordinator} certificates that members no longer keep are from the coordinator: they are "
            "signed by the peers, and lead to those that members have"
        )
    return AuditResult(report, chain.from_members, chain.from_coordinator, final[0] if final else None, warnings)


Totals = dict[PeerKey, tuple[int, int, int]]
"""Settled, pending and voided micro-credits of each peer."""


async def _totals(log: LogClient) -> tuple[CreditedRounds, Totals | None, str]:
    """Return how many rounds are final and settled, and peers' totals after just these rounds.

    Without totals, the reason is returned too.
    """
    attempt = 0
    while True:
        attempt += 1
        start, found = await log.rounds(0, 1), Totals()
        try:
            while True:
                size, page = await log.balances(next(reversed(found), None))
                found |= page
                if len(found) > MAX_TOTALS:
                    return start, None, f"there are more than {MAX_TOTALS} peers"
                if size != start.size or len(page) < BALANCES_PAGE:
                    break
        except MalformedError as e:
            return start, None, str(e)
        if size == start.size:
            return start, found, ""
        if attempt == TOTALS_ATTEMPTS:
            return start, None, "by the coordinator's answers rounds became final during every reading: audit again"


def audit_receipts(text: str, files: Sequence[Path], peer: PeerKey | None, home: Path, *, via: Sequence[str]) -> bool:
    """Check receipts in files, or the newest of a peer (by default this machine's); return whether all are good.

    Raises CairnError.
    """
    given = [_receipt_bytes(f) for f in files]
    key = peer if files or peer else _own_key(home)

    async def work() -> list[str]:
        async with connect(text, via) as r:
            words = [open_receipt(data, r.spec.run_id, r.spec.owner_key) for data in given]
            if key is not None:
                words = [item.word for item in await r.log.receipts(key)]
            wrong = []
            for word in words:
                b = word.body
                problem = await receipt_problem(r, b)
                good = f"good: by a certificate of record {b.record.short} that the coordinator gives"
                verdict = f"WRONG: {problem}" if problem else good
                click.echo(f"round {b.round}, peer {b.peer.short}, update {b.update.short}  {verdict}")
                wrong += [problem] if problem else []
            if not words:
                click.echo("there are no receipts yet")
            return wrong

    return not asyncio.run(work())


async def receipt_problem(r: CoordinatorConnection, receipt: Receipt) -> str:
    """Return the difference between a receipt and the certificate of its record; "" if there is none."""
    sent = await r.client.certificate(receipt.record)
    if sent is None:
        return "the coordinator does not give the certificate of its record"
    try:
        certificate = MessageDecoder(r.spec.run_id, r.spec.owner_key, remember=1024).decode_certificate(sent)
    except ProtocolError as e:
        return str(e)
    if (certificate.digest, certificate.record.body.round) != (receipt.record, receipt.round):
        return "the certificate is not of the round that the receipt names"
    lines = credits_of(certificate, CreditRule.of(r.spec)).lines
    true = next((x for x in lines if (x.peer, x.update) == (receipt.peer, receipt.update)), None)
    if not receipt.accepted:
        return "the record lists the update, and the receipt says that it was not accepted" if true else ""
    if true is None:
        return "the record does not list the update"
    if receipt.pending_until != receipt.number + r.spec.credit.hold_rounds:
        return f"it settles with number {receipt.number + r.spec.credit.hold_rounds}, not {receipt.pending_until}"
    said = (receipt.windows, receipt.tokens, receipt.micro_credits)
    if said != (true.windows, true.tokens, true.micro_credits):
        return f"it says {said[0]} windows and {said[2]} micro-credits; {true.windows} earn {true.micro_credits}"
    return ""


def _receipt_bytes(path: Path) -> bytes:
    """Return a receipt's envelope from a file of raw bytes, base64 or base64url. Raises CairnError."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise CairnError(f"{path} cannot be read: {os_reason(e)}") from None
    try:
        text = data.decode("ascii").strip()
        return from_b64url(text.translate(str.maketrans("+/", "-_")).rstrip("="))
    except (UnicodeDecodeError, MalformedError):
        return data


def _own_key(home: Path) -> PeerKey:
    path = home / "identity.key"
    try:
        return load(path).key
    except FileNotFoundError:
        raise CairnError(f"there is no {path}: name a peer with --peer, or receipts in files") from None


def result_lines(a: AuditResult) -> list[str]:
    """Return an audit's result for people."""
    r = a.report
    final = "nothing is finalized yet" if not r.rounds else "no member was there to say up to which round it is final"
    if a.final is not None:
        final = f"finalized up to round {a.final}"
    lines = [
        f"rounds   {r.rounds} final rounds, {r.lines} accepted updates",
        f"chain    {sum(a.from_members.values())} certificates from {len(a.from_members)} members"
        + (f", {a.from_coordinator} from the coordinator" if a.from_coordinator else "")
        + f"; {final}",
        f"credits  {credit_text(r.issued)} issued: {credit_text(r.settled)} settled, {credit_text(r.pending)} pending, "
        f"{credit_text(r.voided)} voided; {len(r.balances)} peers",
    ]
    lines += [f"note     {w}" for w in a.warnings]
    lines += [f"UNPROVED {d.message}" for d in r.unproved]
    lines += [f"WRONG    {d.message}" for d in r.findings]
    if a.clean:
        lines.append("clean    every credit was recomputed from the certificates: all are correct")
    else:
        lines.append(f"{len(r.findings)} differences, {len(r.unproved)} not proved")
    return lines


def as_plain(a: AuditResult) -> dict[str, Any]:
    """Return an audit's result as a JSON object."""
    r = a.report
    return {
        "clean": a.clean,
        "rounds": r.rounds,
        "lines": r.lines,
        "final": a.final,
        "micro_credits": {"issued": r.issued, "settled": r.settled, "pending": r.pending, "voided": r.voided},
        "peers": {
            str(peer): {
                "settled": b.settled.micro_credits, "pending": b.pending.micro_credits, "voided": b.voided.micro_credits
            }
            for peer, b in sorted(r.balances.items())
        },
        "certificates": {"members": {str(k): n for k, n in a.from_members.items()}, "coordinator": a.from_coordinator},
        "findings": [dataclasses.asdict(d) for d in r.findings],
        "unproved": [dataclasses.asdict(d) for d in r.unproved],
        "warnings": a.warnings,
    }  # fmt: skip
