"""Swarms of real processes on the emulated internet: each scenario is a TOML file here, with what must come of it.

    python -m tests.scenarios [NAME ...] [--tries N] [--json FILE]

`script` reads such a file (pure; its docstring has the form). `swarm` is the coordinator and the peers on their
hosts, and `play` does the steps. `judge` checks the expectations against the results of `seen`, `counted` and the
`metered` links. `results` is the JSON of all tries. `slowed` and `faulty` are peers that are so; `history` makes a
run's past. The defaults are those of the `run.toml` in `tests.e2e.world`: a Llama of 61,000 parameters in rounds of a
few seconds.
"""
