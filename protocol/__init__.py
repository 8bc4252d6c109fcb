"""The rules that every member of a run must agree on, as pure functions and state machines.

Here live identities and signatures, the run spec, blobs and their digests, the update codec, `apply`,
the chain of certificates, the round machine and the assignment of data windows. Nothing in this package opens a
socket or a file, reads a clock, draws a random number or starts a process. `peer`, `coordinator` and `cairn` do that;
they depend on this package, and never the reverse.

Read in this order to learn the protocol: `ids`, `errors`, `identity`, `envelope`, `merkle`, `spec`, `layout`,
`bodies`, `messages`, `assignment`, `codec`, `outer`, `exchange`, `chain`, `rounds`, `ledger`.
"""
