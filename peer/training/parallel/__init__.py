"""One peer with several GPUs (or CPU processes): the layout of its model and batch over them. See `docs/parallel.md`.

`parallel_dims` and `plans` decide, in plain numbers; `ownership` distributes the state between peers; the rest acts.
"""
