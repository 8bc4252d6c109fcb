"""The node: one asyncio process that drives the round machine with the store, the swarm and the trainer.

Decisions about rounds are made in `protocol.rounds`, and tensors are handled in `peer.training`. Most parts that
have collaborators are dataclasses of them, and their private state follows. Data flows in one direction:

    other peers -> RequestServer --+                                         +-> Network, ChainStore
    trainer -> TrainerClient ------+-> EventQueue -> RoundDriver -> machine -+-> ActionHandler -> RoundBlobFetcher,
    fetched blobs, ticks ----------+                                         |                    ShardReducer
    auditor -> AuditRunner --------+                                         +-> TrainerClient, AuditRunner

Read the modules in this order:

1. The whole
   - `options`, `builder`: the settings, and all parts put together, bottom-up
   - `node`: start, end, and what the rest of the process may use
   - `events`, `tasks`: the machine's queue, observable events, background tasks
   - `driver`, `round_timings`: events into the round machine, actions out of it, and the time that a round takes
   - `action_handler`: the effect of each action
   - `request_server`, `packet_decoder`: other peers' packets and requests, verified
2. The run
   - `enrollment`, `machine_check`: the right to take part, and what this machine needs for it (see `peer.doctor`)
   - `coordinator_discovery`, `admission_wait`: the coordinator's address, and the wait while it is away
   - `directive_handler`: the owner's directives on this machine
   - `chain_store`: the chain on disk
   - `rest`, `last_member`, `end_of_run`: a rest of this peer, the last peer to leave, the last state
3. The network
   - `network`: the swarm as the node uses it
   - `peer_table`, `introducer`: the peers that can be reached, and how they find each other
   - `outbox`, `message_relay`: messages out, and for members that cannot reach each other
   - `compact_records`: large records as names of headers
4. Blobs
   - `round_blob_fetcher`, `provider_order`, `blob_retention`: fetched, from whom, checked, and removed
   - `shard_reducer`, `slice_relay`: a committee member's work in a reduced round
5. The work of the devices
   - `device_work`: training and checks, which begin and rest together
   - `trainer_files`, `trainer_supervisor`: its files and its process; `base_model`: the frozen base
   - `state_fetcher`: the files of a state, for the trainer's moves and for audits
   - `state_loader`, `trainer_client`: its moves along the chain, and its requests and answers
   - `audit_runner`, `audit_jobs`, `audit_disk`, `audit_process`: the checks of others' updates
   - `usage_log`, `rate_meter`, `downloads`, `failure_log`, `snapshot`, `status_reporter`: reports for people
"""
