"""Commands that are modules of their own; `cairn.main` registers them."""
