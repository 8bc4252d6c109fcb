"""The ledger's database: the books of `protocol.ledger` written down, append-only, in SQLite or PostgreSQL.

`database` is what differs between the two, `migrations` the tables, `rows` what is read back, `writing` how entries go
in, `store` the ledger as the coordinator uses it, `checking` how it is compared with itself.
"""

from coordinator.ledger.rows import AdmissionRow, BindingRow, CreditedLine, RefusedUpdate, RoundRow, TreeHeadRow
from coordinator.ledger.store import Ledger

__all__ = ["AdmissionRow", "BindingRow", "CreditedLine", "TreeHeadRow", "Ledger", "RefusedUpdate", "RoundRow"]
