"""The usual limit of 1024 open files is too small for a member with many peers."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any, cast

import click
import pytest

from cairn.commands.join import JoinOptions, join_run
from cairn.open_files import MAX_FILES, allow_many_files
from tests.support.open_files import files_limit


def limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_the_limit_is_raised_as_far_as_it_may_be_and_never_lowered():
    hard = limits()[1]
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    with files_limit(256):
        allow_many_files()
        assert limits() == (most, hard)
        allow_many_files()
        assert limits() == (most, hard)


def test_who_joins_a_run_may_open_many_files(tmp_path: Path):
    options = dict.fromkeys(("device", "threads", "listen", "announce", "disk", "allow_private_data", "plain", "via"))
    with files_limit(256):
        with pytest.raises(click.BadParameter, match="at most 40 bytes"):
            join_run(JoinOptions("an invite", tmp_path, "x" * 100, **cast(Any, options)))
        assert limits()[0] > 256
