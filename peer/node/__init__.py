"""The node: one asyncio process that drives the round machine with the store, the swarm and the trainer.

`builder` puts a `Node` together, bottom-up. `driver` feeds the round machine, and `action_handler` carries out its
actions. `peer_requests` answers other peers, and `trainer_client` speaks with the trainer. Decisions about rounds are
made in `protocol.rounds`, and tensors are handled in `peer.training`.
"""
