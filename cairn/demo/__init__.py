"""`cairn demo`: a coordinator and four peers as real processes on this machine; one is killed, one joins late.

It uses the same commands as anybody (`cairn coordinator serve`, `cairn peer join`) and looks at the swarm through the
coordinator's gRPC and the peers' status files. No training or protocol code belongs in here.
"""

from cairn.demo.story import run_demo

__all__ = ["run_demo"]
