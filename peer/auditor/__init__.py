"""The checks of audits, in a process of their own: jobs in, an answer to each out (docs/audits.md).

A node starts the process for a job, and ends it when no other waits. It has no network and no key, so it signs nothing:
the node does.
"""
