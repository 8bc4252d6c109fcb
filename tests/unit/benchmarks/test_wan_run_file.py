"""The run.toml of the benchmark over the emulated internet is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.convergence.setting import PROFILES
from benchmarks.convergence.wan_run_file import tables_of, toml
from coordinator.authoring.prepare import prepare
from coordinator.authoring.runfile import load_run
from coordinator.authoring.summary import validate
from coordinator.authoring.toml_file import tomllib


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("Four score and seven years ago. " * 400)
    (folder / "held.txt").write_text("A new nation, conceived in liberty. " * 20)
    out = folder / "prepared"
    prepare([str(folder / "text.txt")], out, vocabulary=300, validation=[str(folder / "held.txt")])
    return out


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_the_run_file_of_a_profile_validates_and_says_what_was_asked(name: str, prepared: Path, tmp_path: Path):
    profile = PROFILES[name]
    tables = tables_of(profile, prepared=prepared, seed=5, h=10, codec={"k": 128}, outer={"mean": "all"})
    file = tmp_path / "run.toml"
    file.write_text(toml(tables))
    assert any("is a valid run file" in line for line in validate(file))
    read = load_run(file)
    assert (read.run.seed, read.run.total_tokens) == (5, profile.tokens)
    assert (read.codec.k, read.outer.mean) == (128, "all")
    assert read.round.target_tokens == 10 * profile.peers * profile.batch * profile.window
    assert read.inner.schedule.total_tokens == profile.tokens
    assert read.inner.lr == profile.lr


def test_toml_is_read_as_it_was_written():
    tables = {"a": {"text": 'a "quoted" ümlaut\n', "yes": True, "n": 3, "x": 1e-8, "list": [1, 2], "b": {"deep": -1.5}}}
    assert tomllib.loads(toml(tables)) == tables
