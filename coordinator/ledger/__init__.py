"""The coordinator's database: an index of the credits that follow from the chain, and its own notes.

`database` hides the difference between SQLite and PostgreSQL. `schema` has the tables, `queries` the statements that
read, `rows` the types of what is read. `store` is the ledger as the coordinator uses it.
"""

from coordinator.ledger.rows import (
    AdmissionRow,
    BindingRow,
    CarriedReport,
    CreditedLine,
    RefusedUpdate,
    RoundRow,
    StatedDecision,
    StatedPardon,
)
from coordinator.ledger.store import Ledger

__all__ = [
    "AdmissionRow",
    "BindingRow",
    "CarriedReport",
    "CreditedLine",
    "Ledger",
    "RefusedUpdate",
    "RoundRow",
    "StatedDecision",
    "StatedPardon",
]
