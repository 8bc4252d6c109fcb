"""Does it learn as well, and for how many bytes? Cairn beside the ways in which others train apart.

Here live the comparison's setting, the methods as simulations of all peers in one process, and the studies from which
the run spec's defaults come; `over_wan` and `rival_hivemind` run the real thing. Cairn's row is Cairn's own code: the
trainer's inner loop and outer side, the codec, the outer step. Nothing here is imported by the rest of Cairn.
"""
