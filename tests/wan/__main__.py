"""The emulated internet from a terminal: `python -m tests.wan`.

up TOPOLOGY.json [--ttl S]   build it (an older one of the same name is removed)
exec HOST -- COMMAND...      run a command on a host (same files, user and process id)
run TOPOLOGY.json -- COMMAND...   up; the command, outside the hosts; down; exits with the command's status
cut A [B] [--oneway]         black-hole A and B (A and everyone without B; only from A to B with --oneway)
heal [A [B]]                 undo cuts (all of them without names)
set A B RTT_MS LOSS          change the line of a pair while it runs
kill HOST                    power failure: cut HOST off, then SIGKILL what runs on it
stat                         counters, as JSON
down                         remove everything

The form of a topology is in tests/wan/topology.py. $WAN_NAME (default "wan") names the emulated internet, so that
several can run at once. Give the commands outside the hosts. After --ttl seconds everything is removed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.wan.daemon import serve
from tests.wan.testbed import Wan, remove
from tests.wan.topology import Topology, WanError

VERBS = ("up", "exec", "run", "cut", "heal", "set", "kill", "stat", "down", "serve")


def main() -> int:
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    command = given[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m tests.wan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=VERBS, metavar="VERB")
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--ttl", type=float, default=3600.0)
    parser.add_argument("--oneway", action="store_true")
    options = parser.parse_args(given[:at])
    verb, arguments, name = options.verb, options.arguments, os.environ.get("WAN_NAME", "wan")
    if verb == "serve":
        serve(arguments[0], float(arguments[1]))
    elif verb in ("up", "run"):
        wan = Wan(Topology.parse(json.loads(Path(arguments[0]).read_text())), name=name, ttl=options.ttl)
        wan.up()
        if verb == "run":
            try:
                return subprocess.call(command)
            finally:
                wan.down()
    elif verb == "down":
        remove(name)
    else:
        return _do(Wan.running(name), verb, arguments, command, oneway=options.oneway)
    return 0


def _do(wan: Wan, verb: str, arguments: list[str], command: list[str], *, oneway: bool) -> int:
    if verb == "exec":
        argv = wan.command(arguments[0], command)
        os.execvp(argv[0], argv)
    elif verb == "cut":
        wan.cut(*arguments, oneway=oneway)
    elif verb == "heal":
        wan.heal(*arguments, oneway=oneway)
    elif verb == "set":
        wan.set(arguments[0], arguments[1], rtt_ms=float(arguments[2]), loss=float(arguments[3]))
    elif verb == "kill":
        wan.kill(arguments[0])
    else:
        print(json.dumps(dataclasses.asdict(wan.counters()), indent=1))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (WanError, OSError, ValueError, IndexError, TypeError) as e:
        sys.exit(f"tests.wan: {e}")
