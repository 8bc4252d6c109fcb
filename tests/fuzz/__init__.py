"""Mutated foreign input through every parser: none may crash, hang, or take more memory than its bound.

`python -m tests.fuzz --inputs 1000000` (`make fuzz`); a short run is part of the tests.
"""
