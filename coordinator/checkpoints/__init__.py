"""Keeping a run's checkpoints: which stay, who signed them, where copies lie, what they are worth, what they write.

Read `policy`, `proof`, `keeper`; `errand` runs what must not be in the coordinator's own process.
"""
