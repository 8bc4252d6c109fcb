"""The ledger's migrations, in the order of their numbers: NUMBER_NAME.sql for both databases, or NUMBER_NAME.sqlite.sql
and NUMBER_NAME.postgresql.sql where they differ. One that has been released is never changed."""
