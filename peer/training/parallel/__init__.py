"""One peer, many GPUs (or CPU processes): how its model and batch lie over them. `docs/parallel.md` has the whole.

`degrees` and `plans` decide, in plain numbers; `ownership` says who holds what of the state between peers; the rest
acts.
"""
