"""`cairn audit`: recomputes a run's credits on any machine, and reports differences from the coordinator's log."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.connection import CoordinatorConnection, connect
from cairn.number_format import credits
from coordinator import durable
from peer.keyfile import load_or_make
from protocol.errors import CairnError, MalformedError, ProtocolError
from protocol.ids import PeerKey, RunId, from_b64url
from protocol.ledger.audit import Auditor, AuditReport, Finding, TrustedTreeHead
from protocol.ledger.entries import RoundEntry, decode_entry, decode_line
from protocol.ledger.statements import Receipt, SignedStatement, TreeHead, open_receipt, open_tree_head
from protocol.merkle import leaf_hash, tree_hash
from protocol.proofs import check_consistency, check_inclusion

if TYPE_CHECKING:
    from cairn.audited_chain import AuditedChain

log = logging.getLogger("cairn.audit")

PAGE = 500
"""Entries in one request."""

HEADS = 100
"""Tree heads in one request."""

MAX_HEADS = 2000
"""Maximum number of signed tree heads to compare, the newest first: more than a day's."""


@dataclass
class AuditResult:
    """The result of an audit, with its sources."""

    report: AuditReport
    head: TreeHead
    seen_before: TreeHead | None
    heads: int
    from_members: dict[PeerKey, int]
    from_coordinator: int
    final: int | None
    warnings: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return self.report.clean


def audit_ledger(text: str, home: Path, *, as_json: bool, via: Sequence[str]) -> bool:
    """Audit and print; return whether everything is correct. Raises CairnError if the audit is impossible."""

    async def work() -> AuditResult:
        async with connect(text, via) as r:
            return await audit_log(r, home)

    found = asyncio.run(work())
    if as_json:
        print(json.dumps(_plain(found), indent=1))
    else:
        for line in _lines(found):
            click.echo(line)
    return found.clean


async def audit_log(r: CoordinatorConnection, home: Path, *, listen: tuple[str, ...] = ()) -> AuditResult:
    """Read and check the whole log; remember the newest head for the next audit. Raises CairnError."""
    from cairn.audited_chain import AuditedChain  # it imports hivemind and torch, which receipts do not need
    from peer.swarm.anonymous import ANY, chain_reader, members_at

    seen = _seen_head(home, r)
    async with AsyncExitStack() as stack:
        asker = None
        if r.members:
            own = members_at(r.own)
            asking = chain_reader(r.spec.run_id, r.members, leave_out=own, listen=listen or ANY)
            asker = await stack.enter_async_context(asking)
        chain = AuditedChain(r.spec, asker, r.client)
        await chain.begin()
        final = chain.newest_final
        heads, bad = await _heads(r)
        if not heads and not bad:
            raise CairnError("the coordinator has signed no tree head yet: try again in a minute")
        if not heads:
            raise CairnError(f"{bad[0].message}: without a head that its owner signed a log cannot be audited")
        newest = heads[0].body
        wanted = [TrustedTreeHead(h.body, f"signed at {_when(h.body)}") for h in heads]
        if seen is not None:
            wanted.append(TrustedTreeHead(seen.body, f"seen by this machine, signed at {_when(seen.body)}"))
        auditor = Auditor(r.spec, chain.find, wanted, is_abandoned=chain.is_abandoned)
        await _check_entries(r, auditor, chain, newest.size)
        if chain.newest_final is None:
            final = None  # the chain carries a newer rollback
    report = auditor.finish(*(final or (None, None)), epoch=chain.epoch if chain.agreed else None)
    if not chain.is_followed(auditor.tip):
        words = f"the log ends with record {auditor.tip.short}, which is not on the chain that the swarm follows"
        report.findings.append(Finding(None, words))
    report.findings += bad
    report.findings += await _proofs(r, seen, heads[0])
    if not report.findings:
        _remember_head(home, r, heads[0])
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
    return AuditResult(
        report, newest, seen.body if seen else None, len(heads), chain.from_members, chain.from_coordinator,
        final[0] if final else None, warnings,
    )  # fmt: skip


async def _heads(r: CoordinatorConnection) -> tuple[list[SignedStatement[TreeHead]], list[Finding]]:
    """Return the newest signed heads, newest first, and a difference for each that the owner did not sign."""
    heads: list[SignedStatement[TreeHead]] = []
    bad: list[Finding] = []
    before = 0
    while len(heads) + len(bad) < MAX_HEADS:
        page = await r.log.heads_sent(before, HEADS)
        before_page = len(heads)
        for sent in page:
            try:
                heads.append(open_tree_head(sent, r.spec.run_id, r.spec.owner_key))
            except ProtocolError as e:
                bad.append(Finding(None, f"a tree head that the coordinator gives was not signed by the owner: {e}"))
        if len(page) < HEADS or len(heads) == before_page or heads[-1].body.size == 0:
            break
        before = heads[-1].body.size
    return heads, bad


