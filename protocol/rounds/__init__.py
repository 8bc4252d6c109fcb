"""The round machine: a pure state machine that turns events into actions (docs/rounds.md).

No I/O, clock, randomness or tensor is allowed in here: the time is an argument and signing is deterministic. The driver
(asyncio in a peer, the seeded simulator in tests) carries out the actions.

Reading order:

    phase                     the phases of a machine, and the table of their transitions
    policy, events, actions   inputs and outputs
    deadlines                 the registry from which the next tick follows
    round_state               the undecided round: headers, proposals, votes
    exchange, gather, reduce  the two kinds of rounds behind one interface
    consensus, stragglers     announce, propose, vote
    own_updates, state_sync   the trainer's state, and the moves of it
    chain_sync, governance    certificates and directives of others
    departure                 the end of a machine's part
    machine                   all of them together
"""
