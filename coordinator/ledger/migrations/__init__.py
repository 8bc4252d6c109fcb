"""The ledger's migrations, in the order of their numbers.

NUMBER_NAME.sql is for both databases, NUMBER_NAME.sqlite.sql and NUMBER_NAME.postgresql.sql where they differ. A
released migration is never changed.
"""
