"""`cairn demo`: a coordinator and four peers as real processes on this machine; one is killed, one joins late.

It uses the public commands (`cairn coordinator serve`, `cairn peer join`) and observes the swarm through the
coordinator's gRPC and the peers' status files. It contains no training or protocol code.
"""
