"""Commands that have a file of their own; `cairn.main` registers each in a line."""
