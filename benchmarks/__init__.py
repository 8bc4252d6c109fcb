"""Measurements as commands: `python -m benchmarks.NAME [--quick] [--json FILE]`, each with its rivals and its floor.

One module a benchmark; its docstring lists the keys of its JSON. Nothing here is imported by the product. Results worth
keeping are in `docs/results/`, with the command that made them.
"""
