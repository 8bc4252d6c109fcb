"""The ledger under kill -9 and faulty disks: what was acknowledged is there, once, and the books are whole."""
