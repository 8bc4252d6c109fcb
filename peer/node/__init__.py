"""The node: one asyncio process that drives the round machine with the store, the swarm and the trainer.

`node` is the loop; around it, one idea a file: `membership` enters a run, `inbox` opens what arrives, `directory` knows
who is where, `outbox` sends, `updates` fetches and checks blobs, `states` gets the trainer to a state, `trainer` keeps
the trainer's process alive, `keeping` decides what stays on disk. Decisions about rounds belong to
`protocol.rounds`, tensors to
`peer.training`: neither is in here.
"""
