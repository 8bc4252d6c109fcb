"""The node that a volunteer runs: its network side and its training side, in two kinds of processes.

Here live the store of blobs and certificates, the swarm (libp2p and DHT), the node that drives `protocol`'s round
machine, the channel to the trainer, and the trainer itself. The node's side (all but `training`) never touches CUDA and
imports no torch at start; `training` runs in its own process and never speaks to the swarm. Nothing here imports
`coordinator`: what both must agree on is in `protocol`.
"""
