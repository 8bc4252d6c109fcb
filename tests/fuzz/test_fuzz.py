"""A short run of the fuzzer, and its negative controls: planted faults are found, and named by their inputs."""

from __future__ import annotations

import os
import random
import signal
import time
import tracemalloc

import pytest

from tests.fuzz import harness
from tests.fuzz.harness import Parser, run
from tests.fuzz.mutation import MAX_GROWN, mutate_bytes, mutate_json
from tests.fuzz.parsers import all_parsers
from tests.support.long_cases import long_cases

SEED = 1
INPUTS = 150
PARSERS = all_parsers()


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_input_is_accepted_or_refused(name: str):
    tally = run(PARSERS[name], SEED, INPUTS)
    assert not tally.failures, (
        f"python -m tests.fuzz --seed {SEED} --parser {name!r} --input {tally.failures[0].number}"
    )
    assert tally.inputs == INPUTS == tally.accepted + tally.refused
    assert tally.refused


@pytest.mark.parametrize("name", PARSERS)
def test_samples_are_accepted(name: str):
    for sample in PARSERS[name].samples:
        PARSERS[name].parse(sample)


def test_an_input_follows_from_seed_parser_and_number():
    for parser in PARSERS.values():
        assert parser.input(7, 3) == parser.input(7, 3)
    assert len({PARSERS["messages"].input(7, n) for n in range(50)}) > 40


def test_an_input_that_grows_again_and_again_takes_no_more_than_a_parser_may():
    rng, data = random.Random(9), b"[" + b"0," * 20_000 + b"0]"
    tracemalloc.start()
    for _ in range(10):  # two of them would be ten thousand times as long
        assert len(mutate_json(rng, data)) <= MAX_GROWN
    assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    tracemalloc.stop()


# -- negative controls ------------------------------------------------------------------------------------------

MAGIC = 7
"""Inputs with this byte at the end meet the planted fault: about one in 20."""


def planted(fault) -> Parser:
    def mutate(rng: random.Random, data: bytes) -> bytes:
        return mutate_bytes(rng, data)[:20] + bytes([rng.randrange(20)])

    def parse(data: bytes) -> None:
        if data[-1] == MAGIC:
            fault()
        raise ValueError("refused")

    return Parser("planted", [b"sample"], mutate, parse, (ValueError,), seconds=1.0, mebibytes=32)


def raises_another_error():
    raise KeyError("odd")


def recurses():
    recurses()


def hangs():
    while True:
        try:
            sum(range(1000))
        except Exception:  # noqa: BLE001, S110 - as a careless parser would
            pass


def takes_memory():
    assert len(bytearray(b"x") * (100 * 2**20))


def takes_all_memory():
    assert len([bytearray(b"x") * 2**20 for _ in range(100_000)])


def kills_the_process():
    os.kill(os.getpid(), signal.SIGKILL)


def is_stuck():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    time.sleep(600)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (raises_another_error, "crash: KeyError"), (recurses, "crash: RecursionError"), (hangs, "hang"),
        (takes_memory, "memory"), (takes_all_memory, "memory"), (kills_the_process, "death: exit code -9"),
        *long_cases((is_stuck, "death: no end")),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_and_its_input_named(monkeypatch: pytest.MonkeyPatch, fault, what: str):
    monkeypatch.setattr(harness, "STUCK_SECONDS", 10.0 if fault is is_stuck else 30.0)
    monkeypatch.setattr(harness, "MAX_FAILURES", 1)
    parser = planted(fault)
    tally = run(parser, SEED, 200)
    assert tally.failures and tally.failures[0].what.startswith(what), tally
    number = tally.failures[0].number
    assert parser.input(SEED, number)[-1] == MAGIC
    assert number == next(n for n in range(200) if parser.input(SEED, n)[-1] == MAGIC)
    assert tally.inputs == number + 1


def test_after_a_death_the_run_goes_on():
    tally = run(planted(kills_the_process), SEED, 60)
    guilty = [n for n in range(60) if planted(kills_the_process).input(SEED, n)[-1] == MAGIC]
    assert [f.number for f in tally.failures] == guilty[: harness.MAX_FAILURES]
