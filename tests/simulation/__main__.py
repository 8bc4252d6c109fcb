"""`python -m tests.simulation --seeds N`: run seeds on two processes; a failing one prints how to replay it."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

from protocol.reduce_plan import GATHER
from tests.simulation.checkers import Broken
from tests.simulation.scenario import Outcome, Scenario
from tests.simulation.siege import storm
from tests.simulation.world import REDUCE

EXCHANGES = {"gather": GATHER, "reduce": REDUCE}


def run_seed(job: tuple[int, str, bool, bool]) -> Outcome | str:
    """Return the outcome, or the broken promise and the command that replays it."""
    seed, exchange, orders, attackers = job
    try:
        return Scenario(seed, exchange=EXCHANGES[exchange], orders=orders, attackers=attackers).run()
    except Broken as e:
        replay = f"python -m tests.simulation --seed {seed} --exchange {exchange} --verbose" + " --orders" * orders
        replay += " --attackers" * attackers
        return f"seed {seed}, {exchange}: {e}\n    replay: {replay}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=340, help="how many seeds to run (340 are about 10,000 rounds)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--sieges", type=int, default=100, help="how many attacks on a swarm without other faults")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument(
        "--exchange", choices=("gather", "reduce", "both"), default="both", help="both: seeds take turns"
    )
    parser.add_argument("--orders", action="store_true", help="the owner meddles in every run, not in each third")
    parser.add_argument(
        "--attackers", action="store_true", help="hostile peers are a coalition in every run, not in a fifth"
    )
    parser.add_argument("--verbose", action="store_true", help="print every move and report (with --seed)")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.seed is not None:
        scenario = Scenario(
            args.seed, verbose=args.verbose, exchange=EXCHANGES.get(args.exchange, GATHER), orders=args.orders,
            attackers=args.attackers,
        )  # fmt: skip
        try:
            print(scenario.run())
        except Broken as e:
            print(f"broken: {e}")
            for line in scenario.world.describe():
                print(line)
            return 1
        return 0
    began = time.monotonic()
    with multiprocessing.Pool(args.processes) as pool:
        kinds = tuple(EXCHANGES) if args.exchange == "both" else (args.exchange,)
        seeds = range(args.first, args.first + args.seeds)
        jobs = [
            (seed, kinds[seed % len(kinds)], args.orders or seed % 3 == 0, args.attackers or seed % 5 == 2)
            for seed in seeds
        ]
        results = list(pool.imap_unordered(run_seed, jobs, chunksize=4))
        stormed = pool.map(storm, range(args.first, args.first + args.sieges))
    failures = [r for r in (*results, *stormed) if isinstance(r, str)]
    good = [r for r in results if isinstance(r, Outcome)]
    rounds = sum(o.rounds for o in good)
    slow = sorted(o.rounds_to_agree for o in good)
    steps, forks = sum(o.steps for o in good), sum(o.forks for o in good)
    took = time.monotonic() - began
    print(f"{len(results)} seeds, {rounds} rounds, {steps} steps, {forks} records off the final chain, {took:.1f} s")
    print(
        f"{args.sieges} attacks by less than half of the stake, {sum(s is not None for s in stormed)} broke a promise"
    )
    if slow:
        print(f"rounds until agreement after the faults: median {slow[len(slow) // 2]}, most {slow[-1]}")
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
