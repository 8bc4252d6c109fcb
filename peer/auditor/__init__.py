"""The checks of audits, in a process of their own: jobs in, an answer to each out (docs/audits.md).

A node starts the process for a job, and ends it when no other waits. It has no key and no peers, so the node signs and
sends what it measured. It reads the run's data as a trainer does, also from the spec's addresses.
"""
