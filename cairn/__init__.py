"""The front door: the command line, the local demo, and the wiring of `peer` and `coordinator` to each other.

Thin on purpose. Whatever a volunteer's node does lives in `peer`, whatever a run owner's service does in `coordinator`,
whatever both must agree on in `protocol`. Heavy libraries are imported by the commands that need them, not at the top.
"""

__version__ = "0.1.0"
