"""The same parsers and mutations under atheris (libFuzzer), which keeps the inputs that reach new code.

`python -m tests.fuzz.guided PARSER RUNS SEED`. One process a parser: libFuzzer ends its process at the first failure.
"""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.harness import Parser

SECONDS_PER_INPUT = 0.05
"""Wall-clock seconds that a run may take for each of its inputs, beside a minute for its start."""


def is_available() -> bool:
    return importlib.util.find_spec("atheris") is not None


def run_all(parsers: Sequence[Parser], runs: int, seed: int) -> list[dict[str, Any]]:
    """Run each parser, print a line, and return what was found."""
    if not is_available():
        print("atheris is not installed (pip install '.[fuzz]'): no coverage-guided inputs")
        return []
    found = []
    for parser in parsers:
        done = _run(parser, runs, seed)
        found.append(done)
        print(f"guided: {parser.name}: {done['inputs']:,} inputs, {done['features']} features")
        print(*done["failures"], sep="\n", end="")
    return found


def _run(parser: Parser, runs: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.fuzz.guided", parser.name, str(runs), str(seed)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60 + SECONDS_PER_INPUT * runs)
        text = ended.stderr
        failures = [] if ended.returncode == 0 else ["\n".join(text.splitlines()[-40:])]
    except subprocess.TimeoutExpired as e:
        text = (e.stderr or b"").decode(errors="replace")
        failures = []  # a slow machine: what was done counts; one slow input ends the process itself (-timeout)
    marks = re.findall(r"^#(\d+)\s.*?\bft: (\d+)", text, re.M)
    inputs, features = map(int, marks[-1]) if marks else (0, 0)
    return {"parser": parser.name, "inputs": inputs, "features": features, "failures": failures}


def main() -> None:
    import atheris

    name, runs, seed = sys.argv[1], sys.argv[2], sys.argv[3]
    with atheris.instrument_imports(include=["protocol", "peer", "coordinator"]):
        from tests.fuzz.parsers import all_parsers
    parser = all_parsers()[name]
    samples = list(parser.samples)

    def one(data: bytes) -> None:
        try:
            parser.parse(data)
        except parser.refusals:
            pass

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return parser.mutate(rng, data if len(data) > 1 else rng.choice(samples))[:max_size]

    with tempfile.TemporaryDirectory() as folder:
        for i, sample in enumerate(samples):
            (Path(folder) / str(i)).write_bytes(sample)
        flags = [f"-runs={runs}", f"-seed={seed}", "-max_len=1200000", f"-timeout={int(4 * parser.seconds)}"]
        flags += ["-rss_limit_mb=4096", f"-artifact_prefix={folder}/", "-print_final_stats=0"]
        atheris.Setup([sys.argv[0], *flags, folder], one, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
