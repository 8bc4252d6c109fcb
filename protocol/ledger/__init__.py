"""The ledger of credits: its entries, what they do to accounts, and the signed words about it (wire/ledger.proto)."""
