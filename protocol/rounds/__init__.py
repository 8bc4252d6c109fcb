"""The round machine: a pure state machine that turns events into actions (docs/architecture.md).

`events` are what happened, `actions` are what is to be done about it, `machine` is the logic between them. No I/O,
clock, randomness or tensor is allowed in here: the time is an argument, signing is deterministic, and whoever drives
the machine (asyncio in a peer, the seeded simulator in tests) carries out the actions.

Read in this order: `policy`, `events`, `actions`, `ballot` (the undecided round), `deciding` (announce, propose, vote),
`slate` and `reducing` (rounds whose mean committees make in parts), `own`, `position` (where the trainer stands and
how it is moved), `follower` (whom to ask), `blame` (what follows from a bad blob), `machine`.
"""
