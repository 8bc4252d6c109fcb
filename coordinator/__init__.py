"""The run owner's service: it admits peers, follows the chain, keeps the ledger, and shows the swarm.

It is never in the training path: rounds are between peers, and continue when this process is down. Nothing here imports
`peer`: the swarm comes in through the interface in `swarm`, which `cairn` implements over an observer node. `authoring`
makes a signed run spec from the owner's `run.toml`.

Reading order: `swarm`, `indexed_chain`, `finalizer`, `chain_indexer`, `ledger`, `credits`, `admission`, `control`,
`checkpoints`, `rpc`, `overview`, `page`, `service`.
"""
