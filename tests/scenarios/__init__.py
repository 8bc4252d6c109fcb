"""Swarms of real processes on the emulated internet: each scenario is a TOML file here, with what must come of it.

    python -m tests.scenarios [NAME ...]

`script` reads such a file (pure; its docstring has the form), `swarm` is the coordinator and the peers on their hosts,
`play` does the steps, `judge` says whether what is expected came, by what was `seen` and `counted` and by the `metered`
lines. `slowed` and `faulty` are peers that are so; `history` makes a run's past. What is not said in a file is of
`run.toml`'s kind in `tests.e2e.world`: a Llama of 61,000 parameters in rounds of some seconds.
"""