async def _check_entries(r: CoordinatorConnection, auditor: Auditor, chain: AuditedChain, size: int) -> None:
    """Pass the log to the auditor page by page, each round after its certificate was read.

    These are the `size` entries under the newest head, and those written since it was signed.
    """
    first, end = 0, None
    while end is None or first < end:
        page, now = await r.log.entries(first, PAGE)
        if not page:
            return  # the auditor reports that the head covers more entries
        end = max(size, now) if end is None else end
        page = page[: end - first]
        lines = await _lines_of(r, first, first + len(page))
        for i, sent in enumerate(page):
            record = _record_of(sent)
            if record is not None and not await chain.ensure(record):
                chain.refresh()
                await chain.ensure(record)
            auditor.add(sent, lines.get(first + i, ()))
        first += len(page)


async def _lines_of(r: CoordinatorConnection, first: int, end: int) -> dict[int, tuple[bytes, ...]]:
    found: dict[int, tuple[bytes, ...]] = {}
    while first < end:
        groups, following = await r.log.lines(first, end - first)
        found.update({g.entry: g.lines for g in groups})
        if following <= first:
            break
        first = following
    return found


def _record_of(sent: bytes):
    try:
        what = decode_entry(sent).payload
    except MalformedError:
        return None
    return what.record if isinstance(what, RoundEntry) else None


