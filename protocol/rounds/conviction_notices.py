"""Notices about convictions: who is convicted by which measurements, what that costs, and what the convicted can do."""

from __future__ import annotations

from itertools import islice

from protocol.audit_findings import describe_failures, reports_behind
from protocol.messages import AuditDecision, Certificate
from protocol.rounds.context import Context


def notify_convictions(context: Context, certificate: Certificate) -> None:
    """Report the convictions that a record of the chain states: to the convicted with the remedy."""
    chain = context.chain
    for decision in certificate.record.body.decisions:
        if not decision.convicted or certificate.digest not in chain:
            continue
        key, until = decision.author, chain.barred_until(decision.author, certificate.digest)
        found = _findings(context, certificate, decision)
        if key == context.me:
            text = (
                f"THIS PEER IS CONVICTED: {found}. Its stake and pending credit are lost. It is barred until round "
                f"{until}, and then trains again as a newcomer: leave it running. If it trained honestly, check its "
                "memory, its GPU's driver and its version of Cairn, and write to the run's owner"
            )
            context.notify("error", "convicted", text, key)
        else:
            text = (
                f"peer {key.short} is convicted: {found}. Its stake and pending credit are lost, and it is barred "
                f"until round {until}"
            )
            context.notify("warning", "convicted", text, key)


def _findings(context: Context, certificate: Certificate, decision: AuditDecision) -> str:
    chain = context.chain
    branch = islice(chain.ancestors(certificate.digest), context.policy.stake.hold_rounds + 1)
    known = (chain.certificate(record) for record in branch if record != chain.root)
    measured = describe_failures(reports_behind(decision, known))
    known_round = decision.record in chain and decision.record != chain.root
    update = f"update of round {chain.certificate(decision.record).record.body.round}" if known_round else "update"
    return f"its {update} was not trained as it claims" + (f": {measured}" if measured else "")
