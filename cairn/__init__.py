"""The front door: the command line, the local demo, and the wiring of `peer` and `coordinator` to each other.

This package is thin on purpose. A volunteer's node lives in `peer`, a run owner's service in `coordinator`, and the
rules that both must agree on in `protocol`. Commands import heavy libraries when they run, not at the top of a module.
"""

__version__ = "0.1.0"
