"""`python -m tests.fuzz --inputs N`: N mutated inputs in all through the parsers, a table, and JSON.

A failing input prints the command that repeats it. With --guided N and atheris (`pip install '.[fuzz]'`) the same
parsers then get N inputs each that libFuzzer chooses by the code that they reach.

JSON keys:
  seed, inputs, seconds; machine: processor, cores, python, torch, threads, load
  parsers: a list, each with parser, inputs, accepted, refused, slowest_seconds (CPU), peak_mebibytes, seconds
    failures: a list of number (the input's), what, input (its first bytes, hexadecimal)
  guided: a list, each with parser, inputs, features, failures; absent if it was not run
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes are forked after torch is imported

from benchmarks import report
from tests.fuzz import guided
from tests.fuzz.harness import as_json, run
from tests.fuzz.parsers import all_parsers


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--inputs", type=int, default=100_000, help="of all parsers together")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--parser", help="only this one")
    options.add_argument("--input", type=int, help="repeat this input of --parser")
    options.add_argument("--guided", type=int, default=0, metavar="N", help="also N inputs of each, coverage-guided")
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    args = options.parse_args()
    parsers = [p for p in all_parsers().values() if args.parser in (None, p.name)]
    if not parsers:
        options.error(f"no parser {args.parser!r}: one of {', '.join(all_parsers())}")
    if args.input is not None:
        print(as_json(run(parsers[0], args.seed, 1, args.input)))
        return 0
    logging.disable()
    began, each = time.monotonic(), -(-args.inputs // len(parsers))
    with ThreadPoolExecutor(args.processes) as pool:
        tallies = []
        for done in pool.map(lambda p: run(p, args.seed, each), parsers):
            print(f"{done.parser}: {done.inputs:,} inputs in {done.seconds:.0f} s", file=sys.stderr, flush=True)
            tallies.append(done)
    columns = ("parser", "inputs", "accepted", "refused", "slowest, CPU s", "peak, MiB", "failures")
    rows = [
        (t.parser, t.inputs, t.accepted, t.refused, t.slowest_seconds, t.peak_mebibytes, len(t.failures))
        for t in tallies
    ]
    print(report.table(columns, rows))
    for t in tallies:
        for f in t.failures:
            print(f"{t.parser}: {f.what}")
            print(f"    python -m tests.fuzz --seed {args.seed} --parser {t.parser!r} --input {f.number}")
    results = {
        "seed": args.seed, "inputs": sum(t.inputs for t in tallies), "machine": report.machine(),
        "parsers": [as_json(t) for t in tallies],
    }  # fmt: skip
    bad = any(t.failures for t in tallies)
    if args.guided:
        found = guided.run_all(parsers, args.guided, args.seed)
        results["guided"] = found
        bad |= any(f["failures"] for f in found)
    results["seconds"] = round(time.monotonic() - began, 1)
    if args.json:
        report.save(args.json, results)
    print(f"{results['inputs']:,} inputs in {results['seconds']:,} s: {'FAILED' if bad else 'no parser failed'}")
    return bad


if __name__ == "__main__":
    sys.exit(main())
