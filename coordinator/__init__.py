"""The run owner's service: it admits peers, follows the chain, keeps the ledger, and shows the swarm.

It is never in the training path: rounds are between peers, and go on when this process is gone. Here live the gRPC
service, the ledger, the page and the metrics, and `authoring`, which makes a signed run spec of the owner's `run.toml`.
Nothing here imports `peer`: the swarm comes in through the interface in `swarm`, which `cairn` wires to an observer.

Read in this order: `swarm`, `credits`, `ledger`, `plausible`, `follower`, `admission`, `limits`, `rpc`, `overview`,
`page`, `service`.
"""
