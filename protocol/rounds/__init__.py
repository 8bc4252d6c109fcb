"""The round machine: a pure state machine that turns events into actions (docs/rounds.md).

No I/O, clock, randomness or tensor is allowed in here: the time is an argument and signing is deterministic. The driver
(asyncio in a peer, the seeded simulator in tests) carries out the actions.

Reading order:

    phase                     the phases of a machine, and the table of their transitions
    policy, events, actions   inputs and outputs
    deadlines                 the registry from which the next tick follows
    round_state               the undecided round: headers, proposals, votes
    exchange                  the interface of the two kinds of rounds: gathered_exchange, reduced_exchange
    consensus                 announce, propose, vote; awaited_members: the members that it waits for
    own_updates, state_sync   the trainer's state, and the moves of it; update_fate: for people
    chain_sync                certificates of others; directive_gossip: the owner's directives
    context, members, blobs   shared by the parts: members and their penalties, blobs held and requested
    branch_quarantine         branches that are not followed for a while; faults: whose fault a bad blob is
    future_messages           messages that came early; header_repair: headers that a member misses; shard_tally
    audit_scheduler           the checks of this peer; report_pool: work reports to carry; audit_notices: for people
    rest, retention           a user's rest; the states and blobs that members keep; summary: for people
    departure                 the end of a machine's part
    machine                   all of them together
"""
