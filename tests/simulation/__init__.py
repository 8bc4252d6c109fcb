"""A whole swarm in one process, seeded: round machines on a faulty network in virtual time, and checkers.

`python -m tests.simulation --seeds N` runs seeds; `--seed S --verbose` replays one. All is drawn from the seed.
"""
