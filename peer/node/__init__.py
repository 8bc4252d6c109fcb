"""The node: one asyncio process that drives the round machine with the store, the swarm and the trainer.

`node` is the loop; around it, one idea a file: `membership` enters a run, `network` and `directory` know who is where,
`inbox` opens what arrives, `outbox` sends, `updates` fetches and checks blobs, `states` gets the trainer to a state,
`trainer` keeps the trainer's process alive, `assets` is what it starts with, `chainlog` and `keeping` decide what is on
disk. Decisions about rounds belong to `protocol.rounds`, tensors to `peer.training`: neither is in here.
"""
