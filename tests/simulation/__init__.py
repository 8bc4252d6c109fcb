"""A whole swarm in one process, seeded: round machines over a faulty network in virtual time, and checkers of their promises.

`python -m tests.simulation --seeds N` runs seeds; `--seed S --verbose` replays one. Nothing here is random but by the seed.
"""
