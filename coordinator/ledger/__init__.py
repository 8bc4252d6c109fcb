"""The ledger's database: the state of `protocol.ledger`, append-only, in SQLite or PostgreSQL.

`database` hides the difference between the two. `schema` applies the `migrations`, which define the tables. `queries`
has the statements that read, `writes` those that write, `rows` the types of what is read. `store` is the ledger as the
coordinator uses it, and `integrity` compares it with itself.
"""

from coordinator.ledger.rows import AdmissionRow, BindingRow, CreditedLine, RefusedUpdate, RoundRow, TreeHeadRow
from coordinator.ledger.store import Ledger

__all__ = ["AdmissionRow", "BindingRow", "CreditedLine", "TreeHeadRow", "Ledger", "RefusedUpdate", "RoundRow"]
