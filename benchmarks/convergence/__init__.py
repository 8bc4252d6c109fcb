"""Does it learn as well, and for how many bytes? Cairn beside the ways in which others train apart.

This package has the comparison's setting, the methods as simulations of all peers in one process, and the studies
behind the run spec's defaults. `over_wan` and `rival_hivemind` run real processes. Cairn's row is Cairn's own code:
the
trainer's inner loop and outer side, the codec, the outer step. Nothing here is imported by the rest of Cairn.
"""
