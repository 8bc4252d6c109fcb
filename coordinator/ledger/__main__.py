"""Checks a whole ledger: `python -m coordinator.ledger`, with its address and the run's spec on standard input.

It is a separate process of low priority, because replaying millions of lines must not delay the coordinator. It prints
the differences, one a line, and nothing if the ledger is whole. Exit status 1: the ledger could not be read.
"""

from __future__ import annotations

import os
import sys

from coordinator.ledger import Ledger
from protocol.errors import CairnError
from protocol.spec import MAX_SPEC, parse_spec


def main() -> int:
    where = sys.stdin.buffer.readline().decode().rstrip("\n")
    os.nice(10)
    try:
        ledger = Ledger(where, parse_spec(sys.stdin.buffer.read(MAX_SPEC + 1)), reader=True)
        try:
            for problem in ledger.check():
                print(problem)
        finally:
            ledger.close()
    except CairnError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
