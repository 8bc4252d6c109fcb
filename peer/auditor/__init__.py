"""The checks of audits, in a process of their own: one job in, one answer out (docs/audits.md).

A node starts the process for each job. It has no network and no key, so it signs nothing: the node does.
"""
