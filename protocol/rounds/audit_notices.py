"""Notices about audits: who is accused, convicted, pardoned, acquitted or refuted, by what, and what to do."""

from __future__ import annotations

from itertools import islice

from protocol.audit_findings import Attributed, describe_failures, describe_replays, describe_scores, reports_behind
from protocol.ids import Digest, Round
from protocol.messages import AuditDecision, Certificate
from protocol.rounds.context import Context
from protocol.rounds.directive_gossip import because


def notify_audits(context: Context, certificate: Certificate) -> None:
    """Report what a record of the chain says of audits: convictions, and what concerns this peer's own work."""
    chain, me, body = context.chain, context.me, certificate.record.body
    _notify_pardon(context, certificate)
    for decision in body.decisions:
        if certificate.digest not in chain:
            continue
        if decision.convicted:
            _notify_conviction(context, certificate, decision)
        elif decision.author == me and not _is_decided(context, body.parent, decision):
            measured = describe_replays(_reports(context, certificate, decision), passed=True)
            text = f"this peer was accused and acquitted: its {_update(context, decision)} was trained as it claims"
            context.notify("info", "acquitted", text + (f": {measured}" if measured else ""), me)
        if me in decision.refuted:
            _notify_refutation(context, certificate, decision)
    _notify_accusations(context, certificate)


def _notify_pardon(context: Context, certificate: Certificate) -> None:
    """Report to this peer that a directive in the record has lifted its bar."""
    chain, body = context.chain, certificate.record.body
    if body.directive is None or certificate.digest not in chain or body.parent not in chain:
        return
    directive = body.directive.body
    why = because(directive) if directive.run_status == "running" else ""  # else it is the pause's
    if chain.is_barred(context.me, body.parent) and not chain.barred_until(context.me, certificate.digest):
        text = (
            f"the run's owner has pardoned this peer{why}: it trains again, as a newcomer. "
            "The stake and the credit that its conviction took stay lost"
        )
        context.notify("info", "pardoned", text, context.me)


def _notify_accusations(context: Context, certificate: Certificate) -> None:
    """Report to this peer the failed replays of its own updates that a record carries without a decision."""
    chain, body = context.chain, certificate.record.body
    found: dict[Digest, list[Attributed]] = {}
    for report in body.reports:
        audited = report.body.record
        if report.body.check != "replay" or report.body.passed or audited not in chain or audited == chain.root:
            continue
        updates = chain.certificate(audited).record.body.updates
        is_mine = any(u.digest == report.body.update and u.author == context.me for u in updates)
        if is_mine and not chain.reports_after(body.parent).is_decided(audited, report.body.update):
            found.setdefault(audited, []).append((report.author, report.body))
    for audited in sorted(found.keys() - {d.record for d in body.decisions if d.author == context.me}):
        number = chain.certificate(audited).record.body.round
        text = (
            f"this peer's update of round {number} is accused, and nothing is decided: "
            f"{describe_failures(found[audited])}. When two auditors accuse, a jury trains it again. See what this "
            f"machine finds: cairn audit update INVITE --round {number} --peer {context.me}"
        )
        context.notify("warning", "accused", text, context.me)


def _notify_conviction(context: Context, certificate: Certificate, decision: AuditDecision) -> None:
    key, until = decision.author, context.chain.barred_until(decision.author, certificate.digest)
    measured = describe_failures(_reports(context, certificate, decision))
    found = f"its {_update(context, decision)} was not trained as it claims" + (f": {measured}" if measured else "")
    if key == context.me:
        text = (
            f"THIS PEER IS CONVICTED: {found}. Its stake and pending credit are lost. It is barred until round "
            f"{until}, and then trains again as a newcomer: leave it running. If it trained honestly, check its "
            f"memory, its GPU's driver and its version of Cairn, {_repeat(context, decision)}and write to the run's "
            "owner"
        )
        context.notify("error", "convicted", text, key)
    else:
        text = (
            f"peer {key.short} is convicted: {found}. Its stake and pending credit are lost, and it is barred "
            f"until round {until}"
        )
        context.notify("warning", "convicted", text, key)


def _notify_refutation(context: Context, certificate: Certificate, decision: AuditDecision) -> None:
    """Report to this peer that a jury found the opposite of its own replay."""
    reports = _reports(context, certificate, decision)
    mine = tuple(r for r in reports if r[0] == context.me and r[1].check == "replay")
    own = describe_scores(report for _, report in mine)
    jury = describe_replays(reports, passed=not mine[0][1].passed) if mine else ""
    compared = f": this peer found {own}, and {jury}" if own and jury else ""
    text = (
        f"THIS PEER'S REPORT IS REFUTED: a jury found the opposite of its replay of the {_update(context, decision)} "
        f"by {decision.author.short}{compared}. Its stake up to round {certificate.record.body.round} is lost; its "
        "credit remains, and it is not barred. Check its memory, its GPU's driver and its version of Cairn. Until "
        "the cause is found, start it with --audit-device cpu, or off"
    )
    context.notify("error", "refuted", text, context.me)


def _reports(context: Context, certificate: Certificate, decision: AuditDecision) -> tuple[Attributed, ...]:
    """Return the reports behind a decision of a record; none if the audited record is not in memory."""
    chain = context.chain
    branch = islice(chain.ancestors(certificate.digest), context.policy.stake.hold_rounds + 1)
    return reports_behind(decision, (chain.certificate(record) for record in branch if record != chain.root))


def _is_decided(context: Context, parent: Digest, decision: AuditDecision) -> bool:
    """Return whether the branch up to `parent` decides about the same update: the decision then only refutes."""
    chain = context.chain
    if decision.record not in chain or decision.record == chain.root or parent not in chain:
        return False
    updates = chain.certificate(decision.record).record.body.updates
    following = chain.reports_after(parent)
    return any(u.author == decision.author and following.is_decided(decision.record, u.digest) for u in updates)


def _round(context: Context, decision: AuditDecision) -> Round | None:
    """Return the round of the audited record; None if it is not in memory."""
    chain = context.chain
    known = decision.record in chain and decision.record != chain.root
    return chain.certificate(decision.record).record.body.round if known else None


def _update(context: Context, decision: AuditDecision) -> str:
    round_ = _round(context, decision)
    return "update" if round_ is None else f"update of round {round_}"


def _repeat(context: Context, decision: AuditDecision) -> str:
    """Return the advice to repeat the check here; "" if the audited record is not in memory."""
    round_ = _round(context, decision)
    if round_ is None:
        return ""
    return f"repeat the check (cairn audit update INVITE --round {round_} --peer {decision.author}), "
