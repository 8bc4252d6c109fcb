"""The round machine: a pure state machine that turns events into actions (docs/rounds.md).

No I/O, clock, randomness or tensor is allowed in here: the time is an argument and signing is deterministic. The driver
(asyncio in a peer, the seeded simulator in tests) carries out the actions.

Reading order: `phase` (the table of the machine's phases), `policy`, `events`, `actions`, `timers`, `round_state` (the
undecided round), `exchange` with `gather` and `reduce` (the two kinds of rounds), `consensus` (announce, propose, vote),
`own_updates`, `state_sync` (the state that the trainer holds), `chain_sync`, `governance`, `departure`, `machine`.
"""