async def _proofs(
    r: CoordinatorConnection, seen: SignedStatement[TreeHead] | None, head: SignedStatement[TreeHead]
) -> list[Finding]:
    """Check the proofs that the coordinator makes for light clients; return the differences."""
    found: list[Finding] = []
    new = head.body
    try:
        if seen is not None and seen.body.size <= new.size:
            path = await r.log.consistency(seen.body.size, new.size)
            check_consistency(seen.body.size, seen.body.root, new.size, new.root, path)
    except ProtocolError as e:
        found.append(Finding(None, f"the coordinator's proof that its log only grew: {e}"))
    for n in sorted({0, new.size // 2, new.size - 1}) if new.size else ():
        try:
            entries, _ = await r.log.entries(n, 1)
            check_inclusion(leaf_hash(entries[0]), n, new.size, await r.log.inclusion(n, new.size), new.root)
        except (ProtocolError, IndexError) as e:
            found.append(Finding(n, f"the coordinator's proof that entry {n} is in its log: {e}"))
    return found


def audit_receipts(text: str, files: Sequence[Path], peer: str, home: Path, *, via: Sequence[str]) -> bool:
    """Check receipts in files, or the newest of a peer (by default this machine's); return whether all are good.

    Raises CairnError.
    """

    async def work() -> list[str]:
        async with connect(text, via) as r:
            words = [open_receipt(_receipt_bytes(f), r.spec.run_id, r.spec.owner_key) for f in files]
            if not files:
                key = _peer_key(peer, home)
                words = [item.word for item in (await r.log.receipts(key, limit=50))[0]]
            (head,) = await r.log.heads()
            wrong = []
            for word in words:
                b = word.body
                what = f"round {b.round}, peer {b.peer.short}, update {b.update.short}"
                if b.entry >= head.body.size:
                    click.echo(f"{what}  entry {b.entry} is in no signed head yet: try again in a minute")
                    continue
                problem = await receipt_problem(r, b, head.body)
                verdict = f"WRONG: {problem}" if problem else f"good: entry {b.entry} of {head.body.size}, proved"
                click.echo(f"{what}  {verdict}")
                wrong += [problem] if problem else []
            if not words:
                click.echo("there are no receipts yet")
            return wrong

    return not asyncio.run(work())


async def receipt_problem(r: CoordinatorConnection, receipt: Receipt, head: TreeHead) -> str:
    """Return the difference between a receipt and the log; "" if the signed head proves that the log holds it."""
    n = receipt.entry
    try:
        entries, _ = await r.log.entries(n, 1)
        if not entries:
            return f"the log has no entry {n}"
        check_inclusion(leaf_hash(entries[0]), n, head.size, await r.log.inclusion(n, head.size), head.root)
        what = decode_entry(entries[0]).payload
        if not isinstance(what, RoundEntry) or (what.record, what.round) != (receipt.record, receipt.round):
            return f"entry {n} of the log is not the round that the receipt names"
        groups, _ = await r.log.lines(n, 1)
        lines = groups[0].lines if groups else ()
        if tree_hash([leaf_hash(line) for line in lines]) != what.lines_root:
            return f"the lines of entry {n} are not those that it commits to"
        shares = [decode_line(line) for line in lines]
    except ProtocolError as e:
        return str(e)
    if not receipt.accepted:
        accepted = any((s.peer, s.update) == (receipt.peer, receipt.update) for s in shares)
        return "the log credits the update, and the receipt says that it was not accepted" if accepted else ""
    true = shares[receipt.line] if receipt.line < len(shares) else None
    said = (receipt.peer, receipt.update, receipt.windows, receipt.tokens, receipt.micro_credits)
    if true is None or said != (true.peer, true.update, true.windows, true.tokens, true.micro_credits):
        return f"line {receipt.line} of entry {n} says otherwise than the receipt"
    return ""


def _receipt_bytes(path: Path) -> bytes:
    """Return a receipt's envelope from a file of raw bytes, base64 or base64url. Raises CairnError."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise CairnError(f"{path} cannot be read: {(e.strerror or str(e)).lower()}") from None
    try:
        text = data.decode("ascii").strip()
        return from_b64url(text.translate(str.maketrans("+/", "-_")).rstrip("="))
    except (UnicodeDecodeError, MalformedError):
        return data


def _peer_key(text: str, home: Path) -> PeerKey:
    if text:
        return PeerKey.parse(text)
    path = home / "identity.key"
    if not path.exists():
        raise CairnError(f"there is no {path}: name a peer with --peer, or receipts in files")
    return load_or_make(path).key


def head_file(home: Path, run: RunId) -> Path:
    """Return the file with the newest head that an audit on this machine has seen."""
    return home / "audits" / f"{run.hex()[:12]}.head"


def _seen_head(home: Path, r: CoordinatorConnection) -> SignedStatement[TreeHead] | None:
    path = head_file(home, r.spec.run_id)
    try:
        return open_tree_head(path.read_bytes(), r.spec.run_id, r.spec.owner_key)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise CairnError(f"{path} cannot be read: {(e.strerror or str(e)).lower()}") from None
    except ProtocolError as e:
        raise CairnError(f"{path}, which holds the tree head seen last, is damaged: {e}; move it away") from None


def _remember_head(home: Path, r: CoordinatorConnection, head: SignedStatement[TreeHead]) -> None:
    """Write the newest head, whole or not at all. Raises CairnError."""
    path = head_file(home, r.spec.run_id)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.replace(path, head.encoded)
    except OSError as e:
        raise CairnError(f"{path} cannot be written: {(e.strerror or str(e)).lower()}") from None


def _when(head: TreeHead) -> str:
    return datetime.fromtimestamp(head.time / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _lines(a: AuditResult) -> list[str]:
    r = a.report
    lines = [
        f"log      {r.entries} entries, {r.rounds} rounds, {r.lines} lines; head signed at {_when(a.head)}, root "
        f"{a.head.root}",
        f"chain    {sum(a.from_members.values())} certificates from {len(a.from_members)} members"
        + (f", {a.from_coordinator} from the coordinator" if a.from_coordinator else "")
        + (f"; finalized up to round {a.final}" if a.final is not None else "; nothing is finalized yet"),
        f"credits  {credits(r.issued)} issued: {credits(r.settled)} settled, {credits(r.pending)} pending, "
        f"{credits(r.voided)} voided; {len(r.balances)} peers",
        f"heads    {a.heads} compared"
        + (f"; the last one seen was over {a.seen_before.size} entries" if a.seen_before else "; none was seen before"),
    ]
    lines += [f"note     {w}" for w in a.warnings]
    lines += [f"UNPROVED {d.message}" for d in r.unproved]
    lines += [f"WRONG    {d.message}" for d in r.findings]
    if a.clean:
        lines.append("clean    every entry, line, hash, root and head was recomputed: all are correct")
    else:
        lines.append(f"{len(r.findings)} differences, {len(r.unproved)} not proved: the log is wrong")
    return lines


def _plain(a: AuditResult) -> dict[str, Any]:
    r = a.report
    return {
        "clean": a.clean,
        "head": {"size": a.head.size, "root": str(a.head.root), "time": a.head.time},
        "seen_before": None if a.seen_before is None else {"size": a.seen_before.size, "root": str(a.seen_before.root)},
        "heads": a.heads,
        "entries": r.entries,
        "rounds": r.rounds,
        "lines": r.lines,
        "final": a.final,
        "micro_credits": {"issued": r.issued, "settled": r.settled, "pending": r.pending, "voided": r.voided},
        "peers": {
            str(peer): {k: getattr(s, k).micro_credits for k in ("settled", "pending", "voided")}
            for peer, s in sorted(r.balances.items())
        },
        "certificates": {"members": {str(k): n for k, n in a.from_members.items()}, "coordinator": a.from_coordinator},
        "differences": [dataclasses.asdict(d) for d in r.findings],
        "unproved": [dataclasses.asdict(d) for d in r.unproved],
        "warnings": a.warnings,
    }
