"""Credits as a pure function of a certificate: the rule itself is `protocol.ledger.credits`, for whoever checks."""

from __future__ import annotations

from protocol.ledger.credits import (
    FLOPS_PER_MICRO_CREDIT,
    Balance,
    CreditRule,
    RoundAccount,
    account_for,
    pending,
)
from protocol.ledger.entries import Line as Entry

__all__ = ["FLOPS_PER_MICRO_CREDIT", "Balance", "CreditRule", "Entry", "RoundAccount", "account_for", "pending"]
